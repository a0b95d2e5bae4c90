"""The demo as a person sees it: real SDKs on both sides, a real terminal, and nothing left behind."""

import fcntl
import os
import runpy
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.parts.launch import PARTS

ROOT = Path(__file__).parents[3]
DEMO = [sys.executable, "-m", "gateway", "demo"]
DUPLICATE = "Bug #4522 resolved as Duplicate of Bug #4301. State set to Resolved and duplicate link created."
DEADLINE_SECONDS = 60

pytestmark = pytest.mark.real


@pytest.fixture
def parts() -> dict[str, str]:
    """Take the interpreters from the environment, or those that scripts/parts has built."""
    named = {
        variable: os.environ.get(variable, str(PARTS / folder / "bin" / "python"))
        for variable, folder in (("MRTR_DEMO_OLD_PYTHON", "py130"), ("MRTR_DEMO_MODERN_PYTHON", "modern"))
    }
    # What the runner of the tests says of its own terminal is not about the one of the demo.
    inherited = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    return {**inherited, **named, "TERM": "xterm"}


def unattended(env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *options],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


class Terminal:
    """A pseudo-terminal with the demo in its foreground."""

    def __init__(self, env: dict[str, str], columns: int = 100) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process = subprocess.Popen(
            DEMO,
            cwd=ROOT,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # Ctrl-C is a signal only on a controlling terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no threads here
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> None:
        """Read the screen until the text stands there."""
        start, deadline = len(self.shown), time.monotonic() + DEADLINE_SECONDS
        while text not in self.shown[start:]:
            assert self._read(deadline), f"{text!r} never came:\n{self.shown}"

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read what is left, and return the exit status."""
        while self._read(time.monotonic() + DEADLINE_SECONDS):
            pass
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(DEADLINE_SECONDS)
        os.close(self._master)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            # EIO is how Linux says that nobody has the other side open any more.
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@contextmanager
def terminal(env: dict[str, str], columns: int = 100) -> Iterator[Terminal]:
    screen = Terminal(env, columns)
    try:
        yield screen
    finally:
        screen.close()


def descendants(pid: int) -> set[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = set(), [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting.extend(children)
    return found


def assert_in_order(text: str, *parts: str) -> None:
    at = 0
    for part in parts:
        at = text.find(part, at)
        assert at >= 0, f"{part!r} is missing, or comes too early:\n{text}"
        at += len(part)


def test_without_a_terminal_it_answers_by_itself_and_shows_both_sides(parts: dict[str, str]) -> None:
    done = unattended(parts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answered automatically" in done.stdout
    assert DUPLICATE in done.stdout
    assert "\033" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(ROOT) not in line) <= 100

    picture = done.stdout.partition("on the wire")[2]
    left = "\n".join(line.partition("│")[0] for line in picture.splitlines() if "│" in line)
    right = "\n".join(line.partition("│")[2] for line in picture.splitlines() if "│" in line)
    assert_in_order(
        left,
        "initialize 2025-11-25",
        "tools/call update_work_item",
        "elicitation/create",
        "accept resolution = Duplicate",
        "elicitation/create",
        "accept duplicateOfId = 4301",
        "resolved as Duplicate of Bug #4301",
    )
    assert left.count("tools/call") == 1
    assert_in_order(
        right,
        "tools/call update_work_item",
        "input_required",
        "requestState",
        "again",
        "input_required",
        "again",
        "complete",
        "resolved as Duplicate of Bug #4301",
    )
    # Across the columns: neither side hears what the other has not yet said.
    assert_in_order(
        picture,
        "◀ tools/call update_work_item",
        "elicitation/create",
        "▶ input_required",
        "◀ tools/call update_work_item, again",
        "the answer",
        "elicitation/create",
        "▶ input_required",
        "◀ tools/call update_work_item, again",
        "the answer",
        "▶ complete",
        "mrtr-gateway serve --upstream",
    )


def test_fixed_takes_one_round(parts: dict[str, str]) -> None:
    with terminal(parts | {"NO_COLOR": "1"}) as screen:
        screen.until("[3]:")
        assert "1  Fixed" in screen.shown
        screen.type("Fixed\n")
        assert screen.end() == 0, screen.shown
        assert "Bug #4522 resolved as Fixed. State set to Resolved." in screen.shown
        assert screen.shown.count("▶ input_required") == 1
        assert "\033" not in screen.shown


def test_defaults_are_taken_and_wrong_answers_asked_again(parts: dict[str, str]) -> None:
    with terminal(parts) as screen:
        screen.until("[3]:")
        screen.type("7\n")
        screen.until("not one of the choices")
        screen.type("\n")
        screen.until("[4301]:")
        screen.type("12\n")
        assert screen.end() == 0, screen.shown
        assert "resolved as Duplicate of Bug #12." in screen.shown
        assert "\033" in screen.shown


@pytest.mark.parametrize(("key", "action"), [("d", "decline"), ("c", "cancel")])
def test_a_question_may_be_refused(parts: dict[str, str], key: str, action: str) -> None:
    with terminal(parts | {"NO_COLOR": "1"}, columns=70) as screen:
        screen.until("[3]:")
        screen.type(f"{key}\n")
        assert screen.end() == 0, screen.shown
        assert "Bug #4522 was not changed: no resolution was given." in screen.shown
        assert_in_order(screen.shown, "the answer", action, "complete")


@pytest.mark.parametrize("how", ["\x03", "\x03\x03", signal.SIGTERM])
def test_ctrl_c_leaves_no_child_behind(parts: dict[str, str], how: str | signal.Signals) -> None:
    with terminal(parts) as screen:
        screen.until("[3]:")
        children = descendants(screen.process.pid)
        assert len(children) == 3
        if isinstance(how, str):
            screen.type(how)
        else:
            screen.process.send_signal(how)
        assert screen.end() == 128 + (signal.SIGINT if isinstance(how, str) else how), screen.shown
        assert "Traceback" not in screen.shown
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_an_interpreter_without_the_sdk_is_refused_with_the_fix(parts: dict[str, str]) -> None:
    env = parts | {"MRTR_DEMO_OLD_PYTHON": "/nonexistent/python"}
    done = unattended(env)
    assert done.returncode == 1
    assert_in_order(done.stderr, "MRTR_DEMO_OLD_PYTHON names /nonexistent/python", "Fix: install mcp==1.30.0")


def test_without_an_index_the_error_says_what_why_and_how_to_mend_it(parts: dict[str, str], tmp_path: Path) -> None:
    env = {name: value for name, value in parts.items() if name != "MRTR_DEMO_OLD_PYTHON"}
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = unattended(env, "--cache", str(tmp_path))
    assert done.returncode == 1
    assert "building" in done.stdout
    assert_in_order(done.stderr, "cannot install mcp==1.30.0", "ERROR:", "Fix:", "PIP_INDEX_URL")


def test_the_recording_shows_what_the_demo_says(parts: dict[str, str]) -> None:
    """Not in its order: some messages of the two sides happen at once."""
    recording = runpy.run_path(str(ROOT / "scripts" / "recording"))
    done = unattended(parts | {"COLUMNS": str(recording["COLUMNS"])})
    drawn = ET.parse(ROOT / "docs" / "images" / "demo.svg").iter("{http://www.w3.org/2000/svg}text")
    wanted = "the demo says something else now: make recording"
    assert sorted(text.text or "" for text in drawn) == sorted(recording["constant"](done.stdout)), wanted

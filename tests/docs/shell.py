"""Runs the commands of one page in order, as its reader would: in one folder; servers that it starts keep running.

Ports of 127.0.0.1 are others than on the page (a test shares its machine); outputs have the page's own again.
At 127.0.0.1:9000 is a real legacy server, and at :8080 and :9464 a gateway in front of it, unless the page starts its
own. `npx` runs what scripts/parts installed, and downloads nothing.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import yaml

from tests.docs.pages import Block
from tests.parts.launch import NODE, NODE_MODULES, PARTS, REPOSITORY, die_with_parent, free_port

COMMAND_SECONDS: Final = 60.0
START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 15.0

OLD_SERVER, LISTEN, ADMIN = "9000", "8080", "9464"
_PORT: Final = re.compile(r"(?P<before>127\.0\.0\.1:|localhost:|PORT=)(?P<port>\d{4,5})\b")
_GATEWAY: Final = re.compile(r"^(?!#).*\bmrtr-gateway serve\b", re.MULTILINE)
_SERVER: Final = re.compile(r"^(?!#).*(?:\bmrtr-gateway serve\b|server-everything (?:streamableHttp|sse)\b)")
_STARTED: Final = "server.started"
"""The gateway's log event when all its listeners are open."""
_CONFIG: Final = re.compile(r"--config[ =](\S+)")
_NPX: Final = f"""\
#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
package=${{1%@[0-9]*}}; shift
case $package in
  @modelcontextprotocol/server-everything) program=dist/index.js ;;
  *) echo "npx: $package is not among the parts of the tests" >&2; exit 1 ;;
esac
exec {NODE} {NODE_MODULES}/$package/$program "$@"
"""


class DocumentError(AssertionError):
    """A command of a page did not do what the page says."""


_ELSEWHERE: Final = re.compile(
    r"(?:[A-Z_]+=\S+ )*(docker|podman|buildah|kubectl|helm|systemctl|sudo|apt|apt-get|nginx|haproxy) "
)
"""Programs that need a cluster, a container engine or a system of one's own. tests/deploy runs what it can."""


def steps(block: Block) -> Iterator[tuple[str, str | None]]:
    """The scripts of a block in order, each with its output (None if the page has none), without what is not run.

    A server is a step of its own.
    """
    if block.kind == "console":
        yield from (step for step in _console(block.text) if not _ELSEWHERE.match(step[0]))
        return
    only, _ = block.left_out or (None, "")
    script: list[str] = []
    for line in re.sub(r"\\\n", "\0", block.text.rstrip()).splitlines():
        if _ELSEWHERE.match(line) or (only is not None and line.startswith(only)):
            continue
        if not _SERVER.match(line):
            script.append(line)
            continue
        yield _joined(script), None
        yield _joined([line]), None
        script.clear()
    yield _joined(script), None


def _joined(lines: list[str]) -> str:
    return "\n".join(lines).replace("\0", "\\\n")


def _console(text: str) -> Iterator[tuple[str, str]]:
    """`$ ` begins a command, `> ` continues it, and the rest is its output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        more = next((place for place, line in enumerate(lines[1:], 1) if not line.startswith("> ")), len(lines))
        command = "\n".join([lines[0], *(line.removeprefix("> ") for line in lines[1:more])])
        yield command, "\n".join(lines[more:])


def agrees(printed: str, told: str) -> bool:
    """Whether an output is that of the page, where `…` stands for any text."""

    def lines(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.strip().splitlines())

    pattern = ".*?".join(map(re.escape, lines(told).split("…")))
    return re.fullmatch(pattern, lines(printed), re.DOTALL) is not None


def is_open(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


class Reader:
    """A reader that follows one page; close it with `leave`."""

    def __init__(self, folder: Path, old_server_port: int, programs: Path = Path(sys.executable).parent) -> None:
        """`programs` is the folder with the gateway's command."""
        self._folder = folder
        self._old_server_port = str(old_server_port)
        self._ports: dict[str, str] = {}
        self._written: set[str] = set()
        self._running: list[tuple[str, subprocess.Popen[bytes], Path, bool]] = []
        tools = folder / ".bin"
        tools.mkdir()
        (tools / "npx").write_text(_NPX)
        (tools / "npx").chmod(0o755)
        found = [str(tools), str(programs), str(NODE.parent), os.environ["PATH"]]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GATEWAY_", "MRTR_"))},
            "PATH": os.pathsep.join(found),
            "MRTR_DEMO_OLD_PYTHON": str(PARTS / "py130" / "bin" / "python"),
            "MRTR_DEMO_MODERN_PYTHON": str(PARTS / "modern" / "bin" / "python"),
            # A drain at the end of a test does not wait.
            "GATEWAY_HOLD__DRAIN_DELAY_SECONDS": "0",
            "GATEWAY_HOLD__DRAIN_SECONDS": "0.2",
        }

    def follow(self, blocks: list[Block]) -> None:
        """Follow the whole page."""
        text = "\n".join(block.text for block in blocks)
        named = {found["port"] for found in _PORT.finditer(text)}
        self._ports = {port: str(free_port()) for port in named | {LISTEN, ADMIN}}
        if f"PORT={OLD_SERVER}" not in text:
            self._ports[OLD_SERVER] = self._old_server_port
        for path in REPOSITORY.iterdir():
            if path.name != ".git":
                (self._folder / path.name).symlink_to(path)
        if {LISTEN, ADMIN} & named and not _GATEWAY.search(text):
            self._start(f"mrtr-gateway serve --upstream http://127.0.0.1:{OLD_SERVER}/mcp", "a gateway for the page")
        for block in blocks:
            if block.file is not None:
                (self._folder / block.file).write_text(self._moved(block.text))
                self._written.add(block.file)
            elif block.is_commands:
                self._do(block)

    def _do(self, block: Block) -> None:
        for command, told in steps(block):
            if _SERVER.match(command):
                self._start(command, block.where)
                continue
            code, printed = self._run(command)
            if code:
                raise DocumentError(f"{block.where}: {command}\nends with {code}:\n{printed}")
            if told is not None and not agrees(printed, told):
                raise DocumentError(f"{block.where}: {command}\nprints\n{printed}\nand the page says\n{told}")

    def _run(self, command: str) -> tuple[int, str]:
        """Run a script; return its exit code and its output, with the page's own ports."""
        script = self._script(command)
        done = subprocess.run(
            script,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        printed = done.stdout.decode(errors="replace")
        for theirs, ours in self._ports.items():
            printed = re.sub(rf"\b{ours}\b", theirs, printed)
        return done.returncode, printed

    def _script(self, command: str, *, last: str = "{ export -p; declare -f; } > .variables") -> list[str]:
        """Variables last as long as the page: each command sees those of the commands before it."""
        start = "set -eauo pipefail; if [ -f .variables ]; then . ./.variables; fi"
        return ["bash", "-c", f"{start}\n{self._moved(command)}\n{last}"]

    def _start(self, command: str, where: str) -> None:
        """Start a server, and wait until it accepts connections on one more of the page's ports."""
        closed = [port for port in self._ports.values() if not is_open(port)]
        log = self._folder / f".log-{len(self._running)}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self._script(f"exec env {command}", last=""),
                cwd=self._folder,
                env={**self._environment, **self._addresses(command)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no threads here
            )
        is_gateway = _GATEWAY.search(command) is not None
        self._running.append((where, process, log, is_gateway))
        deadline = time.monotonic() + START_SECONDS
        while not (any(map(is_open, closed)) and (not is_gateway or _STARTED in log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise DocumentError(f"{where}: {command}\ndoes not accept:\n{log.read_text()}")
            time.sleep(0.02)

    def _addresses(self, command: str) -> Mapping[str, str]:
        """Override the addresses that are not on the page: those of defaults, and of the files in config/."""
        file = next(iter(_CONFIG.findall(command)), None)
        given = yaml.safe_load((self._folder / file).read_text()) if file else {}
        found = {}
        for key, default in (("listen", LISTEN), ("admin", ADMIN)):
            if file not in self._written or key not in given:
                port = str(given.get(key, default)).rpartition(":")[2]
                found[f"GATEWAY_{key.upper()}"] = f"127.0.0.1:{self._ports.setdefault(port, str(free_port()))}"
        return found

    def _moved(self, text: str) -> str:
        return _PORT.sub(lambda found: found["before"] + self._ports.get(found["port"], found["port"]), text)

    def leave(self) -> None:
        """Stop the servers, the last one first; a gateway must exit with 0."""
        ended = []
        for where, process, log, is_gateway in reversed(self._running):
            was_up = process.poll() is None
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            ended.append((where, was_up, code if is_gateway else 0, log))
        for where, was_up, code, log in ended:
            if not was_up or code:
                raise DocumentError(f"{where}: what was started ended with {code}:\n{log.read_text()}")
        self._running.clear()

    def kill(self) -> None:
        """Leave nothing behind, even after a failure."""
        for _, process, _, _ in self._running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

"""`python -m bench.instructions`: what one operation costs in instructions and in Python calls, which no mood changes.

Valgrind counts the instructions of the process in user mode, for the gateway and for the anchor. The counts hardly
differ from run to run, however busy the machine is. The figures of one machine say something about another one only as
ratios, because libraries choose their code by the processor.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench import modern
from bench.load import Connection, Operation, run
from bench.processes import ROOT, Fleet, Process, ProcessError, free_port
from bench.report import layout

CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no")
COUNTED = ROOT / "bench" / "counted"
"""A folder with a sitecustomize that counts the calls of Python functions."""
WARM_UP = 150
OPERATIONS = 300
CLIENTS = 8
DUMP_SECONDS = 30
BUDGET = ROOT / "bench" / "instructions.json"
"""The most instructions of each operation, as ratios to the anchor's echo."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What one operation costs."""

    instructions: float
    python_calls: float


@dataclass(frozen=True, slots=True)
class Row:
    """One operation at the gateway, beside the anchor's echo."""

    name: str
    gateway: Counted
    anchor: Counted

    @property
    def ratio(self) -> float:
        return self.gateway.instructions / self.anchor.instructions


class Operations:
    """The operations; a held call is opened and stays open."""

    def __init__(self) -> None:
        self.held: list[modern.Parked] = []

    async def hold(self, connection: Connection) -> None:
        self.held.append(await modern.open_ask(connection))

    def all(self) -> dict[str, Operation]:
        return {"echo": modern.echo("echo"), "sse": modern.echo("echo_sse"), "ask": modern.ask, "held": self.hold}


def started(fleet: Fleet, upstream: Process, name: str, gateway: str, prefix: Sequence[str]) -> Process:
    """The gateway or the anchor, run by `prefix`."""
    fleet.start_seconds = 180
    if name == "anchor":
        port = free_port()
        command = [sys.executable, "-m", "bench.forwarder", "--port", str(port)]
        command += ["--upstream", f"http://{upstream.address}"]
        return fleet.start(name, [*prefix, *command], f"127.0.0.1:{port}")
    return fleet.gateway(shlex.join([*prefix, *shlex.split(gateway)]), upstream)


def drive(process: Process, operation: Operation, count: int) -> None:
    _, wrong = uvloop.run(run(process.address, operation, count, CLIENTS))
    if wrong:
        raise ProcessError(f"{process.name}: {wrong[0]}")


def instructions(process: Process, operation: Operation, folder: Path) -> float:
    """The instructions of one operation."""
    drive(process, operation, WARM_UP)
    control(process, "--instr=on")
    drive(process, operation, OPERATIONS)
    control(process, "--instr=off")
    control(process, "--dump")
    dump = latest_dump(process, folder)
    control(process, "--zero")
    return dump / OPERATIONS


def control(process: Process, *what: str) -> None:
    command = ["callgrind_control", *what, str(process.popen.pid)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def latest_dump(process: Process, folder: Path) -> int:
    """The sum of the newest dump, as soon as it is complete; dumps are numbered."""
    deadline = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline:
        dumps = sorted(folder.glob(f"callgrind.{process.name}.*"), key=lambda path: path.stat().st_mtime_ns)
        found = re.findall(r"^(?:totals|summary): (\d+)", dumps[-1].read_text(), re.MULTILINE) if dumps else []
        if found:
            for dump in dumps:
                dump.unlink()
            return int(found[-1])
        time.sleep(0.05)
    raise ProcessError(process.last_words("wrote no dump"))


def python_calls(process: Process, operation: Operation, counts: Path) -> float:
    """The calls of Python functions in one operation; a resumed coroutine is a call."""
    drive(process, operation, WARM_UP)
    counts.unlink(missing_ok=True)
    process.popen.send_signal(signal.SIGUSR1)
    drive(process, operation, OPERATIONS)
    process.popen.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + DUMP_SECONDS
    while not counts.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return int(counts.read_text()) / OPERATIONS


def count(gateway: str, folder: Path, names: Sequence[str]) -> list[Row]:
    """Count each operation at the gateway and the echo at the anchor."""
    counted: dict[str, dict[str, Counted]] = {"anchor": {}, "mrtr-gateway": {}}
    for process_name, results in counted.items():
        wanted = ["echo"] if process_name == "anchor" else list(names)
        for operation in wanted:
            by_valgrind = run_counted(gateway, folder, process_name, operation, is_valgrind=True)
            by_python = run_counted(gateway, folder, process_name, operation, is_valgrind=False)
            results[operation] = Counted(by_valgrind, by_python)
    anchor = counted["anchor"]["echo"]
    return [Row(name, counted["mrtr-gateway"][name], anchor) for name in names]


def run_counted(gateway: str, folder: Path, process_name: str, operation: str, *, is_valgrind: bool) -> float:
    """Start the process, and count one operation in one of the two ways."""
    fleet = Fleet(folder)
    counts = folder / "calls"
    path = os.pathsep.join([str(COUNTED), str(ROOT)])
    prefix = (
        [*CALLGRIND, f"--callgrind-out-file={folder}/callgrind.{process_name}.%n"]
        if is_valgrind
        else ["env", f"PYTHONPATH={path}", f"COUNTED_CALLS={counts}"]
    )
    try:
        process = started(fleet, fleet.upstream(), process_name, gateway, prefix)
        chosen = Operations().all()[operation]
        if is_valgrind:
            return instructions(process, chosen, folder)
        return python_calls(process, chosen, counts)
    finally:
        fleet.stop()


def table(rows: list[Row], *, markdown: bool) -> str:
    header = ["operation", "instructions", "of the anchor's echo", "ratio", "Python calls", "of the anchor's echo"]
    body = [
        [
            row.name,
            f"{row.gateway.instructions / 1e3:.0f}k",
            f"{row.anchor.instructions / 1e3:.0f}k",
            f"{row.ratio:.2f}",
            f"{row.gateway.python_calls:.0f}",
            f"{row.anchor.python_calls:.0f}",
        ]
        for row in rows
    ]
    return layout(header, body, markdown=markdown)


def over_budget(rows: list[Row]) -> list[str]:
    """The operations that cost more than their budget."""
    budget = json.loads(BUDGET.read_text())
    return [
        f"{row.name} costs {row.ratio:.2f} echoes of the anchor, and {budget[row.name]:.2f} are allowed"
        for row in rows
        if row.ratio > budget[row.name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    default = f"{shlex.quote(sys.executable)} -m gateway"
    parser.add_argument("--gateway", default=default, metavar="CMD", help="how to run it (default: %(default)s)")
    parser.add_argument("--only", default="echo,sse,ask,held", help="operations (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: install it, or use `python -m bench`", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="mrtr-instructions-") as folder:
            rows = count(options.gateway, Path(folder), options.only.split(","))
    except ProcessError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(table(rows, markdown=options.markdown))
    print("\n".join(found := over_budget(rows)), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

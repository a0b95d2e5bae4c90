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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench import legacy, modern
from bench.load import Connection, Operation, run
from bench.processes import ROOT, Fleet, Process, ProcessError, free_port
from bench.report import layout
from gateway.http_client import idle_connections

CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no")
COUNTED = ROOT / "bench" / "counted"
"""A folder with a sitecustomize that counts the calls of Python functions."""
WARM_UP = 150
OPERATIONS = 300
CLIENTS = 8
LEARN_SECONDS = idle_connections.KEEP_ALIVE_SECONDS + 1
"""Once connections were idle for so long, the gateway knows that it can use them again after a pause."""
DUMP_SECONDS = 30
FORWARDED = "forwarded"
"""An ask whose retry goes to a peer of the gateway that holds its call."""
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

    def all(self, last: Process) -> dict[str, Operation]:
        """By name; `last` is the process that a forwarded retry goes to, and which does not hold its call."""
        return {
            "echo": modern.echo("echo"),
            "sse": modern.echo("echo_sse"),
            "passed": legacy.echo("echo"),
            "ask": modern.ask,
            FORWARDED: modern.ask_answered_at(last.address),
            "held": self.hold,
            "opened": modern.echo_of_another_client("echo"),
        }


def started(fleet: Fleet, name: str, gateway: str, operation: str, prefix: Sequence[str]) -> list[Process]:
    """The gateway, or two that are peers, or the anchor, run by `prefix`; the first one is called."""
    fleet.start_seconds = 180
    upstream = fleet.upstream()
    if name == "anchor":
        port = free_port()
        command = [sys.executable, "-m", "bench.forwarder", "--port", str(port)]
        command += ["--upstream", f"http://{upstream.address}"]
        return [fleet.start(name, [*prefix, *command], f"127.0.0.1:{port}")]
    command_line = shlex.join([*prefix, *shlex.split(gateway)])
    if operation == FORWARDED:
        return fleet.replicas(command_line, upstream, 2)
    return [fleet.gateway(command_line, upstream)]


def drive(process: Process, operation: Operation, count: int) -> None:
    _, wrong = uvloop.run(run(process.address, operation, count, CLIENTS))
    if wrong:
        raise ProcessError(f"{process.name}: {wrong[0]}")


def warm_up(process: Process, operation: Operation) -> None:
    """Have the process learn what it only knows after a while."""
    drive(process, operation, WARM_UP)
    time.sleep(LEARN_SECONDS)
    drive(process, operation, WARM_UP)


def instructions(processes: list[Process], operation: Operation, folder: Path) -> float:
    """The instructions of one operation, in all of the processes."""
    warm_up(processes[0], operation)
    for process in processes:
        control(process, "--instr=on")
    drive(processes[0], operation, OPERATIONS)
    dumped = 0
    for process in processes:
        control(process, "--instr=off")
        control(process, "--dump")
        dumped += latest_dump(process, folder)
        control(process, "--zero")
    return dumped / OPERATIONS


def control(process: Process, *what: str) -> None:
    command = ["callgrind_control", *what, str(process.popen.pid)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def latest_dump(process: Process, folder: Path) -> int:
    """The sum of the newest dump, as soon as it is complete; dumps are numbered."""
    deadline = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline:
        dumps = sorted(folder.glob(f"callgrind.{process.popen.pid}.*"), key=lambda path: path.stat().st_mtime_ns)
        found = re.findall(r"^(?:totals|summary): (\d+)", dumps[-1].read_text(), re.MULTILINE) if dumps else []
        if found:
            for dump in dumps:
                dump.unlink()
            return int(found[-1])
        time.sleep(0.05)
    raise ProcessError(process.last_words("wrote no dump"))


def python_calls(processes: list[Process], operation: Operation, counts: Path) -> float:
    """The calls of Python functions in one operation, in all of the processes; a resumed coroutine is a call."""
    warm_up(processes[0], operation)
    for process in processes:
        process.popen.send_signal(signal.SIGUSR1)
    drive(processes[0], operation, OPERATIONS)
    counted = 0
    for process in processes:
        process.popen.send_signal(signal.SIGUSR2)
        written = counts.with_name(f"{counts.name}.{process.popen.pid}")
        deadline = time.monotonic() + DUMP_SECONDS
        while not (written.exists() and written.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)  # it exists before it has its number
        counted += int(written.read_text())
    return counted / OPERATIONS


def count(gateway: str, folder: Path, names: Sequence[str]) -> list[Row]:
    """Count each operation at the gateway and the echo at the anchor."""
    wanted = [("anchor", "echo"), *(("mrtr-gateway", name) for name in names)]
    # Counting calls is nearly all waiting, and goes on beside valgrind.
    with ThreadPoolExecutor(1) as beside:
        calls = [beside.submit(run_counted, gateway, folder, *each, is_valgrind=False) for each in wanted]
        by_valgrind = [run_counted(gateway, folder, *each, is_valgrind=True) for each in wanted]
    anchor, *rows = (Counted(each, call.result()) for each, call in zip(by_valgrind, calls, strict=True))
    return [Row(name, row, anchor) for name, row in zip(names, rows, strict=True)]


def run_counted(gateway: str, folder: Path, process_name: str, operation: str, *, is_valgrind: bool) -> float:
    """Start the process, and count one operation in one of the two ways."""
    fleet = Fleet(folder)
    counts = folder / "calls"
    path = os.pathsep.join([str(COUNTED), str(ROOT)])
    prefix = (
        [*CALLGRIND, f"--callgrind-out-file={folder}/callgrind.%p.%n"]
        if is_valgrind
        else ["env", f"PYTHONPATH={path}", f"COUNTED_CALLS={counts}"]
    )
    try:
        processes = started(fleet, process_name, gateway, operation, prefix)
        chosen = Operations().all(processes[-1])[operation]
        if is_valgrind:
            return instructions(processes, chosen, folder)
        return python_calls(processes, chosen, counts)
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
    every = "echo,sse,passed,ask,forwarded,held,opened"
    parser.add_argument("--only", default=every, help="operations (default: %(default)s)")
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

"""`python -m bench`: start upstream, anchors and gateway, run the scenarios, print the tables."""

import argparse
import json
import shlex
import sys
import tempfile
from functools import cached_property
from pathlib import Path

import uvloop

from bench import legacy, modern, report
from bench.cluster import STORED, ClusterOutcome, measure_cluster
from bench.cold import ColdOutcome, cool
from bench.environment import environment
from bench.hostile import MIB, HostileOutcome, hostile
from bench.load import Operation
from bench.processes import ENDED_CONFIG, PARKED_CONFIG, ROOT, Fleet, Process, ProcessError
from bench.rivals import Rival, start_rivals
from bench.scenarios import (
    ONE_WORKER,
    TWO_WORKERS,
    EndedOutcome,
    Interleaved,
    ParkedOutcome,
    Target,
    end_all,
    forward,
    interleave,
    most_calls,
    park,
)
from bench.timeline import TimelineOutcome, measure_timeline

# The tool, the bytes of each large result, and those of the argument.
LARGE = {
    "large": ("large", 100_000, 0),
    "large-sse": ("large_sse", 100_000, 0),
    "large-both": ("large", 100_000, 100_000),
    "huge": ("large", 1_000_000, 0),
    "huge-sse": ("large_sse", 1_000_000, 0),
    "huge-both": ("large", 1_000_000, 1_000_000),
}
SCENARIOS = (
    *("echo", "sse", "passed", "passed-ask", *LARGE, "ask"),
    *("forwarded", "cluster", "timeline", "timeline-plain", "workers", "parked", "ended", "cold", "hostile"),
    *("rivals", "rivals-legacy"),  # last, because rivals go on running, and work while they are idle
)
# These start gateways of their own.
APART = {"forwarded", "cluster", "timeline", "timeline-plain", "workers", "parked", "ended", "cold", "hostile"}
# Few, so that the slowest rival answers within a second.
RIVAL_CLIENTS = 8
ENDED_CALLS = 5000
C_LIBRARY = "PYTHONMALLOC=malloc"
ENDED_CLIENTS = 256
# A round of `ask` waits out the quiet window, so it takes fewer operations to fill a slice.
ASKS_PER_REQUEST = 0.25
# While an ask waits out the quiet window, its gateway would idle, so as many clients ask as keep it busy.
ASK_CLIENTS = 4
# A slice of large results copies as much as this for each of `--requests`.
LARGE_BYTES = 10_000
LARGE_CLIENTS = 8
COLD_ANSWERED = 1_000


def default_gateway() -> str:
    installed = ROOT / ".venv" / "bin" / "mrtr-gateway"
    if installed.exists():
        return shlex.quote(str(installed))
    return f"{shlex.quote(sys.executable)} -m gateway"


def scenario_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown scenario {unknown[0]!r}, choose from {', '.join(SCENARIOS)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--gateway",
        default=default_gateway(),
        metavar="CMD",
        help="how to run the gateway; 'none' measures the anchors alone (default: %(default)s)",
    )
    parser.add_argument("--only", type=scenario_names, default=list(SCENARIOS), metavar="NAME,NAME")
    parser.add_argument("--rounds", type=int, default=7, help="slices of each row (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=2000, help="requests in a slice (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=32, help="connections at once (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10_000, help="calls to park (default: %(default)s)")
    parser.add_argument("--cold-calls", type=int, default=1_000, help="calls that go cold (default: %(default)s)")
    parser.add_argument(
        "--cold-records", type=int, default=100_000, help="cold calls made at the start (default: %(default)s)"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every slice to FILE")
    return parser.parse_args()


class Bench:
    """One run: the processes that are up, and the scenarios on them."""

    def __init__(self, options: argparse.Namespace, fleet: Fleet) -> None:
        self._options = options
        self._fleet = fleet
        self._upstream = fleet.upstream()
        self._anchors = [fleet.forwarder(self._upstream)]
        others = fleet.nginx(self._upstream), fleet.envoy(self._upstream)
        self._anchors += [each for each in others if each is not None]
        self._gateway: Process | None = None
        if options.gateway != "none" and not APART.issuperset(options.only):
            self._gateway = fleet.gateway(options.gateway, self._upstream)

    def run(self, name: str) -> report.Outcome | None:
        """None when the scenario says nothing without a gateway."""
        match name:
            case "echo":
                return self._interleaved("echo: one request, JSON reply", "echo")
            case "sse":
                return self._interleaved("sse: one request, SSE reply", "echo_sse")
            case "passed":
                return self._passed()
            case "passed-ask":
                return self._passed_ask()
            case _ if name in LARGE:
                return self._large(*LARGE[name])
            case "ask":
                return self._ask()
            case "rivals":
                return self._compare_rivals("rivals: echo of a modern client", is_modern=True)
            case "rivals-legacy":
                return self._compare_rivals("rivals-legacy: echo in the session of a legacy client", is_modern=False)
            case "forwarded":
                return self._forwarded()
            case "cluster":
                return self._cluster()
            case "timeline":
                return self._timeline(STORED)
            case "timeline-plain":
                return self._timeline("ask")
            case "workers":
                return self._workers()
            case "parked":
                return self._parked()
            case "ended":
                return self._ended()
            case "cold":
                return self._cold()
            case _:
                return self._hostile()

    def _interleaved(self, title: str, tool: str) -> Interleaved:
        return self._compare(title, modern.echo(tool), modern.echo(tool), self._options.requests)

    def _passed(self) -> Interleaved:
        title = "passed: one request of an old client, JSON reply"
        return self._compare(title, legacy.echo("echo"), legacy.echo("echo"), self._options.requests)

    def _passed_ask(self) -> Interleaved:
        title = "passed-ask: call, question, answer, result of an old client; the other rows: one request"
        return self._compare(title, modern.echo("echo"), legacy.ask, self._options.requests)

    def _large(self, tool: str, size: int, sent: int) -> Interleaved:
        """A result is copied by the anchors, bridged for a modern client, and passed through for an old one."""
        kind = "SSE" if tool.endswith("_sse") else "JSON"
        count = max(1, self._options.requests * LARGE_BYTES // size)
        title = f"{size // 1000} kB: one {kind} reply of this size" + (", to a request of this size" if sent else "")
        targets = self._anchor_targets(legacy.large(tool, size, sent))
        if self._gateway is not None:
            targets.append(Target(self._gateway, modern.large(tool, size, sent), "mrtr-gateway, bridged"))
            targets.append(Target(self._gateway, legacy.large(tool, size, sent), "mrtr-gateway, passed"))
        return self._interleave(title, targets, count, min(LARGE_CLIENTS, self._options.clients))

    def _ask(self) -> Interleaved:
        """An ask is two requests of the client, so an anchor's operation is two forwarded ones."""
        title = (
            "ask: call, question, answer, result; the other rows: two requests, the quiet window apart; "
            f"{ASK_CLIENTS} times the connections"
        )
        clients, requests = ASK_CLIENTS * self._options.clients, self._options.requests
        return self._compare(title, modern.two_echoes("echo"), modern.ask, requests, clients)

    def _asks(self) -> int:
        return max(1, int(self._options.requests * ASKS_PER_REQUEST))

    def _compare(
        self, title: str, plain: Operation, bridged: Operation, count: int, clients: int | None = None
    ) -> Interleaved:
        targets = self._anchor_targets(plain)
        if self._gateway is not None:
            targets.append(Target(self._gateway, bridged, self._gateway.name))
        return self._interleave(title, targets, count, clients or self._options.clients)

    def _anchor_targets(self, plain: Operation) -> list[Target]:
        targets = [Target(self._upstream, plain, "upstream, no proxy")]
        return targets + [Target(anchor, plain, anchor.name) for anchor in self._anchors]

    def _interleave(self, title: str, targets: list[Target], count: int, clients: int) -> Interleaved:
        return uvloop.run(interleave(title, targets, self._options.rounds, count, clients))

    def _compare_rivals(self, title: str, *, is_modern: bool) -> Interleaved:
        """Beside other MCP proxies. Each is called as it was by its first operations, in sessions that stay open."""
        operation = modern.echo if is_modern else legacy.echo_in_session
        targets = self._anchor_targets(operation("echo"))
        if self._gateway is not None:
            targets.append(Target(self._gateway, operation("echo"), "mrtr-gateway"))
        targets += [
            Target(process, operation(rival.tool), rival.name, part=rival.part)
            for rival, process in self._rivals
            if rival.is_modern or not is_modern
        ]
        return self._interleave(title, targets, self._options.requests, min(RIVAL_CLIENTS, self._options.clients))

    @cached_property
    def _rivals(self) -> list[tuple[Rival, Process]]:
        return start_rivals(self._fleet, self._upstream)

    def _forwarded(self) -> Interleaved | None:
        if self._options.gateway == "none":
            return None
        pair = self._fleet.pair(self._options.gateway, self._upstream)
        return forward(pair, self._options.rounds, self._asks(), self._options.clients)

    def _cluster(self) -> ClusterOutcome | None:
        """On an upstream of its own, which counts its executions."""
        if self._options.gateway == "none":
            return None
        options, clients = self._options, self._options.clients
        calls, _ = most_calls(options.calls, clients)
        return measure_cluster(
            self._fleet, options.gateway, self._fleet.upstream(), options.rounds, self._asks(), clients, calls
        )

    def _timeline(self, tool: str) -> TimelineOutcome | None:
        """On an upstream of its own, which counts its executions."""
        if self._options.gateway == "none":
            return None
        return measure_timeline(self._fleet, self._options.gateway, self._fleet.upstream(), tool)

    def _workers(self) -> Interleaved | None:
        if self._options.gateway == "none":
            return None
        one, two = (self._fleet.gateway(self._options.gateway, self._upstream, workers=n) for n in (1, 2))
        echo = modern.echo("echo")
        # Twice the connections, so that each worker is as busy as the one.
        targets = [Target(one, echo, ONE_WORKER), Target(two, echo, TWO_WORKERS, clients=2)]
        title = "workers: echo at a gateway with one worker, and with two and twice the connections"
        count, clients = self._options.requests, self._options.clients
        return uvloop.run(interleave(title, targets, self._options.rounds, count, clients, anchor=ONE_WORKER))

    def _ended(self) -> EndedOutcome | None:
        """As it is started, and with the allocator of the C library for all objects."""
        if self._options.gateway == "none":
            return None
        calls, _ = most_calls(min(ENDED_CALLS, self._options.calls), ENDED_CLIENTS)
        outcome = EndedOutcome(calls)
        for name, prefix in (("as started", "env -u PYTHONMALLOC"), (C_LIBRARY, f"env {C_LIBRARY}")):
            command = f"{prefix} {self._options.gateway}"
            gateway = self._fleet.gateway(command, self._fleet.upstream(), config=ENDED_CONFIG)
            row = outcome.rows[name] = end_all(gateway, calls, ENDED_CLIENTS)
            outcome.wrong.extend(row.wrong)
        return outcome

    def _parked(self) -> ParkedOutcome | None:
        """On processes of its own, with fresh memory and with the limit of open files that it needs."""
        if self._options.gateway == "none":
            return None
        calls, limit = most_calls(self._options.calls, self._options.clients)
        upstream = self._fleet.upstream()
        gateway = self._fleet.gateway(self._options.gateway, upstream, config=PARKED_CONFIG)
        outcome = ParkedOutcome(self._options.calls, calls, limit)
        park(gateway, outcome, self._options.clients)
        return outcome

    def _cold(self) -> ColdOutcome | None:
        """On processes of its own. They run from this tree, because one of them makes records at its start."""
        if self._options.gateway == "none":
            return None
        opened, records = self._options.cold_calls, self._options.cold_records
        upstream = self._fleet.upstream()
        outcome = ColdOutcome(records, opened, min(opened, COLD_ANSWERED))
        bare = self._fleet.cold_gateway(upstream, 0)
        cool(bare, self._fleet.cold_gateway(upstream, records), outcome, self._options.clients)
        return outcome

    def _hostile(self) -> HostileOutcome | None:
        if self._options.gateway == "none":
            return None
        gateway = self._fleet.gateway(self._options.gateway, self._fleet.upstream())
        return uvloop.run(hostile(gateway, (MIB, 4 * MIB, 16 * MIB)))


def run_all(options: argparse.Namespace, fleet: Fleet) -> dict[str, report.Outcome]:
    outcomes = {}
    try:
        bench = Bench(options, fleet)
        for name in options.only:
            outcome = bench.run(name)
            fleet.check()
            if outcome is None:
                print(f"{name}: skipped, it needs a gateway")
                continue
            print(report.text(outcome, markdown=options.markdown), flush=True)
            outcomes[name] = outcome
    except OSError:
        fleet.check()
        raise
    finally:
        fleet.stop()
    return outcomes


def main() -> int:
    options = arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="mrtr-bench-") as folder:
            outcomes = run_all(options, Fleet(Path(folder)))
    except ProcessError as exc:
        print(exc, file=sys.stderr)
        return 2
    if options.json is not None:
        written = {"environment": environment(options)}
        written |= {name: report.as_json(outcome) for name, outcome in outcomes.items()}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if any(report.complaints(outcome) for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs one history: a cluster of gateways, a server, clients, and what goes wrong."""

import gc
import importlib
import io
import json
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import sha256
from random import Random
from typing import Any, Final

import structlog
from msgspec import structs

from gateway.cluster.witness import ASK_AGAIN_SECONDS
from gateway.config import Config
from gateway.config.parsing.yaml_tree import Document
from gateway.server.process import Gateway
from gateway.server.serve import serve
from tests.simulation import faults
from tests.simulation.attacker import Attacker
from tests.simulation.client import Client, Record
from tests.simulation.kernel import Process, Spinning
from tests.simulation.legacy_client import LegacyClient
from tests.simulation.listening import Change
from tests.simulation.modern_server import ModernServer
from tests.simulation.network import Connection
from tests.simulation.plan import LOAD_SECONDS, REST_SECONDS, Fault, Plan
from tests.simulation.server import Ledger, LegacyServer, Store
from tests.simulation.subscriber import LegacySubscriber, Listened, Subscriber
from tests.simulation.task_client import TaskClient, TaskRecord
from tests.simulation.world import Simulation

KEY: Final = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
# As in `tests/conftest.py`: it never changes.
load: Any = importlib.import_module("gateway.config.load")  # the package has a function of that name
load.config_shape = cache(load.config_shape)
_SERVER: Final = ("10.0.1.1", 9000)
_MODERN_SERVER: Final = ("10.0.1.2", 9001)
_CLIENTS: Final = "10.0.9.1"
WARM_SECONDS: Final = 1.0
_REMAINS_SECONDS: Final = 100.0
"""How long something of a call may be kept after its end: its session is quarantined, and then idle."""
_STOP_SECONDS: Final = 30.0


@dataclass(slots=True)
class Line:
    """One line of a log."""

    at: float
    process: str
    level: str
    event: str
    fields: dict[str, Any]


@dataclass
class Outcome:
    """What a history leaves behind, for the oracle."""

    plan: Plan
    records: list[Record]
    tasks: list[TaskRecord]
    listened: list[Listened]
    ledger: Ledger = field(default_factory=Ledger)
    lines: list[Line] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ended_badly: list[str] = field(default_factory=list)
    noted: list[tuple[float, str]] = field(default_factory=list)
    deaths: list[tuple[float, str]] = field(default_factory=list)
    """When a replica ended, or let go of its calls."""
    second_signals: list[tuple[float, str]] = field(default_factory=list)
    """When a replica was asked to end for the second time, by one fault or by two: it hands nothing over then."""
    faults: list[Fault] = field(default_factory=list)
    """Those that have begun, with the time and the replica that the ones found which wait for a state."""
    changed: list[float] = field(default_factory=list)
    """When each change happened."""
    learnt: list[str] = field(default_factory=list)
    """What an attacker was told that is not its own."""
    own_keys: list[bytes] = field(default_factory=list)
    """The keys of processes that were given none: another one is made at each start."""
    trace: list[str] = field(default_factory=list)
    """Every packet that arrived, every line of a log, every run of a tool; equal for the same plan, in any process."""


class History:
    """One history at work."""

    def __init__(self, plan: Plan, *, traces: bool = False) -> None:
        self.plan = plan
        self.outcome = Outcome(
            plan,
            [Record(call) for call in plan.calls],
            [TaskRecord(call) for call in plan.tasks],
            [Listened(listener) for listener in plan.listeners],
        )
        self.simulation = Simulation(str(plan.seed))
        self.network = self.simulation.network
        self.network.names |= {"server.test": [_SERVER[0]], "modern.test": [_MODERN_SERVER[0]]}
        self.kernel = self.simulation.kernel
        self.random = Random(f"faults {plan.seed}")
        self._store = Store()
        self._traces = traces
        self.simulation.children.ledger = self.outcome.ledger
        if traces:
            self.network.watchers.append(self._note_packet)
        self._ended: list[Process] = []
        self._servers: list[LegacyServer] = []
        self._is_over = False
        self.load_began = 0.0
        self._signals: dict[Process, int] = {}
        """How often each process was asked to end."""
        attacks = any(fault.kind == "replay" for fault in plan.faults)
        self.attacker = Attacker(self) if attacks else None

    # -- for the faults -----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.kernel.now

    def later(self, seconds: float, callback: Any, *args: Any) -> None:
        self.kernel.call_later(seconds, callback, *args)

    def host(self, number: int) -> str:
        return f"10.0.0.{number}"

    def hosts(self) -> list[str]:
        return [
            *(self.host(number) for number in range(1, self.plan.replicas + 1)),
            _SERVER[0],
            _MODERN_SERVER[0],
            _CLIENTS,
        ]

    def gateway(self, number: int) -> Process:
        return self.simulation.processes[f"gw-{number}"]

    def replica_with(self, when: str) -> int | None:
        """The replica that has a call in this state; `unread` if a reply of it is not read, though it is all there."""
        is_unread, state = when.startswith("unread "), when.removeprefix("unread ")
        for number in range(1, self.plan.replicas + 1):
            process = self.gateway(number)
            gateway = _gateway_of(process) if process.is_alive else None
            if gateway is None:
                continue
            legs = gateway.downstream.legs
            drivers = [*legs._running.values(), *legs.relayed]
            if not is_unread:
                drivers += [each.driver for each in legs.plain if each.driver]
                drivers += gateway.lot
            exchanges = [driver._exchange for driver in drivers]
            if any(each.state == state and not (is_unread and each.legs) for each in exchanges):
                return number
        return None

    @property
    def server(self) -> Process:
        return self.simulation.processes["server"]

    def start_gateway(self, number: int) -> None:
        """Start a replica, unless it runs."""
        name = f"gw-{number}"
        before = self.simulation.processes.get(name)
        if self._is_over or (before is not None and before.is_alive):
            return
        if before is not None:
            self._retire(before)
        process = self.simulation.process(name, self.host(number))
        process.when_ended.append(lambda: self.outcome.deaths.append((self.now, name)))
        process.start(serve(_config(self.plan, number)))

    def terminate(self, process: Process, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask a gateway to end; the second time, it lets go of its calls at once."""
        before = self._signals.get(process, 0)
        if before:
            self.outcome.deaths.append((self.now, process.name))
        if before == 1:
            self.outcome.second_signals.append((self.now, process.name))
        self._signals[process] = before + 1
        process.signal(number)

    def is_terminated(self, number: int) -> bool:
        """Whether a gateway has been asked to end, and has not ended yet."""
        process = self.gateway(number)
        return process in self._signals and process.is_alive

    def start_server(self) -> None:
        before = self.simulation.processes.get("server")
        if before is not None:
            if before.is_alive:
                return
            self._retire(before)
        process = self.simulation.process("server", _SERVER[0])
        self._store.sessions.clear()
        for run in self.outcome.ledger.runs:
            if run.ended is None and run.session.startswith(self._store.name):
                run.ended, run.died = self.now, True
        server = LegacyServer(process, self.plan.server, self.outcome.ledger, self._store, _SERVER[1])
        self._servers.append(server)
        process.start(server.main())

    def _start_modern_server(self) -> None:
        process = self.simulation.process("modern", _MODERN_SERVER[0])
        changes = self.plan.server.has_changes
        self._modern_server = ModernServer(process, self.outcome.ledger, _MODERN_SERVER[1], has_changes=changes)
        process.start(self._modern_server.main())

    def _change(self, change: Change) -> None:
        """Have something change at a server, which announces it if it runs."""
        self.outcome.changed.append(self.now)
        server = self._servers[-1] if change.path == "/mcp" else self._modern_server
        server.announce(len(self.outcome.changed), change)

    def _retire(self, process: Process) -> None:
        self._ended.append(process)

    # -- the trace ----------------------------------------------------------------------------------------------

    def _note_packet(self, connection: Connection, is_to_server: bool, data: bytes) -> None:  # noqa: FBT001
        one, other = connection.ends if is_to_server else connection.ends[::-1]
        where = f"{one.process.name}>{other.process.name} #{connection.number}"
        self.outcome.trace.append(f"{self.now!r} {where} {len(data)} {sha256(data).hexdigest()[:16]}")

    def note_line(self, line: Line) -> None:
        """A process has logged a line."""
        self.outcome.lines.append(line)
        if line.event == "server.started":
            gateway = _gateway_of(self.simulation.processes[line.process])
            assert gateway is not None
            configured = gateway.config.state.raw_keys()
            self.outcome.own_keys += [key for key in gateway.keys.value.present if key not in configured]
        if self._traces:
            self.outcome.trace.append(f"{line.at!r} {line.process} {line.level} {line.event} {line.fields!r}")

    # -- running ------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run it to its end."""
        plan, outcome = self.plan, self.outcome
        records, tasks, listened = outcome.records, outcome.tasks, outcome.listened
        configure_log(self)
        with _collected_seldom() as collects, self.simulation.entered():
            self.start_server()
            self._start_modern_server()
            for number in range(1, plan.replicas + 1):
                self.start_gateway(number)
            self.kernel.run(self.now + WARM_SECONDS)
            at_first = self._held()
            clients = self.simulation.process("clients", _CLIENTS)
            addresses = [(self.host(number), 8080) for number in range(1, plan.replicas + 1)]
            with clients.running():
                for record in records:
                    kind = LegacyClient if record.call.is_legacy else Client
                    work = kind(record.call, addresses, record).play()
                    clients.keep(clients.loop.create_task(work, name=record.call.tag))
                for task in tasks:
                    work = TaskClient(task.call, addresses, task).play()
                    clients.keep(clients.loop.create_task(work, name=task.call.tag))
                for each in listened:
                    listen = LegacySubscriber if each.listener.is_legacy else Subscriber
                    work = listen(each.listener, addresses, each).play()
                    clients.keep(clients.loop.create_task(work, name=each.listener.tag))
            self.load_began = self.now
            for change in plan.changes:
                self.later(change.at, self._change, change)
            for fault in plan.faults:
                self.later(fault.at, faults.begin, self, fault)
            try:
                self.kernel.run(self.now + LOAD_SECONDS + REST_SECONDS)
                runs = [outcome.ledger.of(each.call.tag) for each in records if each.ended is None]
                if any(len(each) > 1 for each in runs):  # its tool may hang in each of them
                    self.kernel.run(self.now + REST_SECONDS)
                if any(fault.kind == "jump" for fault in plan.faults):
                    # A replica whose clock was ahead refuses what others ask it about an expired call until their
                    # clocks have come as far.
                    self.kernel.run(self.now + sum(ASK_AGAIN_SECONDS))
                last = max((each.ended or 0.0 for each in (*records, *tasks, *listened)), default=0.0)
                self.kernel.run(last + _REMAINS_SECONDS)
                outcome.left += _differences(at_first, self._held())
                outcome.left += [f"{each.listener.tag} has not ended" for each in listened if each.ended is None]
                outcome.left += [f"{each.call.tag} has not ended" for each in (*records, *tasks) if each.ended is None]
                self._is_over = True
                for number in range(1, plan.replicas + 1):
                    self.gateway(number).signal(signal.SIGTERM)
                self.kernel.run(self.now + _STOP_SECONDS)
            except Spinning as exc:
                outcome.ended_badly.append(f"spins {exc}")
            for number in range(1, plan.replicas + 1):
                process = self.gateway(number)
                if process.is_alive:
                    outcome.ended_badly.append(f"{process.name} did not end after SIGTERM")
            outcome.failures += self._found_failures()
            outcome.deaths += self._partings()
            if self._traces:
                ends = (*outcome.failures, *outcome.left, *outcome.ended_badly)
                outcome.trace += map(repr, (*outcome.ledger.runs, *records, *ends))
            self._bury(collects=collects)
        return outcome

    def _bury(self, *, collects: bool) -> None:
        """End every process, and let go of it."""
        _current.clear()
        processes = (*self._ended, *self.simulation.processes.values())
        for process in processes:
            process.end()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for process in processes:
                process.bury()
            with processes[0].running():
                self.simulation.processes.clear()
                self._ended.clear()
                self._servers.clear()
                if collects:
                    _ = gc.collect()

    def _partings(self) -> list[tuple[float, str]]:
        """When replicas let go of their calls, at the end of a drain."""
        parted = [(line.at, line.process) for line in self.outcome.lines if line.event == "server.parted"]
        # A replica whose calls have all ended does not say that it parts, but lets go of their results.
        drains = [line for line in self.outcome.lines if line.event == "server.draining"]
        return [*parted, *((line.at + float(line.fields["deadline_seconds"]), line.process) for line in drains)]

    def _found_failures(self) -> list[str]:
        return [
            f"{process.name}: {what}"
            for process in (*self._ended, *self.simulation.processes.values())
            for what in (*process.failures, *([] if process.exit is None else [f"ended with {process.exit!r}"]))
        ]

    def _held(self) -> dict[str, Any]:
        """What the gateways and the server hold."""
        held: dict[str, Any] = {}
        for number in range(1, self.plan.replicas + 1):
            process = self.gateway(number)
            gateway = _gateway_of(process)
            if gateway is not None:
                held |= {f"{process.name} {name}": value for name, value in _held_by(gateway, process).items()}
        held |= {f"server {name}": value for name, value in self._servers[-1].held().items()}
        held["modern server listeners"] = self._modern_server.held()
        held["children"] = len(self.simulation.children.servers)
        return held


_has_frozen: list[bool] = []


@contextmanager
def _collected_seldom() -> Iterator[bool]:
    """Within, nothing is collected: when that happens depends on what the process did before.

    Yields whether to collect at the end; not if the process, which then ends soon, has disabled that altogether.
    """
    if not _has_frozen:
        _ = gc.collect()
        gc.freeze()  # what is imported by now is not looked at after each history
        _has_frozen.append(True)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield was_enabled
    finally:
        if was_enabled:
            gc.enable()


def _gateway_of(process: Process) -> Gateway | None:
    """The gateway of a process: its handler of SIGHUP belongs to it."""
    handler = process.loop.handlers.get(signal.SIGHUP)
    if handler is None:
        return None
    reload: Any = handler[0].__self__  # type: ignore[attr-defined]
    gateway = reload._owner
    assert isinstance(gateway, Gateway)
    return gateway


def _held_by(gateway: Gateway, process: Process) -> dict[str, Any]:
    metrics = gateway.metrics
    gauges = {
        "held": metrics.held_calls,
        "cold": metrics.cold_calls,
        "legacy": metrics.client_sessions,
        "subscriptions": metrics.subscriptions,
        "sessions": metrics.sessions,
    }
    return {
        **{f"gauge {name}": sum(count.value for count in gauge.values()) for name, gauge in gauges.items()},
        **{f"budget {name}": status.used for name, status in metrics.budgets().items()},
        "calls": len(gateway.lot),
        "cold": len(gateway.lot.cold),
        "running": len(gateway.downstream.legs.running),
        "in flight": gateway.downstream.in_flight,
        "weight": gateway.calls.used,
        "results": gateway.lot.results.status().used,
        "bugs": gateway.tasks.failures,
        "tasks": sorted(task.get_name() for task in gateway.tasks._running if not task.done()),
        "connections": sum(
            not end.is_closed
            for connection in process.loop.network.connections
            for end in connection.ends
            if end.process is process
        ),
    }


def _differences(first: dict[str, Any], last: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {last[name]!r}, at first {value!r}"
        for name, value in first.items()
        if last.get(name, value) != value
    ]


def _config(plan: Plan, number: int) -> Config:
    """The configuration of a replica. Reading one takes longer than anything else at its start, most of it YAML."""
    common = _read(_text(plan))
    if number == 1:
        return common
    host = f"10.0.0.{number}"
    own = structs.replace(common.replica, id=f"gw-{number}", listen=f"{host}:8081")
    return structs.replace(common, listen=f"{host}:8080", replica=own)


@lru_cache(maxsize=512)
def _read(text: str) -> Config:
    config: Config = load._finish(Document(json.loads(text), [], {}), "simulated", {})
    return config


def _text(plan: Plan) -> str:
    """The configuration of the first replica."""
    tree: dict[str, Any] = {
        "listen": "10.0.0.1:8080",
        "admin": None,
        "state": {"keys": [KEY]},
        "replica": {
            "id": "gw-1",
            "listen": "10.0.0.1:8081",
            "peers": {f"gw-{each}": f"10.0.0.{each}:8081" for each in range(1, plan.replicas + 1)},
        },
        "routes": [{"upstream": {"url": f"http://server.test:{_SERVER[1]}/mcp"}, "ephemeral": ["search"]}],
        **plan.config,
    }
    tree["routes"][0].update(tree.pop("route", {}))
    tree["routes"].append({"path": "/modern", "upstream": {"url": f"http://modern.test:{_MODERN_SERVER[1]}/mcp"}})
    if plan.has_children:
        tree["routes"].append({"path": "/child", "upstream": {"command": ["simulated"]}, "ephemeral": ["search"]})
    return json.dumps(tree)


# -- log ----------------------------------------------------------------------------------------------------------


_current: list[History] = []


def configure_log(history: History) -> None:
    """Have the log of all processes go to this history."""
    _current[:] = [history]
    structlog.configure(
        processors=[_collect],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.WriteLoggerFactory(io.StringIO()),
        cache_logger_on_first_use=False,
    )


def _collect(_: object, level: str, fields: Any) -> str:
    if not _current:
        raise structlog.DropEvent
    history = _current[0]
    process = history.simulation.running()
    event = str(fields.pop("event", ""))
    history.note_line(Line(history.now, "" if process is None else process.name, level, event, dict(fields)))
    raise structlog.DropEvent

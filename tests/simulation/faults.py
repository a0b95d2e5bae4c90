"""What goes wrong in a history. A fault that lasts is a generator: it begins, yields for its time, and ends."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.simulation.plan import Fault

if TYPE_CHECKING:
    from tests.simulation.history import History

SLOW_SECONDS: Final = 1.5
"""How much longer than usual a message may be on its way while everything is slow."""
_WAITS_SECONDS: Final = 20.0
_LOOKS_SECONDS: Final = 0.02


def begin(history: "History", fault: Fault) -> None:
    """Begin a fault, and have it end; one that waits for a state of a call looks again for a while."""
    if fault.when:
        _wait(history, fault, history.now + _WAITS_SECONDS)
    else:
        _begin(history, fault)


def _wait(history: "History", fault: Fault, until: float, seen: int = -1) -> None:
    """Look whether a replica has a call in the state; only if any process has run since the turn that was seen."""
    turns = history.kernel.turns
    number = None if turns == seen else history.replica_with(fault.when)
    if number is not None:
        _begin(history, replace(fault, target=number))
    elif history.now < until:
        history.later(_LOOKS_SECONDS, _wait, history, fault, until, turns)


def _begin(history: "History", fault: Fault) -> None:
    kind = _KINDS[fault.kind]
    if fault.kind in ("term", "int") and history.is_terminated(fault.target):
        fault = replace(fault, kind="term twice")  # for the oracle: this is the second signal
    history.outcome.faults.append(replace(fault, at=history.now - history.load_began))
    history.outcome.noted.append((history.now, f"fault: {fault.kind} of gw-{fault.target} for {fault.seconds} s"))
    lasting = kind(history, fault)
    if lasting is not None:
        next(lasting)
        history.later(fault.seconds, next, lasting, None)


def _kill(history: "History", fault: Fault) -> Iterator[None]:
    history.gateway(fault.target).end()
    yield
    history.start_gateway(fault.target)


def _power(history: "History", fault: Fault) -> Iterator[None]:
    host = history.host(fault.target)
    history.network.cut_power(host)
    history.gateway(fault.target).end()
    for process in list(history.simulation.processes.values()):
        if process.host == host:
            process.end()
    yield
    history.network.restore_power(host)
    history.start_gateway(fault.target)


def _term(history: "History", fault: Fault, number: signal.Signals = signal.SIGTERM) -> None:
    process = history.gateway(fault.target)
    if not process.is_alive:
        return
    process.when_ended.append(lambda: history.later(fault.seconds, history.start_gateway, fault.target))
    history.terminate(process, number)


def _int(history: "History", fault: Fault) -> None:
    """As `term`, but for its delay."""
    _term(history, fault, signal.SIGINT)


def _term_twice(history: "History", fault: Fault) -> None:
    process = history.gateway(fault.target)
    _term(history, fault)
    history.later(fault.seconds / 2, history.terminate, process)


def _stop(history: "History", fault: Fault) -> Iterator[None]:
    process = history.gateway(fault.target)
    process.freeze()
    yield
    process.thaw()


def _block(history: "History", *ways: tuple[str, str]) -> Iterator[None]:
    for way in ways:
        history.network.block(*way)
    yield
    for way in ways:
        history.network.unblock(*way)


def _part(history: "History", fault: Fault) -> Iterator[None]:
    """Cut a replica off from everything."""
    own = history.host(fault.target)
    return _block(history, *(way for each in history.hosts() if each != own for way in ((own, each), (each, own))))


def _one_way(history: "History", fault: Fault) -> Iterator[None]:
    """Nothing that one replica sends arrives at the other replicas."""
    others = [number for number in range(1, history.plan.replicas + 1) if number != fault.target]
    return _block(history, *((history.host(fault.target), history.host(each)) for each in others))


def _peers(history: "History", fault: Fault) -> Iterator[None]:
    """Two replicas do not reach each other, but everybody else."""
    one, other = history.host(fault.target), history.host(fault.other)
    return _block(history, (one, other), (other, one))


def _server(history: "History", fault: Fault) -> Iterator[None]:
    history.server.end()
    yield
    history.start_server()


def _cut(history: "History", fault: Fault) -> None:
    """Reset some connections."""
    found = [each for each in history.network.connections if not each.is_local]
    if found:
        for connection in history.random.sample(found, min(len(found), 3)):
            connection.cut()


def _cold_cut(history: "History", fault: Fault) -> None:
    """Reset every connection of the server."""
    _reset_all(history, "server")


def _modern_cut(history: "History", fault: Fault) -> None:
    """Reset every connection of the modern server."""
    _reset_all(history, "modern")


def _reset_all(history: "History", server: str) -> None:
    process = history.simulation.processes[server]
    for connection in list(history.network.connections):
        if connection.ends[1].process is process:
            connection.cut()


def _child(history: "History", fault: Fault) -> None:
    """Kill a server over stdio."""
    found = list(history.simulation.children.servers.values())
    if found:
        history.random.choice(found).end()


def _slow(history: "History", fault: Fault) -> Iterator[None]:
    history.network.extra_seconds = SLOW_SECONDS
    yield
    history.network.extra_seconds = 0.0


def _split(history: "History", fault: Fault) -> None:
    history.network.cut_segments = 0.5


def _dns(history: "History", fault: Fault) -> Iterator[None]:
    history.network.is_dns_down = True
    yield
    history.network.is_dns_down = False


def _jump(history: "History", fault: Fault) -> Iterator[None]:
    history.gateway(fault.target).wall_offset += fault.amount
    yield
    history.gateway(fault.target).wall_offset -= fault.amount


def _drift(history: "History", fault: Fault) -> None:
    history.gateway(fault.target).wall_drift = fault.amount / 100_000


def _replay(history: "History", fault: Fault) -> None:
    assert history.attacker is not None, "the plan has it"
    history.attacker.strike(fault.target)


_KINDS: Final[dict[str, Callable[["History", Fault], Iterator[None] | None]]] = {
    "kill": _kill,
    "power": _power,
    "term": _term,
    "term twice": _term_twice,
    "int": _int,
    "stop": _stop,
    "stall": _stop,
    "part": _part,
    "one way": _one_way,
    "peers": _peers,
    "server": _server,
    "cut": _cut,
    "cold cut": _cold_cut,
    "modern cut": _modern_cut,
    "child": _child,
    "slow": _slow,
    "split": _split,
    "dns": _dns,
    "jump": _jump,
    "drift": _drift,
    "replay": _replay,
}

"""Gathers a process's account of itself, when somebody looks: nothing here is kept, counted or asked beforehand."""

import hashlib
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from gateway import __version__
from gateway.config import Config, cautions, digest
from gateway.net.bridge import Bridge
from gateway.net.members import Members
from gateway.net.status import (
    MOST_HELD,
    MOST_PEERS,
    HeldStatus,
    KeyStatus,
    Notice,
    PeerStatus,
    ProcessStatus,
    RouteStatus,
    Status,
    cut,
    failing_first,
    health,
)
from gateway.net.troubles import presentable

if TYPE_CHECKING:  # it has the survey made
    from gateway.net.app import Gateway

_PAGE_BYTES: Final = resource.getpagesize()
_CALLER_BYTES: Final = 4
_REJECTIONS: Final = 5
"""Problems of a rejected file that are told; the log has them all."""


def survey(gateway: "Gateway", salt: bytes) -> Status:
    """Tell of one process; `salt` keeps the callers' marks from being anything but marks."""
    held = Counter(driver.bridge.route.path for driver in gateway.lot.waiting())
    routes = [
        _route(bridge, held[path], gateway.metrics.sessions(path), gateway.routes.children(path))
        for path, bridge in gateway.routes.bridges.items()
    ]
    peers = known_peers(gateway.members)
    status = Status(
        version=__version__,
        replica=gateway.members.own,
        state="ready" if gateway.ready else "draining",
        time=now(),
        uptime_seconds=time.monotonic() - gateway.began,
        configuration=digest(gateway.config),
        notices=tuple(_notices(gateway)),
        processes=(_process(gateway),),
        routes=tuple(failing_first(routes)),
        routes_total=len(routes),
        held=tuple(_held(gateway, salt)),
        held_total=len(gateway.lot),
        peers=tuple(peers[:MOST_PEERS]),
        peers_total=len(peers),
        keys=_keys(_told_keys(gateway)),
        key_phase=_key_phase(gateway),
        errors=gateway.troubles.told(),
    )
    return cut(status)


def now() -> str:
    """Tell the time, by the wall clock, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _route(bridge: Bridge, held: int, sessions: dict[str, int], children: int) -> RouteStatus:
    route, pool = bridge.route, bridge.pool
    last = max(bridge.health.answered, pool.served)
    last_ok = time.monotonic() - last if last > float("-inf") else None
    failure = bridge.health.failure
    by_command = route.upstream.command is not None
    return RouteStatus(
        path=route.path,
        upstream=route.upstream.name,
        transport=_transport(bridge, is_known=last_ok is not None),
        era=_era(bridge),
        continuation=route.continuation,
        health=health(last_ok, failure),
        last_ok_seconds_ago=last_ok,
        last_failure=failure,
        held=held,
        sessions=sessions,
        sessions_limit=pool.most,
        waiting=pool.waiting,
        children=children if by_command else None,
        children_limit=route.upstream.max_children if by_command else None,
        subscriptions=len(bridge.listeners),
        streams=len(bridge.streams),
    )


def _transport(bridge: Bridge, *, is_known: bool) -> str:
    upstream = bridge.route.upstream
    if upstream.command is not None:
        return "stdio"
    if upstream.transport != "auto":
        return upstream.transport
    if bridge.health.speaks_sse:
        return "sse"
    return "streamable-http" if is_known else "auto"


def _era(bridge: Bridge) -> Literal["old", "modern", "unknown"]:
    if bridge.era is None:
        return "old"
    return "unknown" if bridge.era.known is None else "modern" if bridge.era.known else "old"


def _held(gateway: "Gateway", salt: bytes) -> Iterator[HeldStatus]:
    """The calls that were parked first."""
    moment, owner = time.monotonic(), gateway.members.own
    for driver in islice(gateway.lot.waiting(), MOST_HELD):
        caller = hashlib.blake2b(driver.principal, digest_size=_CALLER_BYTES, key=salt).hexdigest()
        yield replace(driver.glance(moment), owner=owner, caller=caller)


def _process(gateway: "Gateway") -> ProcessStatus:
    hold, limits = gateway.config.hold, gateway.config.limits
    return ProcessStatus(
        id=gateway.members.own,
        state="ready" if gateway.ready else "draining",
        configuration=digest(gateway.config),
        pid=os.getpid(),
        uptime_seconds=time.monotonic() - gateway.began,
        in_flight=gateway.downstream.in_flight,
        held=len(gateway.lot),
        held_limit=hold.max_calls,
        held_of_one_caller=gateway.lot.most_of_one,
        held_of_one_caller_limit=hold.max_calls_per_principal,
        connections=gateway.connections,
        connections_limit=limits.connections,
        open_files=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
    )


def known_peers(members: Members) -> list[PeerStatus]:
    """Return the other members, and what came of dealing with them; nobody is asked now."""
    moment = time.monotonic()
    found = []
    for name, address in members.others().items():
        seen = members.seen.get(name)
        found.append(
            PeerStatus(
                id=name,
                address=address,
                state="not asked" if seen is None else seen.state,
                last_answer_seconds_ago=None if seen is None or seen.answered is None else moment - seen.answered,
            )
        )
    return found


def _told_keys(gateway: "Gateway") -> tuple[str, ...]:
    """Return the ids of the configured keys, or of the one that stands in where there are none."""
    return gateway.key_ids[: len(gateway.config.state.keys) or 1]


def _keys(ids: tuple[str, ...]) -> tuple[KeyStatus, ...]:
    return tuple(KeyStatus(key, "only opens" if place else "seals and opens") for place, key in enumerate(ids))


def _key_phase(gateway: "Gateway") -> str:
    """Say where a rotation stands, as far as the ring tells: which of two keys is the newer one, it does not."""
    config, (first, *others) = gateway.config, _told_keys(gateway)
    if not config.state.keys:
        return (
            "No state.keys: this key was made at the start and ends with the process, and what is held ends with it."
        )
    if not others:
        return "One key: no rotation is under way."
    return (
        f"{len(others) + 1} keys: a rotation is under way, {first} seals. If it is the new one, the old one may go "
        f"{config.state.ttl_seconds:g} s after it came first everywhere; if it is the old one, all replicas need the "
        "new one before it may come first."
    )


def _notices(gateway: "Gateway") -> Iterator[Notice]:
    if gateway.tasks.failures:
        yield Notice(
            f"{gateway.tasks.failures} unexpected errors inside the gateway since its start",
            "Each is a bug: please report it with the traceback in the log (`task.failed`)",
        )
    rejected = gateway.reload.rejected
    if rejected is not None:
        more = f"; and {len(rejected) - _REJECTIONS} more" if len(rejected) > _REJECTIONS else ""
        text = "; ".join(presentable(problem) for problem in rejected[:_REJECTIONS])
        yield Notice(
            f"The configuration file was rejected, and the one before it is in use: {text}{more}",
            "Correct the file (`mrtr-gateway check --config FILE`) and send SIGHUP",
        )
    for sentence in cautions(gateway.config):
        yield Notice(sentence, is_bad=False)


def about(config: Config, host: str, began: float, *, is_draining: bool) -> Status:
    """Tell of a supervisor, which serves nobody; its workers are all silent until they are heard."""
    return Status(
        version=__version__,
        replica=host,
        state="draining" if is_draining else "ready",
        time=now(),
        uptime_seconds=time.monotonic() - began,
        configuration=digest(config),
        processes=tuple(ProcessStatus(id=f"{host}#{number}", state="silent") for number in range(config.workers)),
    )

"""Merges the statuses of several processes into one; pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from gateway.telemetry.process_status import (
    MOST_ERRORS,
    MOST_HELD,
    MOST_KEYS,
    MOST_NOTICES,
    MOST_PEERS,
    MOST_PROCESSES,
    MOST_ROUTES,
    ErrorStatus,
    Failure,
    Notice,
    PeerStatus,
    ProcessStatus,
    RouteStatus,
    Status,
    UpstreamHealth,
)

T = TypeVar("T")
_ADDED_UP: Final = (
    *("held", "sessions_limit", "waiting"),
    *("subscriptions", "mirrored", "client_sessions", "tasks", "streams"),
)
"""The numbers of a route that several processes have together."""


def cut(status: Status) -> Status:
    """Return a status with every list cut to its bound, the most important entries first."""
    return replace(
        status,
        notices=status.notices[:MOST_NOTICES],
        processes=status.processes[:MOST_PROCESSES],
        keys=status.keys[:MOST_KEYS],
        routes=status.routes[:MOST_ROUTES],
        held=tuple(sorted(status.held, key=lambda call: -call.age_seconds)[:MOST_HELD]),
        peers=status.peers[:MOST_PEERS],
        errors=tuple(sorted(status.errors, key=lambda error: error.last_seconds_ago)[:MOST_ERRORS]),
    )


def failing_first(routes: Iterable[RouteStatus]) -> list[RouteStatus]:
    """Return the routes by path, failing ones first."""
    return sorted(routes, key=lambda route: (route.health != "failing", route.path))


def together(own: Status, parts: Sequence[Status]) -> Status:
    """Merge the workers of one host; `own` is from the supervisor, which knows the workers that should exist."""
    workers = {process.id for process in own.processes}
    peers = _merged(parts, lambda part: part.peers, lambda peer: peer.id, _peer)
    notices = dict.fromkeys([*own.notices, *(notice for part in parts for notice in part.notices)])
    told = merged(own, parts)
    told = replace(
        told,
        state=_state(own, told.processes),
        notices=(*_odd_ones(told.processes), *notices),
        peers=tuple(peer for peer in peers if peer.id not in workers),
        peers_total=max((part.peers_total - len(workers) + 1 for part in parts), default=0),
        keys=parts[0].keys if parts else (),
        key_phase=parts[0].key_phase if parts else "",
    )
    return cut(told)


def merged(own: Status, parts: Sequence[Status]) -> Status:
    """Return `own` with the processes, routes, held calls and errors of all parts.

    Its own processes are those that should exist: one that is in no part stays as it is.
    """
    processes = [process for part in parts for process in part.processes]
    heard = {process.id for process in processes}
    processes += [process for process in own.processes if process.id not in heard]
    routes = _merged(parts, lambda part: part.routes, lambda route: route.path, _route)
    errors = _merged(parts, lambda part: part.errors, lambda each: f"{each.route} {each.kind} {each.text}", _error)
    return replace(
        own,
        processes=tuple(sorted(processes, key=lambda process: _number(process.id))),
        routes=tuple(failing_first(routes)),
        routes_total=max((part.routes_total for part in parts), default=0),
        held=tuple(call for part in parts for call in part.held),
        held_total=sum(part.held_total for part in parts),
        errors=tuple(errors),
    )


def _state(own: Status, processes: Sequence[ProcessStatus]) -> str:
    """Ready only if every worker is, as in /readyz."""
    return own.state if all(process.state == "ready" for process in processes) or own.state != "ready" else "not ready"


def _odd_ones(processes: Sequence[ProcessStatus]) -> list[Notice]:
    """Report workers that are missing, and workers whose configurations differ."""
    silent = [process.id for process in processes if process.state == "silent"]
    digests = {process.configuration for process in processes if process.configuration}
    found = []
    if silent:
        text = f"No answer within a second from {', '.join(silent[:10])}: the calls they hold are not counted here"
        found.append(Notice(text, "Look for `worker.ended` in the log: it says why the worker ended"))
    if len(digests) > 1:
        text = f"The workers run under different configurations ({', '.join(sorted(digests))})"
        found.append(Notice(text, "Send SIGHUP to the supervisor, and look for `config.rejected` in the log"))
    return found


def _number(process: str) -> tuple[str, int]:
    host, _, number = process.partition("#")
    return host, int(number) if number.isdecimal() else 0


def _merged(
    parts: Sequence[Status], rows: Callable[[Status], Sequence[T]], name: Callable[[T], str], add: Callable[[T, T], T]
) -> list[T]:
    """Merge the rows that have the same name, in the order in which the names first appear."""
    found: dict[str, T] = {}
    for row in (row for part in parts for row in rows(part)):
        known = found.get(name(row))
        found[name(row)] = row if known is None else add(known, row)
    return list(found.values())


def _route(one: RouteStatus, other: RouteStatus) -> RouteStatus:
    failures = [each.last_failure for each in (one, other) if each.last_failure is not None]
    failure = min(failures, key=lambda each: each.seconds_ago, default=None)
    last_ok = _least(one.last_ok_seconds_ago, other.last_ok_seconds_ago)
    known = other if one.era == "unknown" else one
    return replace(
        one,
        transport=known.transport,
        era=known.era,
        health=health(last_ok, failure),
        last_ok_seconds_ago=last_ok,
        last_failure=failure,
        sessions={state: count + other.sessions.get(state, 0) for state, count in one.sessions.items()},
        children=_sum(one.children, other.children),
        children_limit=_sum(one.children_limit, other.children_limit),
        **{name: getattr(one, name) + getattr(other, name) for name in _ADDED_UP},
    )


def health(last_ok_seconds_ago: float | None, failure: Failure | None) -> UpstreamHealth:
    """Judge an upstream by its last answer or failure."""
    if failure is not None and (last_ok_seconds_ago is None or failure.seconds_ago < last_ok_seconds_ago):
        return "failing"
    return "unknown" if last_ok_seconds_ago is None else "ok"


def _peer(one: PeerStatus, other: PeerStatus) -> PeerStatus:
    """Prefer the worker with the most recent answer, or else one that has asked."""

    def rank(peer: PeerStatus) -> tuple[float, bool]:
        ago = peer.last_answer_seconds_ago
        return math.inf if ago is None else ago, peer.state == "not asked"

    return min(one, other, key=rank)


def _error(one: ErrorStatus, other: ErrorStatus) -> ErrorStatus:
    return replace(
        one,
        count=one.count + other.count,
        first_seconds_ago=max(one.first_seconds_ago, other.first_seconds_ago),
        last_seconds_ago=min(one.last_seconds_ago, other.last_seconds_ago),
    )


def _least(*ages: float | None) -> float | None:
    return min((age for age in ages if age is not None), default=None)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other

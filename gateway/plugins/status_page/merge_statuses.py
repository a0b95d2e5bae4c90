"""Merges the statuses of several processes, workers of a host or replicas of a cluster, into one; pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import chain
from math import inf
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from gateway.cluster.worker import host_of
from gateway.telemetry.process_status import (
    BOUNDS,
    MOST_CLIENTS,
    CallerStatus,
    ErrorStatus,
    Failure,
    PeerState,
    ProcessStatus,
    RouteStatus,
    Status,
    StatusNotice,
    Use,
    health,
)

Told = TypeVar("Told", ErrorStatus, Failure)
Key = TypeVar("Key")
Value = TypeVar("Value")
_NAMED: Final = 10
_ADDED_UP: Final = (
    *("held", "sessions_limit", "waiting"),
    *("subscriptions", "mirrored", "client_sessions", "tasks", "running", "unsent", "streams"),
)
"""The numbers of a route that several processes have together."""


def cut(status: Status) -> Status:
    """Return a status with every list cut to its bound, the most important entries first."""
    ordered = {
        **asdict(status),
        "held": sorted(status.held, key=lambda call: -call.age_seconds),
        "callers": sorted(status.callers, key=lambda each: -max(each.held, each.sessions)),
        "running": sorted(status.running, key=lambda call: -(call.running_seconds or 0.0)),
        "errors": sorted(status.errors, key=lambda error: error.last_seconds_ago),
    }
    return replace(status, **{name: tuple(ordered[name][:most]) for name, most in BOUNDS.items()})


def failing_first(routes: Iterable[RouteStatus]) -> list[RouteStatus]:
    """Return the routes by path, failing ones first."""
    return sorted(routes, key=lambda route: (route.health != "failing", route.path))


class Heard(Struct, frozen=True, kw_only=True):
    """What came of asking one process, or one other replica, for its status."""

    state: PeerState
    why: str = ""
    """Why there is no status."""
    fix: str = "Check whether it runs, and read its log"
    status: Status | None = None


def of_host(own: Status, heard: Mapping[str, Heard], host: str) -> Status:
    """Merge a worker with the other ones of its host, which were asked."""
    told = _merged(own, heard)
    is_ready = own.state != "ready" or all(process.state == "ready" for process in told.processes)
    seconds = max(process.uptime_seconds for process in told.processes)
    state = own.state if is_ready else "not ready"  # as in /readyz
    return cut(replace(told, replica=host, state=state, uptime_seconds=seconds))


def of_cluster(own: Status, heard: Mapping[str, Heard]) -> Status:
    """Merge this replica with the others, which were asked."""
    elsewhere = {name: replace(each, status=_of_another(each.status, name)) for name, each in heard.items()}
    return cut(replace(_merged(own, elsewhere), covers="cluster", peers=own.peers))


def _of_another(status: Status | None, replica: str) -> Status | None:
    """Say in each fix where its commands run: they name the file of that replica."""
    if status is None:
        return None

    def there(told: Told) -> Told:
        return replace(told, fix=f"On {replica}: {told.fix}") if told.fix else told

    routes = (
        replace(route, last_failure=there(route.last_failure)) if route.last_failure is not None else route
        for route in status.routes
    )
    return replace(status, errors=tuple(map(there, status.errors)), routes=tuple(routes))


def _merged(own: Status, heard: Mapping[str, Heard]) -> Status:
    """Return `own` with what all have that answered, and with a row of its state for each of the others."""
    answered = {name: each.status for name, each in heard.items() if each.status is not None}
    parts = {own.replica: own, **answered}
    processes = [process for part in parts.values() for process in part.processes]
    processes += [ProcessStatus(id=name, state=each.state) for name, each in heard.items() if name not in parts]
    missing = [
        StatusNotice(
            f"No status from {name}: its calls, and what servers answered it, are not counted here", each.fix, each.why
        )
        for name, each in heard.items()
        if each.status is None
    ]
    routes = _grouped((route.path, route) for part in parts.values() for route in part.routes)
    told = (error for part in parts.values() for error in part.errors)
    errors = _grouped(((error.route, error.kind, error.text), error) for error in told)
    callers = _grouped((caller.caller, caller) for part in parts.values() for caller in part.callers)
    peers = _grouped((peer.id, peer) for part in parts.values() for peer in part.peers)
    return replace(
        own,
        notices=(*missing, *_unreached(parts), *_notices(parts)),
        key_phase=key_phase(parts, processes),
        # By host, and "gw#9" before "gw#10".
        processes=tuple(sorted(processes, key=lambda process: (host_of(process.id), len(process.id), process.id))),
        routes=tuple(failing_first(map(_route, routes.values()))),
        # All parts have the same routes, except around a reload: a sum would repeat them.
        routes_total=max(part.routes_total for part in parts.values()),
        held=tuple(call for part in parts.values() for call in part.held),
        held_total=sum(part.held_total for part in parts.values()),
        callers=tuple(
            CallerStatus(
                caller=tag,
                held=sum(each.held for each in same),
                sessions=sum(each.sessions for each in same),
                # Limits are those of each process, with which a sum has nothing to do.
                most_held=max((each.most_held for each in same), key=Use.part),
                most_sessions=max((each.most_sessions for each in same), key=Use.part),
                clients=dict(sum((Counter(each.clients) for each in same), Counter()).most_common(MOST_CLIENTS)),
            )
            for tag, same in callers.items()
        ),
        # Each worker asks for itself: what any of them found last counts, and the last answer that any of them got.
        peers=tuple(
            replace(
                min(peers[each.id], key=lambda peer: _age(peer.found_seconds_ago)),
                last_answer_seconds_ago=min((peer.last_answer_seconds_ago for peer in peers[each.id]), key=_age),
            )
            for each in own.peers
        ),
        addresses=dict(sum((Counter(part.addresses) for part in parts.values()), Counter()).most_common(MOST_CLIENTS)),
        running=tuple(call for part in parts.values() for call in part.running),
        running_total=sum(part.running_total for part in parts.values()),
        errors=tuple(
            replace(
                same[0],
                count=sum(error.count for error in same),
                first_seconds_ago=max(error.first_seconds_ago for error in same),
                last_seconds_ago=min(error.last_seconds_ago for error in same),
            )
            for same in errors.values()
        ),
    )


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Gather the values of each key."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _age(seconds_ago: float | None) -> float:
    return inf if seconds_ago is None else seconds_ago


def _unreached(parts: Mapping[str, Status]) -> Iterator[StatusNotice]:
    """Yield which of these replicas others did not reach lately, since their processes began."""
    found = _grouped(
        (name, f"{peer.id} at {peer.address} ({peer.state})")
        for name, part in parts.items()
        for peer in part.peers
        if peer.state not in ("answered", "not asked")
        and peer.id in parts
        and _age(peer.found_seconds_ago) < min(parts[peer.id].uptime_seconds, 600.0)
    )
    for peers_named, names in _grouped((_names(peers), name) for name, peers in found.items()).items():
        there = _names(names)
        fix = f"Run `mrtr-gateway doctor --config FILE` on {there}, and compare replica.peers with that of others"
        yield StatusNotice(f"{there} did not reach {peers_named} within the last 10 minutes", fix)


def _notices(parts: Mapping[str, Status]) -> Iterator[StatusNotice]:
    """Yield what differs, as some things do during an update or a reload, and then what the parts report."""
    for what, values in (
        ("versions", {name: part.version for name, part in parts.items()}),
        ("configurations", {name: part.configuration for name, part in parts.items()}),
        ("sealing keys", {name: part.keys[0].id if part.keys else "" for name, part in parts.items()}),
    ):
        groups = _grouped((value, name) for name, value in values.items())
        if len(groups) > 1:
            shown = "; ".join(f"{value} ({_names(names)})" for value, names in groups.items())
            fix = (
                "Expected during an update; for the next step of a rotation, see State keys. If it stays, run "
                "`mrtr-gateway check --config FILE` on each host: where it prints another digest than here, a "
                "reload was forgotten or rejected (`config.rejected` in the log), or the service's GATEWAY_ "
                "variables override the file; otherwise the files differ. The digest has no keys: `mrtr-gateway "
                "doctor --config FILE` tells those of a file, in order"
            )
            yield StatusNotice(f"The {what} differ: {shown}", fix, is_bad=False)
    reported = _grouped((notice, name) for name, part in parts.items() for notice in part.notices)
    for notice, names in reported.items():
        yield notice if len(names) == len(parts) else replace(notice, text=f"{_names(names)}: {notice.text}")


def key_phase(parts: Mapping[str, Status], processes: Sequence[ProcessStatus]) -> str:
    """Say how far a key rotation is at these replicas or workers."""
    own = next(iter(parts.values()))
    if not own.keys_kept_seconds:
        return "state.keys is empty: this key is lost when the process ends, together with every held call."
    rings = {name: [key.id for key in part.keys] for name, part in parts.items() if part.keys}
    sealing = dict.fromkeys(ring[0] for ring in rings.values())
    keys = [*dict.fromkeys((*sealing, *chain.from_iterable(rings.values())))]
    silent = _names([each.id for each in processes if each.state in ("silent", "refused", "stalled")])
    unknown = f"; {silent} did not tell any keys" if silent else ""
    if refusing := _names([each.id for each in processes if each.state == "refused"]):
        unknown += f", and {refusing} may lack {keys[0]}, or {own.replica} one of theirs"
    if len(keys) == 1:
        return f"One key at {_names([*rings])}: no rotation is under way there{unknown}."
    lacking = {key: _names([name for name in rings if key not in rings[name]]) for key in keys}
    facts = [f"{key} seals at {_names([name for name in rings if rings[name][0] == key])}" for key in sealing]
    facts += [f"{there} cannot open {key}" for key, there in lacking.items() if there]
    if any(lacking[key] for key in sealing):
        step = "Calls fail until each replica has every key that seals: give it the missing one, as its last"
    elif silent:
        step = f"Before the next step, see State keys on the page of {silent}"
    else:
        step = _next_step(own, rings, lacking, processes)
    return f"A rotation is under way: {'; '.join(facts)}{unknown}. {step}."


def _next_step(
    own: Status, rings: Mapping[str, Sequence[str]], lacking: Mapping[str, str], processes: Iterable[ProcessStatus]
) -> str:
    """Say what comes next, as each key that seals opens everywhere; `lacking` says where a key does not."""
    # A rotation adds the new key as the last one, and leaves the old one there.
    other = next(filter(lacking.get, lacking), [*lacking][-1])
    having = [each for each in processes if other in rings.get(each.id, rings.get(host_of(each.id), lacking))]
    newest = {each.newest_key for each in having} & lacking.keys()
    new = newest.pop() if len(newest) == 1 else None
    if len({ring[0] for ring in rings.values()}) > 1:
        return f"Phase 2 is half done: put {new or 'the new key'} first everywhere"
    half = "half " if lacking[other] else ""
    as_new = f"{other} is the new key, phase 1 is {half}done: put it {'last' if half else 'first'} everywhere"
    end = _end_of_wait(own, [each.sealing_seconds_ago for each in having])
    old = f"{other} is the old key, phase {3 if half else 2} is {half}done"
    as_old = f"{old}: move it from state.keys to session_keys {end}"
    if half and end.startswith("from"):
        as_old += f"; {lacking[other]} did too early: if calls fail there, put it back as the last key"
    if new is None:
        return f"If {as_new}. If {as_old}"
    return f"As {as_new if new == other else as_old}"


def _end_of_wait(own: Status, ages: Sequence[float | None]) -> str:
    """Say when a key may go that some have; their first keys have sealed for so long, in seconds."""
    told = [age for age in ages if age is not None]
    if len(told) < len(ages):
        return f"when no replica has sealed with it for {own.keys_kept_seconds:,g} s"
    left = own.keys_kept_seconds - max(min(told, default=0.0), 0.0)
    # In whole minutes, because those are the same at every view, whatever fraction of a second it takes.
    end = datetime.fromisoformat(own.time) + timedelta(seconds=max(left, 0.0), minutes=1)
    return f"from {end:%Y-%m-%d %H:%M} UTC on" if left > 0 else "now"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _route(rows: Sequence[RouteStatus]) -> RouteStatus:
    """Merge what several processes tell of one route."""
    failures = [row.last_failure for row in rows if row.last_failure is not None]
    failure = min(failures, key=lambda each: each.seconds_ago, default=None)
    last_ok = min((row.last_ok_seconds_ago for row in rows if row.last_ok_seconds_ago is not None), default=None)
    if failure is not None and health(last_ok, failure) == "failing":
        # What began before an answer, whichever process got it, has ended since; if all began before, it may be new.
        began = [each.since_seconds_ago for each in failures if last_ok is None or each.since_seconds_ago < last_ok]
        failure = replace(failure, since_seconds_ago=max(began, default=last_ok or 0.0))
    # A process that has served no request of the route knows neither its era nor its transport.
    first = next((row for row in rows if row.era != "unknown"), rows[0])
    numbers = _ADDED_UP if first.children is None else (*_ADDED_UP, "children", "children_limit")
    return replace(
        first,
        health=health(last_ok, failure),
        last_ok_seconds_ago=last_ok,
        last_failure=failure,
        oldest_call_seconds=max(row.oldest_call_seconds or 0.0 for row in rows) or None,
        sessions={state: sum(row.sessions.get(state, 0) for row in rows) for state in first.sessions},
        **{name: sum(getattr(row, name) or 0 for row in rows) for name in numbers},
    )

"""What the status page says, worked out from a status: rows, figures, warnings; without HTML."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from msgspec.structs import replace

from gateway import world
from gateway.protocol.errors import COUNTED_BY_CALLER
from gateway.telemetry.process_status import CallStatus, Failure, RouteStatus, Status, StatusNotice

NEAR: Final = 0.8
"""The fraction of a limit from which the page warns."""
_HANGS_SECONDS: Final = 30.0
"""The page names a server that has answered nothing for so long, while a call waits for it. Clients wait for 60 s."""
HEALTH: Final = {"ok": ("good", "answered"), "failing": ("bad", "failing"), "unknown": ("idle", "not asked yet")}
_ERAS: Final = {"unknown": "era not known yet", "old": "legacy", "modern": "modern, passed through"}
_PROCESS_LIMITS: Final = (
    ("Held calls", "held", "hold.max_calls"),
    ("Connections", "connections", "limits.connections"),
    ("Open files", "open_files", "ulimit -n, less a reserve"),
)
"""The label of each limit of a process, the field that has what is used of it, its key."""
_FULL: Final = {
    "limits.calls_bytes": "new calls that do not fit are refused",
    "limits.receiving_bytes": "the oldest unfinished request is refused",
    "limits.sending_bytes": "the client that is behind longest is closed",
    "limits.arriving_bytes": "only the oldest message of an upstream is read on",
    "limits.results_bytes": "the oldest result of the caller that has most is dropped",
    "limits.replay_bytes": "the oldest stream of the caller that has most forgets what it sent, or its session ends",
    "limits.cold_bytes": "calls stay held instead of going cold",
}
"""What happens when a budget is full."""
_UNITS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
_NO_SESSION: Final = "a session with the server, or its list of tools"
_RUNNING: Final = {"parked": "; between rounds of its client", "detached": "; its client has left"}
"""Why a running call has no leg, by its state."""


class Figure(NamedTuple):
    """One number of the overview; with a limit, also how much of the limit is used."""

    label: str
    number: int
    limit: int = 0
    unit: str = ""
    is_bad: bool = False


class PageView(NamedTuple):
    """What the template shows besides the status itself."""

    status: Status
    level: str
    """The colour of the whole: good, warn or bad."""
    verdict: str
    figures: Sequence[Figure]


def only(status: Status, path: str) -> Status:
    """Return a status with the routes, calls and errors of one path; the processes stay as they are."""
    routes = tuple(route for route in status.routes if route.path == path)
    running = tuple(call for call in status.running if call.route == path)
    return replace(
        status,
        routes=routes,
        routes_total=len(routes),
        held=tuple(call for call in status.held if call.route == path),
        held_total=sum(route.held for route in routes),
        running=running,
        running_total=max(sum(route.running for route in routes), len(running)),  # an older replica tells no sum
        errors=tuple(error for error in status.errors if error.route == path),
    )


def view(status: Status) -> PageView:
    """Prepare a status for the template."""
    status = judged(status)

    def total(name: str) -> int:
        return sum(getattr(process, name) for process in status.processes)

    failing = sum(route.health == "failing" for route in status.routes)
    known = "" if all(process.state in ("ready", "draining") for process in status.processes) else ", as far as known"
    errors = sum(error.count for error in status.errors)
    bad = sum(notice.is_bad for notice in status.notices)
    return PageView(
        status=status,
        level="bad" if bad else "good" if status.state == "ready" else "warn",
        verdict=f"{status.state}, {counted(bad, 'problem')}" if bad else status.state,
        figures=[
            Figure("Held calls", status.held_total, total("held_limit")),
            Figure("In flight", total("in_flight"), unit="requests"),
            Figure("Connections", total("connections"), total("connections_limit")),
            Figure("Open files", total("open_files"), total("open_files_limit")),
            Figure("Upstreams failing", failing, unit=f"of {status.routes_total:,}{known}", is_bad=failing > 0),
            Figure("Errors", errors, unit="listed below" if errors else "since the start"),
        ],
    )


def judged(status: Status) -> Status:
    """Return a status with the notices that its numbers give reason for, the bad ones first."""
    notices = (*_upstreams(status), *_limits(status), *status.notices)
    return replace(status, notices=tuple(sorted(notices, key=lambda notice: not notice.is_bad)))


def _upstreams(status: Status) -> Iterator[StatusNotice]:
    """Yield the upstreams that are failing or may hang."""
    for route in status.routes:
        failure, ok = route.last_failure, route.last_ok_seconds_ago
        if route.health == "failing" and failure is not None:
            last = f"it last failed {ago(failure.seconds_ago)}"
            if ok is not None:
                last += f" and answered {ago(ok)}"
            if younger := _younger(failure, status):
                last += f"; an answer since may be forgotten: {counted(younger, 'process', 'processes')} started later"
            yield StatusNotice(
                f"The upstream of {route.path} is failing{since(route, status)}; {last}", failure.fix, failure.cause
            )
        elif (route.oldest_call_seconds or 0.0) >= _HANGS_SECONDS and (ok is None or ok >= _HANGS_SECONDS):
            yield StatusNotice(
                f"The upstream of {route.path} may hang: last answer {ago(ok)}; {running_calls(route)}",
                "A slow tool looks the same. `mrtr-gateway doctor --config FILE` asks it: if it hangs, restart it",
                is_bad=False,
            )


def _limits(status: Status) -> Iterator[StatusNotice]:
    """Yield what is nearly used up of the limits of each process."""
    for each in status.processes:
        where = f" in {each.id}" if len(status.processes) > 1 else ""
        for label, name, key in _PROCESS_LIMITS:
            yield from near(f"{label}{where}", getattr(each, name), getattr(each, f"{name}_limit"), key)
        for name, budget in each.budgets.items():
            # A notice about a limit of one caller is its process's own, which knows the caller.
            if budget.used >= NEAR * budget.limit and not name.startswith(COUNTED_BY_CALLER):
                yield StatusNotice(
                    f"{name}{where}: {budget.used:,} of {budget.limit:,} bytes",
                    f"At the limit, {_FULL[name]}" if name in _FULL else "",
                )


def sessions_near_limit(routes: Iterable[RouteStatus]) -> Iterator[StatusNotice]:
    """Yield the routes of one process that have nearly as many sessions in use as they may."""
    for route in routes:
        # Idle sessions are closed when a new one is needed, so they do not count towards the limit.
        busy = sum(route.sessions.values()) - route.sessions.get("idle", 0)
        key = "upstream.max_children" if route.sessions_limit == route.children_limit else "sessions.max"
        yield from near(f"Sessions in use on {route.path}", busy, route.sessions_limit, key)


def near(label: str, number: int, limit: int, key: str) -> Iterator[StatusNotice]:
    """Yield that a limit, whose key this is, is nearly used up, if it is."""
    if limit and number >= NEAR * limit:
        when = "When the limit is reached, new" if number < limit else "New"
        first = ", once no session is idle" if key.startswith("ulimit") else ""
        whose = "; see Callers" if key.startswith(COUNTED_BY_CALLER) else ""
        yield StatusNotice(f"{label}: {number:,} of {limit:,} ({key})", f"{when} ones are refused{first}{whose}")


def mode(route: RouteStatus) -> str:
    """Return the transport and the era of a route's upstream."""
    replays = "" if route.continuation == "hold" else f", continuation: {route.continuation}"
    return f"{route.transport}, {_ERAS[route.era]}{replays}"


def sessions_note(route: RouteStatus) -> str:
    """Return what is to say of a route's sessions."""
    notes = [f"{count:,} {state}" for state, count in route.sessions.items() if count]
    if route.tasks:
        notes.append(f"{counted(route.tasks, 'task')} in them")
    if route.waiting:
        notes.append(f"{counted(route.waiting, 'call')} waiting for one")
    if route.children is not None:
        notes.append(f"{counted(route.children, 'child process', 'child processes')} of {route.children_limit:,}")
    if route.client_sessions:
        notes.append(f"{route.client_sessions:,} of legacy clients")
    return ", ".join(notes)


def running_calls(route: RouteStatus) -> str:
    """Return how many calls of a route have run at its server for long, and for how long."""
    count = max(route.running - route.unsent, 1)  # an older replica tells only of the oldest
    return f"{counted(count, 'running call')}, the oldest for {duration(route.oldest_call_seconds or 0.0)}"


def streams(route: RouteStatus) -> str:
    """Return the open streams of a route, by kind."""
    kinds = ((route.subscriptions, "bridged"), (route.streams, "passed through"), (route.mirrored, "mirrored"))
    return ", ".join(f"{count:,} {what}" for count, what in kinds if count) or "none"


def waits_for(call: CallStatus) -> str:
    """Return what a held or running call waits for."""
    if call.is_lost:
        return "lost: the client will be told"
    if call.running_seconds is not None:
        return (_NO_SESSION if call.silent_seconds is None else "the server's response") + _RUNNING.get(call.state, "")
    lost = "; the upstream call was lost and will run again" if call.state == "broken" else ""
    return (", ".join(call.asked) or "the client's next request") + lost


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number with its noun in the singular or the plural."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def ago(seconds: float | None) -> str:
    """Return an age in words."""
    if seconds is None:
        return "never"
    return f"{duration(seconds)} ago" if seconds >= 1 else "just now"


def _younger(failure: Failure, status: Status) -> int:
    """Return how many processes began after a failure, and may have forgotten an answer between."""
    began = max(failure.since_seconds_ago, failure.seconds_ago)
    return sum(0 < each.uptime_seconds < began for each in status.processes)


def since(route: RouteStatus, status: Status) -> str:
    """Return since when an upstream is failing, by the clock and in words; empty if it is not, or nobody knows."""
    failure = route.last_failure
    if route.health != "failing" or failure is None or not (seconds := failure.since_seconds_ago):
        return ""
    began = datetime.fromtimestamp((world.wall() - seconds) % 86_400, UTC)
    later = " or later" if _younger(failure, status) else ""
    return f" since {began:%H:%M:%S} UTC ({duration(seconds)}){later}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = max(int(seconds), 0)
    for size, unit, smaller, smaller_unit in _UNITS:
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {smaller_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"

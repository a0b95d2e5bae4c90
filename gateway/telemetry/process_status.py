"""The model of /status: the status of one process, the merging of several into one; pure.

Rule 1: no contents. Allowed are numbers, names from the configuration, protocol terms, and the name of a held tool or
prompt; never arguments, questions, answers, results, resource URIs, session ids, tokens or the caller's identity.
Rule 2: every list that grows with traffic or configuration is cut to a bound here; its full length stands beside it.
Rule 3: times are ages in seconds, so that the statuses of processes with different clocks can be merged.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gateway.telemetry.metrics.process import BudgetStatus

MOST_HELD: Final = 200
MOST_ROUTES: Final = 200
MOST_PEERS: Final = 200
MOST_ERRORS: Final = 50
MOST_NOTICES: Final = 50
MOST_PROCESSES: Final = 500
MOST_KEYS: Final = 50

UpstreamHealth = Literal["ok", "failing", "unknown"]
ProcessState = Literal["ready", "draining", "silent"]
PeerState = Literal["answered", "dead", "silent", "stalled", "not asked"]
T = TypeVar("T")


class Failure(Struct, frozen=True, kw_only=True):
    """The last failure of an upstream."""

    kind: str
    """As in the metric mcp_gateway_upstream_errors_total."""
    cause: str
    fix: str
    seconds_ago: float


class RouteStatus(Struct, frozen=True, kw_only=True):
    """One route, and its upstream as its traffic shows it: the page itself sends nothing upstream."""

    path: str
    upstream: str
    """Its URL without credentials and query, or the program's name without arguments."""
    transport: str
    era: Literal["old", "modern", "unknown"]
    continuation: str
    health: UpstreamHealth
    last_ok_seconds_ago: float | None
    last_failure: Failure | None
    held: int
    sessions: dict[str, int]
    """By state."""
    sessions_limit: int
    waiting: int
    """Calls that are waiting for a session."""
    children: int | None
    """None unless the upstream is a command."""
    children_limit: int | None
    subscriptions: int
    client_sessions: int = 0
    """Sessions of legacy clients that end at the gateway, because it changes the transport."""
    newcomers: int = 0
    """Sessions of callers whose calls the upstream has never answered, without idle ones."""
    newcomers_limit: int = 0
    of_one_address: int = 0
    """Sessions of the address that has the most."""
    of_one_address_limit: int = 0
    """0: no limit."""
    mirrored: int = 0
    """Calls of legacy clients at a modern server."""
    tasks: int = 0
    """Tasks of clients, each of which has a session."""
    streams: int
    """Streams that are passed through: GET streams of legacy clients, subscriptions at a modern upstream."""


class HeldStatus(Struct, frozen=True, kw_only=True):
    """One call that is waiting for its client."""

    route: str
    method: str
    name: str
    """Of the tool or prompt; empty for a resource, because a URI may hold private data."""
    state: str
    round: int
    asked: tuple[str, ...]
    """The kinds of its open questions: elicitation, sampling, roots."""
    age_seconds: float
    """Since its first round began."""
    expires_in_seconds: float | None
    """None while a client is waiting for its next reply."""
    owner: str
    """The replica, or worker, that holds it."""
    caller: str
    """A tag that calls of the same caller share; the salt changes at every start, so it reveals nothing else."""


class PeerStatus(Struct, frozen=True, kw_only=True):
    """Another replica or worker, as this one last found it."""

    id: str
    address: str
    state: PeerState
    last_answer_seconds_ago: float | None


class KeyStatus(Struct, frozen=True):
    """One state key; its id is not secret."""

    id: str
    role: Literal["seals and opens", "only opens"]


class ErrorStatus(Struct, frozen=True, kw_only=True):
    """A recent error; errors of the same kind and wording are one entry."""

    kind: str
    route: str
    text: str
    fix: str
    count: int
    first_seconds_ago: float
    last_seconds_ago: float


class Notice(Struct, frozen=True):
    """Something that needs the operator's attention, and how to fix it."""

    text: str
    fix: str = ""
    detail: str = ""
    is_bad: bool = True
    """False for a mere advisory."""


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """One process."""

    id: str
    state: ProcessState
    configuration: str = ""
    pid: int = 0
    uptime_seconds: float = 0.0
    in_flight: int = 0
    held: int = 0
    held_limit: int = 0
    held_of_one_caller: int = 0
    held_of_one_caller_limit: int = 0
    held_of_one_address: int = 0
    held_of_one_address_limit: int = 0
    """0: no limit."""
    cold: int = 0
    cold_limit: int = 0
    connections: int = 0
    connections_limit: int = 0
    open_files: int = 0
    open_files_limit: int = 0
    memory_bytes: int = 0
    budgets: dict[str, BudgetStatus] = {}
    """By the key in the configuration that sets the limit."""


class Status(Struct, frozen=True, kw_only=True):
    """The whole page."""

    version: str
    replica: str
    state: str
    """`ready`, `draining`, or `not ready` if a worker is not ready."""
    covers: Literal["replica", "cluster"] = "replica"
    """Which processes the numbers cover: those of this replica alone, or of all replicas that answered."""
    time: str
    """RFC 3339, by the clock of the process that answers."""
    uptime_seconds: float
    configuration: str
    """12 digits of a digest that leaves secrets out."""
    notices: tuple[Notice, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()
    routes: tuple[RouteStatus, ...] = ()
    routes_total: int = 0
    held: tuple[HeldStatus, ...] = ()
    """The oldest."""
    held_total: int = 0
    peers: tuple[PeerStatus, ...] = ()
    peers_total: int = 0
    keys: tuple[KeyStatus, ...] = ()
    key_phase: str = ""
    errors: tuple[ErrorStatus, ...] = ()
    """The newest."""


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
    parts: Sequence[Status],
    rows: Callable[[Status], Sequence[T]],
    name: Callable[[T], str],
    add: Callable[[T, T], T],
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
        held=one.held + other.held,
        sessions={state: count + other.sessions.get(state, 0) for state, count in one.sessions.items()},
        sessions_limit=one.sessions_limit + other.sessions_limit,
        newcomers=one.newcomers + other.newcomers,
        newcomers_limit=one.newcomers_limit + other.newcomers_limit,
        of_one_address=max(one.of_one_address, other.of_one_address),
        waiting=one.waiting + other.waiting,
        children=_sum(one.children, other.children),
        children_limit=_sum(one.children_limit, other.children_limit),
        subscriptions=one.subscriptions + other.subscriptions,
        mirrored=one.mirrored + other.mirrored,
        client_sessions=one.client_sessions + other.client_sessions,
        tasks=one.tasks + other.tasks,
        streams=one.streams + other.streams,
    )


def health(last_ok_seconds_ago: float | None, failure: Failure | None) -> UpstreamHealth:
    """Judge an upstream by its last answer or failure."""
    if failure is not None and (last_ok_seconds_ago is None or failure.seconds_ago < last_ok_seconds_ago):
        return "failing"
    return "unknown" if last_ok_seconds_ago is None else "ok"


def _peer(one: PeerStatus, other: PeerStatus) -> PeerStatus:
    """Prefer the worker with the most recent answer."""
    ages = (one.last_answer_seconds_ago, other.last_answer_seconds_ago)
    if one.state == "not asked" or (None not in ages and ages[1] == _least(*ages)):
        return other
    return one


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

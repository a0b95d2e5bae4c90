"""The model of /status; pure.

Rule 1: no contents. Allowed are numbers, names from the configuration, protocol terms, the name of a held tool or
prompt, and of a client its address and the name of its program; never arguments, questions, answers, results, resource
URIs, session ids, tokens or whom a token names.
Rule 2: every list that grows with traffic or configuration is cut to a bound below; its full length is shown too.
Rule 3: times are ages in seconds, so that the statuses of processes with different clocks can be merged.
"""

from typing import Final, Literal

from msgspec import Struct

from gateway.telemetry.metrics.registry import BudgetStatus

MOST_HELD: Final = 200
LONG_SECONDS: Final = 5.0
"""The status lists the calls that have run for so long."""
MOST_ERRORS: Final = 50
MOST_CALLERS: Final = 5
MOST_CLIENTS: Final = 3
BOUNDS: Final = {
    "held": MOST_HELD,
    "running": MOST_HELD,
    "errors": MOST_ERRORS,
    "callers": MOST_CALLERS,
    "routes": 200,
    "peers": 200,
    "processes": 500,
    "notices": 50,
    "keys": 50,
}
"""The length of each list of a status."""

UpstreamHealth = Literal["ok", "failing", "unknown"]
Fate = Literal["resumed", "run again", "lost"]
PeerState = Literal["answered", "dead", "silent", "refused", "stalled", "not asked"]
ProcessState = Literal["ready", "draining", PeerState]


class Failure(Struct, frozen=True, kw_only=True):
    """The last failure of an upstream."""

    kind: str
    """As in the metric mcp_gateway_upstream_errors_total."""
    cause: str
    fix: str
    seconds_ago: float
    since_seconds_ago: float = 0.0
    """That of the first failure after the last answer; 0 if an older replica does not tell it."""


def health(last_ok_seconds_ago: float | None, failure: Failure | None) -> UpstreamHealth:
    """Judge an upstream by its last answer or failure."""
    if failure is not None and (last_ok_seconds_ago is None or failure.seconds_ago < last_ok_seconds_ago):
        return "failing"
    return "unknown" if last_ok_seconds_ago is None else "ok"


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
    mirrored: int = 0
    """Calls of legacy clients at a modern server."""
    tasks: int = 0
    """Tasks of clients, each of which has a session."""
    oldest_call_seconds: float | None = None
    """How long the longest call that was sent has run; None if none has for `LONG_SECONDS`."""
    running: int = 0
    """How many calls have, sent or not; 0 from an older replica."""
    unsent: int = 0
    """How many of them their server has not got, because they wait for a session or for its list of tools."""
    streams: int
    """Streams that are passed through: GET streams of legacy clients, subscriptions at a modern upstream."""


class CallStatus(Struct, frozen=True, kw_only=True):
    """One call: held for its client, or running at its server, or both after a round that shed load."""

    route: str
    method: str
    name: str
    """Of the tool or prompt; empty for a resource, because a URI may hold private data."""
    state: str
    round: int = 0
    asked: tuple[str, ...] = ()
    """The kinds of its open questions: elicitation, sampling, roots."""
    age_seconds: float
    """Since its first round began."""
    expires_in_seconds: float | None = None
    """None while a client is waiting for its next reply."""
    owner: str = ""
    """The replica, or worker, that holds it."""
    is_lost: bool = False
    """Whether its upstream has failed, which its client has still to be told."""
    waits_for: str = ""
    """In words."""
    running_seconds: float | None = None
    """Its age without the time that its users took; None if its server is not working on it."""
    silent_seconds: float | None = None
    """Since its server last sent a message on it, or got it or answers; None if it was not sent from here."""
    request_id: str = ""
    """The id of its newest HTTP request, as in the log."""
    first_request_id: str = ""
    """That of its first one, if it is another, and came to the owner."""
    exchange_id: str = ""
    """The id by which the log joins its requests, once it has one."""
    at_end: Fate | None = None
    """What becomes of it if its process ends first; None if it has not begun upstream, or is lost already."""
    caller: str = ""
    """A tag that calls of the same caller share, at every replica; without the state keys it reveals nothing else."""
    client: str = ""
    """The address from which it came to this process, and the name that the client gives itself."""


class Use(Struct, frozen=True):
    """How much of a limit is used; a limit of 0 is not known."""

    used: int = 0
    limit: int = 0
    where: str = ""
    """The process that counts it, with the route if it is a route's."""

    def part(self) -> float:
        """Return the fraction that is used."""
        return self.used / (self.limit or 1)


class CallerStatus(Struct, frozen=True, kw_only=True):
    """What one caller has, on all routes; of several processes, only where it is among those that have the most."""

    caller: str
    """The tag, as in `CallStatus` and in the log."""
    held: int
    """Its calls that wait for their client, cold ones included, and those in the mirror that may ask it."""
    sessions: int
    """Those in use, relayed ones included."""
    most_held: Use = Use()
    """The calls in the process that has the most of them, and `hold.max_calls_per_principal`."""
    most_sessions: Use = Use()
    """The sessions on the route of a process that is nearest to its `sessions.max_per_principal`."""
    clients: dict[str, int] = {}
    """The three that have the most held and running calls under this tag, as in `CallStatus`, with their number."""


class PeerStatus(Struct, frozen=True, kw_only=True):
    """Another replica or worker, as this one last found it."""

    id: str
    address: str
    state: PeerState
    found_seconds_ago: float | None = None
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


class StatusNotice(Struct, frozen=True):
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
    loaded_seconds_ago: float | None = None
    """Since the configuration was loaded; None if an older replica does not say."""
    sealing_seconds_ago: float | None = None
    """Since its first state key became that, or its start; None if an older replica does not say."""
    newest_key: str = ""
    """The id of the state key that a reload put first, or added; empty if it began with those that it has."""
    pid: int = 0
    uptime_seconds: float = 0.0
    in_flight: int = 0
    held: int = 0
    held_limit: int = 0
    lost_at_end: int = 0
    """How many calls end without a result if the process ends first, without mirrored ones."""
    ends_in_seconds: float | None = None
    """Until a drain ends the process at the latest; None unless it drains."""
    cold: int = 0
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
    notices: tuple[StatusNotice, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()
    routes: tuple[RouteStatus, ...] = ()
    routes_total: int = 0
    held: tuple[CallStatus, ...] = ()
    """The oldest."""
    held_total: int = 0
    callers: tuple[CallerStatus, ...] = ()
    """Those that have the most calls or sessions in use."""
    addresses: dict[str, int] = {}
    """The three from which the most held and running calls came, with their number."""
    running: tuple[CallStatus, ...] = ()
    """Those that have run for `LONG_SECONDS`, the longest first, without mirrored ones."""
    running_total: int = 0
    peers: tuple[PeerStatus, ...] = ()
    peers_total: int = 0
    keys: tuple[KeyStatus, ...] = ()
    key_phase: str = ""
    keys_kept_seconds: float = 0.0
    """How long a former key has to stay; 0 for a key that ends with its process."""
    errors: tuple[ErrorStatus, ...] = ()
    """The newest."""

"""The structs of the configuration: every key with its type, range, default, meaning.

These structs, and those of routes in `route.py`, are the only place where a key is declared. The loader, the
environment overrides, the JSON Schema and the documentation all read them, so a new key is one new field here, and one
line in `config/full.yaml` (a test compares). The text below a field is its description (`schema.py` reads it).
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from gateway.config.model.route import Route
from gateway.config.model.value_types import (
    Address,
    Bytes,
    Count,
    Header,
    Host,
    Level,
    LongSeconds,
    Network,
    Origin,
    PerSecond,
    QuietSeconds,
    ReplicaId,
    Rounds,
    Seconds,
    Secret,
    Section,
    SomeSeconds,
    Text,
)
from gateway.config.parsing.state_keys import decode_key


class Tls(Section, frozen=True, kw_only=True):
    """TLS of the listener for clients, switched on by `cert_file`."""

    cert_file: Text | None = None
    """Certificate (PEM), followed by its intermediate certificates. null: plain HTTP."""
    key_file: Text | None = None
    """Private key (PEM) of the certificate, without a password. null: the key is in `cert_file`."""
    client_ca_file: Text | None = None
    """Authorities (PEM) of client certificates: other clients are rejected. null: no client certificate is needed."""


class State(Section, frozen=True, kw_only=True):
    """How `requestState` and session ids are sealed."""

    keys: tuple[Secret, ...] = ()
    """State keys (`mrtr-gateway keygen`): base64 or hex of 32 bytes or more. The first key seals, all keys open.
    Empty: the gateway makes a key at each start, for a single replica only."""
    keys_file: Text | None = None
    """Alternative to `keys`: a file with one key per line and `#` comments. A relative path starts in the folder of
    the configuration file."""
    ttl_seconds: SomeSeconds = 600.0
    """Lifetime of a sealed state."""
    session_ttl_seconds: LongSeconds = 604_800.0
    """Lifetime of a sealed `Mcp-Session-Id`, with which the gateway serves legacy clients before a modern server. Such
    clients use a session for days, and none of them begins a new one when it ends."""
    session_keys: tuple[Secret, ...] = ()
    """Former state keys that still open ids and addresses of sessions and the event ids of their streams, but nothing
    else. Put a key here when it leaves `keys`, and remove it `session_ttl_seconds` later."""

    def raw_keys(self) -> tuple[bytes, ...]:
        """Return the keys as bytes, in order; raises ValueError for a malformed key (never after `load`)."""
        return tuple(decode_key(text) for text in self.keys)

    def raw_session_keys(self) -> tuple[bytes, ...]:
        """Return the keys that only open session ids as bytes; raises ValueError (never after `load`)."""
        return tuple(decode_key(text) for text in self.session_keys)


class Replica(Section, frozen=True, kw_only=True):
    """This process among its peers."""

    id: ReplicaId | None = None
    """Name of this replica, unique among its peers. null: the host's name."""
    listen: Address | None = None
    """host:port of the peer listener. null: no peer listener."""
    peers: dict[ReplicaId, Address] = field(default_factory=dict)
    """Peer listeners of all replicas by replica id, including this one's."""
    peers_dns: Address | None = None
    """Alternative to `peers`: name:port of a headless service that resolves to all replicas."""


class Hold(Section, frozen=True, kw_only=True):
    """Calls that wait between two rounds."""

    ttl_seconds: SomeSeconds = 600.0
    """How long a parked call waits for its next round. state.ttl_seconds limits the wait too."""
    max_calls: Count = 10_000
    """Maximum number of parked calls in this replica, and of tasks beside them. Beyond it, finished tasks are
    forgotten, the oldest first."""
    max_calls_per_principal: Count = 1_000
    """Maximum number of parked calls of one principal, and of its tasks."""
    quiet_seconds: QuietSeconds = 0.04  # enough for three questions on two streams in the conformance suite
    """Nested requests that arrive within this time of each other share a round. 0: each is sent at once."""
    grace_seconds: Seconds = 6.0
    """When the client of a retry disconnects: how long it may come back before the call is cancelled. A client that
    obeys the 503 of another replica needs twice `timeouts.peer_connect_seconds` and `timeouts.peer_accept_seconds`,
    and 2 s."""
    linger_seconds: Seconds = 30.0
    """How long a delivered result is kept in case the client repeats the same retry."""
    drain_delay_seconds: Seconds = 2.0
    """After SIGTERM: how long the replica reports unready but still serves new calls, so that load balancers notice.
    SIGINT skips this delay."""
    drain_seconds: Seconds = 30.0
    """After that delay: how long parked calls may take to finish. Peers can still reach them."""
    cold_seconds: Seconds = 0.0
    """After this time, a parked call whose server stores events is let go of (a cold call): its connections are
    closed, and the retry resumes it as another replica would. 0: never."""


class Limits(Section, frozen=True, kw_only=True):
    """Maximum sizes of messages, and limits of connections."""

    body_bytes: Bytes = 4_194_304
    """Maximum size of a client's request body. A larger one gets HTTP 413."""
    event_bytes: Bytes = 16_777_216
    """Maximum size of one SSE event or JSON response of an upstream."""
    receiving_bytes: Bytes = 33_554_432
    """Maximum size of all unfinished requests together. Beyond it, the oldest unfinished body
    gets HTTP 503. A value below `body_bytes` counts as `body_bytes`."""
    sending_bytes: Bytes = 33_554_432
    """Maximum size of everything together that clients have not read. Beyond it, the gateway closes the connection of
    the client that is behind for the longest time. A value below `event_bytes` counts as `event_bytes`."""
    results_bytes: Bytes = 16_777_216
    """Maximum size of all delivered results together that are kept for `hold.linger_seconds`, with their requests. In
    the mirror, the subscriptions of its sessions count too. Beyond it, the gateway forgets the oldest of the caller
    that has the most."""
    calls_bytes: Bytes = 134_217_728
    """Maximum size of all calls under way together, running or parked: their requests as they came and as they go
    upstream, their questions and answers. Beyond it, a new call gets HTTP 503. A call that has begun is never ended,
    and its retries are always served. Should be several times `body_bytes`, which a call may take twice."""
    calls_bytes_per_principal: Bytes | None = None
    """The same for the calls of one principal, which then get HTTP 429. null: a quarter of `calls_bytes`."""
    state_bytes: Annotated[int, Meta(ge=1024, le=65_536)] = 8_192
    """Maximum size of a sealed `requestState`."""
    receive_seconds: SomeSeconds = 30.0
    """Time limit for a request head to arrive, and again for its whole body."""
    connections: Count = 20_000
    """Maximum number of open client connections."""

    @property
    def share_of_calls_bytes(self) -> int:
        """The maximum size of the calls of one principal."""
        own = self.calls_bytes_per_principal
        return max(self.calls_bytes // 4, 1) if own is None else own


class Timeouts(Section, frozen=True, kw_only=True):
    """Timeouts towards clients, upstreams and peers, in seconds."""

    connect_seconds: SomeSeconds = 5.0
    """Time limit for opening a connection to an upstream."""
    handshake_seconds: SomeSeconds = 10.0
    """Time limit from `initialize` to its result."""
    answer_seconds: SomeSeconds = 10.0
    """Time limit for the upstream to accept the POST of an answer or a notification."""
    idle_seconds: SomeSeconds = 300.0
    """How long an upstream may be silent during a call."""
    session_wait_seconds: SomeSeconds = 10.0
    """How long a request waits for a free session when the caps are reached."""
    keepalive_seconds: SomeSeconds = 15.0
    """How long a response stream may be silent before the gateway sends an SSE comment."""
    cancel_seconds: SomeSeconds = 5.0
    """Time limit for delivering `notifications/cancelled` or DELETE."""
    send_seconds: SomeSeconds = 30.0
    """How long a client may fail to read its reply."""
    peer_connect_seconds: SomeSeconds = 0.5
    """Time limit for opening a connection to a peer. A peer that takes longer counts as silent, not as proven dead."""
    peer_accept_seconds: SomeSeconds = 1.0
    """Time limit for a connected peer to take the request over. After it, the client is told to retry."""


class Sessions(Section, frozen=True, kw_only=True):
    """The pool of upstream sessions."""

    max: Count = 11_000  # more than hold.max_calls, because running calls need sessions too
    """Maximum number of sessions per route, in use or idle. A parked call uses one."""
    max_per_principal: Count = 1_100  # more than hold.max_calls_per_principal, likewise
    """Maximum number of sessions of one principal on one route."""
    new_per_second: PerSecond = 200.0
    """How many sessions a route may open per second, after a burst of `max`."""
    idle_seconds: Seconds = 60.0
    """After this idle time, the gateway closes a session with DELETE."""
    quarantine_seconds: Seconds = 60.0
    """How long an abandoned call may take to end before its session is dropped."""
    client_idle_seconds: SomeSeconds = 1800.0
    """After this time without a request or an open stream of a legacy client whose transport the gateway changes, its
    session ends. Legacy clients do not begin a new one by themselves."""


class Legs(Section, frozen=True, kw_only=True):
    """Early ends of long requests, for clients that give up at 60 seconds."""

    limit_seconds: SomeSeconds = 50.0
    """A request that is open this long is answered with a round without questions."""
    rounds: Rounds = 4
    """Maximum number of such rounds per exchange (clients allow 10 rounds in all). 0: streams stay open."""


class TaskLimits(Section, frozen=True, kw_only=True):
    """Tasks of clients that declare the extension io.modelcontextprotocol/tasks."""

    ttl_seconds: SomeSeconds = 3600.0
    """How long a server is asked to keep a task, and how long it is kept at most, its result included. The work and
    the user's answers must fit. Keep an old state key this long."""


class Principal(Section, frozen=True, kw_only=True):
    """How callers are identified."""

    source: Literal["authorization", "header", "jwt"] = "authorization"
    """How callers are identified. `authorization`: by the bearer token, not verified; `header`: by a header that a
    trusted proxy sets; `jwt`: by the bearer token, verified with its issuer's keys."""
    header: Header | None = None
    """With source `header`: the name of the header."""
    trusted_proxies: tuple[Network, ...] = ()
    """Networks (CIDR) of proxies whose forwarded headers are trusted."""
    issuer: Text | None = None
    """With source `jwt`: the exact value that `iss` must have."""
    jwks_url: Annotated[str | None, Meta(extra={"form": "url"})] = None
    """With source `jwt`: the URL of the issuer's keys."""
    jwks_file: Text | None = None
    """Alternative to `jwks_url`: a file with the keys (JWKS)."""
    jwks_ca_file: Text | None = None
    """Authority (PEM) of the server at `jwks_url`. null: the system's authorities."""
    audience: tuple[Text, ...] = ()
    """With source `jwt`: `aud` must name one of these. Empty: not checked."""


class Security(Section, frozen=True, kw_only=True):
    """Protection against DNS rebinding."""

    allowed_hosts: tuple[Host, ...] = ()
    """Accepted values of `Host`. Empty: loopback names if `listen` is on loopback, otherwise any."""
    allowed_origins: tuple[Origin, ...] = ()
    """Origins whose pages may send requests and read replies (CORS). Empty: the served name and, if `listen` is on
    loopback, loopback names. Requests without `Origin` are always accepted."""


class Log(Section, frozen=True, kw_only=True):
    """The log on stderr."""

    level: Level = "info"
    """Minimum level. It is read only at start, and `serve --log-level` overrides it."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console format on a terminal, otherwise JSON lines."""
    access: bool = False
    """true: log one line (`request.finished`) for each HTTP request of a client."""


class Debug(Section, frozen=True, kw_only=True):
    """Debugging aids."""

    bodies: bool = False
    """true: log every message of clients and upstreams, truncated and with secrets masked. The gateway logs a warning
    about this at every start and reload."""


class Config(Section, frozen=True, kw_only=True):
    """The configuration of one mrtr-gateway process."""

    listen: Address = "127.0.0.1:8080"
    """host:port for clients. Port 0 picks a free port."""
    public_url: Origin | None = None
    """Origin at which clients reach this gateway, used in OAuth metadata. null: the request's `Host`."""
    admin: Address | None = "127.0.0.1:9464"  # 9090 is Prometheus's own port
    """host:port of /metrics, /healthz, /readyz and /status. null: no admin listener."""
    workers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of processes that share `listen`. The caps of hold, limits and sessions apply to each process."""
    tls: Tls = Tls()
    state: State = State()
    replica: Replica = Replica()
    hold: Hold = Hold()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    sessions: Sessions = Sessions()
    legs: Legs = Legs()
    tasks: TaskLimits = TaskLimits()
    principal: Principal = Principal()
    security: Security = Security()
    log: Log = Log()
    traces: bool = False
    """true: send spans with OTLP over HTTP, as the OTEL_* environment variables say. Needs `pip install
    'mrtr-gateway[otel]'`."""
    errors: Literal["full", "brief"] = "full"
    """What clients are told of errors that the gateway makes. `full`: everything. `brief`: a sentence and the
    `requestId`, without addresses, commands, names of replicas and values of settings. The log has the rest beside the
    id, of refusals at most 20 a second (`error.shortened`)."""
    debug: Debug = Debug()
    routes: Annotated[tuple[Route, ...], Meta(min_length=1)]
    """Public paths and their upstreams."""

"""The structs of the configuration: every key with its type, range, default, meaning.

These structs are the only place where a key is declared. The loader, the environment overrides, the JSON Schema and
the documentation all read them, so a new key is one new field here, and one line in `config/full.yaml` (a test
compares). The text below a field is its description (`schema.py` reads it). `extra={"form": ...}` names the text form
of `gateway/config/parsing/formats.py` that a value must have.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from gateway.config.parsing.formats import redacted_url
from gateway.config.parsing.state_keys import decode_key

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
SomeSeconds = Annotated[float, Meta(ge=0.001, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1_073_741_824)]
QuietSeconds = Annotated[float, Meta(ge=0, le=5)]
Depth = Annotated[int, Meta(ge=8, le=512)]
Rounds = Annotated[int, Meta(ge=0, le=9)]
LongSeconds = Annotated[float, Meta(ge=60, le=31_536_000)]
PerSecond = Annotated[float, Meta(ge=0.001, le=1_000_000)]

Address = Annotated[str, Meta(extra={"form": "address"})]
Header = Annotated[str, Meta(extra={"form": "header"})]
ReplicaId = Annotated[str, Meta(extra={"form": "replica id"})]
Network = Annotated[str, Meta(extra={"form": "network"})]
Host = Annotated[str, Meta(extra={"form": "host"})]
Origin = Annotated[str, Meta(extra={"form": "origin"})]
Variable = Annotated[str, Meta(extra={"form": "variable"})]
Text = Annotated[str, Meta(min_length=1)]
HeaderValue = Annotated[str, Meta(extra={"form": "header value", "secret": True})]
Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # no algorithm with a shared secret: an attacker could use a public key as the secret
Level = Literal["debug", "info", "warning", "error"]
Era = Literal["auto", "bridge", "mirror"]
Dialect = Literal["sep-1442", "sep-1655", "sep-1685"]
TtlMs = Annotated[int, Meta(ge=0, le=86_400_000)]
CacheScope = Literal["private", "public"]
Cacheable = Literal[
    "server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read"
]


class Discreet(Struct, frozen=True, kw_only=True):
    """A section that hides its secrets when printed, and redacts its URLs."""

    _secrets: ClassVar[frozenset[str]] = frozenset()
    _urls: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the fields with the secrets hidden; rich's printer asks this, and not `repr`."""
        return [(name, self._shown(name, value)) for name, value in structs.asdict(self).items()]

    def _shown(self, name: str, value: Any) -> Any:
        if name in self._urls and value is not None:
            return redacted_url(value)
        return _hidden(value) if name in self._secrets else value


def _hidden(value: object) -> str | None:
    """A placeholder for secrets, with their number or names."""
    if isinstance(value, tuple):
        return f"<{len(value)} hidden>"
    if isinstance(value, Mapping):
        return f"<{', '.join(value)} hidden>" if value else "{}"
    return None if value is None else "<hidden>"


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the listener for clients, switched on by `cert_file`."""

    cert_file: Text | None = None
    """Certificate (PEM), followed by its intermediate certificates. null: plain HTTP."""
    key_file: Text | None = None
    """Private key (PEM) of the certificate, without a password. null: the key is in `cert_file`."""
    client_ca_file: Text | None = None
    """Authorities (PEM) of client certificates: other clients are rejected. null: no client certificate is needed."""


class State(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `requestState` and session ids are sealed."""

    _secrets = frozenset({"keys", "session_keys"})

    keys: Annotated[tuple[str, ...], Meta(extra={"secret": True})] = ()
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
    session_keys: Annotated[tuple[str, ...], Meta(extra={"secret": True})] = ()
    """Former state keys that still open session ids and the event ids of their streams, but nothing else. Put a key
    here when it leaves `keys`, and remove it `session_ttl_seconds` later."""

    def raw_keys(self) -> tuple[bytes, ...]:
        """Return the keys as bytes, in order; raises ValueError for a malformed key (never after `load`)."""
        return tuple(decode_key(text) for text in self.keys)

    def raw_session_keys(self) -> tuple[bytes, ...]:
        """Return the keys that only open session ids as bytes; raises ValueError (never after `load`)."""
        return tuple(decode_key(text) for text in self.session_keys)


class Replica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """This process among its peers."""

    id: ReplicaId | None = None
    """Name of this replica, unique among its peers. null: the host's name."""
    listen: Address | None = None
    """host:port of the peer listener. null: no peer listener."""
    peers: dict[ReplicaId, Address] = {}
    """Peer listeners of all replicas by replica id, including this one's."""
    peers_dns: Address | None = None
    """Alternative to `peers`: name:port of a headless service that resolves to all replicas."""


class Hold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls that wait between two rounds."""

    ttl_seconds: SomeSeconds = 600.0
    """How long a parked call waits for its next round. state.ttl_seconds limits the wait too."""
    max_calls: Count = 10_000
    """Maximum number of parked calls in this replica."""
    max_calls_per_principal: Count = 1_000
    """Maximum number of parked calls of one principal."""
    max_calls_per_address: Count | None = None
    """Maximum number of parked calls from one client address: the newest hop of X-Forwarded-For that is not in
    `principal.trusted_proxies`, IPv6 by its /64. null: no limit."""
    quiet_seconds: QuietSeconds = 0.04
    """Nested requests that arrive within this time of each other share a round. 0: each is sent at once."""
    grace_seconds: Seconds = 1.5
    """When the client of a retry disconnects: how long it may come back before the call is cancelled."""
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
    max_cold_calls: Count = 1_000_000
    """Maximum number of cold calls in this replica, besides `max_calls`. Beyond it, calls stay held."""


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Maximum sizes of messages, and limits of connections."""

    body_bytes: Bytes = 4_194_304
    """Maximum size of a client's request body, after decompression. A larger one gets HTTP 413."""
    event_bytes: Bytes = 16_777_216
    """Maximum size of one SSE event or JSON response of an upstream."""
    behind_bytes: Bytes = 1_048_576
    """Maximum size of the notifications that wait for one client that does not read. Beyond it, the gateway drops the
    oldest, but keeps the newest whatever its size."""
    receiving_bytes: Bytes = 33_554_432
    """Maximum size of all unfinished requests together, after decompression. Beyond it, the oldest unfinished body
    gets HTTP 503. A value below `body_bytes` counts as `body_bytes`."""
    receiving_bytes_per_address: Bytes | None = None
    """The same for the requests of one client address (IPv6: of one /64). null: no limit, since clients behind one
    load balancer share an address."""
    sending_bytes: Bytes = 33_554_432
    """Maximum size of everything together that clients have not read. Beyond it, the gateway closes the connection of
    the client that is behind for the longest time. A value below `event_bytes` counts as `event_bytes`."""
    arriving_bytes: Bytes = 33_554_432
    """Maximum size of all unfinished messages of one upstream together, those below 64 KiB aside. Beyond it, the
    gateway reads on with the oldest of them only."""
    results_bytes: Bytes = 16_777_216
    """Maximum size of all delivered results together that are kept for `hold.linger_seconds`, with their requests. In
    the mirror, the subscriptions of its sessions count too. Beyond it, the gateway forgets the oldest."""
    replay_bytes: Bytes = 33_554_432
    """Maximum size of all messages together that wait for legacy clients whose transport the gateway changes, or that
    such a client may ask for again. Beyond it, the oldest stream forgets what it delivered; if its client has not read
    it, the session ends. A value below `event_bytes` counts as `event_bytes`."""
    cold_bytes: Bytes = 1_073_741_824
    """Maximum size of what is kept of all cold calls together (`hold.cold_seconds`). Beyond it, calls stay held."""
    json_depth: Depth = 64
    """Maximum nesting of objects and arrays in a message."""
    state_bytes: Annotated[int, Meta(ge=1024, le=65_536)] = 8_192
    """Maximum size of a sealed `requestState`."""
    receive_seconds: SomeSeconds = 30.0
    """Time limit for a request head to arrive, and again for its whole body."""
    connections: Count = 20_000
    """Maximum number of open client connections."""


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class Sessions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of upstream sessions."""

    max: Count = 11_000
    """Maximum number of sessions per route, in use or idle. A parked call uses one."""
    max_per_principal: Count = 1_100
    """Maximum number of sessions of one principal on one route."""
    max_per_address: Count | None = None
    """Maximum number of sessions on one route that requests from one client address opened, determined as in
    `hold.max_calls_per_address`. null: no limit."""
    max_newcomers: Count | None = None
    """Maximum number of sessions on one route of all principals together whose calls the upstream has never answered.
    null: a tenth of `max`, or half of `upstream.max_children`; at least 8."""
    new_per_second_per_principal: PerSecond = 20.0
    """How many sessions one principal may open per second on one route, after a burst of `max_per_principal`."""
    new_per_second: PerSecond = 200.0
    """How many sessions a route may open per second, after a burst of `max`."""
    idle_seconds: Seconds = 60.0
    """After this idle time, the gateway closes a session with DELETE."""
    quarantine_seconds: Seconds = 60.0
    """How long an abandoned call may take to end before its session is dropped."""
    client_idle_seconds: SomeSeconds = 1800.0
    """After this time without a request or an open stream of a legacy client whose transport the gateway changes, its
    session ends. Legacy clients do not begin a new one by themselves."""


class Legs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Early ends of long requests, for clients that give up at 60 seconds."""

    limit_seconds: SomeSeconds = 50.0
    """A request that is open this long is answered with a round without questions."""
    rounds: Rounds = 4
    """Maximum number of such rounds per exchange (clients allow 10 rounds in all). 0: streams stay open."""


class TaskLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tasks of clients that declare the extension io.modelcontextprotocol/tasks."""

    max: Count = 1_000
    """Maximum number of tasks in this replica. A task takes one session of its route until its time is over. Beyond
    it, finished tasks are forgotten, the oldest first; if there is none, a call gets HTTP 503."""
    max_per_principal: Count = 100
    """Maximum number of tasks of one principal. Beyond it, as with `max`, but the call gets HTTP 429."""
    ttl_seconds: SomeSeconds = 3600.0
    """How long a server is asked to keep a task, and how long it is kept at most, its result included. The work and
    the user's answers must fit. Keep an old state key this long."""


class Principal(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How callers are identified."""

    _urls = frozenset({"jwks_url"})

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
    jwks_stale_seconds: Annotated[float, Meta(ge=0, le=604_800)] = 86_400.0
    """How long the keys stay in use after the last successful fetch."""
    audience: tuple[Text, ...] = ()
    """With source `jwt`: `aud` must name one of these. Empty: not checked."""
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1)] = ("RS256", "ES256")
    """With source `jwt`: the accepted signature algorithms."""


class Security(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Protection against DNS rebinding."""

    allowed_hosts: tuple[Host, ...] = ()
    """Accepted values of `Host`. Empty: loopback names if `listen` is on loopback, otherwise any."""
    allowed_origins: tuple[Origin, ...] = ()
    """Accepted values of `Origin`. Requests without `Origin` are always accepted."""


class Log(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log on stderr."""

    level: Level = "info"
    """Minimum level. It is read only at start, and `serve --log-level` overrides it."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console format on a terminal, otherwise JSON lines."""


class Debug(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Debugging aids."""

    bodies: bool = False
    """true: log every message of clients and upstreams, truncated and with secrets masked. The gateway logs a warning
    about this at every start and reload."""


class UpstreamTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS towards an upstream whose URL is https."""

    ca_file: Text | None = None
    """Trusted authorities (PEM), instead of the system's. null: the system's authorities."""
    cert_file: Text | None = None
    """Client certificate (PEM) for the server. null: none."""
    key_file: Text | None = None
    """Private key (PEM) of the certificate, without a password. null: the key is in `cert_file`."""
    server_name: Host | None = None
    """Name that the server's certificate must be for. null: the name in `url`."""
    verify: bool = True
    """false: accept any certificate, and so any server. The gateway logs a warning about this at every start and
    reload."""


class Upstream(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server behind a route: `url` or `command`."""

    _secrets = frozenset({"env"})
    _urls = frozenset({"url"})

    url: Annotated[str | None, Meta(extra={"form": "url"})] = None
    """URL of the server's MCP endpoint."""
    command: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None
    """Program and arguments of a stdio server, started without a shell."""
    env: dict[Variable, Annotated[str, Meta(extra={"secret": True})]] = {}
    """With `command`: the child's environment. Of the gateway's own variables it gets only PATH, HOME, USER, SHELL,
    TERM, TMPDIR, TZ and the locale."""
    inherit_env: tuple[Variable, ...] = ()
    """With `command`: names of further variables of the gateway's environment that the child gets, e.g.
    `HTTPS_PROXY`."""
    cwd: Text | None = None
    """With `command`: the working directory. null: the gateway's own."""
    max_children: Annotated[int, Meta(ge=1, le=10_000)] = 32
    """With `command`: maximum number of its processes, in use, idle or ending. A parked call uses one."""
    new_children_per_second: PerSecond = 1.0
    """With `command`: how many sessions, each of which is a process, may be opened per second, after a burst of
    `max_children`."""
    warm: Annotated[int, Meta(ge=0, le=100)] = 1
    """With `command`: how many children are started in advance."""
    transport: Literal["auto", "streamable-http", "sse", "stdio"] = "auto"
    """Transport of the server. `auto` detects it."""
    tls: UpstreamTls = UpstreamTls()

    @property
    def name(self) -> str:
        """The upstream's name in logs and errors: the redacted url, or the program without its arguments."""
        return redacted_url(self.url) if self.url else (self.command or ("?",))[0]

    def _shown(self, name: str, value: Any) -> Any:
        """Hide the arguments of the command too."""
        return value and (value[0], "...") if name == "command" else super()._shown(name, value)


class Credentials(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The credential that goes upstream: the client's `Authorization`, none, or the gateway's own."""

    _secrets = frozenset({"token"})

    mode: Literal["forward", "drop", "replace"] = "forward"
    """What happens to the client's `Authorization`: `forward` sends it upstream, `drop` does not, `replace` sends the
    gateway's own instead."""
    token: Annotated[HeaderValue | None, Meta(extra={"secret": True})] = None
    """With `replace`: the gateway's own secret."""
    token_file: Text | None = None
    """Alternative to `token`: a file with the secret in its only line."""
    header: Header | None = None
    """With `replace`: the header that carries the bare secret. null: `Authorization: Bearer`."""


class Freshness(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides for one method. Keys that are left out have the route's value."""

    ttl_ms: TtlMs | None = None
    """`ttlMs` of this method's results."""
    scope: CacheScope | None = None
    """`cacheScope` of this method's results."""


_AS_FOR_ALL = Freshness()


class Cache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freshness of lists and resources, which modern results must state and legacy servers cannot."""

    ttl_ms: TtlMs = 0
    """`ttlMs` of lists and resources. A server's own value takes precedence."""
    scope: CacheScope = "private"
    """`cacheScope` of the same results. `public` lets caches share them between callers."""
    methods: dict[Cacheable, Freshness] = {}
    """Values for single methods, e.g. `tools/list: {ttl_ms: 60000, scope: public}`."""
    lists_seconds: Seconds = 0.0
    """How long the gateway answers a caller's lists from its own memory. 0: never. A `list_changed` from the server
    ends this early."""

    def of(self, method: str) -> tuple[int, str]:
        """Return `ttlMs` and `cacheScope` of a method's results."""
        if not self.methods:
            return self.ttl_ms, self.scope
        own = next((own for name, own in self.methods.items() if name == method), _AS_FOR_ALL)
        return (self.ttl_ms if own.ttl_ms is None else own.ttl_ms, self.scope if own.scope is None else own.scope)


class RouteHold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `hold` for one route. Keys that are left out have the value of `hold`."""

    ttl_seconds: SomeSeconds | None = None
    quiet_seconds: QuietSeconds | None = None
    grace_seconds: Seconds | None = None
    linger_seconds: Seconds | None = None
    cold_seconds: Seconds | None = None


class RouteLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `limits` for one route. Keys that are left out have the value of `limits`."""

    body_bytes: Bytes | None = None
    event_bytes: Bytes | None = None
    json_depth: Depth | None = None


class RouteTimeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `timeouts` for one route. Keys that are left out have the value of `timeouts`."""

    connect_seconds: SomeSeconds | None = None
    handshake_seconds: SomeSeconds | None = None
    answer_seconds: SomeSeconds | None = None
    idle_seconds: SomeSeconds | None = None
    session_wait_seconds: SomeSeconds | None = None
    keepalive_seconds: SomeSeconds | None = None
    cancel_seconds: SomeSeconds | None = None
    send_seconds: SomeSeconds | None = None


class RouteSessions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `sessions` for one route, and how its calls share sessions."""

    affinity: Literal["none", "principal"] = "none"
    """`none`: a call uses any session of its principal; `principal`: all calls of a principal with the same client
    and capabilities use one session while it lives, one after another."""
    max: Count | None = None
    max_per_principal: Count | None = None
    max_per_address: Count | None = None
    max_newcomers: Count | None = None
    new_per_second_per_principal: PerSecond | None = None
    new_per_second: PerSecond | None = None
    idle_seconds: Seconds | None = None
    quarantine_seconds: Seconds | None = None
    client_idle_seconds: SomeSeconds | None = None


class RouteLegs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `legs` for one route. Keys that are left out have the value of `legs`."""

    limit_seconds: SomeSeconds | None = None
    rounds: Rounds | None = None


class RouteTasks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `tasks` for one route, and how it calls tools as tasks for clients without the extension."""

    undeclared: Literal["drive", "refuse"] = "drive"
    """How a tool that requires a task is called for such a client. `drive`: the gateway runs the task, and the client
    sees an ordinary call; `refuse`: the call gets -32021."""
    optional: Literal["plain", "drive"] = "plain"
    """How a tool that supports tasks, but does not require them, is called for such a client. `plain`: without a task;
    `drive`: as above. Tools of the TypeScript SDK that ask need `drive`: called plainly, they fail after 60 s."""
    ttl_seconds: SomeSeconds | None = None


class Route(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One public path and its upstream."""

    _secrets = frozenset({"set_headers"})

    path: Annotated[str, Meta(extra={"form": "path"})] = "/mcp"
    """The public path."""
    upstream: Upstream
    era: Era = "auto"
    """Which side of the server clients use. `auto`: the side of their own era; the other one if there is no such side.
    `bridge`: always its legacy side. That is for a server that speaks both protocols but can ask only legacy clients:
    for modern clients its tools fail with -32600 "no back-channel" or "unavailable on 2026-07-28 connections".
    `mirror`: always its modern side. That is for a server that speaks both but can ask only modern clients: for
    legacy clients its tools fail with -32603 "Handler returned an invalid result" or "per-request legacy serving"."""
    continuation: Literal["hold", "replay"] = "hold"
    """`hold` parks the call between rounds; `replay` holds nothing and runs the call again with the answers, so every
    tool of the route must be safe to run twice."""
    ephemeral: tuple[Text, ...] = ()
    """Name patterns of tools that may run twice, e.g. `weather_*`, in addition to tools with `readOnlyHint` or
    `idempotentHint`. If a call of such a tool is lost, it is run again."""
    undeclared: Literal["abort", "refuse"] = "abort"
    """What happens to a nested request that needs a capability which the client did not declare: `abort` ends the
    call (-32021), `refuse` answers the server with an error and lets the tool continue."""
    credentials: Credentials = Credentials()
    forward_headers: tuple[Header, ...] = ()
    """Client headers that go upstream, in addition to `Authorization`."""
    bind_headers: tuple[Header, ...] | None = None
    """The `forward_headers` that are credentials: a retry must bring the same values. null: all except traceparent,
    tracestate, baggage, x-request-id, x-forwarded-*, forwarded, via, user-agent and accept-language."""
    drop_headers: tuple[Header, ...] = ()
    """Client headers that do not go upstream with passed-through requests, where all others do."""
    set_headers: dict[Header, HeaderValue] = {}
    """Headers of every upstream request. They replace the client's, and are treated as secrets."""
    cache: Cache = Cache()
    hold: RouteHold = RouteHold()
    limits: RouteLimits = RouteLimits()
    timeouts: RouteTimeouts = RouteTimeouts()
    sessions: RouteSessions = RouteSessions()
    legs: RouteLegs = RouteLegs()
    tasks: RouteTasks = RouteTasks()
    dialects: tuple[Dialect, ...] = ()
    """Drafts of the protocol that the route speaks too, with clients that declare them. `sep-1442`: requests without a
    session, with questions on the response stream. `sep-1655`: clients keep a sealed state, which leads each of their
    requests to the same session of a legacy server. `sep-1685`: the mirror sends a sealed state with its nested
    requests over streamable HTTP, and the client must echo it."""

    @property
    def bound_headers(self) -> tuple[str, ...]:
        """Return the forwarded headers that are credentials."""
        if self.bind_headers is not None or not self.forward_headers:
            return self.bind_headers or ()
        return _credentials_among(self.forward_headers)


_NO_CREDENTIALS = frozenset(
    {
        "accept-language",
        "baggage",
        "forwarded",
        "traceparent",
        "tracestate",
        "user-agent",
        "via",
        "x-request-id",
    }
)


@lru_cache(maxsize=1024)
def _credentials_among(names: tuple[str, ...]) -> tuple[str, ...]:
    """The headers of these that may be credentials: all but those known to vary between a caller's requests."""
    return tuple(name for name in names if name not in _NO_CREDENTIALS and not name.startswith("x-forwarded-"))


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one mrtr-gateway process."""

    listen: Address = "127.0.0.1:8080"
    """host:port for clients. Port 0 picks a free port."""
    public_url: Origin | None = None
    """Origin at which clients reach this gateway, used in OAuth metadata. null: the request's `Host`."""
    admin: Address | None = "127.0.0.1:9464"
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
    debug: Debug = Debug()
    routes: Annotated[tuple[Route, ...], Meta(min_length=1)]
    """Public paths and their upstreams."""

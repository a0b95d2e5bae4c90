"""The structs of the configuration: every key with its type, range, default, meaning.

These structs are the only place where a key is declared. The loader, the environment overrides and the JSON
Schema all walk them, so a new key is one new line here, and one in `config/full.yaml` (a test compares).
`extra={"form": ...}` names the text form of `gateway/config/parsing/formats.py` that a value must have.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from gateway.config.parsing.formats import redacted_url
from gateway.config.parsing.keys import decode_key

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
SomeSeconds = Annotated[float, Meta(ge=0.001, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Bytes = Annotated[int, Meta(ge=1, le=1_073_741_824)]

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

    cert_file: Annotated[
        Text | None,
        Meta(description="Certificate (PEM), followed by its intermediate certificates. null: plain HTTP."),
    ] = None
    key_file: Annotated[
        Text | None,
        Meta(description="Private key (PEM) of the certificate, without a password. null: the key is in `cert_file`."),
    ] = None
    client_ca_file: Annotated[
        Text | None,
        Meta(
            description="Authorities (PEM) of client certificates: other clients are rejected. null: no "
            "client certificate is needed."
        ),
    ] = None


class State(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `requestState` is sealed."""

    _secrets = frozenset({"keys"})

    keys: Annotated[
        tuple[str, ...],
        Meta(
            description="State keys (`mrtr-gateway keygen`): base64 or hex of 32 bytes or more. The first key "
            "seals, all keys open. Empty: the gateway makes a key at each start, for a single "
            "replica only.",
            extra={"secret": True},
        ),
    ] = ()
    keys_file: Annotated[
        Text | None,
        Meta(
            description="Alternative to `keys`: a file with one key per line and `#` comments. A relative "
            "path starts in the folder of the configuration file."
        ),
    ] = None
    ttl_seconds: Annotated[SomeSeconds, Meta(description="Lifetime of a sealed state.")] = 600.0

    def raw_keys(self) -> tuple[bytes, ...]:
        """Return the keys as bytes, in order; raises ValueError for a malformed key (never after `load`)."""
        return tuple(decode_key(text) for text in self.keys)


class Replica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process among its peers."""

    id: Annotated[
        ReplicaId | None,
        Meta(description="Name of this replica, unique among its peers. null: the host's name."),
    ] = None
    listen: Annotated[Address | None, Meta(description="host:port of the peer listener. null: no peer listener.")] = (
        None
    )
    peers: Annotated[
        dict[ReplicaId, Address],
        Meta(description="Peer listeners of all replicas by replica id, including this one's."),
    ] = {}
    peers_dns: Annotated[
        Address | None,
        Meta(description="Alternative to `peers`: name:port of a headless service that resolves to all replicas."),
    ] = None


class Hold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls that wait between two rounds."""

    ttl_seconds: Annotated[
        SomeSeconds,
        Meta(description="How long a parked call waits for its next round. state.ttl_seconds limits the wait too."),
    ] = 600.0
    max_calls: Annotated[Count, Meta(description="Maximum number of parked calls in this replica.")] = 10_000
    max_calls_per_principal: Annotated[Count, Meta(description="Maximum number of parked calls of one principal.")] = (
        1_000
    )
    quiet_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=5)],
        Meta(
            description="Nested requests that arrive within this time of each other share a round. 0: each is "
            "sent at once."
        ),
    ] = 0.04
    grace_seconds: Annotated[
        Seconds,
        Meta(
            description="When the client of a retry disconnects: how long it may come back before the call is "
            "cancelled."
        ),
    ] = 1.5
    linger_seconds: Annotated[
        Seconds, Meta(description="How long a delivered result is kept in case the client repeats the same retry.")
    ] = 30.0
    drain_delay_seconds: Annotated[
        Seconds,
        Meta(
            description="After SIGTERM: how long the replica reports unready but still serves new calls, so "
            "that load balancers notice. SIGINT skips this delay."
        ),
    ] = 2.0
    drain_seconds: Annotated[
        Seconds,
        Meta(description="After that delay: how long parked calls may take to finish. Peers can still reach them."),
    ] = 30.0


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Maximum sizes of messages, and limits of connections."""

    body_bytes: Annotated[
        Bytes,
        Meta(description="Maximum size of a client's request body, after decompression. A larger one gets HTTP 413."),
    ] = 4_194_304
    event_bytes: Annotated[
        Bytes, Meta(description="Maximum size of one SSE event or JSON response of an upstream.")
    ] = 16_777_216
    behind_bytes: Annotated[
        Bytes,
        Meta(
            description="Maximum size of the notifications that wait for one client that does not read. Beyond it, "
            "the gateway drops the oldest, but keeps the newest whatever its size."
        ),
    ] = 1_048_576
    json_depth: Annotated[
        Annotated[int, Meta(ge=8, le=512)], Meta(description="Maximum nesting of objects and arrays in a message.")
    ] = 64
    state_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=65_536)], Meta(description="Maximum size of a sealed `requestState`.")
    ] = 8_192
    receive_seconds: Annotated[
        SomeSeconds, Meta(description="Time limit for a request head to arrive, and again for its whole body.")
    ] = 30.0
    connections: Annotated[Count, Meta(description="Maximum number of open client connections.")] = 20_000


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts towards clients, upstreams and peers, in seconds."""

    connect_seconds: Annotated[
        SomeSeconds, Meta(description="Time limit for opening a connection to an upstream.")
    ] = 5.0
    handshake_seconds: Annotated[SomeSeconds, Meta(description="Time limit from `initialize` to its result.")] = 10.0
    answer_seconds: Annotated[
        SomeSeconds, Meta(description="Time limit for the upstream to accept the POST of an answer or a notification.")
    ] = 10.0
    idle_seconds: Annotated[SomeSeconds, Meta(description="How long an upstream may be silent during a call.")] = 300.0
    session_wait_seconds: Annotated[
        SomeSeconds, Meta(description="How long a request waits for a free session when the caps are reached.")
    ] = 10.0
    keepalive_seconds: Annotated[
        SomeSeconds,
        Meta(description="How long a response stream may be silent before the gateway sends an SSE comment."),
    ] = 15.0
    cancel_seconds: Annotated[
        SomeSeconds, Meta(description="Time limit for delivering `notifications/cancelled` or DELETE.")
    ] = 5.0
    send_seconds: Annotated[SomeSeconds, Meta(description="How long a client may fail to read its reply.")] = 30.0
    peer_connect_seconds: Annotated[
        SomeSeconds,
        Meta(
            description="Time limit for opening a connection to a peer. A peer that takes longer counts as silent, "
            "not as proven dead."
        ),
    ] = 0.5
    peer_accept_seconds: Annotated[
        SomeSeconds,
        Meta(
            description="Time limit for a connected peer to take the request over. After it, the client is "
            "told to retry."
        ),
    ] = 1.0


class Sessions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of upstream sessions."""

    max: Annotated[
        Count, Meta(description="Maximum number of sessions per route, in use or idle. A parked call uses one.")
    ] = 11_000
    max_per_principal: Annotated[
        Count, Meta(description="Maximum number of sessions of one principal on one route.")
    ] = 1_100
    idle_seconds: Annotated[
        Seconds, Meta(description="After this idle time, the gateway closes a session with DELETE.")
    ] = 60.0
    quarantine_seconds: Annotated[
        Seconds,
        Meta(description="How long an abandoned call may take to end before its session is dropped."),
    ] = 60.0


class Legs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Early ends of long requests, for clients that give up at 60 seconds."""

    limit_seconds: Annotated[
        SomeSeconds, Meta(description="A request that is open this long is answered with a round without questions.")
    ] = 50.0
    rounds: Annotated[
        Annotated[int, Meta(ge=0, le=9)],
        Meta(
            description="Maximum number of such rounds per exchange (clients allow 10 rounds in all). 0: "
            "streams stay open."
        ),
    ] = 4


class Principal(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How callers are identified."""

    _urls = frozenset({"jwks_url"})

    source: Annotated[
        Literal["authorization", "header", "jwt"],
        Meta(
            description="How callers are identified. `authorization`: by the bearer token, not verified; "
            "`header`: by a header that a trusted proxy sets; `jwt`: by the bearer token, "
            "verified with its issuer's keys."
        ),
    ] = "authorization"
    header: Annotated[Header | None, Meta(description="With source `header`: the name of the header.")] = None
    trusted_proxies: Annotated[
        tuple[Network, ...], Meta(description="Networks (CIDR) of proxies whose forwarded headers are trusted.")
    ] = ()
    issuer: Annotated[Text | None, Meta(description="With source `jwt`: the exact value that `iss` must have.")] = None
    jwks_url: Annotated[
        str | None, Meta(description="With source `jwt`: the URL of the issuer's keys.", extra={"form": "url"})
    ] = None
    jwks_file: Annotated[Text | None, Meta(description="Alternative to `jwks_url`: a file with the keys (JWKS).")] = (
        None
    )
    jwks_ca_file: Annotated[
        Text | None, Meta(description="Authority (PEM) of the server at `jwks_url`. null: the system's authorities.")
    ] = None
    jwks_stale_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=604_800)],
        Meta(description="How long the keys stay in use after the last successful fetch."),
    ] = 86_400.0
    audience: Annotated[
        tuple[Text, ...], Meta(description="With source `jwt`: `aud` must name one of these. Empty: not checked.")
    ] = ()
    algorithms: Annotated[
        tuple[Algorithm, ...],
        Meta(description="With source `jwt`: the accepted signature algorithms.", min_length=1),
    ] = ("RS256", "ES256")


class Security(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Protection against DNS rebinding."""

    allowed_hosts: Annotated[
        tuple[Host, ...],
        Meta(
            description="Accepted values of `Host`. Empty: loopback names if `listen` is on loopback, otherwise any."
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[Origin, ...],
        Meta(description="Accepted values of `Origin`. Requests without `Origin` are always accepted."),
    ] = ()


class Log(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log on stderr."""

    level: Annotated[
        Level, Meta(description="Minimum level. It is read only at start, and `serve --log-level` overrides it.")
    ] = "info"
    format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="`auto`: console format on a terminal, otherwise JSON lines."),
    ] = "auto"


class Debug(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Debugging aids."""

    bodies: Annotated[
        bool,
        Meta(
            description="true: log every message of clients and upstreams, truncated and with secrets masked. "
            "The gateway logs a warning about this at every start and reload."
        ),
    ] = False


class UpstreamTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS towards one upstream."""

    ca_file: Annotated[
        Text | None,
        Meta(description="Trusted authorities (PEM), instead of the system's. null: the system's authorities."),
    ] = None
    cert_file: Annotated[Text | None, Meta(description="Client certificate (PEM) for the server. null: none.")] = None
    key_file: Annotated[
        Text | None,
        Meta(description="Private key (PEM) of the certificate, without a password. null: the key is in `cert_file`."),
    ] = None
    server_name: Annotated[
        Host | None, Meta(description="Name that the server's certificate must be for. null: the name in `url`.")
    ] = None
    verify: Annotated[
        bool,
        Meta(
            description="false: accept any certificate, and so any server. The gateway logs a warning about "
            "this at every start and reload."
        ),
    ] = True


class Upstream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server: `url` or `command`."""

    url: Annotated[str | None, Meta(description="URL of the server's MCP endpoint.", extra={"form": "url"})] = None
    command: Annotated[
        Annotated[tuple[Text, ...], Meta(min_length=1)] | None,
        Meta(description="Program and arguments of a stdio server, started without a shell."),
    ] = None
    env: Annotated[
        dict[Variable, Annotated[str, Meta(extra={"secret": True})]],
        Meta(
            description="With `command`: the child's environment. Of the gateway's own variables it gets only "
            "PATH, HOME, USER, SHELL, TERM, TMPDIR, TZ and the locale."
        ),
    ] = {}
    cwd: Annotated[
        Text | None, Meta(description="With `command`: the working directory. null: the gateway's own.")
    ] = None
    max_children: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)],
        Meta(
            description="With `command`: maximum number of its processes, in use, idle or ending. A parked "
            "call uses one."
        ),
    ] = 32
    warm: Annotated[
        Annotated[int, Meta(ge=0, le=100)],
        Meta(description="With `command`: how many children are started in advance."),
    ] = 1
    transport: Annotated[
        Literal["auto", "streamable-http", "sse", "stdio"],
        Meta(description="Transport of the server. `auto` detects it."),
    ] = "auto"
    tls: Annotated[UpstreamTls, Meta(description="TLS towards the server, if the URL is https.")] = UpstreamTls()

    @property
    def name(self) -> str:
        """The upstream's name in logs and errors: the redacted url, or the program without its arguments."""
        return redacted_url(self.url) if self.url else (self.command or ("?",))[0]

    def __repr__(self) -> str:
        return f"Upstream({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the fields with possible secrets hidden, as `State` does."""
        url = self.url and redacted_url(self.url)
        shown = {"url": url, "command": self.command and (self.command[0], "..."), "env": sorted(self.env)}
        return [(name, shown.get(name, getattr(self, name))) for name in self.__struct_fields__]


class Credentials(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The credential that goes upstream: the client's `Authorization`, none, or the gateway's own."""

    _secrets = frozenset({"token"})

    mode: Annotated[
        Literal["forward", "drop", "replace"],
        Meta(
            description="What happens to the client's `Authorization`: `forward` sends it upstream, `drop` "
            "does not, `replace` sends the gateway's own instead."
        ),
    ] = "forward"
    token: Annotated[
        HeaderValue | None, Meta(description="With `replace`: the gateway's own secret.", extra={"secret": True})
    ] = None
    token_file: Annotated[
        Text | None, Meta(description="Alternative to `token`: a file with the secret in its only line.")
    ] = None
    header: Annotated[
        Header | None,
        Meta(description="With `replace`: the header that carries the bare secret. null: `Authorization: Bearer`."),
    ] = None


class Freshness(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides for one method. Keys that are left out have the route's value."""

    ttl_ms: Annotated[TtlMs | None, Meta(description="`ttlMs` of this method's results.")] = None
    scope: Annotated[CacheScope | None, Meta(description="`cacheScope` of this method's results.")] = None


_AS_FOR_ALL = Freshness()


class Cache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freshness, which modern results must state and legacy servers cannot."""

    ttl_ms: Annotated[
        TtlMs, Meta(description="`ttlMs` of lists and resources. A server's own value takes precedence.")
    ] = 0
    scope: Annotated[
        CacheScope,
        Meta(description="`cacheScope` of the same results. `public` lets caches share them between callers."),
    ] = "private"
    methods: Annotated[
        dict[Cacheable, Freshness],
        Meta(description="Values for single methods, e.g. `tools/list: {ttl_ms: 60000, scope: public}`."),
    ] = {}
    lists_seconds: Annotated[
        Seconds,
        Meta(
            description="How long the gateway answers a caller's lists from its own memory. 0: never. A "
            "`list_changed` from the server ends this early."
        ),
    ] = 0.0

    def of(self, method: str) -> tuple[int, str]:
        """Return `ttlMs` and `cacheScope` of a method's results."""
        if not self.methods:
            return self.ttl_ms, self.scope
        own = next((own for name, own in self.methods.items() if name == method), _AS_FOR_ALL)
        return (self.ttl_ms if own.ttl_ms is None else own.ttl_ms, self.scope if own.scope is None else own.scope)


class RouteHold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `hold` for one route. Keys that are left out have the value of `hold`."""

    ttl_seconds: Annotated[SomeSeconds | None, Meta(description="As `hold.ttl_seconds`.")] = None
    quiet_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=5)] | None, Meta(description="As `hold.quiet_seconds`.")
    ] = None
    grace_seconds: Annotated[Seconds | None, Meta(description="As `hold.grace_seconds`.")] = None
    linger_seconds: Annotated[Seconds | None, Meta(description="As `hold.linger_seconds`.")] = None


class RouteLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `limits` for one route. Keys that are left out have the value of `limits`."""

    body_bytes: Annotated[Bytes | None, Meta(description="As `limits.body_bytes`.")] = None
    event_bytes: Annotated[Bytes | None, Meta(description="As `limits.event_bytes`.")] = None
    json_depth: Annotated[Annotated[int, Meta(ge=8, le=512)] | None, Meta(description="As `limits.json_depth`.")] = (
        None
    )


class RouteTimeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `timeouts` for one route. Keys that are left out have the value of `timeouts`."""

    connect_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.connect_seconds`.")] = None
    handshake_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.handshake_seconds`.")] = None
    answer_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.answer_seconds`.")] = None
    idle_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.idle_seconds`.")] = None
    session_wait_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.session_wait_seconds`.")] = None
    keepalive_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.keepalive_seconds`.")] = None
    cancel_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.cancel_seconds`.")] = None
    send_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.send_seconds`.")] = None


class RouteSessions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `sessions` for one route, and how its calls share sessions."""

    affinity: Annotated[
        Literal["none", "principal"],
        Meta(
            description="`none`: a call uses any session of its principal; `principal`: all calls of a "
            "principal with the same client and capabilities use one session while it lives, one "
            "after another."
        ),
    ] = "none"
    max: Annotated[Count | None, Meta(description="As `sessions.max`.")] = None
    max_per_principal: Annotated[Count | None, Meta(description="As `sessions.max_per_principal`.")] = None
    idle_seconds: Annotated[Seconds | None, Meta(description="As `sessions.idle_seconds`.")] = None
    quarantine_seconds: Annotated[Seconds | None, Meta(description="As `sessions.quarantine_seconds`.")] = None


class RouteLegs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Overrides of `legs` for one route. Keys that are left out have the value of `legs`."""

    limit_seconds: Annotated[SomeSeconds | None, Meta(description="As `legs.limit_seconds`.")] = None
    rounds: Annotated[Annotated[int, Meta(ge=0, le=9)] | None, Meta(description="As `legs.rounds`.")] = None


class Route(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One public path and its upstream."""

    _secrets = frozenset({"set_headers"})

    path: Annotated[str, Meta(description="The public path.", extra={"form": "path"})] = "/mcp"
    upstream: Annotated[Upstream, Meta(description="The server behind this route.")]
    continuation: Annotated[
        Literal["hold", "replay"],
        Meta(
            description="`hold` parks the call between rounds; `replay` holds nothing and runs the call again "
            "with the answers, so every tool of the route must be safe to run twice."
        ),
    ] = "hold"
    ephemeral: Annotated[
        tuple[Text, ...],
        Meta(
            description="Name patterns of tools that may run twice, e.g. `weather_*`, in addition to tools "
            "with `readOnlyHint` or `idempotentHint`. If a call of such a tool is lost, it is run "
            "again."
        ),
    ] = ()
    undeclared: Annotated[
        Literal["abort", "refuse"],
        Meta(
            description="What happens to a nested request that needs a capability which the client did not "
            "declare: `abort` ends the call (-32021), `refuse` answers the server with an error "
            "and lets the tool continue."
        ),
    ] = "abort"
    credentials: Annotated[Credentials, Meta(description="Credential that the upstream receives.")] = Credentials()
    forward_headers: Annotated[
        tuple[Header, ...], Meta(description="Client headers that go upstream, in addition to `Authorization`.")
    ] = ()
    bind_headers: Annotated[
        tuple[Header, ...] | None,
        Meta(
            description="The `forward_headers` that are credentials: a retry must bring the same values. null: all "
            "except traceparent, tracestate, baggage, x-request-id, x-forwarded-*, forwarded, via, user-agent and "
            "accept-language."
        ),
    ] = None
    drop_headers: Annotated[
        tuple[Header, ...],
        Meta(description="Client headers that do not go upstream with passed-through requests, where all others do."),
    ] = ()
    set_headers: Annotated[
        dict[Header, HeaderValue],
        Meta(description="Headers of every upstream request. They replace the client's, and are treated as secrets."),
    ] = {}
    cache: Annotated[Cache, Meta(description="Freshness of this route's lists and resources.")] = Cache()
    hold: Annotated[RouteHold, Meta(description="Overrides of `hold` for this route.")] = RouteHold()
    limits: Annotated[RouteLimits, Meta(description="Overrides of `limits` for this route.")] = RouteLimits()
    timeouts: Annotated[RouteTimeouts, Meta(description="Overrides of `timeouts` for this route.")] = RouteTimeouts()
    sessions: Annotated[RouteSessions, Meta(description="Overrides of `sessions` for this route.")] = RouteSessions()
    legs: Annotated[RouteLegs, Meta(description="Overrides of `legs` for this route.")] = RouteLegs()

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

    listen: Annotated[Address, Meta(description="host:port for clients. Port 0 picks a free port.")] = "127.0.0.1:8080"
    public_url: Annotated[
        Origin | None,
        Meta(
            description="Origin at which clients reach this gateway, used in OAuth metadata. null: the "
            "request's `Host`."
        ),
    ] = None
    admin: Annotated[
        Address | None,
        Meta(description="host:port of /metrics, /healthz, /readyz and /status. null: no admin listener."),
    ] = "127.0.0.1:9090"
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=1024)],
        Meta(
            description="Number of processes that share `listen`. The caps of hold, limits and sessions apply "
            "to each process."
        ),
    ] = 1
    tls: Annotated[Tls, Meta(description="TLS of `listen`.")] = Tls()
    state: Annotated[State, Meta(description="How `requestState` is sealed.")] = State()
    replica: Annotated[Replica, Meta(description="This process among its peers.")] = Replica()
    hold: Annotated[Hold, Meta(description="Calls that wait between two rounds.")] = Hold()
    limits: Annotated[Limits, Meta(description="Maximum sizes of messages, and limits of connections.")] = Limits()
    timeouts: Annotated[Timeouts, Meta(description="Timeouts towards clients, upstreams and peers.")] = Timeouts()
    sessions: Annotated[Sessions, Meta(description="The pool of upstream sessions.")] = Sessions()
    legs: Annotated[Legs, Meta(description="Early ends of long requests, for clients that give up at 60 seconds.")] = (
        Legs()
    )
    principal: Annotated[Principal, Meta(description="How callers are identified.")] = Principal()
    security: Annotated[Security, Meta(description="Protection against DNS rebinding.")] = Security()
    log: Annotated[Log, Meta(description="The log on stderr.")] = Log()
    traces: Annotated[
        bool,
        Meta(
            description="true: send spans with OTLP over HTTP, as the OTEL_* environment variables say. Needs "
            "`pip install 'mrtr-gateway[otel]'`."
        ),
    ] = False
    debug: Annotated[Debug, Meta(description="Debugging aids.")] = Debug()
    routes: Annotated[tuple[Route, ...], Meta(description="Public paths and their upstreams.", min_length=1)]

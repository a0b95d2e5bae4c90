"""The configuration's shape: every key with its type, range, default and meaning.

These structs are the only place where a key is declared. The loader, the environment overrides and the JSON
Schema all walk them, so a new key is one new line here, and one in `config/full.yaml` (a test compares).
`extra={"form": ...}` names the text form of `gateway/config/forms.py` that a value must have.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from gateway.config.keys import decode_key

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
]  # none with a shared secret: a public key must not pass for one
Level = Literal["debug", "info", "warning", "error"]
TtlMs = Annotated[int, Meta(ge=0, le=86_400_000)]
CacheScope = Literal["private", "public"]
Cacheable = Literal[
    "server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read"
]


class Discreet(Struct, frozen=True, kw_only=True):
    """A section that never prints its secrets: what is a secret to a field's eye is only counted."""

    _secrets: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the fields with the secrets hidden; rich's printer asks this, and not `repr`."""
        fields = structs.asdict(self).items()
        return [(name, _hidden(value) if name in self._secrets else value) for name, value in fields]


def _hidden(value: object) -> str | None:
    """What can be told of a secret: how many there are, or by which names."""
    if isinstance(value, tuple):
        return f"<{len(value)} hidden>"
    if isinstance(value, Mapping):
        return f"<{', '.join(value)} hidden>" if value else "{}"
    return None if value is None else "<hidden>"


class Tls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the listener for clients; without `cert_file` there is none."""

    cert_file: Annotated[
        Text | None,
        Meta(description="Certificate (PEM), with those that link it to its authority. null: plain HTTP."),
    ] = None
    key_file: Annotated[
        Text | None, Meta(description="Its private key (PEM), without a password. null: it stands in `cert_file`.")
    ] = None
    client_ca_file: Annotated[
        Text | None,
        Meta(description="Authorities (PEM) of clients: only who shows a certificate of theirs is let in. null: all."),
    ] = None


class State(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `requestState` is sealed."""

    _secrets = frozenset({"keys"})

    keys: Annotated[
        tuple[str, ...],
        Meta(
            description="State keys (`mrtr-gateway keygen`): base64 or hex of 32 bytes or more. The first "
            "seals, all open. Empty: one ephemeral key per start, for a single replica only.",
            extra={"secret": True},
        ),
    ] = ()
    keys_file: Annotated[
        Text | None,
        Meta(
            description="Instead of `keys`: a file with one key per line and `#` comments. Its path "
            "starts in the folder of the configuration file."
        ),
    ] = None
    ttl_seconds: Annotated[SomeSeconds, Meta(description="How long a sealed state opens, in seconds.")] = 600.0

    def raw_keys(self) -> tuple[bytes, ...]:
        """Return the keys as bytes, in order; ValueError where a text is no key (never after `load`)."""
        return tuple(decode_key(text) for text in self.keys)


class Replica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process among its peers."""

    id: Annotated[
        ReplicaId | None,
        Meta(description="This replica's name, unique among its peers. Empty: the host's name."),
    ] = None
    listen: Annotated[Address | None, Meta(description="host:port of the peer listener. Empty: none.")] = None
    peers: Annotated[
        dict[ReplicaId, Address],
        Meta(description="Peer listeners by replica id, this replica's own among them."),
    ] = {}
    peers_dns: Annotated[
        Address | None,
        Meta(description="Instead of `peers`: name:port of a headless service that resolves to all."),
    ] = None


class Hold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls that wait between two rounds."""

    ttl_seconds: Annotated[
        SomeSeconds,
        Meta(description="How long a parked call waits for its next round; state.ttl_seconds ends the wait too."),
    ] = 600.0
    max_calls: Annotated[Count, Meta(description="Parked calls of this replica, in all.")] = 10_000
    max_calls_per_principal: Annotated[Count, Meta(description="Parked calls of one principal.")] = 1_000
    quiet_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=5)],
        Meta(description="Nested requests this close to one another share a round; 0 sends each at once."),
    ] = 0.04
    grace_seconds: Annotated[
        Seconds,
        Meta(description="How long a vanished client of a retry may come back before the call is cancelled."),
    ] = 1.5
    linger_seconds: Annotated[
        Seconds, Meta(description="How long a delivered result is kept for a repeat of the same retry.")
    ] = 30.0
    drain_delay_seconds: Annotated[
        Seconds,
        Meta(
            description="After SIGTERM: unready, but new calls are still served, so that load balancers can notice. "
            "SIGINT does not wait."
        ),
    ] = 2.0
    drain_seconds: Annotated[
        Seconds, Meta(description="After that: how long parked calls may take to finish; peers still reach them.")
    ] = 30.0


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes beyond which a message is refused."""

    body_bytes: Annotated[Bytes, Meta(description="One downstream request body, inflated; beyond it HTTP 413.")] = (
        4_194_304
    )
    event_bytes: Annotated[Bytes, Meta(description="One upstream SSE event or JSON answer.")] = 16_777_216
    json_depth: Annotated[
        Annotated[int, Meta(ge=8, le=512)], Meta(description="Nesting of objects and arrays in a message.")
    ] = 64
    state_bytes: Annotated[
        Annotated[int, Meta(ge=1024, le=65_536)], Meta(description="One sealed `requestState`.")
    ] = 8_192
    receive_seconds: Annotated[
        SomeSeconds, Meta(description="Time in which a request head, and then its whole body, must arrive.")
    ] = 30.0
    connections: Annotated[Count, Meta(description="Open downstream connections.")] = 20_000


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Waiting times towards both sides, in seconds."""

    connect_seconds: Annotated[SomeSeconds, Meta(description="Opening a connection to an upstream.")] = 5.0
    handshake_seconds: Annotated[SomeSeconds, Meta(description="`initialize` until its result.")] = 10.0
    answer_seconds: Annotated[
        SomeSeconds, Meta(description="POST of an answer or a notification until the upstream accepted it.")
    ] = 10.0
    idle_seconds: Annotated[SomeSeconds, Meta(description="An upstream that is silent in a call.")] = 300.0
    session_wait_seconds: Annotated[SomeSeconds, Meta(description="Waiting for a free session under the caps.")] = 10.0
    keepalive_seconds: Annotated[
        SomeSeconds, Meta(description="Silence downstream before an SSE comment is sent.")
    ] = 15.0
    cancel_seconds: Annotated[SomeSeconds, Meta(description="Delivery of `notifications/cancelled` or DELETE.")] = 5.0
    send_seconds: Annotated[SomeSeconds, Meta(description="A client that does not read its reply.")] = 30.0
    peer_connect_seconds: Annotated[
        SomeSeconds,
        Meta(description="Opening a connection to a peer; one that takes longer is silent, not proven dead."),
    ] = 0.5
    peer_accept_seconds: Annotated[
        SomeSeconds,
        Meta(
            description="A peer that is connected, until it takes the request over; then the client is told to retry."
        ),
    ] = 1.0


class Sessions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of upstream sessions."""

    max: Annotated[Count, Meta(description="Sessions per route, in use or idle; a parked call has one.")] = 11_000
    max_per_principal: Annotated[Count, Meta(description="Sessions of one principal on one route.")] = 1_100
    idle_seconds: Annotated[Seconds, Meta(description="An idle session is closed with DELETE after this time.")] = 60.0
    quarantine_seconds: Annotated[
        Seconds,
        Meta(description="How long a call that was given up may take to end; its session is dropped then."),
    ] = 60.0


class Legs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Early ends of long requests, for clients that give up at 60 seconds."""

    limit_seconds: Annotated[
        SomeSeconds, Meta(description="A request open this long is answered with a state-only round.")
    ] = 50.0
    rounds: Annotated[
        Annotated[int, Meta(ge=0, le=9)],
        Meta(description="State-only rounds per exchange (clients allow 10 in all); 0 keeps streams open."),
    ] = 4


class Principal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is calling."""

    source: Annotated[
        Literal["authorization", "header", "jwt"],
        Meta(
            description="`authorization`: the bearer token, not verified; `header`: a header that a trusted proxy "
            "sets; `jwt`: the bearer token, verified with the keys of its issuer."
        ),
    ] = "authorization"
    header: Annotated[Header | None, Meta(description="With source `header`: its name.")] = None
    trusted_proxies: Annotated[
        tuple[Network, ...], Meta(description="Networks (CIDR) whose forwarded headers are believed.")
    ] = ()
    issuer: Annotated[Text | None, Meta(description="With source `jwt`: what `iss` must be, to the letter.")] = None
    jwks_url: Annotated[
        str | None, Meta(description="With source `jwt`: where the issuer's keys are.", extra={"form": "url"})
    ] = None
    jwks_file: Annotated[Text | None, Meta(description="Instead of `jwks_url`: a file with the keys (JWKS).")] = None
    jwks_ca_file: Annotated[
        Text | None, Meta(description="The authority (PEM) of `jwks_url`. null: those of the system.")
    ] = None
    jwks_stale_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=604_800)],
        Meta(description="How long the keys are used after the last time that they could be fetched."),
    ] = 86_400.0
    audience: Annotated[
        tuple[Text, ...], Meta(description="With source `jwt`: `aud` must name one of these. Empty: not looked at.")
    ] = ()
    algorithms: Annotated[
        tuple[Algorithm, ...],
        Meta(description="With source `jwt`: the signatures that are accepted.", min_length=1),
    ] = ("RS256", "ES256")


class Security(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defence against DNS rebinding."""

    allowed_hosts: Annotated[
        tuple[Host, ...],
        Meta(description="Values of `Host`. Empty: loopback names when listening on loopback, else any."),
    ] = ()
    allowed_origins: Annotated[
        tuple[Origin, ...], Meta(description="Values of `Origin`, beside requests that carry none.")
    ] = ()


class Log(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lines on stderr."""

    level: Annotated[Level, Meta(description="The least level; read at start only. `serve --log-level` beats it.")] = (
        "info"
    )
    format: Annotated[
        Literal["auto", "json", "console"],
        Meta(description="`auto`: console on a terminal, else JSON lines."),
    ] = "auto"


class Debug(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is for finding a fault only."""

    bodies: Annotated[
        bool,
        Meta(
            description="true: the log has every message of clients and upstreams, cut, without what looks like a "
            "secret; a warning is logged at every start and reload."
        ),
    ] = False


class UpstreamTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS towards one upstream."""

    ca_file: Annotated[
        Text | None,
        Meta(description="The authorities (PEM) that are trusted, and no others. null: those of the system."),
    ] = None
    cert_file: Annotated[
        Text | None, Meta(description="The certificate (PEM) that is shown to the server. null: none.")
    ] = None
    key_file: Annotated[
        Text | None, Meta(description="Its private key (PEM), without a password. null: it stands in `cert_file`.")
    ] = None
    server_name: Annotated[
        Host | None, Meta(description="The name that the server's certificate must be for. null: that of `url`.")
    ] = None
    verify: Annotated[
        bool, Meta(description="false: the server may be anybody; a warning is logged at every start and reload.")
    ] = True


class Upstream(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One old server: `url` or `command`."""

    url: Annotated[str | None, Meta(description="The server's MCP endpoint.", extra={"form": "url"})] = None
    command: Annotated[
        Annotated[tuple[Text, ...], Meta(min_length=1)] | None,
        Meta(description="A stdio server's program and its arguments; it is started without a shell."),
    ] = None
    env: Annotated[
        dict[Variable, Annotated[str, Meta(extra={"secret": True})]],
        Meta(
            description="With `command`: the child's environment, beside PATH, HOME, USER, SHELL, TERM, TMPDIR, TZ "
            "and the locale; it gets nothing else of the gateway's."
        ),
    ] = {}
    cwd: Annotated[
        Text | None, Meta(description="With `command`: the folder it runs in. Empty: the gateway's own.")
    ] = None
    max_children: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)],
        Meta(description="With `command`: its processes, in use, idle or ending; a parked call has one."),
    ] = 32
    warm: Annotated[
        Annotated[int, Meta(ge=0, le=100)],
        Meta(description="With `command`: children started ahead for whoever comes next."),
    ] = 1
    transport: Annotated[
        Literal["auto", "streamable-http", "sse", "stdio"],
        Meta(description="How to talk to it; `auto` finds out."),
    ] = "auto"
    tls: Annotated[UpstreamTls, Meta(description="TLS towards it, where the url is https.")] = UpstreamTls()

    @property
    def name(self) -> str:
        """What logs and errors call it: the url, or the program; arguments and environment may be secret."""
        return self.url or (self.command or ("?",))[0]

    def __repr__(self) -> str:
        return f"Upstream({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the fields without what may be secret, as `State` does."""
        shown = {"command": self.command and (self.command[0], "..."), "env": sorted(self.env)}
        return [(name, shown.get(name, getattr(self, name))) for name in self.__struct_fields__]


class Credentials(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes upstream in place of, or as, the client's `Authorization`."""

    _secrets = frozenset({"token"})

    mode: Annotated[
        Literal["forward", "drop", "replace"],
        Meta(
            description="The client's `Authorization`: `forward` sends it upstream, `drop` does not, `replace` sends "
            "the gateway's own instead."
        ),
    ] = "forward"
    token: Annotated[HeaderValue | None, Meta(description="With `replace`: the secret.", extra={"secret": True})] = (
        None
    )
    token_file: Annotated[
        Text | None, Meta(description="Instead of `token`: a file with the secret in its only line.")
    ] = None
    header: Annotated[
        Header | None,
        Meta(description="With `replace`: the header that carries it as it is. null: `Authorization: Bearer`."),
    ] = None


class Freshness(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What differs for one method; what is left out is as for all."""

    ttl_ms: Annotated[TtlMs | None, Meta(description="`ttlMs` of this method's results, in milliseconds.")] = None
    scope: Annotated[CacheScope | None, Meta(description="`cacheScope` of this method's results.")] = None


_AS_FOR_ALL = Freshness()


class Cache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freshness that modern results must state and old servers cannot."""

    ttl_ms: Annotated[
        TtlMs, Meta(description="`ttlMs` of lists and resources, in milliseconds; a server's own wins.")
    ] = 0
    scope: Annotated[
        CacheScope, Meta(description="`cacheScope` of the same results; `public` lets caches mix callers.")
    ] = "private"
    methods: Annotated[
        dict[Cacheable, Freshness],
        Meta(description="Other values for single methods, e.g. `tools/list: {ttl_ms: 60000, scope: public}`."),
    ] = {}
    lists_seconds: Annotated[
        Seconds,
        Meta(
            description="How long the gateway itself keeps a caller's lists and answers from them; 0: not. "
            "A list_changed that it hears ends that early."
        ),
    ] = 0.0

    def of(self, method: str) -> tuple[int, str]:
        """Return `ttlMs` and `cacheScope` of a method's results."""
        if not self.methods:
            return self.ttl_ms, self.scope
        own = next((own for name, own in self.methods.items() if name == method), _AS_FOR_ALL)
        return (self.ttl_ms if own.ttl_ms is None else own.ttl_ms, self.scope if own.scope is None else own.scope)


class RouteHold(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one route has of `hold` for itself; a key that is not given is that of `hold`."""

    ttl_seconds: Annotated[SomeSeconds | None, Meta(description="As `hold.ttl_seconds`.")] = None
    quiet_seconds: Annotated[
        Annotated[float, Meta(ge=0, le=5)] | None, Meta(description="As `hold.quiet_seconds`.")
    ] = None
    grace_seconds: Annotated[Seconds | None, Meta(description="As `hold.grace_seconds`.")] = None
    linger_seconds: Annotated[Seconds | None, Meta(description="As `hold.linger_seconds`.")] = None


class RouteLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one route has of `limits` for itself; a key that is not given is that of `limits`."""

    body_bytes: Annotated[Bytes | None, Meta(description="As `limits.body_bytes`.")] = None
    event_bytes: Annotated[Bytes | None, Meta(description="As `limits.event_bytes`.")] = None
    json_depth: Annotated[Annotated[int, Meta(ge=8, le=512)] | None, Meta(description="As `limits.json_depth`.")] = (
        None
    )


class RouteTimeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one route has of `timeouts` for itself; a key that is not given is that of `timeouts`."""

    connect_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.connect_seconds`.")] = None
    handshake_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.handshake_seconds`.")] = None
    answer_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.answer_seconds`.")] = None
    idle_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.idle_seconds`.")] = None
    session_wait_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.session_wait_seconds`.")] = None
    keepalive_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.keepalive_seconds`.")] = None
    cancel_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.cancel_seconds`.")] = None
    send_seconds: Annotated[SomeSeconds | None, Meta(description="As `timeouts.send_seconds`.")] = None


class RouteSessions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one route has of `sessions` for itself, beside how its calls share them."""

    affinity: Annotated[
        Literal["none", "principal"],
        Meta(
            description="`none`: a call takes any session of its principal; `principal`: all calls of a principal, "
            "with the same client and capabilities, go to one session while it lives, one after the other."
        ),
    ] = "none"
    max: Annotated[Count | None, Meta(description="As `sessions.max`.")] = None
    max_per_principal: Annotated[Count | None, Meta(description="As `sessions.max_per_principal`.")] = None
    idle_seconds: Annotated[Seconds | None, Meta(description="As `sessions.idle_seconds`.")] = None
    quarantine_seconds: Annotated[Seconds | None, Meta(description="As `sessions.quarantine_seconds`.")] = None


class RouteLegs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one route has of `legs` for itself; a key that is not given is that of `legs`."""

    limit_seconds: Annotated[SomeSeconds | None, Meta(description="As `legs.limit_seconds`.")] = None
    rounds: Annotated[Annotated[int, Meta(ge=0, le=9)] | None, Meta(description="As `legs.rounds`.")] = None


class Route(Discreet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One public path and its upstream."""

    _secrets = frozenset({"set_headers"})

    path: Annotated[str, Meta(description="The public path.", extra={"form": "path"})] = "/mcp"
    upstream: Annotated[Upstream, Meta(description="Where its requests go.")]
    continuation: Annotated[
        Literal["hold", "replay"],
        Meta(
            description="`hold` parks the call between rounds; `replay` holds nothing and runs the call again with "
            "the answers, so every tool of the route must be one that may run twice."
        ),
    ] = "hold"
    ephemeral: Annotated[
        tuple[Text, ...],
        Meta(
            description="Name patterns of tools that may run twice, e.g. `weather_*`, beside those that say so with "
            "`readOnlyHint` or `idempotentHint`: they are run again when their call is lost."
        ),
    ] = ()
    undeclared: Annotated[
        Literal["abort", "refuse"],
        Meta(
            description="A nested request that the client did not declare: `abort` ends the call (-32021), "
            "`refuse` answers it with an error and lets the tool fall back."
        ),
    ] = "abort"
    credentials: Annotated[Credentials, Meta(description="Who the upstream is told is calling.")] = Credentials()
    forward_headers: Annotated[
        tuple[Header, ...], Meta(description="Client headers that go upstream, beside `Authorization`.")
    ] = ()
    drop_headers: Annotated[
        tuple[Header, ...],
        Meta(description="Client headers that do not go upstream where all others do: with clients of the old era."),
    ] = ()
    set_headers: Annotated[
        dict[Header, HeaderValue],
        Meta(description="Headers that every request upstream has, in place of the client's; taken for secrets."),
    ] = {}
    cache: Annotated[Cache, Meta(description="Freshness of this route's lists and resources.")] = Cache()
    hold: Annotated[RouteHold, Meta(description="This route's own times of a wait.")] = RouteHold()
    limits: Annotated[RouteLimits, Meta(description="This route's own sizes.")] = RouteLimits()
    timeouts: Annotated[RouteTimeouts, Meta(description="This route's own waiting times.")] = RouteTimeouts()
    sessions: Annotated[RouteSessions, Meta(description="This route's own pool of sessions.")] = RouteSessions()
    legs: Annotated[RouteLegs, Meta(description="This route's own early ends.")] = RouteLegs()


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one mrtr-gateway process."""

    listen: Annotated[Address, Meta(description="host:port for clients; port 0 picks a free one.")] = "127.0.0.1:8080"
    public_url: Annotated[
        Origin | None,
        Meta(
            description="Origin at which clients reach this gateway, for what OAuth metadata names. Empty: what the "
            "request's `Host` says."
        ),
    ] = None
    admin: Annotated[
        Address | None, Meta(description="host:port of /metrics /healthz /readyz /status. null: none.")
    ] = "127.0.0.1:9090"
    workers: Annotated[
        Annotated[int, Meta(ge=1, le=1024)],
        Meta(description="Processes that share `listen`; each has the caps of hold, limits and sessions for itself."),
    ] = 1
    tls: Annotated[Tls, Meta(description="TLS of `listen`.")] = Tls()
    state: Annotated[State, Meta(description="How `requestState` is sealed.")] = State()
    replica: Annotated[Replica, Meta(description="This process among its peers.")] = Replica()
    hold: Annotated[Hold, Meta(description="Calls that wait between two rounds.")] = Hold()
    limits: Annotated[Limits, Meta(description="Sizes beyond which a message is refused.")] = Limits()
    timeouts: Annotated[Timeouts, Meta(description="Waiting times towards both sides.")] = Timeouts()
    sessions: Annotated[Sessions, Meta(description="The pool of upstream sessions.")] = Sessions()
    legs: Annotated[Legs, Meta(description="Early ends of long requests.")] = Legs()
    principal: Annotated[Principal, Meta(description="Who is calling.")] = Principal()
    security: Annotated[Security, Meta(description="Defence against DNS rebinding.")] = Security()
    log: Annotated[Log, Meta(description="Lines on stderr.")] = Log()
    traces: Annotated[
        bool,
        Meta(
            description="true: spans are sent with OTLP over HTTP, as the OTEL_* environment variables say; needs "
            "`pip install 'mrtr-gateway[otel]'`."
        ),
    ] = False
    debug: Annotated[Debug, Meta(description="What is for finding a fault only.")] = Debug()
    routes: Annotated[tuple[Route, ...], Meta(description="Public paths and their upstreams.", min_length=1)]

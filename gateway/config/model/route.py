"""The structs of one route in the configuration."""

from functools import lru_cache
from typing import Annotated, Final, Literal

from msgspec import Meta, field

from gateway.config.model.value_types import (
    Count,
    Dialect,
    Era,
    Header,
    HeaderValue,
    Host,
    PerSecond,
    Seconds,
    Secret,
    Section,
    SomeSeconds,
    Text,
    Variable,
)
from gateway.config.parsing.formats import redacted_url
from gateway.protocol import mcp


class UpstreamTls(Section, frozen=True, kw_only=True):
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


class Upstream(Section, frozen=True, kw_only=True):
    """The server behind a route: `url` or `command`."""

    url: Annotated[str | None, Meta(extra={"form": "url"})] = None
    """URL of the server's MCP endpoint. Requests without `Authorization` get user and password in it as `Basic`."""
    command: Annotated[tuple[Text, ...], Meta(min_length=1)] | None = None
    """Program and arguments of a stdio server, started without a shell."""
    env: dict[Variable, Secret] = field(default_factory=dict)
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
    request_id_header: Header | None = None
    """With `url`: the header that brings the server the id of a client's request, e.g. `X-Request-Id`. null: none."""
    tls: UpstreamTls = UpstreamTls()

    @property
    def name(self) -> str:
        """The upstream's name in logs and errors: the redacted url, or the program without its arguments."""
        return redacted_url(self.url) if self.url else (self.command or ("?",))[0]


class Credentials(Section, frozen=True, kw_only=True):
    """The credential that goes upstream: the client's `Authorization`, none, or the gateway's own."""

    mode: Literal["forward", "drop", "replace"] = "forward"
    """What happens to the client's `Authorization`: `forward` sends it upstream, `drop` does not, `replace` sends the
    gateway's own instead."""
    token: HeaderValue | None = None
    """With `replace`: the gateway's own secret."""
    token_file: Text | None = None
    """Alternative to `token`: a file with the secret in its only line."""
    header: Header | None = None
    """With `replace`: the header that carries the bare secret. null: `Authorization: Bearer`."""


class Cache(Section, frozen=True, kw_only=True):
    """Freshness of lists and of `server/discover`, which modern results must state and legacy servers cannot."""

    ttl_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    """`ttlMs` of these results. A server's own value takes precedence."""
    scope: Literal["private", "public"] = "private"
    """`cacheScope` of these results. `public` lets caches share them between callers."""

    def of(self, method: str) -> tuple[int, str]:
        """Return `ttlMs` and `cacheScope` of a method's results; no key can promise what a resource holds."""
        return (0, "private") if method == mcp.RESOURCES_READ else (self.ttl_ms, self.scope)


class RouteHold(Section, frozen=True, kw_only=True):
    """Overrides of `hold` for one route. Keys that are left out have the value of `hold`."""

    ttl_seconds: SomeSeconds | None = None


class RouteTimeouts(Section, frozen=True, kw_only=True):
    """Overrides of `timeouts` for one route. Keys that are left out have the value of `timeouts`."""

    handshake_seconds: SomeSeconds | None = None
    idle_seconds: SomeSeconds | None = None


class RouteSessions(Section, frozen=True, kw_only=True):
    """Overrides of `sessions` for one route, and how its calls share sessions."""

    affinity: Literal["none", "principal"] = "none"
    """`none`: a call uses any session of its principal; `principal`: all calls of a principal with the same client
    and capabilities use one session while it lives, one after another."""
    max: Count | None = None
    max_per_principal: Count | None = None
    idle_seconds: Seconds | None = None


class RouteTasks(Section, frozen=True, kw_only=True):
    """How the route calls tools as tasks for clients without the extension."""

    undeclared: Literal["drive", "refuse"] = "drive"
    """How a tool that requires a task is called for such a client. `drive`: the gateway runs the task, and the client
    sees an ordinary call; `refuse`: the call gets -32021."""
    optional: Literal["plain", "drive"] = "plain"
    """How a tool that supports tasks, but does not require them, is called for such a client. `plain`: without a task;
    `drive`: as above. Tools of the TypeScript SDK that ask need `drive`: called plainly, they fail after 60 s."""


class Route(Section, frozen=True, kw_only=True):
    """One public path and its upstream."""

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
    tracestate, baggage, x-request-id, x-forwarded-*, forwarded, via, user-agent and accept-language. A DPoP header is
    never one of them: each request has its own."""
    drop_headers: tuple[Header, ...] = ()
    """Client headers that do not go upstream with passed-through requests, where all others do."""
    set_headers: dict[Header, HeaderValue] = field(default_factory=dict)
    """Headers of every upstream request. They replace the client's, and are treated as secrets."""
    cache: Cache = Cache()
    hold: RouteHold = RouteHold()
    timeouts: RouteTimeouts = RouteTimeouts()
    sessions: RouteSessions = RouteSessions()
    tasks: RouteTasks = RouteTasks()
    dialects: tuple[Dialect, ...] = ()
    """Drafts of the protocol that the route speaks too, with clients that declare them. `sep-1442`: requests without a
    session, with questions on the response stream. `sep-1655`: clients keep a sealed state, which leads each of their
    requests to the same session of a legacy server. `sep-1685`: the mirror sends a sealed state with its nested
    requests over streamable HTTP, and the client must echo it."""

    @property
    def where(self) -> str:
        """The upstream, as errors name it."""
        return f"The upstream {self.upstream.name} of route {self.path}"

    @property
    def bound_headers(self) -> tuple[str, ...]:
        """Return the forwarded headers that are credentials."""
        if self.bind_headers is not None:
            return _without_proof(self.bind_headers)
        return _credentials_among(self.forward_headers)

    @property
    def pooled_headers(self) -> tuple[str, ...]:
        """Return the forwarded headers that shape a session: requests that differ in them share none."""
        return _without_proof(self.forward_headers)


DPOP: Final = "dpop"
"""Proves that the sender of one request has the key of its token (RFC 9449), so no other request may bring it."""
_NO_CREDENTIALS = frozenset(
    {
        "accept-language",
        "baggage",
        DPOP,
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


def _without_proof(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name != DPOP) if DPOP in names else names

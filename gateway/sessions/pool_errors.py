"""The errors of a route that cannot provide a session, or an answer in it."""

import math

from gateway import world
from gateway.config import Config, Route
from gateway.protocol.errors import Busy, CallLost, CannotAsk, ChildUnreachable, NoHandshake, Unreachable, hung
from gateway.telemetry import SessionLimit


def too_many_at_once(route: Route, limit: SessionLimit, per_second: float, seconds: float) -> Busy:
    """Sessions are opened too fast."""
    what = "processes" if limit is SessionLimit.CHILD_RATE else "sessions"
    return Busy(
        f"Clients open {what} on route {route.path} faster than {limit} allows; call later",
        retry_after_seconds=math.ceil(seconds),
        reached={limit: per_second},
    )


def few_descriptors(route: Route) -> Busy:
    """The file descriptors that are left are for the answers of held calls."""
    return Busy(
        f"The gateway has no file descriptor left for a new session on route {route.path}; call later",
        reached={SessionLimit.DESCRIPTORS: world.most_descriptors()},
    )


def in_use(route: Route, config: Config, *, is_pinned: bool) -> Busy:
    """The one session did not come free in time; `is_pinned`: the state of its client leads to it."""
    whose, why = ("client", "dialects: [sep-1655]") if is_pinned else ("principal", "sessions.affinity: principal")
    return Busy(
        f"Another call of the same {whose} has the one session of route {route.path} ({why}), and it did not come "
        "free in timeouts.session_wait_seconds; answer or end that call, or call later",
        reached={"timeouts.session_wait_seconds": config.timeouts.session_wait_seconds},
    )


def none_free(route: Route, limit: SessionLimit, most: int, *, is_shared: bool) -> Busy:
    """No session came free in time, and there may be no more; `is_shared` as in `Busy`."""
    if limit is SessionLimit.OF_CALLER:
        return Busy(
            f"You have as many sessions on route {route.path} as one caller may have ({limit}), and none came free in "
            "timeouts.session_wait_seconds; answer or end a call, or call later",
            status=429,
            is_shared=is_shared,
            reached={limit: most},
        )
    return Busy(
        f"No session to the upstream of route {route.path} came free in timeouts.session_wait_seconds; "
        f"raise {limit}, or call later",
        reached={limit: most},
    )


def handshake_failed(exc: BaseException, route: Route, handshake_seconds: float) -> BaseException:
    """What the failure of a handshake means to the operator; the exception itself if it says that already."""
    if isinstance(exc, TimeoutError):
        late = f"{route.where} did not finish its handshake in {handshake_seconds:g} s (timeouts.handshake_seconds)"
        if route.upstream.command is not None:
            return ChildUnreachable(f"{late}; check that it is an MCP server")
        # An address that accepts no connection has an error of its own, after timeouts.connect_seconds.
        return Unreachable(
            f"{late}. It accepts connections but does not answer: hung or overloaded?",
            fix=hung("timeouts.handshake_seconds"),
        )
    if isinstance(exc, CallLost):
        # A server that misses a client's certificate says so only after its handshake, or hangs up (TLS 1.3).
        may_miss = (route.upstream.url or "").startswith("https") and route.upstream.tls.cert_file is None
        hint = "; if it asks for client certificates, give upstream.tls.cert_file" if may_miss else ""
        return Unreachable(exc.message.partition(";")[0] + hint)  # no call was sent that may have had effects
    if isinstance(exc, ValueError | RecursionError):
        return Unreachable(f"{route.where} is not an MCP server: {exc}")
    if isinstance(exc, NoHandshake) and route.era == "bridge":
        return NoHandshake(
            f"{exc.message}. The route has era: bridge, which needs the legacy side of the server; if the server is "
            "modern only, set era: auto",
            fix="if the server is modern only, set era: auto on the route; otherwise check the path of upstream.url. "
            "`mrtr-gateway probe URL` shows which protocols the server speaks",
        )
    return exc


def cannot_ask(route: str) -> CannotAsk:
    """The upstream asked a question in a session that has no id."""
    return CannotAsk(
        f"The upstream of route {route} gives no Mcp-Session-Id (stateless mode): it asked the user, but an answer "
        "can never reach it. Run the server with sessions"
    )

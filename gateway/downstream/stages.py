"""The stages of a client's request before its route takes it; docs/protocol.md (Errors) lists them in the same order.

A stage replies, raises the error that refuses the request, or calls the next stage. One that does not have to wait
returns what the next one returns: a level of coroutines costs half a percent of a request that is passed on.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.auth.authenticator import Authenticator
from gateway.auth.host_check import HostCheck
from gateway.config import Config, InForce, Limits
from gateway.downstream.legacy_routing import LegacyRouting
from gateway.downstream.rejections import no_route
from gateway.http.incoming import Incoming
from gateway.http.reply import HttpReply
from gateway.http.server.body import last_id
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, WholeResponse
from gateway.http.upstream_headers import joined
from gateway.protocol.errors import DownstreamError, GatewayError
from gateway.routes.route_table import RouteTable

if TYPE_CHECKING:
    from gateway.plugins.oauth.oauth_proxy import OAuthProxy

Next = Callable[[Incoming, HttpReply], Awaitable[Response]]
Stage = Callable[[Next, Incoming, HttpReply], Awaitable[Response]]

_REFUSED_BYTES: Final = 65_536
"""The largest body that is read for the id of a request whose caller is not verified."""


class Stages:
    """What each request to one listener passes, from its head to its whole body."""

    def __init__(
        self,
        in_force: InForce[Config],
        routes: RouteTable,
        authenticator: Authenticator,
        legacy: LegacyRouting,
        serve: Next,
    ) -> None:
        """`serve` takes the requests that have passed."""
        self._routes = routes
        self._authenticator = authenticator
        self._legacy = legacy
        self._receiving = routes.process.traffic.receiving
        self.oauth_proxy: OAuthProxy | None = None
        """Made as soon as a configuration asks for it."""
        stages: tuple[Stage, ...] = (self._check_host, self._find_path, self._authenticate, self._receive)
        for stage in reversed(stages):
            serve = partial(stage, serve)
        self.serve = serve
        """Calls the first stage, each of which calls the next."""
        self._use(in_force.value)
        in_force.after_replace(self._use)

    def _use(self, config: Config) -> None:
        self._config = config
        self._host_check = HostCheck(config.security, config.listen)

    def challenge(self, http: HttpRequest, value: str) -> str:
        """Rewrite a WWW-Authenticate value so that it points the client to the gateway."""
        return value if self.oauth_proxy is None else self.oauth_proxy.challenge(http, value)

    def _check_host(self, then: Next, incoming: Incoming, reply: HttpReply) -> Awaitable[Response]:
        """Refuse a page that must not send requests here; the head of a known caller has no page."""
        if incoming.caller is None and (page := self._host_check.check(incoming.headers)) is not None:
            reply.http.show_to(page)
            if incoming.method == "OPTIONS" and "Access-Control-Request-Method" in incoming.headers:
                return _preflight(incoming)
        return then(incoming, reply)

    def _find_path(self, then: Next, incoming: Incoming, reply: HttpReply) -> Awaitable[Response]:
        """Answer OAuth clients, and refuse any other path without a route."""
        is_route = incoming.path in self._routes.live
        return then(incoming, reply) if is_route else self._without_route(then, incoming, reply)

    async def _without_route(self, then: Next, incoming: Incoming, reply: HttpReply) -> Response:
        if self.oauth_proxy is not None and (response := await self.oauth_proxy.handle(reply.http)) is not None:
            return response
        if incoming.method != "POST":  # the call of one may have begun while the path had a route
            raise no_route(incoming.path)
        return await then(incoming, reply)

    def _authenticate(self, then: Next, incoming: Incoming, reply: HttpReply) -> Awaitable[Response]:
        """Verify a caller by its headers, before its body takes time and memory."""
        if self._authenticator.verifies:
            return self._verify(then, incoming, reply)
        return then(incoming, reply)

    async def _verify(self, then: Next, incoming: Incoming, reply: HttpReply) -> Response:
        try:
            _ = await self._authenticator.caller(incoming, is_checked=False)
        except GatewayError as exc:
            if 0 < reply.http.head.length <= _REFUSED_BYTES:  # the error should name the request's id
                seconds = self._limits(incoming).receive_seconds
                with suppress(DownstreamError):
                    await incoming.receive(reply.http, _REFUSED_BYTES, seconds, self._receiving)
            if isinstance(exc, DownstreamError) and incoming.path not in self._routes.live:
                raise no_route(incoming.path) from exc
            await self._keep_session(exc, incoming, reply)
            raise
        return await then(incoming, reply)

    def _receive(self, then: Next, incoming: Incoming, reply: HttpReply) -> Awaitable[Response]:
        """Take the body, as it is in nearly every packet that a head is in."""
        limits = self._limits(incoming)  # that are in force now; a reload may come before the end of the body
        if incoming.receive_now(reply.http, limits.body_bytes):
            return then(incoming, reply)
        return self._wait_for_body(then, incoming, reply, limits)

    async def _wait_for_body(self, then: Next, incoming: Incoming, reply: HttpReply, limits: Limits) -> Response:
        try:
            await incoming.receive(reply.http, limits.body_bytes, limits.receive_seconds, self._receiving)
        except GatewayError as exc:
            await self._keep_session(exc, incoming, reply)
            raise
        return await then(incoming, reply)

    def _limits(self, incoming: Incoming) -> Limits:
        live = self._routes.live.get(incoming.path)
        return (self._config if live is None else live.config).limits

    async def _keep_session(self, error: GatewayError, incoming: Incoming, reply: HttpReply) -> None:
        """Have an error that comes before the body is read refuse one request and not the session.

        If the request has an id that cannot be read, the client would wait for ever, so the error keeps its status.
        """
        live = self._routes.live.get(incoming.path)
        if live is None or error.status_in_session == error.status or not self._legacy.names_session(incoming, live):
            return
        if not incoming.body:
            id_ = await last_id(reply.http, self._limits(incoming).receive_seconds)
            if id_ is None:
                return
            incoming.drop_body(id_)
        incoming.found_session()


async def _preflight(incoming: Incoming) -> Response:
    """Tell a browser that a page may send a request, on any path, so that the page can read what is wrong with it.

    The browser asks without credentials. The page may send any header, as every other client may.
    """
    allowed = {"Access-Control-Allow-Methods": "DELETE, GET, POST", "Access-Control-Max-Age": "600"}
    if (asked := joined(incoming.headers, "Access-Control-Request-Headers")) is not None:
        allowed["Access-Control-Allow-Headers"] = asked
    return WholeResponse(status=204, headers=allowed)

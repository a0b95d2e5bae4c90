"""Decides whether a request is bridged, or passed through because the client is legacy or the upstream is modern."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from gateway.auth.authenticator import Authenticator
from gateway.downstream.continuation import Continuation
from gateway.http.forwarded_headers import asks_as_client
from gateway.http.incoming import Incoming
from gateway.passthrough.forwarder import Passthrough
from gateway.passthrough.header_rules import probe_headers
from gateway.passthrough.rejections import id_of, not_allowed
from gateway.protocol import era as eras
from gateway.protocol import mcp
from gateway.protocol.errors import DownstreamError, GatewayError
from gateway.routes.live_route import LiveRoute
from gateway.seal.cipher import PREFIX

_OUR_STATE: Final = f'"{PREFIX}.'.encode()


class EraRouting:
    """Passes through the requests of one listener that are not bridged."""

    def __init__(self, authenticator: Authenticator, continuation: Continuation, passthrough: Passthrough) -> None:
        self._authenticator = authenticator
        self._continuation = continuation
        self._passthrough = passthrough

    async def passed(self, http: web.BaseRequest, incoming: Incoming, live: LiveRoute) -> web.StreamResponse | None:
        """Return the upstream's own reply; None if the request must be bridged."""
        version = incoming.headers.get(mcp.PROTOCOL_VERSION)
        if not eras.is_modern(http.method, version, lambda: incoming.parsed(live.config.limits.json_depth)):
            await self._authenticate(incoming, live)
            return await self._passthrough.legacy(http, live, incoming)
        if http.method != "POST":
            raise not_allowed(http.method, "POST")
        return await self._passed_modern(http, incoming, live)

    async def passed_after_all(
        self, http: web.BaseRequest, incoming: Incoming, live: LiveRoute
    ) -> web.StreamResponse | None:
        """Return the reply of an upstream that refused `initialize`, if a new probe finds that it is modern now."""
        if live.upstream.era is None:
            return None
        live.upstream.era.doubt()
        return await self._passed_modern(http, incoming, live)

    async def _passed_modern(
        self, http: web.BaseRequest, incoming: Incoming, live: LiveRoute
    ) -> web.StreamResponse | None:
        """Return a modern upstream's reply to a modern request; None if the request must be bridged."""
        era = live.upstream.era
        if era is None or era.known is False or await self._is_ours(incoming, live):
            return None
        await self._authenticate(incoming, live)  # before the probe, which carries this request's headers upstream
        with _error_has_request_id(incoming, live):
            headers = self._passthrough.headers.upstream(http, live)
        if not (era.known or await era.is_modern(probe_headers(headers))):
            return None
        return await self._passthrough.modern(http, live, incoming)

    async def _authenticate(self, incoming: Incoming, live: LiveRoute) -> None:
        """Let a request through to an upstream only if its caller may call; raises Unauthorized."""
        with _error_has_request_id(incoming, live):
            _ = await self._authenticator.principal(incoming, is_checked=asks_as_client(live.route))

    async def _is_ours(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Whether this is a round of a call that the gateway began when the upstream seemed to be legacy."""
        json_depth = live.config.limits.json_depth
        if _OUR_STATE not in incoming.body:
            return False
        try:
            if incoming.parsed(json_depth).id is None:
                return False
            request = incoming.request(json_depth)
            principal = await self._authenticator.principal(incoming, is_checked=asks_as_client(live.route))
            _ = self._continuation.open(incoming, request, principal, live.route.bound_headers)
        except DownstreamError:
            return False
        return True


@contextmanager
def _error_has_request_id(incoming: Incoming, live: LiveRoute) -> Iterator[None]:
    """Give an error the id of a request whose body may not have been parsed yet."""
    try:
        yield
    except GatewayError as exc:
        exc.request_id = id_of(incoming, live.config.limits.json_depth)
        raise

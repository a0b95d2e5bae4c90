"""Decides whether a request is bridged, or passed through because the client is legacy or the upstream is modern."""

from gateway.auth.authenticator import Authenticator
from gateway.downstream import stdio_forwarding
from gateway.downstream.continuation import Continuation
from gateway.downstream.task_requests import TaskRequests
from gateway.http.incoming import Caller, Incoming
from gateway.http.reply import HttpReply, ReplyWriter
from gateway.http.server.response import Response
from gateway.http.upstream_headers import asks_as_client
from gateway.mirror.tool_catalog import ToolCatalog
from gateway.passthrough.forwarder import Passthrough
from gateway.protocol import era as eras
from gateway.protocol import mcp
from gateway.protocol.era import names_modern
from gateway.protocol.errors import DownstreamError
from gateway.routes.live_route import LiveRoute
from gateway.seal.keyring import IN_JSON


class EraRouting:
    """Passes through the requests of one listener that are not bridged."""

    def __init__(
        self,
        authenticator: Authenticator,
        continuation: Continuation,
        passthrough: Passthrough,
        task_requests: TaskRequests,
    ) -> None:
        self._authenticator = authenticator
        self._continuation = continuation
        self._task_requests = task_requests
        self._passthrough = passthrough
        self._catalog = ToolCatalog()

    def is_bridged(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Whether it is clear at once that a request is bridged, as it is for most."""
        era = live.upstream.era or live.upstream.stdio
        if not (era is None or live.route.era == "bridge" or era.known is False):
            return False
        known = incoming.known
        if known is not None and known.repeated is not None:  # only a POST is known
            return known.repeated.version in mcp.SUPPORTED_VERSIONS or names_modern(known.repeated.version)
        version = incoming.headers.get(mcp.PROTOCOL_VERSION)
        return incoming.method == "POST" and (version in mcp.SUPPORTED_VERSIONS or names_modern(version))

    def is_legacy(self, incoming: Incoming) -> bool:
        """Whether a request is one of a legacy client."""
        version = incoming.headers.get(mcp.PROTOCOL_VERSION)
        return not eras.is_modern(incoming.method, version, incoming.body, incoming.parsed)

    async def passed_after_all(self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute) -> Response | None:
        """Return the reply of an upstream that refused `initialize`, if a new probe finds that it is modern now.

        A held call has its answers already; another replica decides for itself.
        """
        if live.upstream.era is None or not incoming.body or not isinstance(reply, HttpReply):
            return None
        live.upstream.era.doubt()
        return await self.passed(incoming, reply, live, waits=True)

    async def passed(
        self, incoming: Incoming, reply: ReplyWriter, live: LiveRoute, *, waits: bool = False
    ) -> Response | None:
        """Return a modern upstream's own reply to a modern request; None if the request must be bridged."""
        era = live.upstream.era
        if live.route.era == "bridge":
            return None
        if era is None or not isinstance(reply, HttpReply):
            _ = await self._caller(incoming, live)
            if await self._is_ours(incoming, live):
                return None
            return await stdio_forwarding.serve(incoming, reply, live, self._catalog)
        if era.known is False or await self._is_ours(incoming, live):
            return None
        _ = await self._caller(incoming, live)  # before the probe, which carries this request's headers upstream
        return await self._passthrough.modern(incoming, reply, live, waits=waits)

    async def _caller(self, incoming: Incoming, live: LiveRoute) -> Caller:
        """Let a request through to an upstream only if its caller may call; raises Unauthorized."""
        return await self._authenticator.caller(incoming, is_checked=asks_as_client(live.route))

    async def _is_ours(self, incoming: Incoming, live: LiveRoute) -> bool:
        """Whether this is about a call, or a task, that the gateway began when the upstream seemed to be legacy."""
        if IN_JSON not in incoming.body:
            return False
        try:
            caller = await self._caller(incoming, live)
            if self._task_requests.is_ours(incoming, caller):
                return True
            _ = self._continuation.open(incoming, caller)
        except DownstreamError:
            return False
        return True

"""Detects whether a stdio server is modern or legacy, by asking a new child with `server/discover`.

Source: specification 2026-07-28 basic/transports/stdio (Backward Compatibility): any error but a modern one comes from
a legacy server, and so does silence. Some legacy servers end when their first message is not `initialize`. A child
that has answered is used, whatever its era: nothing of a client has reached it.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from msgspec import Raw

from gateway import world
from gateway.children.launcher import ChildLauncher
from gateway.protocol import era, jsonrpc, mcp
from gateway.protocol.errors import Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry.upstream_health import UpstreamHealth
from gateway.upstream.children.modern_stdio import ModernStdio

_PROBE_SECONDS: Final = 5.0
"""A program that starts slowly answers late; clients wait longer than this for their first answer."""
_UNSURE_SECONDS: Final = 60.0
"""How long a server that did not answer counts as legacy, unless it answers a handshake."""
_PROBE_ID: Final = b'"probe"'
_INITIALIZE: Final = jsonrpc.request(
    _PROBE_ID,
    mcp.INITIALIZE,
    {"protocolVersion": mcp.LEGACY, "capabilities": {}, "clientInfo": {"name": "mrtr-gateway", "version": "1"}},
)


@dataclass(eq=False)
class StdioEra:
    """The era of one command, with the means to speak to it if it is modern."""

    launcher: ChildLauncher
    modern: ModernStdio
    _tasks: Tasks
    _health: UpstreamHealth
    known: bool | None = None
    """Whether the server is modern; None if a probe has to find out."""
    _refuses_legacy: bool | None = None
    _unsure_until: float = 0.0

    async def is_modern(self) -> bool:
        """Return whether the server takes modern requests; requests that arrive meanwhile share one probe."""
        if self.known is None and self._unsure_until > 0 and self.launcher.has_initialized:
            self.known = False
        if self.known is None and world.monotonic() > self._unsure_until:
            _ = await self._tasks.share(self, self._ask(), "era probe")
        return bool(self.known)

    async def is_modern_only(self) -> bool:
        """Return whether the server is modern, and refuses `initialize`."""
        if not await self.is_modern():
            return False
        if self._refuses_legacy is None:
            _ = await self._tasks.share((self, "greet"), self._greet(), "era probe")
        return bool(self._refuses_legacy)

    def retire(self) -> None:
        """Start no more children ahead, and end the modern one once it has answered its open requests."""
        self.launcher.stop_prestarting()
        self.modern.retire()

    async def _ask(self) -> None:
        found: bool | None = None
        try:
            async with self.launcher.lent() as child:
                child.stderr_log.expect_complaint()
                line = await child.probe(era.discover(_PROBE_ID), _PROBE_ID, _PROBE_SECONDS)
                await child.stderr_log.taken()  # what it wrote before its answer
                child.stderr_log.expect_complaint(expects=False)
                if line is not None:
                    found = bool(era.verdict(200, "application/json", line, _PROBE_ID))
                if line is None:
                    child.end()
                elif found:
                    self.launcher.works(child)
                    self.launcher.stop_prestarting()
                    self.modern.use(child)
                else:
                    self.launcher.keep(child)
        except Unreachable:
            pass  # the handshake of a request explains the fault
        self.known = found
        if found is None:
            self._unsure_until = world.monotonic() + _UNSURE_SECONDS
        self._health.era_probed(is_modern=found)

    async def _greet(self) -> None:
        """Send the handshake of legacy clients to a child of its own, which serves nobody."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                child = await self.launcher.take()
            answer = await child.probe(_INITIALIZE, _PROBE_ID, _PROBE_SECONDS)
            child.end()  # this answer pins a connection of the TypeScript SDK 2.4 to an era
            self._refuses_legacy = answer is not None and isinstance(jsonrpc.message(answer).error, Raw)
        except TimeoutError:  # `upstream.max_children` leaves room for no other child, nor for a legacy session
            self._refuses_legacy = True
        except Unreachable:
            pass

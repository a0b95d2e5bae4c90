"""Relays the lines of a host to one child, where both speak the same protocol."""

import asyncio

from gateway.process.child import Child
from gateway.stdio_front.host import Host


class Relay:
    """A host with its child. Messages pass unchanged; other output of the child does not pass."""

    def __init__(self, host: Host, child: Child, send_seconds: float) -> None:
        self._host = host
        self._child = child
        self._send_seconds = send_seconds

    async def send(self, line: bytes) -> None:
        """Pass a line of the host on; raises CallLost if the child has ended or does not read."""
        await self._child.send(line, self._send_seconds)

    async def finish(self, seconds: float) -> None:
        """The host sends nothing more: close the child's input, and let it answer what it has begun."""
        self._child.close_input()
        _ = await asyncio.wait(
            (self._child.over, self._host.gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )

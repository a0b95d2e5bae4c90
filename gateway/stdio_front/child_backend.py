"""Relays a legacy host to a legacy child: the messages pass unchanged in both directions."""

import asyncio
from contextlib import suppress
from typing import Final

from gateway.children.child import Child
from gateway.legacy_front.backend import ClientLink, ClientMessage
from gateway.protocol import jsonrpc
from gateway.protocol.errors import GatewayError
from gateway.runtime.pieces import Turn
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Event, get_logger
from gateway.upstream.children.stdio_era import StdioEra

log = get_logger()


_MESSAGE_BYTES: Final = 512
"""What a message costs besides its text."""


class ChildBackend:
    """A `Backend` that is one child."""

    def __init__(self, stdio: StdioEra, link: ClientLink, tasks: Tasks, waiting_bytes: int) -> None:
        """The host has to wait as long as more than `waiting_bytes` wait for the child."""
        self._room = waiting_bytes
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._stdio = stdio
        self._link = link
        self.child: Child | None = None
        self._waiting: asyncio.Queue[ClientMessage] = asyncio.Queue()
        self._passing = tasks.start(self._pass_on(), "relay to the child")

    def receive(self, message: ClientMessage) -> None:
        """Pass a message on, in the order of their arrival."""
        self._waiting.put_nowait(message)
        self._take_room(_size(message))

    def _take_room(self, size: int) -> None:
        self._room -= size
        if self._room >= 0:
            self._has_room.set()
        else:
            self._has_room.clear()

    async def ready(self) -> None:
        """Wait until the child has read enough of what was sent to it."""
        _ = await self._has_room.wait()

    async def _pass_on(self) -> None:
        turn = Turn()
        while True:
            message = await self._waiting.get()
            try:
                child = self.child or await self._start()
                await child.send(message.data)
                if message.request_id is not None:
                    self._link.passed_on(message.request_id)
            except GatewayError as exc:
                if message.request_id is not None:
                    self._link.refuse(message.request_id, exc)
            finally:
                self._take_room(-_size(message))
                self._waiting.task_done()
            del message  # the next one may come much later
            if not self._waiting.empty():
                await turn.give_way()

    async def _start(self) -> Child:
        child = self.child = await self._stdio.launcher.take()
        child.hear_with(self._hear)
        child.over.add_done_callback(lambda _: self._ended(child))
        return child

    def _hear(self, line: bytes, _message: jsonrpc.Message) -> None:
        self._link.send(line, None)  # no line of a legacy server tells to which request it belongs

    def _ended(self, child: Child) -> None:
        if not child.asked:
            log.warning(Event.CHILD_ENDED, route=child.route, why=child.over.result())
            self._link.ended()

    def give_up_child(self) -> Child | None:
        """Return the child, which this backend serves no longer."""
        _ = self._passing.cancel()
        self._has_room.set()
        child, self.child = self.child, None
        return child

    async def finish(self, seconds: float) -> None:
        """The host sends nothing more: let the child answer what it was sent, and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._waiting.join()
                if self.child is not None and not self.child.over.done():
                    self.child.close_input()
                    _ = await asyncio.wait((self.child.over,))

    async def close(self) -> None:
        """End the child."""
        child = self.give_up_child()
        if child is not None:
            await child.close()


def _size(message: ClientMessage) -> int:
    return len(message.data) + _MESSAGE_BYTES

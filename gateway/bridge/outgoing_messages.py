"""Sends the upstream what goes out beside its call, one message after the other."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from msgspec import Raw

from gateway import world
from gateway.bridge.call_context import Context
from gateway.protocol import jsonrpc
from gateway.protocol.errors import Refused, SessionLost, UpstreamError
from gateway.routes.deadlines import CANCEL_AGAIN_SECONDS
from gateway.sessions.call import Call
from gateway.sessions.session import Session

_CANCEL_PAUSES: Final = (0.0, 0.2, 1.0)
_YOUNG_SECONDS: Final = 0.5
_MAX_REFUSALS: Final = 256
"""Messages that may wait until the upstream takes them; its further questions get no answer of the gateway's own."""


class Outgoing:
    """The messages to the upstream, in the order of the commands. A plain call sends none."""

    __slots__ = ("_context", "_queue", "is_sending")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queue: deque[Callable[[], Awaitable[None]]] = deque()
        self.is_sending = False
        """Whether a message has not been sent yet, or the upstream has not accepted it."""

    def _go_on(self) -> None:
        self._context.live.process.tasks.spawn(self._send_queued(), "send upstream")

    def put(self, send: Callable[[], Awaitable[None]]) -> None:
        """Send something when everything before it is sent."""
        self._queue.append(send)
        if not self.is_sending:
            self.is_sending = True
            self._go_on()

    async def _send_queued(self) -> None:
        goes_on = False
        try:
            while self._queue:
                await self._queue.popleft()()
        except Exception:  # a bug, which the end of this task reports: what waits behind it is sent all the same
            goes_on = bool(self._queue)
            if goes_on:
                self._go_on()
            raise
        finally:
            self.is_sending = goes_on

    def respond(self, session: Session, id_: Raw, body: Raw | jsonrpc.Error) -> None:
        """Answer a question of the upstream without the client."""
        if len(self._queue) >= _MAX_REFUSALS:
            return
        headers = self._context.headers
        id_ = Raw(bytes(id_))  # a copy, because the original keeps the whole message in memory

        async def respond() -> None:
            try:
                await session.answer(id_, body, headers)
            except UpstreamError as exc:
                self._context.unsent(exc.message)

        self.put(respond)

    def cancel(self, session: Session, call: Call, reason: str, is_ours: Callable[[], Awaitable[bool]]) -> None:
        """Tell the upstream that a call is no longer wanted, again if that does not arrive while it may run.

        By then, another replica may have gone on with it: `is_ours` is asked before that.
        """
        headers = self._context.headers

        async def cancel() -> None:
            # The call has a connection of its own, and the upstream ignores a cancellation that overtakes it. So the
            # cancellation of a young call is repeated while the upstream still works on it.
            young = world.monotonic() - call.sent < _YOUNG_SECONDS
            send, is_over = partial(session.cancel, call, reason, headers), False
            for pause in _CANCEL_PAUSES if young else _CANCEL_PAUSES[:1]:
                await asyncio.sleep(pause)
                if pause and not session.works_on(call):
                    break  # it has ended, or nothing reads it any more
                is_over = await self._attempt(send)
            if not is_over:
                self._context.live.process.tasks.spawn(cancel_again(send), "cancel again")

        async def cancel_again(send: Callable[[], Awaitable[None]]) -> None:
            for pause in CANCEL_AGAIN_SECONDS:  # nothing waits behind it
                await asyncio.sleep(pause)
                if not session.may_run(call) or session.is_forgotten:
                    return
                if await is_ours() and await self._attempt(send):
                    return

        self.put(cancel)

    def try_to_send(self, send: Callable[[], Awaitable[None]]) -> None:
        """Send something as `put` does, if that takes no longer than a cancellation may."""

        async def attempt() -> None:
            _ = await self._attempt(send)

        self.put(attempt)

    async def _attempt(self, send: Callable[[], Awaitable[None]]) -> bool:
        """Send something; returns whether it need not be sent again, because it arrived or never will."""
        try:
            async with asyncio.timeout(self._context.live.config.timeouts.cancel_seconds):
                await send()
        except (UpstreamError, TimeoutError) as exc:
            self._context.unsent(str(exc))
            return isinstance(exc, Refused | SessionLost)
        return True

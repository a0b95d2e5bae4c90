"""A session whose server says everything on one stream: what belongs to no request, too."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from msgspec import Raw

from gateway.protocol.jsonrpc import Error
from gateway.upstream.channel import Answer, Channel, Headers, Hearer, SideListener, is_pong

Answered = asyncio.Future[None]
"""Done when a request is answered, or with the reason why it will not be."""


class OneStreamChannel(Channel, Hearer):
    """One request in flight; what comes while there is none goes to the side listener."""

    def __init__(self) -> None:
        self._call: tuple[Hearer, Answered] | None = None
        self._beside: tuple[Answer, Answered] | None = None
        """A request that was sent beside it."""
        self._side: SideListener | None = None

    @contextmanager
    def _awaited(self, hearer: Hearer) -> Iterator[Answered]:
        """Expect the answer to a request on the stream."""
        answered: Answered = asyncio.get_running_loop().create_future()
        call = self._call = hearer, answered
        try:
            yield answered
        finally:
            self._forget(call)
            if not answered.cancel():
                _ = answered.exception()  # it was handled, or another error is raised

    def _forget(self, call: tuple[Hearer, Answered]) -> None:
        """Expect this answer no more. Another request may have been sent as soon as it came."""
        if self._call is call:
            self._call = None

    async def beside(self, message: bytes, headers: Headers) -> Error | Raw | None:
        """See `Channel.beside`; waits for ever if the stream ends."""
        answer, answered = self._beside = Answer(message), asyncio.get_running_loop().create_future()
        try:
            await self.send(message, headers)
            await answered
        finally:
            self._beside = None
        return answer.found

    def hear(self, data: bytes, /) -> bool:
        """Take a message of the server, unless it answers a ping; the stream goes on."""
        if is_pong(data):
            return False
        if self._beside is not None:
            answer, has_answer = self._beside
            with suppress(ValueError):  # which the request in flight hears of
                if answer.hear(data):
                    settle(has_answer, None)
                    return False
        call = self._call
        if call is None:
            if self._side is not None:
                self._side.hear_side(data)
            return False
        hearer, answered = call
        failure: Exception | None = None
        try:
            is_over = hearer.hear(data)
        except Exception as exc:  # noqa: BLE001  (the task of the request handles it, not the stream)
            is_over, failure = True, exc
        if is_over:
            self._forget(call)
            settle(answered, failure)
        return False


def settle(answered: Answered, failure: Exception | None) -> None:
    """Have who waits for an answer go on, unless the request is over."""
    if answered.done():
        return
    if failure is None:
        answered.set_result(None)
    else:
        answered.set_exception(failure)

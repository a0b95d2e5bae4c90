"""Replies that stand before another one, or whose reader is in this process."""

import pytest

from gateway.http.outbox import FinalMessage
from gateway.http.reply import MessageReply, WrappedReply
from gateway.http.server.response import Response, WholeResponse
from gateway.protocol import sse
from gateway.runtime.budget import Share
from gateway.telemetry import Ending, Outcome

LOST = Ending(Outcome.ERROR, "lost")


class Reader(MessageReply):
    """Writes down what it gets."""

    def __init__(self) -> None:
        super().__init__(1_000)
        self.calls: list[object] = []

    def share_unread(self) -> Share:
        raise NotImplementedError

    async def take(self, message: bytes) -> None:
        self.calls.append(message)

    async def only(self, final: FinalMessage) -> Response:
        self.calls.append(final)
        return WholeResponse()


async def test_a_reader_takes_each_message_of_a_stream_once_however_it_is_cut() -> None:
    reader = Reader()
    await reader.start()
    stream = sse.encode(b'{"a":1}') + sse.KEEP_ALIVE + b"id: 7\ndata: \n\n" + sse.encode(b'{"b":2}')
    for byte in stream:
        await reader.write(bytes((byte,)))
    assert (await reader.whole(FinalMessage(b'{"c":3}', ending=LOST))).ending == LOST
    assert reader.calls == [b'{"a":1}', b'{"b":2}', b'{"c":3}']


async def test_a_wrapped_reply_writes_to_the_other_one() -> None:
    reader = Reader()
    wrapped = WrappedReply(reader)
    with pytest.raises(NotImplementedError):
        _ = wrapped.share_unread()
    await wrapped.only(FinalMessage(b"{}", 404))
    await wrapped.start()
    await wrapped.write(sse.encode(b'{"a":1}'))
    assert (await wrapped.end(LOST)).ending == LOST
    assert reader.started
    assert reader.calls == [FinalMessage(b"{}", 404), b'{"a":1}']


async def test_a_wrapped_reply_is_a_stream_once_the_other_one_is() -> None:
    reader = Reader()
    wrapped = WrappedReply(reader)
    assert not wrapped.started
    await wrapped.start()
    _ = await wrapped.whole(FinalMessage(b"{}"))
    assert reader.calls == [b"{}"], "an event, and no body"

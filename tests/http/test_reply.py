"""Replies whose reader is in this process, and what becomes of one whose writer is gone."""

from contextlib import nullcontext

import pytest

from gateway.http.outbox import FinalMessage
from gateway.http.reply import MessageReply
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


@pytest.mark.parametrize("is_one_stream", [True, False])
async def test_a_stream_that_its_client_opens_again_breaks_off_with_its_writer(*, is_one_stream: bool) -> None:
    """As long as nothing was written, and for any other reply, another replica can go on."""
    reader = Reader()
    reply = reader.as_one_stream() if is_one_stream else reader
    reply.orphaned()
    await reply.start()
    with pytest.raises(ConnectionResetError) if is_one_stream else nullcontext():
        reply.orphaned()

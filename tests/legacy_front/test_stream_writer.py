"""The messages of a stream on their way to its client."""

from unittest.mock import AsyncMock, Mock

import pytest

from gateway.http.outbox import FinalMessage
from gateway.legacy_front.stream_writer import StreamWriter
from gateway.protocol import sse
from tests.legacy_front.test_stream import Bench
from tests.support.turns import work_gives_way


@pytest.mark.usefixtures("busy_clock")
async def test_many_messages_that_wait_let_others_run() -> None:
    stream = Bench(limit=1 << 20).stream(is_resumable=False)
    for _ in range(100):
        stream.ask(b"{}")
    stream.finish(FinalMessage(b"{}"))
    reply = Mock(started=True, write=AsyncMock(), end=AsyncMock())
    assert await work_gives_way(StreamWriter(Mock(), stream, reply).write())
    assert [call.args for call in reply.write.await_args_list] == [(sse.encode(b"{}"),)] * 101

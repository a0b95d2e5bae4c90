"""The messages of a stream on their way to its client."""

from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.config import InForce
from gateway.legacy_front.replay_buffer import ReplayBuffer
from gateway.legacy_front.stream_writer import StreamWriter
from gateway.protocol import sse
from gateway.runtime.budget import Budget
from tests.support.turns import work_gives_way


@pytest.mark.usefixtures("busy_clock")
async def test_many_messages_that_wait_let_others_run() -> None:
    stream = ReplayBuffer(1, Budget("x", InForce(1 << 20)), b"", 1 << 20, Mock())
    for _ in range(100):
        stream.put(b"{}")
    stream.finish()
    reply = Mock(started=True, write=AsyncMock(), end=AsyncMock())
    session = Mock()
    session.live.config.timeouts.keepalive_seconds = 20
    assert await work_gives_way(StreamWriter(session, cast("Any", stream), reply).write(0))
    assert [call.args for call in reply.write.await_args_list] == [(sse.encode(b"{}"),)] * 100

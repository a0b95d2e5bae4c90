"""Coroutines that read an event stream which floods: others run meanwhile, and the answer behind the flood counts."""

from typing import Any
from unittest.mock import Mock

import pytest

from gateway.config import InForce
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import mcp
from gateway.runtime.throttle import Throttle
from gateway.upstream.http.era_probe import _verdict
from gateway.upstream.http.resumable_channel import ResumableChannel
from gateway.upstream.http.streamable_http import StreamableChannel
from tests.support.fake_carrier import FakeCarrier
from tests.support.turns import FLOODS, work_gives_way

pytestmark = pytest.mark.usefixtures("busy_clock")

ANSWER = b'{"jsonrpc":"2.0","id":"probe","result":{"supportedVersions":["%b"]}}' % mcp.MODERN.encode()


@pytest.fixture(params=FLOODS)
def reply(request: pytest.FixtureRequest) -> AwaitedReply:
    """A reply that is here, with its answer behind a flood."""
    carrier = FakeCarrier()
    reply = AwaitedReply(carrier.begin)
    reply.on_head(ReplyHead(200, "1.1", [(b"Content-Type", b"text/event-stream")]))
    reply.on_body(FLOODS[request.param] + b"\ndata: " + ANSWER + b"\n\n")
    carrier.end()
    return reply


async def test_the_stream_of_a_call(reply: AwaitedReply) -> None:
    channel: Any = Mock(max_event_bytes=1 << 20, arriving=Throttle(InForce(1 << 20)))
    heard: list[bytes] = []

    def receive(data: bytes) -> bool:
        heard.append(data)
        return data == ANSWER

    assert await work_gives_way(ResumableChannel._read_events(channel, reply, receive, again=True))
    assert heard[-1] == ANSWER


async def test_the_answer_to_a_ping(reply: AwaitedReply) -> None:
    first_is_the_answer = b"info" in reply._parts[0]
    is_slow = await work_gives_way(StreamableChannel._read_ping_answer(Mock(), reply))
    assert is_slow is not first_is_the_answer


async def test_the_answer_to_a_probe(reply: AwaitedReply) -> None:
    found: list[bool | None] = []

    async def probe() -> None:
        found.append(await _verdict(reply))

    assert await work_gives_way(probe())
    assert found == [True]

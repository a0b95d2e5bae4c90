"""The upstream's reply part by part: nothing is read while the client takes a part."""

import pytest

from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.reply_head import ReplyHead
from gateway.passthrough.passage import UpstreamCut, next_part
from tests.support.fake_carrier import FakeCarrier


async def test_nothing_is_read_while_the_client_takes_a_part() -> None:
    carrier = FakeCarrier()
    reply = AwaitedReply(carrier.begin)
    reply.on_head(ReplyHead(200, "1.1", []))
    reply.on_body(b"a")
    assert await next_part(reply, None) == b"a"
    assert carrier.asked == ["pause"]
    reply.on_body(b"b")  # it was read before the pause
    carrier.end()
    assert [await next_part(reply, None) for _ in range(2)] == [b"b", None]


async def test_a_part_that_came_before_a_failure_is_handed_over_first() -> None:
    carrier = FakeCarrier()
    reply = AwaitedReply(carrier.begin)
    reply.on_head(ReplyHead(200, "1.1", []))
    reply.on_body(b"a")
    carrier.cut()
    assert await next_part(reply, None) == b"a"
    with pytest.raises(UpstreamCut):
        _ = await next_part(reply, None)

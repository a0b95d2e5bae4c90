"""The upstream's reply part by part: nothing is read while the client takes a part."""

from gateway.http_client.reply_head import ReplyHead
from gateway.passthrough.passage import next_part
from tests.support.fake_carrier import FakeCarrier


async def test_nothing_is_read_while_the_client_takes_a_part() -> None:
    carrier = FakeCarrier()
    reply = carrier.awaited()
    reply.on_head(ReplyHead(200, []))
    reply.on_body(b"a")
    assert await next_part(reply, None) == b"a"
    assert carrier.asked == ["pause"]
    reply.on_body(b"b")  # it was read before the pause
    carrier.end()
    assert [await next_part(reply, None) for _ in range(2)] == [b"b", None]

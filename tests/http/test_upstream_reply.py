"""A reply that a coroutine awaits hands over all that came, in order, from a bounded buffer."""

import asyncio

import pytest

from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import NoReply, ReplyCut
from gateway.http_client.reply_head import ReplyHead
from tests.support.fake_carrier import FakeCarrier

HEAD = ReplyHead(200, [(b"Content-Type", b"Text/Event-Stream; x=y"), (b"A", b"1"), (b"a", b"2")])
LARGE = b"x" * 131_072


def taking(reply: AwaitedReply) -> asyncio.Task[bytes | None]:
    """A task that takes the next part."""

    async def take() -> bytes | None:
        return await anext(reply, None)

    return asyncio.get_running_loop().create_task(take())


@pytest.fixture
def carrier() -> FakeCarrier:
    return FakeCarrier()


@pytest.fixture
def reply(carrier: FakeCarrier) -> AwaitedReply:
    return carrier.awaited()


async def test_the_head_ends_the_first_wait(reply: AwaitedReply) -> None:
    waiting = asyncio.gather(reply.begun(reply.pending))
    await asyncio.sleep(0)
    assert not waiting.done()
    reply.on_head(HEAD)
    await waiting
    assert (reply.status, reply.content_type) == (200, "text/event-stream")
    assert reply.headers.getall("A") == ["1", "2"]


async def test_a_reply_without_a_media_type_has_the_type_of_unknown_bytes(reply: AwaitedReply) -> None:
    reply.on_head(ReplyHead(200, []))
    assert reply.content_type == "application/octet-stream"


async def test_parts_that_wait_are_one_and_the_end_comes_after_them(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    reply.on_body(b"b")
    assert await anext(reply) == b"ab"
    later = asyncio.gather(anext(reply))
    await asyncio.sleep(0)
    reply.on_body(b"c")
    assert await later == [b"c"]
    carrier.end()
    with pytest.raises(StopAsyncIteration):
        await anext(reply)
    assert carrier.asked == []


async def test_a_reply_is_read_when_its_last_part_was_handed_over(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    carrier.end()
    assert not reply.is_read
    assert await anext(reply) == b"a"
    assert reply.is_read


async def test_what_came_before_a_failure_is_handed_over_first(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    carrier.cut()
    await reply.begun(reply.pending)
    assert await anext(reply) == b"a"
    with pytest.raises(ReplyCut):
        await anext(reply)


async def test_a_failure_before_the_head_ends_the_wait_for_it(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    waiting = asyncio.gather(reply.begun(reply.pending))
    await asyncio.sleep(0)
    carrier.pending.end().on_failed(NoReply())
    with pytest.raises(NoReply):
        await waiting


async def test_reading_pauses_while_much_waits_and_goes_on_when_more_is_wanted(
    reply: AwaitedReply, carrier: FakeCarrier
) -> None:
    reply.on_head(HEAD)
    reply.on_body(LARGE[1:])
    assert carrier.asked == []
    reply.on_body(b"y")
    reply.on_body(b"z")  # it was read before the pause
    assert carrier.asked == ["pause"]
    assert await anext(reply) == LARGE[1:] + b"yz"
    assert carrier.asked == ["pause"]
    more = taking(reply)
    await asyncio.sleep(0)
    assert carrier.asked == ["pause", "resume"]
    reply.on_body(LARGE[1:])
    assert await more == LARGE[1:]
    assert carrier.asked == ["pause", "resume"]
    reply.on_body(LARGE)
    assert carrier.asked == ["pause", "resume", "pause"]


async def test_nothing_is_read_while_the_coroutine_has_a_part_that_it_holds(
    reply: AwaitedReply, carrier: FakeCarrier
) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    assert await anext(reply) == b"a"
    reply.pending.pause_reading()
    reply.pending.pause_reading()
    assert carrier.asked == ["pause"]
    reply.on_body(b"b")  # it was read before the pause
    assert await anext(reply) == b"b"
    assert carrier.asked == ["pause"]
    more = taking(reply)
    await asyncio.sleep(0)
    assert carrier.asked == ["pause", "resume"]
    carrier.end()
    assert await more is None
    reply.pending.pause_reading()
    assert carrier.asked == ["pause", "resume"]


@pytest.mark.parametrize(("limit", "whole"), [(2, b"ab"), (1, None)])
async def test_a_body_that_is_here_is_taken_whole_within_a_limit(
    reply: AwaitedReply, carrier: FakeCarrier, limit: int, whole: bytes | None
) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    reply.on_body(b"b")
    assert reply.whole_at_most(limit) is None
    carrier.end()
    assert reply.whole_at_most(limit) == whole
    assert await anext(reply, None) == (None if whole else b"ab")


async def test_a_body_that_was_cut_is_never_whole(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    carrier.cut()
    assert reply.whole_at_most(9) is None


async def test_a_reply_that_is_cut_from_elsewhere_closes_its_connection_and_wakes_the_coroutine(
    reply: AwaitedReply, carrier: FakeCarrier
) -> None:
    reply.on_head(HEAD)
    waiting = taking(reply)
    await asyncio.sleep(0)
    reply.cut()
    with pytest.raises(ReplyCut):
        await waiting
    reply.cut()
    assert carrier.asked == ["abort"]


async def test_a_reply_that_has_ended_is_not_cut(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    reply.on_head(HEAD)
    reply.on_body(b"a")
    carrier.end()
    reply.cut()
    assert [part async for part in reply] == [b"a"]


@pytest.mark.parametrize(("limit", "body"), [(3, b"abc"), (2, None)])
async def test_a_body_is_read_up_to_its_limit(
    reply: AwaitedReply, carrier: FakeCarrier, limit: int, body: bytes | None
) -> None:
    reply.on_head(HEAD)
    reading = asyncio.gather(reply.read_at_most(limit))
    for part in (b"a", b"b", b"c"):
        await asyncio.sleep(0)
        reply.on_body(part)
    await asyncio.sleep(0)  # all parts are taken
    carrier.end()
    assert await reading == [body]


async def test_an_empty_body_is_empty(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    reply.on_head(HEAD)
    carrier.end()
    assert await reply.read_at_most(0) == b""


async def test_a_cancelled_wait_for_the_head_gives_the_request_up(reply: AwaitedReply, carrier: FakeCarrier) -> None:
    waiting = asyncio.gather(reply.begun(reply.pending))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert carrier.asked == ["abort"]


async def test_closing_gives_up_the_rest_of_a_reply_but_nothing_after_its_end(carrier: FakeCarrier) -> None:
    complete = carrier.awaited()
    complete.on_head(HEAD)
    carrier.end()
    complete.close()
    assert carrier.asked == []
    other = FakeCarrier()
    open_ = other.awaited()
    open_.on_head(HEAD)
    open_.close()
    assert other.asked == ["abort"]

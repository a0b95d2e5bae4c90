"""The reply to a call that is read by callback, and what becomes of it when it holds more than the answer."""

import asyncio

import pytest

from gateway.config import InForce
from gateway.http.awaited_reply import AwaitedReply
from gateway.http_client.errors import ListenerFailed, ReplyCut
from gateway.http_client.pending_request import PendingRequest, ReplyListener
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import jsonrpc
from gateway.runtime.throttle import SMALL_BYTES, Throttle
from gateway.upstream.channel import Receive
from gateway.upstream.plain_reply import PlainReply
from gateway.upstream.resumption import Resumption
from gateway.upstream.stream_timeouts import DEFAULT_TIMES

ANSWER = b'{"id":1,"result":{}}'
OTHER = b'{"method":"ping","id":2}'


class FakeCarrier:
    """A FAKE connection that records whether it was closed."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Reading:
    """A plain reply at work, with what came of it."""

    def __init__(self, drain_seconds: float = 60, max_bytes: int = 1000, throttle: Throttle | None = None) -> None:
        self.answers: list[bytes] = []
        self.unusual = 0
        self.accepted = 0
        self.carrier = FakeCarrier()
        self.awaited: AwaitedReply | None = None
        self.resumption = Resumption(DEFAULT_TIMES)
        self.reply = PlainReply(
            self._begin,
            self._accept,
            self.resumption,
            self._read,
            throttle=throttle or Throttle(InForce(1 << 20)),
            max_bytes=max_bytes,
            drain_seconds=drain_seconds,
        )
        self.reply.start(self._receive, self._become_unusual)

    def _begin(self, listener: ReplyListener) -> PendingRequest:
        self.pending = PendingRequest(listener)
        self.pending.carried(self.carrier)
        return self.pending

    def _accept(self) -> None:
        self.accepted += 1

    def _receive(self, data: bytes) -> bool:
        if data != ANSWER:
            return False
        self.answers.append(data)
        return True

    def _become_unusual(self) -> None:
        self.unusual += 1
        if self.unusual == 1:
            self.reply.keep()

    async def _read(self, reply: AwaitedReply, receive: Receive) -> jsonrpc.Error | None:
        self.awaited = reply
        assert receive(ANSWER)
        return None

    def head(self, content_type: bytes = b"application/json", status: int = 200) -> None:
        self.reply.on_head(ReplyHead(status, "1.1", [(b"Content-Type", content_type)]))

    def stream(self, *parts: bytes) -> None:
        self.head(b"text/event-stream")
        for part in parts:
            self.reply.on_body(part)

    def end(self) -> None:
        _ = self.pending.end()
        self.reply.on_end()

    async def rest(self) -> bytes:
        """What the coroutine gets that reads the rest, which begins with the reply."""
        assert await self.reply.read(lambda _: True) is None
        assert self.awaited is not None
        body = await self.awaited.read_at_most(10_000)
        assert body is not None
        return body


def event(data: bytes, id_: bytes = b"") -> bytes:
    return (b"id: %b\n" % id_ if id_ else b"") + b"data: %b\n\n" % data


async def test_a_body_that_is_the_answer_is_handed_over_at_its_end() -> None:
    reading = Reading()
    reading.head()
    reading.reply.on_body(ANSWER[:5])
    reading.reply.on_body(ANSWER[5:])
    assert reading.answers == []
    reading.end()
    assert (reading.answers, reading.unusual, reading.accepted) == ([ANSWER], 0, 1)


async def test_an_event_that_is_the_answer_is_handed_over_at_once_wherever_the_stream_is_cut() -> None:
    whole = b": hello\n\n" + event(b"", b"e1") + event(ANSWER)
    for cut in range(1, len(whole)):
        reading = Reading()
        reading.stream(whole[:cut], whole[cut:])
        assert (reading.answers, reading.unusual) == ([ANSWER], 0)
        assert reading.resumption.cursor == "e1"
        reading.end()
        assert not reading.carrier.aborted


@pytest.mark.parametrize("data", [OTHER, b"not JSON", b"[" + ANSWER + b"]"])
async def test_another_message_goes_to_the_coroutine_with_all_that_came_before(data: bytes) -> None:
    before = event(b"", b"e1")
    reading = Reading()
    reading.stream(before, event(data, b"e2"))
    assert (reading.answers, reading.unusual) == ([], 1)
    assert reading.resumption.cursor == "e1", "the message has not been handed over yet"
    reading.reply.on_body(b"more")
    reading.end()
    assert await reading.rest() == before + event(data, b"e2") + b"more"
    assert reading.unusual == 1


async def test_a_body_that_is_not_the_answer_goes_to_the_coroutine() -> None:
    reading = Reading()
    reading.head()
    reading.reply.on_body(OTHER)
    reading.end()
    assert await reading.rest() == OTHER


async def test_a_refusal_goes_to_the_coroutine_and_counts_as_not_accepted() -> None:
    reading = Reading()
    reading.head(status=404)
    assert (reading.unusual, reading.accepted) == (1, 0)
    reading.reply.on_body(ANSWER)
    reading.end()
    assert await reading.rest() == ANSWER
    assert reading.awaited is not None
    assert reading.awaited.status == 404


async def test_a_stream_that_ends_without_the_answer_goes_to_the_coroutine() -> None:
    reading = Reading()
    reading.stream(event(b"", b"e1"))
    reading.end()
    assert reading.unusual == 1
    assert await reading.rest() == event(b"", b"e1")


async def test_a_failure_is_raised_where_the_coroutine_reads() -> None:
    reading = Reading()
    reading.stream(b"data: ")
    _ = reading.pending.end()
    reading.reply.on_failed(ReplyCut())
    assert reading.unusual == 1
    with pytest.raises(ReplyCut):
        _ = await reading.rest()


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_more_than_the_limit_goes_to_the_coroutine(content_type: bytes) -> None:
    reading = Reading(max_bytes=10)
    reading.head(content_type)
    reading.reply.on_body(b"data: 12345")
    assert reading.unusual == 1


async def test_a_stream_that_stays_open_after_the_answer_is_closed_in_time() -> None:
    reading = Reading(drain_seconds=0)
    reading.stream(event(ANSWER), event(OTHER))
    assert (reading.answers, reading.unusual) == ([ANSWER], 0)
    async with asyncio.timeout(5):
        while not reading.carrier.aborted:
            await asyncio.sleep(0)


async def test_a_reply_that_is_not_wanted_is_closed_once() -> None:
    reading = Reading()
    reading.head()
    reading.reply.close()
    reading.reply.close()
    assert reading.carrier.aborted


async def test_a_failure_after_the_answer_is_none() -> None:
    reading = Reading()
    reading.stream(event(ANSWER))
    _ = reading.pending.end()
    reading.reply.on_failed(ReplyCut())
    assert reading.unusual == 0


async def test_a_bug_of_the_receiver_is_reported_and_the_reply_dropped() -> None:
    reading = Reading()
    reading.head()
    bug = ListenerFailed()
    bug.__cause__ = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        reading.reply.on_failed(bug)
    assert reading.unusual == 0


async def test_a_large_body_waits_for_an_older_one() -> None:
    throttle = Throttle(InForce(SMALL_BYTES))
    older, later = (Reading(max_bytes=10 * SMALL_BYTES, throttle=throttle) for _ in range(2))
    for reading in (older, later):
        reading.head()
        reading.reply.on_body(b" " * (SMALL_BYTES + 1))
    assert (older.pending.is_paused, later.pending.is_paused) == (False, True)
    older.reply.on_body(ANSWER)
    older.reply.close()
    assert not later.pending.is_paused
    later.reply.close()
    assert throttle.used == 0

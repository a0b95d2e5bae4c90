"""The reply to a call that is read by callback, and what becomes of it when it holds more than the answer."""

import asyncio
import sys

import pytest

from gateway.config import InForce
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.errors import ClientClosed, ListenerFailed, ReplyCut
from gateway.http_client.pending_request import PendingRequest
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import jsonrpc, sse
from gateway.protocol.errors import CallLost
from gateway.runtime.throttle import SMALL_BYTES, Throttle
from gateway.upstream.channel import NO_HEADERS, Headers, Receive
from gateway.upstream.http.plain_reply import Broken, PlainReply
from gateway.upstream.http.resumption import Resumption
from gateway.upstream.http.stream_timeouts import DEFAULT_TIMES

ANSWER = b'{"id":1,"result":{}}'
OTHER = b'{"method":"ping","id":2}'


class FakeCarrier:
    """A FAKE connection that records whether it was closed."""

    aborted = False
    distrusted = False

    def abort(self) -> None:
        self.aborted = True

    def distrust(self) -> None:
        self.distrusted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Reading:
    """A plain reply at work, with what came of it."""

    def __init__(self, drain_seconds: float = 60, max_bytes: int = 1000, throttle: Throttle | None = None) -> None:
        self.answers: list[bytes] = []
        self.unusual = 0
        self.acceptances = 0
        self.carrier = FakeCarrier()
        self.awaited: AwaitedReply | None = None
        self.broken: Broken | None = None
        self.resumption = Resumption(DEFAULT_TIMES)
        self.arriving = throttle or Throttle(InForce(1 << 20))
        self.drain_seconds = drain_seconds
        self.reply = PlainReply(self, b"message", NO_HEADERS, self, self._become_unusual, max_bytes)
        self.pending = self.reply.pending = PendingRequest(self.reply)
        self.pending.carrier = self.carrier

    # -- as the channel of the reply --------------------------------------------------------------------------------

    def accepted(self, headers: Headers) -> None:
        assert headers is NO_HEADERS
        self.acceptances += 1

    async def request(
        self, message: bytes, headers: Headers, receive: Receive, begun: AwaitedReply
    ) -> jsonrpc.Error | None:
        # Once the server has accepted it, the message is not kept.
        assert (message, headers) == (b"" if self.acceptances else b"message", NO_HEADERS)
        self.awaited = begun
        assert receive(ANSWER)
        return None

    async def go_on(self, headers: Headers, broken: Broken, receive: Receive) -> None:
        assert headers is NO_HEADERS
        self.broken = broken

    # ---------------------------------------------------------------------------------------------------------------

    def hear_answer(self, data: bytes) -> bool:
        if data != ANSWER:
            return False
        self.answers.append(data)
        return True

    def hear_call(self, data: bytes) -> bool:
        raise AssertionError(data)

    def _become_unusual(self) -> None:
        self.unusual += 1
        if self.unusual == 1:
            self.reply.keep()

    def head(self, content_type: bytes = b"application/json", status: int = 200) -> None:
        self.reply.on_head(ReplyHead(status, "1.1", [(b"Content-Type", content_type)]))

    def stream(self, *parts: bytes) -> None:
        self.head(b"text/event-stream")
        for part in parts:
            self.reply.on_body(part)

    def whole(self, body: bytes, content_type: bytes = b"application/json", status: int = 200) -> None:
        _ = self.pending.end()
        self.reply.on_whole(ReplyHead(status, "1.1", [(b"Content-Type", content_type)]), body)

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


async def test_a_reply_that_a_coroutine_reads_keeps_nothing_of_who_waited_for_its_answer() -> None:
    reading = Reading()
    references = sys.getrefcount(reading)
    reading.reply.keep()
    assert sys.getrefcount(reading) == references - 2, "neither the hearer nor the function is kept"
    reading.reply.close()
    assert reading.carrier.aborted


async def test_a_body_that_is_the_answer_is_handed_over_at_its_end() -> None:
    reading = Reading()
    reading.head()
    reading.reply.on_body(ANSWER[:5])
    reading.reply.on_body(ANSWER[5:])
    assert reading.answers == []
    reading.end()
    assert (reading.answers, reading.unusual, reading.acceptances) == ([ANSWER], 0, 1)


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
    assert reading.carrier.distrusted, "the connection may bring the response to this request to the next one"


async def test_a_reply_in_one_piece_is_looked_at_once_and_lets_go_of_its_hearer() -> None:
    reading = Reading()
    references = sys.getrefcount(reading)
    reading.whole(ANSWER)
    assert (reading.answers, reading.unusual, reading.acceptances) == ([ANSWER], 0, 1)
    assert sys.getrefcount(reading) == references - 2, "neither the hearer nor the function is kept"
    assert not reading.carrier.distrusted


async def test_a_reply_in_one_piece_may_be_closed_by_who_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading()
    monkeypatch.setattr(reading, "hear_answer", lambda _: reading.reply.close() is None)
    reading.whole(ANSWER)
    assert reading.reply.is_done


@pytest.mark.parametrize(
    ("body", "content_type", "status", "accepted"),
    [
        (OTHER, b"application/json", 200, True),
        (ANSWER, b"application/json", 404, False),
        (event(OTHER), b"text/event-stream", 200, True),
        (b" " * 1001, b"application/json", 200, True),
    ],
)
async def test_any_other_reply_in_one_piece_goes_to_the_coroutine(
    body: bytes, content_type: bytes, status: int, *, accepted: bool
) -> None:
    reading = Reading()
    reading.whole(body, content_type, status)
    assert (reading.answers, reading.unusual, reading.acceptances) == ([], 1, int(accepted))
    assert await reading.rest() == body
    assert reading.awaited is not None
    assert reading.awaited.status == status
    assert reading.carrier.distrusted is (body is OTHER), "the connection may bring the next response to another one"


async def test_an_event_in_one_piece_is_the_answer() -> None:
    reading = Reading()
    reading.whole(event(ANSWER), b"text/event-stream")
    assert (reading.answers, reading.unusual) == ([ANSWER], 0)


async def test_a_refusal_goes_to_the_coroutine_and_counts_as_not_accepted() -> None:
    reading = Reading()
    reading.head(status=404)
    assert (reading.unusual, reading.acceptances) == (1, 0)
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


class Following(Reading):
    """A reply whose stream is followed as soon as something else than the answer comes."""

    def __init__(self, drain_seconds: float = 60, max_bytes: int = 1000, throttle: Throttle | None = None) -> None:
        super().__init__(drain_seconds, max_bytes, throttle)
        self.heard: list[bytes] = []
        self.broke = 0
        self.is_followed = False

    def _become_unusual(self) -> None:
        self.unusual += 1
        self.is_followed = self.reply.follow(self._break)
        if not self.is_followed:
            self.reply.keep()

    def hear_call(self, data: bytes) -> bool:
        self.heard.append(data)
        if data == b"bad":
            raise CallLost("malformed")
        if data == b"leave":
            self.reply.close()
        return data == ANSWER

    def _break(self) -> None:
        self.broke += 1

    async def cause(self) -> Broken:
        """How the stream broke, as the coroutine learns it that goes on."""
        assert self.broke == 1
        assert await self.reply.read(lambda _: True) is None
        assert self.broken is not None
        return self.broken


async def test_a_followed_stream_hands_over_each_message_once_wherever_it_is_cut() -> None:
    whole = event(b"", b"e1") + event(OTHER, b"e2") + event(OTHER, b"e3") + event(ANSWER, b"e4")
    for cut in range(1, len(whole)):
        reading = Following()
        reading.stream(whole[:cut], whole[cut:])
        assert (reading.heard, reading.answers, reading.unusual) == ([OTHER, OTHER, ANSWER], [], 1)
        assert reading.resumption.cursor == "e4"
        reading.end()
        assert (reading.carrier.aborted, reading.broke) == (False, 0)


async def test_a_followed_stream_has_room_for_more_than_the_limit_in_all() -> None:
    reading = Following(max_bytes=100)
    reading.stream(b": " + b"x" * 80 + b"\n\n", event(OTHER), event(OTHER), event(ANSWER))
    assert reading.heard == [OTHER, OTHER, ANSWER]
    assert reading.broke == 0


async def test_a_stream_that_begins_with_more_than_the_limit_in_all_is_followed() -> None:
    reading = Following(max_bytes=100)
    reading.stream(event(OTHER) * 9 + event(ANSWER))
    assert reading.heard == [OTHER] * 9 + [ANSWER]
    assert reading.broke == 0


async def test_only_the_beginning_of_a_stream_may_have_a_byte_order_mark() -> None:
    reading = Following()
    reading.stream(event(OTHER), sse.BOM + event(OTHER), event(ANSWER))
    assert reading.heard == [OTHER, ANSWER]


async def test_a_followed_stream_that_ends_without_the_answer_breaks() -> None:
    reading = Following()
    reading.stream(b"retry: 700\n" + event(OTHER, b"e1"))
    reading.end()
    assert await reading.cause() == Broken(None, 700)
    assert reading.resumption.cursor == "e1"


async def test_a_followed_stream_that_fails_breaks_with_the_failure() -> None:
    reading = Following()
    reading.stream(event(OTHER))
    _ = reading.pending.end()
    failure = ReplyCut()
    reading.reply.on_failed(failure)
    assert await reading.cause() == Broken(failure, None)


async def test_a_followed_stream_does_not_break_because_the_process_ends() -> None:
    reading = Following()
    reading.stream(event(OTHER))
    _ = reading.pending.end()
    reading.reply.on_failed(ClientClosed(sent=True))
    assert reading.broke == 0


async def test_an_event_that_is_too_large_breaks_a_followed_stream() -> None:
    reading = Following(max_bytes=100)
    reading.stream(event(OTHER), b"data: " + b"x" * 200)
    assert isinstance((await reading.cause()).cause, sse.EventTooLarge)
    assert reading.carrier.aborted


@pytest.mark.parametrize("first", [True, False])
async def test_an_error_of_the_receiver_breaks_a_followed_stream(*, first: bool) -> None:
    reading = Following()
    reading.stream(*([] if first else [event(OTHER)]), event(b"bad") + event(ANSWER))
    assert isinstance((await reading.cause()).cause, CallLost)
    assert reading.heard[-1] == b"bad", "nothing is heard after it"
    assert reading.carrier.aborted


async def test_a_bug_of_the_receiver_breaks_a_followed_stream_with_the_bug() -> None:
    reading = Following()
    reading.stream(event(OTHER))
    bug = ListenerFailed()
    bug.__cause__ = ZeroDivisionError()
    _ = reading.pending.end()
    reading.reply.on_failed(bug)
    assert (await reading.cause()).cause is bug.__cause__


async def test_a_followed_stream_that_is_left_hands_over_nothing_more() -> None:
    reading = Following()
    reading.stream(event(b"leave") + event(OTHER))
    reading.reply.on_body(event(ANSWER))
    assert (reading.heard, reading.broke) == ([b"leave"], 0)
    assert reading.carrier.aborted


async def test_an_event_that_is_too_large_at_first_goes_to_the_coroutine() -> None:
    reading = Following(max_bytes=100)
    reading.stream(event(b"", b"e1") + b"data: " + b"x" * 50, b"y" * 60)
    assert not reading.is_followed or reading.broke == 1


async def test_reading_goes_on_when_a_paused_stream_is_followed() -> None:
    throttle = Throttle(InForce(SMALL_BYTES))
    older = Reading(max_bytes=10 * SMALL_BYTES, throttle=throttle)
    later = Following(max_bytes=10 * SMALL_BYTES, throttle=throttle)
    older.head()
    later.head(b"text/event-stream")
    for reading in (older, later):
        reading.reply.on_body(b"data: " + b" " * SMALL_BYTES)
    assert later.pending.is_paused
    later._become_unusual()
    assert not later.pending.is_paused
    later.reply.close()
    older.reply.close()
    assert throttle.used == 0


def held_behind(throttle: Throttle, later: Reading) -> Reading:
    """The older reply that another, which has read a large part of a stream, waits for."""
    older = Reading(max_bytes=10 * SMALL_BYTES, throttle=throttle)
    older.head()
    older.reply.on_body(b" " * (SMALL_BYTES + 1))
    later.reply.on_body(b":" + b" " * SMALL_BYTES)
    assert later.pending.is_paused
    return older


async def test_reading_goes_on_when_a_large_message_was_completed_by_what_was_read_with_it() -> None:
    throttle = Throttle(InForce(SMALL_BYTES))
    later = Following(max_bytes=10 * SMALL_BYTES, throttle=throttle)
    later.stream(event(OTHER))
    older = held_behind(throttle, later)
    later.reply.on_body(b"\n" + event(OTHER))
    assert later.heard == [OTHER, OTHER]
    assert not later.pending.is_paused
    later.reply.close()
    older.reply.close()
    assert throttle.used == 0


async def test_the_end_of_a_stream_is_read_when_its_answer_was_completed_by_what_was_read_with_it() -> None:
    throttle = Throttle(InForce(SMALL_BYTES))
    later = Reading(max_bytes=10 * SMALL_BYTES, throttle=throttle)
    later.stream()
    older = held_behind(throttle, later)
    later.reply.on_body(b"\n" + event(ANSWER))
    assert later.answers == [ANSWER]
    assert not later.pending.is_paused
    later.end()
    older.reply.close()
    assert throttle.used == 0

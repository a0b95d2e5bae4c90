"""The reply to a call, from the first byte to the answer, or to what is for a coroutine."""

import sys
from unittest.mock import Mock

import pytest

from gateway.http_client.connection import PendingRequest
from gateway.http_client.errors import ClientClosed, ListenerFailed, ReplyCut, RequestFailed
from gateway.http_client.origin import Origin
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import sse
from gateway.protocol.errors import CallLost
from gateway.runtime.arrivals import SMALL_BYTES, Arrivals
from gateway.upstream.channel import Headers, Hearer
from gateway.upstream.http import reply_reader
from gateway.upstream.http.call_reply import CallReply
from gateway.upstream.http.http_session import HttpSession
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.reply_reader import REFUSAL_BYTES
from tests.support.fake_carrier import FakeCarrier
from tests.support.workbench import eventually

HEADERS: Headers = {"A": "b"}
ANSWER = b'{"id":1,"result":{}}'
OTHER = b'{"method":"ping","id":2}'


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_reader, "DRAIN_SECONDS", 60)


class Reading(Hearer):
    """A reply at work, with its hearer and its channel."""

    def __init__(self, max_bytes: int = 1000, arrivals: Arrivals | None = None) -> None:
        self.heard: list[bytes] = []
        self.overs = 0
        self.carrier = FakeCarrier()
        client = Mock(arriving=arrivals or Arrivals(1 << 20))
        upstream = HttpUpstream(client, Mock(), Mock())
        self.session = HttpSession(upstream)
        self.reply = CallReply(
            self,
            max_bytes,
            upstream,
            session=self.session,
            message=b"message",
            headers=HEADERS,
        )
        self.pending = self.reply.pending = PendingRequest(Origin("upstream.test", 80), self.reply)
        self.pending.carrier = self.carrier

    def hear(self, data: bytes, /) -> bool:
        self.heard.append(data)
        if data == b"bad":
            raise CallLost("malformed")
        if data == b"leave":
            self.reply.close()
        return data == ANSWER

    def over(self, reply: object, failure: Exception | None, /) -> None:
        assert reply is self.reply
        assert failure is self.reply.failure
        self.overs += 1

    @property
    def is_accepted(self) -> bool:
        return self.session.newest is HEADERS

    @property
    def is_aborted(self) -> bool:
        return "abort" in self.carrier.asked

    def head(self, content_type: bytes = b"application/json", status: int = 200) -> None:
        self.reply.on_head(ReplyHead(status, [(b"Content-Type", content_type)]))

    def stream(self, *parts: bytes) -> None:
        self.head(b"text/event-stream")
        for part in parts:
            self.reply.on_body(part)

    def whole(self, body: bytes, content_type: bytes = b"application/json", status: int = 200) -> None:
        _ = self.pending.end()
        self.reply.on_whole(ReplyHead(status, [(b"Content-Type", content_type)]), body)

    def end(self) -> None:
        _ = self.pending.end()
        self.reply.on_end()

    def fail(self, failure: RequestFailed) -> None:
        _ = self.pending.end()
        self.reply.on_failed(failure)


def event(data: bytes, id_: bytes = b"") -> bytes:
    return (b"id: %b\n" % id_ if id_ else b"") + b"data: %b\n\n" % data


def bug() -> ListenerFailed:
    failure = ListenerFailed()
    failure.__cause__ = ZeroDivisionError()
    return failure


@pytest.mark.parametrize("others", [[], [OTHER, OTHER]])
async def test_a_stream_hands_over_each_message_once_wherever_it_is_cut(others: list[bytes]) -> None:
    whole = b": hello\n\n" + event(b"", b"e1") + b"".join(map(event, others)) + event(ANSWER, b"e2")
    for cut in range(1, len(whole)):
        reading = Reading()
        reading.stream(whole[:cut], whole[cut:])
        assert (reading.heard, reading.reply.resumption.cursor) == ([*others, ANSWER], "e2")
        reading.end()
        assert (reading.is_aborted, reading.overs) == (False, 0)


@pytest.mark.parametrize("how", ["a stream", "a body in parts", "a body in one piece"])
async def test_a_reply_lets_go_of_who_hears_it_with_the_answer(how: str) -> None:
    reading = Reading()
    references = sys.getrefcount(reading)
    if how == "a stream":
        reading.stream(event(ANSWER))
    elif how == "a body in one piece":
        reading.whole(ANSWER)
    else:
        reading.head()
        reading.reply.on_body(ANSWER[:5])
        reading.reply.on_body(ANSWER[5:])
        assert reading.heard == []
        reading.end()
    assert (reading.heard, reading.overs, reading.is_accepted) == ([ANSWER], 0, True)
    assert sys.getrefcount(reading) == references - 1, "the hearer is not kept"
    assert "distrust" not in reading.carrier.asked


async def test_a_reply_in_one_piece_may_be_closed_by_who_hears_it() -> None:
    reading = Reading()
    reading.whole(b"leave")
    assert (reading.reply.is_done, reading.overs) == (True, 0)


@pytest.mark.parametrize("in_one_piece", [True, False])
async def test_a_refusal_is_for_the_coroutine_and_counts_as_not_accepted(*, in_one_piece: bool) -> None:
    reading = Reading()
    if in_one_piece:
        reading.whole(ANSWER, status=404)
    else:
        reading.head(status=404)
        reading.reply.on_body(ANSWER)
        reading.end()
    assert (reading.heard, reading.overs, reading.is_accepted) == ([], 1, False)
    assert reading.reply.message == b"message", "it may have to be sent again"
    assert (reading.reply.status, reading.reply.body, reading.reply.failure) == (404, ANSWER, None)


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_a_reply_that_fails_is_for_the_coroutine(content_type: bytes) -> None:
    reading, failure = Reading(), ReplyCut()
    reading.head(content_type)
    reading.reply.on_body(b"data: ")
    reading.fail(failure)
    assert (reading.overs, reading.reply.failure) == (1, failure)


@pytest.mark.parametrize(
    ("content_type", "status", "limit"),
    [(b"application/json", 200, 1000), (b"text/event-stream", 200, 1000), (b"text/html", 500, REFUSAL_BYTES)],
)
async def test_a_message_larger_than_the_limit_ends_the_reply(content_type: bytes, status: int, limit: int) -> None:
    reading = Reading()
    reading.head(content_type, status)
    reading.reply.on_body(b"data: ".ljust(limit, b"x"))
    assert reading.overs == 0
    reading.reply.on_body(b"x")
    assert reading.overs == 1
    assert isinstance(reading.reply.failure, sse.EventTooLarge)
    assert reading.is_aborted


async def test_a_stream_that_stays_open_after_the_answer_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_reader, "DRAIN_SECONDS", 0)
    reading = Reading()
    reading.stream(event(ANSWER), event(OTHER))
    assert (reading.heard, reading.overs) == ([ANSWER], 0)
    await eventually(lambda: reading.is_aborted)


async def test_a_large_body_waits_for_an_older_one() -> None:
    arrivals = Arrivals(SMALL_BYTES)
    older, later = (Reading(max_bytes=10 * SMALL_BYTES, arrivals=arrivals) for _ in range(2))
    for reading in (older, later):
        reading.head()
        reading.reply.on_body(b" " * (SMALL_BYTES + 1))
    assert (older.pending.is_paused, later.pending.is_paused) == (False, True)
    older.reply.on_body(ANSWER)
    older.reply.close()
    assert not later.pending.is_paused
    later.reply.close()
    assert arrivals.used == 0


@pytest.mark.parametrize("in_one_piece", [True, False])
async def test_a_body_that_is_not_the_answer_is_heard_and_is_for_the_coroutine(*, in_one_piece: bool) -> None:
    reading = Reading()
    if in_one_piece:
        reading.whole(OTHER)
    else:
        reading.head()
        reading.reply.on_body(OTHER)
        reading.end()
    assert (reading.heard, reading.overs) == ([OTHER], 1)
    assert "distrust" in reading.carrier.asked, "the connection may bring the response to this request to the next one"


@pytest.mark.parametrize("data", [OTHER, b"not JSON", b"[" + ANSWER + b"]"])
async def test_a_stream_has_room_for_more_than_the_limit_in_all(data: bytes) -> None:
    reading = Reading(max_bytes=100)
    reading.stream(b": " + b"x" * 80 + b"\n\n", event(data) * 9, event(ANSWER))
    assert reading.heard == [data] * 9 + [ANSWER]
    assert reading.overs == 0


async def test_only_the_beginning_of_a_stream_may_have_a_byte_order_mark() -> None:
    reading = Reading()
    reading.stream(event(OTHER), sse.BOM + event(OTHER), event(ANSWER))
    assert reading.heard == [OTHER, ANSWER]


async def test_a_stream_that_ends_without_the_answer_is_for_the_coroutine() -> None:
    reading = Reading()
    reading.stream(b"retry: 700\n" + event(OTHER, b"e1"))
    reading.end()
    reply = reading.reply
    assert (reading.overs, reply.is_stream, reply.failure, reply.retry_ms) == (1, True, None, 700)
    assert reading.reply.resumption.cursor == "e1"


async def test_a_stream_does_not_break_because_the_process_ends() -> None:
    reading = Reading()
    reading.stream(event(OTHER))
    reading.fail(ClientClosed(sent=True))
    assert reading.overs == 0


@pytest.mark.parametrize("first", [True, False])
async def test_an_error_of_the_receiver_ends_what_a_stream_hands_over(*, first: bool) -> None:
    reading = Reading()
    with pytest.raises(CallLost):
        reading.stream(*([] if first else [event(OTHER)]), event(b"bad") + event(ANSWER))
    assert reading.heard[-1] == b"bad", "nothing is heard after it"


async def test_a_bug_of_the_receiver_breaks_a_stream_with_the_bug() -> None:
    reading, failure = Reading(), bug()
    reading.stream(event(OTHER))
    reading.fail(failure)
    assert (reading.overs, reading.reply.failure) == (1, failure.__cause__)


async def test_a_stream_that_is_left_hands_over_nothing_more() -> None:
    reading = Reading()
    reading.stream(event(b"leave") + event(OTHER))
    reading.reply.on_body(event(ANSWER))
    assert (reading.heard, reading.overs) == ([b"leave"], 0)
    assert reading.is_aborted


@pytest.mark.parametrize("last", [OTHER, ANSWER])
async def test_reading_goes_on_when_a_large_message_was_completed_by_what_was_read_with_it(last: bytes) -> None:
    arrivals = Arrivals(SMALL_BYTES)
    later = Reading(max_bytes=10 * SMALL_BYTES, arrivals=arrivals)
    later.stream(event(OTHER))
    older = Reading(max_bytes=10 * SMALL_BYTES, arrivals=arrivals)
    older.head()
    older.reply.on_body(b" " * (SMALL_BYTES + 1))
    later.reply.on_body(b":" + b" " * SMALL_BYTES)
    assert later.pending.is_paused
    later.reply.on_body(b"\n" + event(last))
    assert later.heard == [OTHER, last]
    assert not later.pending.is_paused
    later.reply.close()
    older.reply.close()
    assert arrivals.used == 0


@pytest.mark.parametrize("content_type", [b"application/json", b"text/event-stream"])
async def test_an_error_of_who_hears_a_reply_in_one_piece_is_for_the_coroutine(content_type: bytes) -> None:
    reading = Reading()
    reading.whole(event(b"bad") if b"event" in content_type else b"bad", content_type)
    assert isinstance(reading.reply.failure, CallLost)
    assert reading.overs == 1
    assert "distrust" in reading.carrier.asked

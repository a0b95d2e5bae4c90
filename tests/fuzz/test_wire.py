"""The judge of replies accepts good ones, and notices each kind of bad one."""

import pytest

from tests.fuzz import wire
from tests.fuzz.wire import CANARY, Broken, Reply

BODY = b'{"jsonrpc":"2.0","id":1,"result":true}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NOTE = b'data: {"jsonrpc":"2.0","method":"notifications/message"}\n\n'
FINAL = b'data: {"jsonrpc":"2.0","id":1,"result":{}}\n\n'


def streamed(*events: bytes) -> bytes:
    return STREAM + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


@pytest.mark.parametrize("data", [OK, streamed(NOTE, FINAL), b"HTTP/1.1 100 Continue\r\n\r\n" + OK])
def test_a_good_reply_is_read(data: bytes) -> None:
    reply = wire.only(wire.replies(data))
    wire.check(reply, explains=True)
    assert wire.final(reply)["id"] == 1


@pytest.mark.parametrize(
    ("data", "why"),
    {
        "head": (b"HTTP/1.1 200 OK\r\nA: b\r\n", "the head of a reply is incomplete"),
        "status": (b"oops\r\n\r\n", "the reply has no status line"),
        "header": (b"HTTP/1.1 200 OK\r\nA: \x1b[0m\r\n\r\n", "a header of the reply is malformed"),
        "switch": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "the reply switches protocols"),
        "nothing": (b"", "0 replies"),
        "two": (OK + OK, "2 replies"),
        "length": (OK[:-1], "the reply was cut off"),
        "chunk": (streamed(FINAL)[:-5], "the reply was cut off"),
    }.values(),
)
def test_a_reply_that_is_framed_badly_is_noticed(data: bytes, why: str) -> None:
    with pytest.raises(Broken, match=why):
        wire.only(wire.replies(data))


@pytest.mark.parametrize("events", [(NOTE,), (FINAL, FINAL), (FINAL, NOTE), (b"data: {\n\n",)])
def test_a_stream_without_exactly_one_final_message_at_its_end_is_noticed(events: tuple[bytes, ...]) -> None:
    with pytest.raises(Broken):
        wire.final(wire.only(wire.replies(streamed(*events))))


@pytest.mark.parametrize(
    "reply",
    [
        Reply(500, {}, b'{"error":{"message":"x"}}', is_whole=True),
        Reply(501, {}, b"", is_whole=True),
        Reply(502, {}, b"Bad Gateway", is_whole=True),
        Reply(200, {}, b"a" + CANARY, is_whole=True),
        Reply(200, {"x": CANARY.decode()}, b"", is_whole=True),
    ],
    ids=lambda reply: str(reply.status),
)
def test_a_reply_that_no_request_may_get_is_noticed(reply: Reply) -> None:
    with pytest.raises(Broken):
        wire.check(reply, explains=True)


def test_a_documented_failure_that_explains_itself_is_allowed() -> None:
    wire.check(
        Reply(503, {}, b'{"jsonrpc":"2.0","error":{"code":-32603,"message":"x"}}', is_whole=True), explains=True
    )
    wire.check(Reply(503, {}, b"not ready", is_whole=True), explains=False)

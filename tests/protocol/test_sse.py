"""The grammar of event streams; tests/property/test_sse_split cuts the same streams at every byte."""

import json
import sys

import pytest

from gateway.protocol import sse
from gateway.protocol.sse import Event, EventTooLarge, Parser

CASES: dict[str, tuple[bytes, list[Event]]] = {
    "one line": (b"data: a\n\n", [Event(b"a")]),
    "no space after the colon": (b"data:a\n\n", [Event(b"a")]),
    "one space only is dropped": (b"data:  a\n\n", [Event(b" a")]),
    "a colon in the value": (b"data: a:b\n\n", [Event(b"a:b")]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [Event(b"a"), Event(b"b")]),
    "CR": (b"data: a\r\rdata: b\r\r", [Event(b"a"), Event(b"b")]),
    "mixed line ends": (b"data: a\r\ndata: b\rdata: c\n\r\n", [Event(b"a\nb\nc")]),
    "CR then an empty line of LF": (b"data: a\r\n\ndata: b\n\n", [Event(b"a"), Event(b"b")]),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [Event(b"a")]),
    "a second byte order mark is part of a name": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
    "a byte order mark within": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [Event(b"a")]),
    "comments": (b": ping\r\n\r\n:\n\ndata: a\n: x\ndata: b\n\n", [Event(b"a\nb")]),
    "several data lines": (b"data: a\ndata\ndata: b\n\n", [Event(b"a\n\nb")]),
    "an event name": (b"event: endpoint\ndata: /m\n\n", [Event(b"/m", None, "endpoint")]),
    "an empty event name": (b"event:\ndata: a\n\n", [Event(b"a")]),
    "the last name counts": (b"event: a\nevent: b\ndata: x\n\n", [Event(b"x", None, "b")]),
    "a name is of one event only": (b"event: a\ndata: x\n\ndata: y\n\n", [Event(b"x", None, "a"), Event(b"y")]),
    "an id is of one event here": (b"id: 7\ndata: x\n\ndata: y\n\n", [Event(b"x", "7"), Event(b"y")]),
    "an empty id": (b"id\ndata: x\n\n", [Event(b"x", "")]),
    "an id with NUL is ignored": (b"id: a\0b\ndata: x\n\n", [Event(b"x")]),
    "an id that is no UTF-8": (b"id: \xff\ndata: x\n\n", [Event(b"x", "\ufffd")]),
    "a priming event": (b"id: 7\ndata:\n\n", [Event(b"", "7")]),
    "an id without data": (b"id: 7\n\n", [Event(b"", "7")]),
    "an id that takes back the one before": (b"id\n\n", [Event(b"", "")]),
    "retry and unknown fields": (b"retry: 10\nfoo: bar\nDATA: x\n data: y\ndata: a\n\n", [Event(b"a")]),
    "an unfinished event": (b"data: a\n", []),
    "nothing": (b"", []),
    "UTF-8 in the data": ("data: é世\n\n".encode(), [Event("é世".encode())]),
}


@pytest.mark.parametrize(("stream", "events"), CASES.values(), ids=CASES)
def test_a_stream_is_read_as_the_standard_says(stream: bytes, events: list[Event]) -> None:
    assert Parser(1000).feed(stream) == events


def test_the_pause_that_a_stream_asks_for() -> None:
    parser = Parser(1000)
    assert parser.retry_ms is None
    parser.feed(b"retry: 500\nretry: soon\nretry: -1\nretry:\nretry: " + b"9" * 900 + b"\n\n")
    assert parser.retry_ms == 500


def test_a_line_that_ends_in_cr_does_not_wait_for_its_lf() -> None:
    parser = Parser(1000)
    assert parser.feed(b"data: a\r\r") == [Event(b"a")]
    assert parser.feed(b"\ndata: b\r\n\r") == [Event(b"b")]
    assert parser.feed(b"") == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: c\r") == []
    assert parser.feed(b"data: d\r\r") == [Event(b"c\nd")]


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"x" * 95, b"data: " + b"x" * 60 + b"\ndata: " + b"y" * 60, b": " + b"x" * 99, b"id: " + b"x" * 99],
)
@pytest.mark.parametrize("end", [b"", b"\n\n"], ids=["unfinished", "finished"])
def test_an_event_beyond_the_bound_is_refused(stream: bytes, end: bytes) -> None:
    with pytest.raises(EventTooLarge, match="100 bytes"):
        Parser(100).feed(stream + end)


def test_the_bound_is_for_one_event() -> None:
    stream = (b"data: " + b"x" * 94 + b"\n\n: ping\n\n") * 50
    assert len(Parser(100).feed(stream)) == 50


def test_what_is_written_is_read_back() -> None:
    assert Parser(1000).feed(sse.KEEP_ALIVE + sse.encode(b'{"a":1}') + sse.KEEP_ALIVE) == [Event(b'{"a":1}')]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_json_with_line_ends_is_written_as_one_event(end: bytes) -> None:
    data = end.join([b"{", b'  "a": "x\\ny",', b'  "b": []', b"}"])
    written = sse.encode(data)
    assert written.count(b"\n") == 3
    assert b"\r" not in written
    (event,) = Parser(1000).feed(written)
    assert json.loads(event.data) == {"a": "x\ny", "b": []}


def test_comments_count_towards_the_size_of_their_event() -> None:
    assert Parser(100).feed((b": " + b"x" * 90 + b"\n\n") * 50) == []
    with pytest.raises(EventTooLarge):
        Parser(100).feed((b": " + b"x" * 90 + b"\n") * 2)


@pytest.mark.parametrize("line", [b"\n", b"\r", b"\r\n", b":\n", b"x\n", b"database:\n"])
def test_lines_that_mean_nothing_cost_no_python_call_each(line: bytes) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        events = Parser(1 << 20).feed(line * 100_000 + b"\n\ndata: a\n\n")
    finally:
        sys.setprofile(None)
    assert events == [Event(b"a")]
    assert calls < 200


@pytest.mark.parametrize(
    ("begin", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"event: message\ndata: {}\n\n", b"{}"),
        (b"event: message\r\ndata: {}\r\n\r\n", b"{}"),
        (b"data: \n\n", b""),
        (b"data: {}\n", None),
        (b"data: {}", None),
        (b"", None),
        (b"data: {}\r\n", None),
        (b"data: {}\r\r", None),
        (b"data: {\r}\n\n", None),
        (b"data: {\ndata: }\n\n", None),
        (b"data: {}\nid: 1\n\n", None),
        (b"id: 1\ndata: {}\n\n", None),
        (b"event: other\ndata: {}\n\n", None),
        (b"data: {}\n\n:\n\n", None),
        (b"data: {}\n\ndata: {}\n\n", None),
        (b"\xef\xbb\xbfdata: {}\n\n", None),
        (b"\ndata: {}\n\n", None),
        (b"database: {}\n\n", None),
    ],
)
def test_a_stream_of_one_plain_event_needs_no_parser(begin: bytes, data: bytes | None) -> None:
    assert sse.only_event(begin) == data
    if data is not None:
        assert Parser(1000).feed(begin) == [Event(data)]


def test_what_was_read_and_is_no_event_yet_has_a_size() -> None:
    parser = Parser(1000)
    assert parser.feed(b"") == []
    assert parser.unfinished_bytes == 0
    assert parser.feed(b"data: a\ndata") == []
    assert parser.unfinished_bytes >= len(b"a" + b"data")
    assert parser.feed(b"") == []
    assert parser.feed(b": ") == []
    assert parser.feed(b"b\n\n") == [Event(b"a\nb")]
    assert parser.unfinished_bytes == 0

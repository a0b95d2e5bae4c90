"""The head of a reply: bytes until somebody asks."""

import pytest

from gateway.http_client.reply_head import ReplyHead


def head(*fields: tuple[bytes, bytes], reason: bytes = b"OK") -> ReplyHead:
    return ReplyHead(200, list(fields), reason)


def test_a_header_is_found_in_any_case_and_without_the_spaces_around_it() -> None:
    found = head((b"X-A", b"1 \t"), (b"x-a", b"2"), (b"B", b""))
    assert found.get(b"x-a") == b"1"
    assert found.get_all(b"x-a") == [b"1", b"2"]
    assert found.get(b"b") == b""
    assert found.get(b"c") is None
    assert found.get_all(b"c") == []
    assert found.text(b"x-a") == "1"
    assert found.text(b"c") is None


def test_the_headers_are_given_in_their_order_as_text() -> None:
    found = head((b"B", b"\xc3\xa9 "), (b"A", b"\xff"), (b"B", b"2"))
    assert list(found.texts()) == [("B", "é"), ("A", "\udcff"), ("B", "2")]
    assert found.fields[0] == (b"B", b"\xc3\xa9 ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"application/json", "application/json"),
        (b"Text/Event-Stream; charset=utf-8", "text/event-stream"),
        (b" text/html ", "text/html"),
        (b";", ""),
        (b"\xff/x", "\xff/x"),
    ],
)
def test_the_media_type_has_no_parameters(value: bytes, expected: str) -> None:
    assert head((b"Content-Type", value)).content_type == expected
    assert head().content_type == ""


def test_the_length_is_a_number() -> None:
    assert head((b"Content-Length", b" 12 ")).content_length == 12
    assert head().content_length is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"timeout=5", 5),
        (b"max=100, Timeout = 15", 15),
        (b'timeout="7"', 7),
        (b"xtimeout=5", None),
        (b"timeout=", None),
        (b"max=3", None),
        (b"timeout=99999999999999999999", 999_999),
    ],
)
def test_the_keep_alive_header_says_how_long_a_connection_stays(value: bytes, seconds: int | None) -> None:
    assert head((b"Keep-Alive", value)).keep_alive_seconds == seconds
    assert head().keep_alive_seconds is None


@pytest.mark.parametrize(
    ("raw", "reason"), [(b"OK", "OK"), (b"", ""), ("Gelöscht".encode(), "Gelöscht"), (b"a\x01b", ""), (b"a\tb", "")]
)
def test_a_reason_that_cannot_be_sent_on_is_empty(raw: bytes, reason: str) -> None:
    assert head(reason=raw).reason == reason

"""Lines out of bytes, however they are cut."""

import pytest

from gateway.protocol.stdio_framing import Lines, one_line
from tests.support.memory import left_by

TEXT = b'{"a":1}\n\r\n\nabc\r\n\xff\xfe\n' + b"x" * 20 + b"\nrest"
WANTED = [b'{"a":1}', b"abc", b"\xff\xfe", b"x" * 20]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_the_bytes_are_cut(size: int) -> None:
    lines = Lines(20)
    assert [line for start in range(0, len(TEXT), size) for line in lines.feed(TEXT[start : start + size])] == WANTED
    assert list(lines.end()) == [b"rest"]
    assert list(lines.end()) == []


def test_a_line_may_be_as_long_as_its_bound_and_no_longer() -> None:
    lines = Lines(4)
    assert list(lines.feed(b"ab")) == []
    assert list(lines.feed(b"cd\n1234\n12345\n")) == [b"abcd", b"1234", None]


def test_a_line_that_never_ends_is_refused_when_it_passes_its_bound() -> None:
    lines = Lines(4)
    assert list(lines.feed(b"1234")) == []
    assert list(lines.feed(b"5")) == [None]


@pytest.mark.parametrize(
    ("message", "line"),
    [(b"{}", b"{}\n"), (b'{\r\n"a":\n1}', b'{  "a": 1}\n'), (b'{"a":"\\n"}', b'{"a":"\\n"}\n')],
)
def test_a_message_is_written_as_one_line(message: bytes, line: bytes) -> None:
    assert one_line(message) == line


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_line_that_is_too_long_is_skipped_and_told_once(size: int) -> None:
    data = b"one\n\r\n" + b"x" * 40 + b"\ntwo\r\n" + b"y" * 9 + b"\nthree"
    lines = Lines(8)
    assert [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])] == [
        b"one",
        None,
        b"two",
        None,
    ]
    assert list(lines.feed(b"\n")) == [b"three"]


@pytest.mark.parametrize(
    ("data", "last"),
    [(b"", []), (b"a\n", []), (b"\r", []), (b"abcd", [b"abcd"]), (b"ab\r", [b"ab"]), (b"12345", [])],
)
def test_the_last_line_needs_no_end_but_has_the_same_bound(data: bytes, last: list[bytes]) -> None:
    lines = Lines(4)
    _ = list(lines.feed(data))
    assert list(lines.end()) == last


def test_a_skipped_line_takes_no_memory() -> None:
    lines = Lines(8)
    assert left_by(lambda: [list(lines.feed(b"x" * 1_000_000)) for _ in range(3)]) < 10_000

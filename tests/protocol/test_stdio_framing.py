"""Lines out of bytes, however they are cut."""

import pytest

from gateway.protocol.stdio_framing import Lines, one_line
from tests.support.memory import left_by

TEXTS: dict[str, tuple[int, bytes, list[bytes | None]]] = {
    "lines of any bytes": (
        20,
        b'{"a":1}\n\r\n\nabc\r\n\xff\xfe\n' + b"x" * 20 + b"\nrest",
        [b'{"a":1}', b"abc", b"\xff\xfe", b"x" * 20],
    ),
    "a line that is too long is told once": (
        8,
        b"one\n\r\n" + b"x" * 40 + b"\ntwo\r\n" + b"y" * 9 + b"\nrest",
        [b"one", None, b"two", None],
    ),
}
"""By what they show: the bound of a line, the text, and its lines before the last one, which has no end."""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("bound", "text", "wanted"), TEXTS.values(), ids=TEXTS)
def test_lines_do_not_depend_on_how_the_bytes_are_cut(
    bound: int, text: bytes, wanted: list[bytes | None], size: int
) -> None:
    lines = Lines(bound)
    assert [line for start in range(0, len(text), size) for line in lines.feed(text[start : start + size])] == wanted
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
    assert left_by(lambda: [list(lines.feed(b"x" * 1_000_000)) for _ in range(3)]) < 100_000

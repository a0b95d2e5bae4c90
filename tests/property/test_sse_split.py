"""However the network cuts a stream, the events are the same, and so is the verdict on their size."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.sse import Event, EventTooLarge, Parser
from tests.protocol.test_sse import CASES

PIECES = [
    b"data",
    b"id",
    b"event",
    b"retry:7",
    b":",
    b" ",
    b"\r",
    b"\n",
    b"\r\n",
    b"\n\n",
    b"\0",
    b"\xef\xbb\xbf",
    b"a",
    b"xyz" * 9,
]


def outcome(chunks: list[bytes], bound: int = 10_000) -> tuple[list[Event], int | None, bool]:
    """The events, the pause asked for, and whether the bound held; a refused stream has no other outcome."""
    parser = Parser(bound)
    events: list[Event] = []
    try:
        for chunk in chunks:
            events += parser.feed(chunk)
    except EventTooLarge:
        return [], None, False
    return events, parser.retry_ms, True


@pytest.mark.parametrize("stream", [case[0] for case in CASES.values()], ids=CASES)
def test_a_stream_cut_at_every_byte_gives_the_same_events(stream: bytes) -> None:
    whole = outcome([stream])
    for cut in range(len(stream) + 1):
        assert outcome([stream[:cut], stream[cut:]]) == whole
    assert outcome([stream[index : index + 1] for index in range(len(stream))]) == whole


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join), st.data())
def test_a_stream_cut_anywhere_gives_the_same_events(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert outcome(chunks) == outcome([stream])


@given(st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join), st.integers(1, 60), st.data())
@example(b"data: " + b"x" * 30 + b"\n\n", 33, None)
def test_a_finished_stream_is_within_the_bound_or_not_wherever_it_is_cut(
    stream: bytes, bound: int, data: st.DataObject | None
) -> None:
    stream += b"\n\n"
    cut = 34 if data is None else data.draw(st.integers(0, len(stream)))
    assert outcome([stream[:cut], stream[cut:]], bound)[2] == outcome([stream], bound)[2]

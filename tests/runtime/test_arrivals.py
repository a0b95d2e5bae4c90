"""Messages that arrive at the same time, and the bytes that they hold together."""

import pytest

from gateway.runtime.arrivals import SMALL_BYTES, Arrivals

LIMIT = 100
"""All sizes here are multiples of that below which messages are not counted."""


class Reader:
    """A reader that notes whether it may read, and how often it was told to read on."""

    def __init__(self) -> None:
        self.is_paused = False
        self.resumed = 0

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        self.resumed += 1


Step = tuple[str, int | None, bool]
"""A reader, the size of its message (None: it is complete), and whether it reads on."""
CASES: dict[str, tuple[list[Step], str, int]] = {
    # (what happens, the readers that were told to read on, what is counted at the end)
    "messages below the limit do not wait": ([("a", 50, True), ("b", 50, True)], "", 100),
    "past the limit only the oldest reads on": ([("a", 60, True), ("b", 60, False), ("a", 5000, True)], "", 5060),
    "the next one reads on when the oldest is complete": (
        [("a", 90, True), ("b", 80, False), ("c", 80, False), ("a", None, True), ("b", 200, True), ("c", 80, False)],
        "b",
        280,
    ),
    "each one has its turn": (
        [("a", 90, True), ("b", 80, False), ("c", 80, False), ("a", None, True), ("b", None, True), ("c", None, True)],
        "bc",
        0,
    ),
    "a reader that waits reads on if its message ends in what it had read": (
        [("a", 90, True), ("b", 80, False), ("b", 81, False), ("b", 0, True)],
        "b",
        90,
    ),
    "all read on when there is room again": (
        [("a", 90, True), ("b", 20, False), ("c", 20, False), ("a", None, True)],
        "bc",
        40,
    ),
    "a message that does not wait is not told to go on": (
        [("a", 10, True), ("b", 10, True), ("a", None, True)],
        "",
        10,
    ),
    "a second release does nothing": ([("a", 10, True), ("a", None, True), ("a", None, True)], "", 0),
    "a message that shrinks makes room for itself, once": (
        [("a", 50, True), ("b", 60, False), ("b", 10, True), ("b", 11, True)],
        "b",
        61,
    ),
    "small messages are not counted": ([("a", 1, True), ("b", 1, True)], "", 0),
}


@pytest.mark.parametrize(("steps", "resumed", "used"), CASES.values(), ids=CASES)
def test_only_the_oldest_message_grows_past_the_limit(steps: list[Step], resumed: str, used: int) -> None:
    arrivals, readers = Arrivals(LIMIT * SMALL_BYTES), {name: Reader() for name in "abc"}
    for name, size, reads_on in steps:
        if size is None:
            arrivals.release(readers[name])
        else:
            assert arrivals.hold(readers[name], size * SMALL_BYTES) is (size > 1)
        assert readers[name].is_paused is not reads_on
    assert "".join(name * reader.resumed for name, reader in readers.items()) == resumed
    assert arrivals.used == used * SMALL_BYTES

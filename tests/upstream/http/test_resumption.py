"""The policy of resuming a stream: places, pauses, silence."""

import tracemalloc

import pytest

from gateway.upstream.http import resumption as policy
from gateway.upstream.http.resumption import MAX_EVENT_ID_CHARACTERS, MAX_EVENT_IDS, Resumption, asked_seconds


@pytest.fixture(autouse=True)
def _pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "RETRY_SECONDS", (1, 2, 3))
    monkeypatch.setattr(policy, "SILENCE_SECONDS", (10, 20, 30))


LONG = "e" * MAX_EVENT_ID_CHARACTERS

ASKED: list[tuple[int | None, float]] = [
    (None, 0),
    (0, 0),
    (1, 0.001),
    (7000, 7),
    (60_000, 60),
    (60_001, 60),
    (900_000_000, 60),
]

PLACES: dict[str, tuple[list[str], list[bool], str | None]] = {
    "no event id": ([], [], None),
    "each moves the cursor": (["a", "b"], [False, False], "b"),
    "a repeated one does not": (["a", "b", "a"], [False, False, True], "b"),
    "an empty one takes the cursor back": (["a", ""], [False, False], None),
    "after an empty one the next is a place again": (["a", "", "b"], [False, False, False], "b"),
    "a repeated one is still known after an empty one": (["a", "", "a"], [False, False, True], None),
    "one that no header can carry": (["a", "\x01"], [False, False], None),
    "one that is as long as possible": ([LONG], [False], LONG),
    "one that is too long": (["a", LONG + "e"], [False, False], None),
    "an invalid one is never known": (["\x01", "\x01"], [False, False], None),
}

# What happens to the streams of a request in turn, and the pause that each thing makes ("-" makes none).
PAUSES: dict[str, list[tuple[str, float | str | None]]] = {
    "a stream that is cut again and again": [("cut", 1), ("cut", 2), ("cut", 3), ("cut", 3), ("cut", 3)],
    "a GET that fails again and again": [("failed", 1), ("failed", 2), ("failed", 3), ("failed", None)],
    "failures and cuts share their pauses": [("cut", 1), ("failed", 2), ("connected", "-"), ("cut", 3)],
    "a new message makes the pauses short": [("cut", 1), ("cut", 2), ("heard", "-"), ("cut", 1)],
    "a stream without a message does not": [
        ("cut", 1),
        ("connected", "-"),
        ("cut", 2),
        ("connected", "-"),
        ("cut", 3),
    ],
    "a silent stream makes no pause": [("silent", "-"), ("silent", "-"), ("cut", 1)],
    "only failures in a row are counted": [
        *[("failed", 1), ("failed", 2), ("failed", 3), ("connected", "-")],
        *[("failed", 3), ("failed", 3), ("failed", 3), ("failed", None)],
    ],
    "a local fault makes a pause and is not counted": [
        *[("failed locally", 1), ("failed locally", 2), ("failed locally", 3), ("failed locally", 3)],
        *[("failed", 3), ("failed", 3), ("failed locally", 3), ("failed", 3), ("failed", None)],
    ],
    "a stream that is cut though its request was cancelled": [
        *[("cut", 1), ("cut", 2), ("give_up", "-"), ("cut", 3), ("cut", None)],
    ],
    "messages of a cancelled request make another row of cuts": [
        *[("give_up", "-"), ("cut", 1), ("cut", 2), ("heard", "-"), ("cut", 1), ("cut", 2), ("cut", 3), ("cut", None)],
    ],
    "a local fault is counted once the request was cancelled": [
        *[("give_up", "-"), ("failed locally", 1), ("failed locally", 2), ("failed locally", 3)],
        *[("failed locally", None)],
    ],
    "a message does not end a row of failures, a stream does": [
        *[("failed", 1), ("failed", 2), ("heard", "-"), ("failed", 1), ("failed", None)],
    ],
}

SILENCES: dict[str, tuple[list[str], float]] = {
    "the first stream": ([], 10),
    "after a silent stream": (["silent"], 20),
    "after a cut": (["cut"], 20),
    "after a failed GET": (["failed"], 10),
    "after two streams": (["silent", "cut"], 30),
    "it stays at the longest": (["silent"] * 9, 30),
    "an answer makes it short": (["silent", "silent", "answered"], 10),
    "and it grows from there": (["silent", "silent", "answered", "silent"], 20),
    "a message does not make it short": (["silent", "heard"], 20),
    "nor does a stream": (["silent", "connected"], 20),
}


def happens(resumption: Resumption, what: str) -> float | str | None:
    """Tell a resumption what happened; the pause that it answers with."""
    if what == "cut":
        return resumption.cut(None)
    if what == "failed":
        return resumption.failed()
    if what == "failed locally":
        return resumption.failed(is_local=True)
    getattr(resumption, what)()
    return "-"


def resuming(place: str = "e1") -> Resumption:
    resumption = Resumption(place)
    resumption.start(place)
    return resumption


@pytest.mark.parametrize(("retry_ms", "seconds"), ASKED)
def test_a_server_gets_the_pause_that_it_asks_for_within_a_bound(retry_ms: int | None, seconds: float) -> None:
    assert asked_seconds(retry_ms) == seconds


@pytest.mark.parametrize(("retry_ms", "pauses"), [(500, [1, 2]), (1500, [1.5, 2]), (2500, [2.5, 2.5])])
def test_a_cut_stream_pauses_for_the_longer_of_both(retry_ms: int, pauses: list[float]) -> None:
    resumption = resuming()
    assert [resumption.cut(retry_ms) for _ in pauses] == pauses


def test_the_longest_event_ids_take_no_more_memory_than_short_ones() -> None:
    resumption = Resumption()
    tracemalloc.start()
    for number in range(3 * MAX_EVENT_IDS):
        assert not resumption.is_repeated(f"{number:0{MAX_EVENT_ID_CHARACTERS}}")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 160 * 1024


@pytest.mark.parametrize(("ids", "repeated", "cursor"), PLACES.values(), ids=PLACES)
def test_the_cursor_is_the_place_after_what_was_handed_over(
    ids: list[str], repeated: list[bool], cursor: str | None
) -> None:
    resumption = Resumption()
    assert [resumption.is_repeated(each) for each in ids] == repeated
    assert resumption.cursor == cursor


def test_the_place_stays_while_the_cursor_moves() -> None:
    resumption = resuming("e1")
    assert not resumption.is_repeated("e2")
    assert (resumption.place, resumption.cursor) == ("e1", "e2")


def test_the_place_moves_when_the_memory_of_event_ids_is_full() -> None:
    resumption = resuming("e1")
    for number in range(MAX_EVENT_IDS):
        assert not resumption.is_repeated(f"a{number}")
    assert resumption.place == "e1"
    assert resumption.is_repeated("a0")
    assert not resumption.is_repeated("full")
    assert resumption.place == resumption.cursor == "full"
    assert resumption.is_repeated("full")
    assert not resumption.is_repeated("a0"), "the server does not send what comes before the place"


def test_a_request_that_is_resumed_knows_what_its_first_stream_brought() -> None:
    resumption = Resumption()
    assert not resumption.is_repeated("e1")
    resumption.start("e1")
    assert resumption.is_repeated("e1")


def test_a_resumed_request_starts_without_failures() -> None:
    resumption = resuming()
    while resumption.failed() is not None:
        resumption.silent()
    resumption.start("e2")
    assert resumption.silence_seconds == 10
    assert [resumption.failed() for _ in range(4)] == [1, 2, 3, None]


@pytest.mark.parametrize("happened", PAUSES.values(), ids=PAUSES)
def test_pauses_grow_until_a_message_is_heard_and_end_after_failures_in_a_row(
    happened: list[tuple[str, float | str | None]],
) -> None:
    resumption = resuming()
    assert [(what, happens(resumption, what)) for what, _ in happened] == happened


def test_local_faults_count_if_another_process_may_still_hold_the_call() -> None:
    resumption = resuming()
    resumption.start("e1", counts_local=True)
    assert [resumption.failed(is_local=True) for _ in range(4)] == [1, 2, 3, None]


@pytest.mark.parametrize(("happened", "seconds"), SILENCES.values(), ids=SILENCES)
def test_a_stream_may_be_silent_for_longer_each_time_until_an_answer_is_accepted(
    happened: list[str], seconds: float
) -> None:
    resumption = resuming()
    for what in happened:
        _ = happens(resumption, what)
    assert resumption.silence_seconds == seconds

"""The records of cold calls: what they take, when they are due, who may continue the call."""

import tracemalloc
from random import Random
from types import SimpleNamespace

import pytest

from gateway.parking.cold_calls import ColdCall, ColdCalls, Counts, packed
from gateway.parking.orphans import Remains
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Whereabouts
from gateway.telemetry import Metrics

LIVE = SimpleNamespace(
    process=SimpleNamespace(metrics=Metrics()),
    route=SimpleNamespace(path="/mcp"),
)
TOKENS = Random(1)
QUESTIONS = ((b"0", "elicitation/create"),)


def record(due: int = 10, id_: str = "", **changes: object) -> ColdCall:
    session, call = TOKENS.randbytes(16).hex(), b'"gw-%b-1"' % TOKENS.randbytes(6).hex().encode()
    texts = packed(
        Remains(Whereabouts(session, "2025-11-25", call, b"", TOKENS.randbytes(16).hex()), QUESTIONS), {"A": "b"}
    )
    fields = {
        "round": 1,
        "due": due,
        "live": LIVE,
        "principal": b"p",
        "is_taken_over": False,
        "is_apart": False,
        **changes,
    }
    return ColdCall(id_ or TOKENS.randbytes(16).hex(), packed=texts[0], headers=texts[1], **fields)  # type: ignore[arg-type]


def cold_calls(limit: int = 1 << 20) -> tuple[ColdCalls, Counts]:
    counts = Counts()
    return ColdCalls(limit, counts, Tasks(Metrics())), counts


def test_a_record_has_what_it_takes_to_give_the_call_up() -> None:
    remains, headers = record().unpacked()
    assert (remains.questions, dict(headers)) == (QUESTIONS, {"A": "b"})
    assert remains.upstream.version == "2025-11-25"


def test_records_of_one_caller_share_the_text_of_their_headers_which_is_freed_after_them() -> None:
    first, second = record(), record()
    assert first.headers is second.headers
    for number in range(2000):
        _ = packed(Remains(Whereabouts("", "", b"", b"", None), ()), {"A": str(number)})
    assert record().headers is not first.headers


async def test_the_headers_of_cold_calls_are_forgotten_with_the_last_one() -> None:
    calls, _ = cold_calls()
    first, last = record(), record(principal=b"other")
    calls.add(first)
    calls.add(last)
    assert calls.take(first)
    assert record().headers is first.headers
    assert calls.take(last)
    assert record().headers is not first.headers


async def test_the_size_of_a_record_is_hardly_less_than_what_it_takes() -> None:
    (calls, _), number = cold_calls(1 << 30), 20_000
    tracemalloc.start()
    try:
        for each in range(number):
            calls.add(record(due=each % 600))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    estimated = calls.status().used
    assert used < estimated * 1.1
    assert estimated / number < 1024


async def test_a_record_is_taken_once() -> None:
    calls, counts = cold_calls()
    call = record()
    calls.add(call)
    assert calls.find(call.id) is call
    assert counts == {call.principal: 1}
    assert [calls.take(call), calls.take(call)] == [True, False]
    assert (len(calls), calls.status().used, calls.find(call.id)) == (0, 0, None)
    assert not counts
    assert calls.take_due(float("inf")) == []


async def test_a_newer_record_of_the_same_exchange_is_not_taken_with_an_older_one() -> None:
    calls, _ = cold_calls()
    older, newer = record(id_="x"), record(id_="x", round=2)
    calls.add(older)
    assert calls.take(older)
    calls.add(newer)
    assert not calls.take(older)
    assert calls.find("x") is newer


async def test_records_are_due_in_the_order_of_their_seconds() -> None:
    calls, counts = cold_calls()
    late, soon, now = (record(due=due) for due in (30, 20, 10))
    for each in (late, soon, now):
        calls.add(each)
    assert calls.take_due(9.9) == []
    assert calls.take_due(20.0) == [now, soon]
    assert (len(calls), sum(counts.values())) == (1, 1)
    assert not calls.take(soon)
    assert calls.take_due(float("inf")) == [late]


async def test_a_call_without_room_is_refused_and_counted() -> None:
    calls, _ = cold_calls(1000)
    first = record()
    assert calls.has_room(first)
    calls.add(first)
    assert not calls.has_room(record())
    assert (calls.refused, calls.status().given_way) == (1, 1)


@pytest.mark.parametrize(
    ("round_", "is_taken_over", "is_apart", "asked_about", "has_taken_over"),
    [(1, False, False, 1, False), (2, False, False, 1, True), (1, True, False, 1, True), (2, False, True, 1, False)],
)
def test_a_record_tells_whether_this_replica_has_continued_the_call(
    round_: int, asked_about: int, *, is_taken_over: bool, is_apart: bool, has_taken_over: bool
) -> None:
    call = record(round=round_, is_taken_over=is_taken_over, is_apart=is_apart)
    assert call.has_taken_over(asked_about) == has_taken_over

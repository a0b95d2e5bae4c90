"""The messages of one stream, without a connection."""

import asyncio

import pytest

from gateway.config import InForce
from gateway.legacy_front.replay_buffer import ReplayBuffer
from gateway.runtime.budget import Budget

EVENT = 256
"""What an event costs besides its message."""


class Bench:
    """Outboxes that share a budget; it notes those that overflowed."""

    def __init__(self, limit: int = 10_000, behind_bytes: int = 100) -> None:
        self.budget = Budget("x", InForce(limit))
        self.behind_bytes = behind_bytes
        self.overflowed: list[int] = []
        self._number = 0

    def outbox(self, *, is_resumable: bool = True, principal: bytes = b"p") -> ReplayBuffer:
        number, self._number = self._number, self._number + 1
        box = ReplayBuffer(number, self.budget, principal, self.behind_bytes, lambda: self.overflowed.append(number))
        box.is_resumable = is_resumable
        return box


def read(box: ReplayBuffer, position: int = 0, *, count: int = 1000) -> list[bytes]:
    """Deliver what comes behind a position."""
    found = []
    while count and (entry := box.after(position)) is not None:
        found.append(entry.data)
        box.deliver(entry.number)
        position, count = entry.number, count - 1
    return found


def waiting(box: ReplayBuffer) -> list[bytes]:
    return [entry.data for entry in box.waiting()]


def test_messages_come_in_order_and_again_if_the_stream_can_be_resumed() -> None:
    box = Bench().outbox()
    for data in (b"a", b"b", b"c"):
        box.put(data)
    assert read(box, count=2) == [b"a", b"b"]
    assert waiting(box) == [b"c"]
    assert read(box, 1) == [b"b", b"c"]
    assert [box.can_resume(number) for number in (-1, 0, 3, 4)] == [False, True, True, False]


def test_what_was_delivered_is_freed_if_the_stream_cannot_be_resumed() -> None:
    bench = Bench()
    box = bench.outbox(is_resumable=False)
    for data in (b"a", b"b"):
        box.put(data)
    assert bench.budget.used == 2 * (EVENT + 1)
    assert read(box, count=1) == [b"a"]
    assert (bench.budget.used, box.can_resume(0), box.can_resume(1)) == (EVENT + 1, False, True)
    assert read(box, 1) == [b"b"]
    assert (bench.budget.used, len(bench.budget)) == (0, 0)


def test_only_notifications_that_wait_make_room() -> None:
    box = Bench().outbox()
    box.put(b"q" * 90)
    for letter in (b"1", b"2", b"3"):
        box.put(letter * 60, is_droppable=True)
    assert read(box) == [b"q" * 90, b"3" * 60]
    box.put(b"4" * 60, is_droppable=True)
    assert read(box, 4) == [b"4" * 60], "delivered ones do not count"


def test_what_waits_comes_in_the_order_in_which_it_was_put() -> None:
    box = Bench(behind_bytes=1000).outbox()
    letters = [b"%d" % number for number in range(9)]
    for number, letter in enumerate(letters):
        assert box.put(letter, is_droppable=number % 3 == 0)
    assert waiting(box) == letters
    assert read(box, count=4) == letters[:4]
    assert waiting(box) == letters[4:]
    assert read(box, 2) == letters[2:]


def test_what_the_client_says_that_it_has_does_not_wait() -> None:
    box = Bench().outbox()
    for letter in (b"1", b"2"):
        box.put(letter * 40, is_droppable=True)
    box.deliver(2)  # it was written, and the connection broke before that was noted
    assert waiting(box) == []
    for letter in (b"3", b"4"):
        box.put(letter * 40, is_droppable=True)
    assert read(box, 2) == [b"3" * 40, b"4" * 40]
    assert read(box, 0) == [letter * 40 for letter in (b"1", b"2", b"3", b"4")]


def test_a_message_that_had_to_give_way_at_once_is_reported() -> None:
    box = Bench(limit=EVENT).outbox()
    assert not box.put(b"x")
    assert box.put(b"")


def test_one_notification_larger_than_the_limit_is_kept() -> None:
    box = Bench().outbox()
    box.put(b"x" * 500, is_droppable=True)
    assert read(box) == [b"x" * 500]


def test_the_oldest_stream_forgets_what_it_delivered() -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    old, new = bench.outbox(), bench.outbox()
    old.put(b"x" * 100)
    assert read(old) == [b"x" * 100]
    new.put(b"y" * 100)
    new.put(b"z" * 100)
    assert (bench.overflowed, old.can_resume(0), old.can_resume(1)) == ([], False, True)
    assert read(new) == [b"y" * 100, b"z" * 100]
    old.put(b"n")
    assert read(old, 1) == [b"n"], "it goes on"


def test_a_stream_that_has_both_keeps_what_waits() -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    box = bench.outbox()
    box.put(b"x" * 100)
    assert read(box) == [b"x" * 100]
    box.put(b"y" * 100)
    box.put(b"z" * 100)
    assert (bench.overflowed, waiting(box)) == ([], [b"y" * 100, b"z" * 100])
    assert bench.budget.used == 2 * (EVENT + 100)


def test_a_stream_with_nothing_to_forget_overflows_once() -> None:
    bench = Bench(limit=2 * (EVENT + 100))
    old, new = bench.outbox(), bench.outbox()
    old.put(b"x" * 100)
    for _ in range(2):
        new.put(b"y" * 100)
    assert (bench.overflowed, waiting(old), waiting(new)) == ([0], [], [b"y" * 100] * 2)
    assert bench.budget.used == 2 * (EVENT + 100)


def test_a_cleared_stream_holds_nothing_and_is_over() -> None:
    bench = Bench()
    box = bench.outbox()
    box.put(b"x")
    box.clear()
    assert (box.is_over, waiting(box), bench.budget.used, len(bench.budget)) == (True, [], 0, 0)


async def test_a_change_wakes_the_reader_and_silence_does_not() -> None:
    box = Bench().outbox()
    assert not await box.changed(0)
    for change in (lambda: box.put(b"x"), box.finish, lambda: box.attach("another"), box.clear):
        waiting = asyncio.get_running_loop().create_task(box.changed(5))
        await asyncio.sleep(0)
        change()
        assert await waiting


@pytest.mark.parametrize(("leaving", "left"), [("first", "second"), ("second", None)])
def test_a_reader_that_was_replaced_detaches_nobody(leaving: str, left: str | None) -> None:
    box = Bench().outbox()
    box.attach("first")
    box.attach("second")
    box.detach(leaving)
    assert box.reader == left


def test_what_waits_for_one_caller_ends_no_session_of_another() -> None:
    bench = Bench(limit=4_000)
    ann = bench.outbox(principal=b"ann")
    assert ann.put(b"x" * 100)
    for _ in range(5):
        _ = bench.outbox(principal=b"eve").put(b"x" * 1_500)
    assert bench.overflowed == [1, 2, 3], "the oldest of the flood"
    assert read(ann) == [b"x" * 100]

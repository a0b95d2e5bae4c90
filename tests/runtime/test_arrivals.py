"""Messages that arrive at the same time, and the bytes that they hold together."""

from gateway.runtime.arrivals import SMALL_BYTES, Arrivals

KIB64 = SMALL_BYTES


class Reader:
    """A reader that notes whether it may read."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.is_paused = False
        self.resumed = 0

    def hold(self, size: int) -> bool:
        """Whether it may read on."""
        _ = self._arrivals.hold(self, size)
        return not self.is_paused

    def release(self) -> None:
        self._arrivals.release(self)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        self.resumed += 1


def test_messages_below_the_limit_do_not_wait() -> None:
    arrivals = Arrivals(100 * KIB64)
    one, two = Reader(arrivals), Reader(arrivals)
    assert one.hold(50 * KIB64)
    assert two.hold(50 * KIB64)
    assert arrivals.used == 100 * KIB64


def test_past_the_limit_only_the_oldest_reads_on() -> None:
    arrivals = Arrivals(100 * KIB64)
    one, two = Reader(arrivals), Reader(arrivals)
    assert one.hold(60 * KIB64)
    assert not two.hold(60 * KIB64)
    assert one.hold(5000 * KIB64)


def test_the_next_one_reads_on_when_the_oldest_is_complete() -> None:
    arrivals = Arrivals(100 * KIB64)
    one, two, three = Reader(arrivals), Reader(arrivals), Reader(arrivals)
    assert one.hold(90 * KIB64)
    assert not two.hold(80 * KIB64)
    assert not three.hold(80 * KIB64)
    one.release()
    assert (two.resumed, three.resumed) == (1, 0)
    assert two.hold(200 * KIB64)
    two.release()
    assert three.resumed == 1
    three.release()
    assert arrivals.used == 0


def test_a_reader_that_waits_reads_on_if_its_message_ends_in_what_it_had_read() -> None:
    arrivals = Arrivals(100 * KIB64)
    one, two = Reader(arrivals), Reader(arrivals)
    assert one.hold(90 * KIB64)
    assert not two.hold(80 * KIB64)
    assert not two.hold(81 * KIB64)
    assert two.resumed == 0
    assert two.hold(10)
    assert (one.resumed, two.resumed, arrivals.used) == (0, 1, 90 * KIB64)


def test_all_read_on_when_there_is_room_again() -> None:
    arrivals = Arrivals(100 * KIB64)
    readers = [Reader(arrivals) for _ in range(3)]
    assert readers[0].hold(90 * KIB64)
    for reader in readers[1:]:
        assert not reader.hold(20 * KIB64)
    readers[0].release()
    assert [reader.resumed for reader in readers] == [0, 1, 1]


def test_a_message_that_does_not_wait_is_not_told_to_go_on() -> None:
    arrivals = Arrivals(100 * KIB64)
    one, two = Reader(arrivals), Reader(arrivals)
    assert one.hold(10 * KIB64)
    assert two.hold(10 * KIB64)
    one.release()
    assert two.resumed == 0


def test_a_second_release_does_nothing() -> None:
    arrivals = Arrivals(100 * KIB64)
    one = Reader(arrivals)
    assert one.hold(10 * KIB64)
    one.release()
    one.release()
    assert arrivals.used == 0


def test_a_message_that_shrinks_makes_room_for_itself() -> None:
    """A stream holds only its unfinished event."""
    arrivals = Arrivals(100 * KIB64)
    one, two = Reader(arrivals), Reader(arrivals)
    assert one.hold(50 * KIB64)
    assert not two.hold(60 * KIB64)
    assert two.hold(10 * KIB64)


def test_small_messages_are_not_counted() -> None:
    arrivals = Arrivals(1)
    one, two = Reader(arrivals), Reader(arrivals)
    assert one.hold(KIB64)
    assert two.hold(KIB64)
    assert arrivals.used == 0

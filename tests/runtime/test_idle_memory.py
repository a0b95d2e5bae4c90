"""Memory is given back when a burst is over, and not while there is work."""

import asyncio
import gc
import weakref

import pytest

from gateway import world
from gateway.runtime import idle_memory
from gateway.runtime.idle_memory import IdleMemory, ProcessMemory
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics

MIB = 1 << 20


class FakeMemory(ProcessMemory):
    """A FAKE process, whose memory the test sets."""

    def __init__(self, mib: float) -> None:
        self.mib = mib
        self.needed = mib
        self.given_back = 0
        self.is_kept = False
        self.seconds = 0.0
        """How long it takes to give memory back."""
        self.now = 0.0

    def resident(self) -> int:
        return int(self.mib * MIB)

    def keep(self) -> None:
        self.is_kept = True

    def give_back(self) -> None:
        self.given_back += 1
        self.mib = self.needed
        self.now += self.seconds


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory(100)
    monkeypatch.setattr(world, "monotonic", lambda: fake.now)
    return fake


def idle(memory: FakeMemory, held: int = 0) -> IdleMemory:
    return IdleMemory(Tasks(Metrics("0")), lambda: held, memory)


def test_memory_that_grew_is_given_back_once_the_process_is_quiet(memory: FakeMemory) -> None:
    it = idle(memory)
    memory.mib = 115
    it.look()
    assert memory.given_back == 0
    memory.mib = 117
    it.look()
    assert (memory.given_back, memory.mib) == (1, 100)


def test_after_much_was_given_back_the_next_look_gives_back_too(memory: FakeMemory) -> None:
    it = idle(memory)
    memory.mib, memory.needed = 300, 120
    it.look()
    memory.needed = 105
    it.look()
    memory.needed = 102
    for _ in range(3):
        it.look()
    assert (memory.given_back, memory.mib) == (3, 102), "until there is little left to give back"


def test_memory_that_is_needed_is_looked_for_once(memory: FakeMemory) -> None:
    it = idle(memory)
    memory.mib = memory.needed = 200
    for _ in range(3):
        it.look()
    assert memory.given_back == 1
    memory.mib = 217
    it.look()
    assert memory.given_back == 2


def test_what_shrinks_by_itself_counts_as_needed_no_longer(memory: FakeMemory) -> None:
    it = idle(memory)
    memory.mib = 50
    it.look()
    memory.mib, memory.needed = 70, 50
    it.look()
    assert memory.given_back == 1


def test_a_process_that_holds_many_calls_is_not_stopped_for_a_collection(memory: FakeMemory) -> None:
    it = idle(memory, held=1000)
    memory.mib = 300
    it.look()
    assert memory.given_back == 0


def test_a_busy_process_is_not_stopped_for_a_collection(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 2.0, 2.1])
    monkeypatch.setattr(world, "cpu", lambda: next(seconds))
    it = idle(memory)
    memory.mib = 300
    it.look()
    assert memory.given_back == 0
    it.look()
    assert memory.given_back == 1


def test_collections_take_a_hundredth_of_the_time_at_most_whoever_makes_the_garbage(memory: FakeMemory) -> None:
    it = idle(memory)
    memory.seconds = 0.4
    for _ in range(200):
        memory.mib = memory.needed + 20
        it.look()
        memory.now += idle_memory.LOOK_SECONDS
    assert memory.given_back == pytest.approx(memory.now / 100 / memory.seconds, abs=3)


def test_a_system_that_does_not_tell_its_memory_changes_nothing() -> None:
    memory = FakeMemory(0)
    idle(memory).look()
    assert memory.given_back == 0


def test_the_real_memory_is_told_and_garbage_is_collected() -> None:
    class Circle:
        pass

    gc.disable()
    try:
        circle = Circle()
        circle.self = circle  # type: ignore[attr-defined]
        gone = weakref.ref(circle)
        del circle
        assert ProcessMemory().resident() > MIB
        ProcessMemory().give_back()
        assert gone() is None
    finally:
        gc.enable()


async def test_it_looks_again_and_again(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_memory, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(idle_memory, "_QUIET_SHARE", 1000.0)
    twice = asyncio.Event()

    def give_back() -> None:
        memory.given_back += 1
        if memory.given_back == 2:
            twice.set()

    memory.give_back = give_back  # type: ignore[method-assign]
    it = idle(memory)
    it.begin()
    assert memory.is_kept
    memory.mib = 200
    while memory.given_back < 1:
        await asyncio.sleep(0.01)
    memory.mib = 300
    async with asyncio.timeout(5):
        await twice.wait()

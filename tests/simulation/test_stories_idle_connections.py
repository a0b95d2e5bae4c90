"""A server that closes idle connections just when the next request comes costs no call, though nothing else fails."""

import pytest

from tests.simulation.oracle import complaints
from tests.simulation.server import Kind
from tests.simulation.told import call, played

_IDLE: list[tuple[float, float]] = [
    # (after how many seconds the server closes a connection, how much later the next request is sent)
    *((idle, after) for idle in (0.4, 5.0) for after in (-0.001, 0.0, 0.001, 0.002, 0.003, 0.004)),
]


@pytest.mark.parametrize(("idle", "after"), _IDLE)
@pytest.mark.parametrize("has_events", [False, True])
def test_a_call_that_comes_when_the_server_closes_its_idle_connections(
    idle: float, after: float, *, has_events: bool
) -> None:
    """A call of a few milliseconds begins so long after the one before has ended."""
    _expect_results(idle, has_events, think=0.0, apart=idle + after, questions=0)


@pytest.mark.parametrize(("idle", "after"), _IDLE)
@pytest.mark.parametrize("has_events", [False, True])
def test_an_answer_that_comes_when_the_server_closes_its_idle_connections(
    idle: float, after: float, *, has_events: bool
) -> None:
    """An answer is sent so long after the one before, or after `initialized`; the quiet window takes 40 ms of it."""
    think = idle - 0.046 + after
    _expect_results(idle, has_events, think=think, apart=3 * think + 0.01, questions=2)


def _expect_results(idle: float, has_events: bool, *, think: float, apart: float, questions: int) -> None:  # noqa: FBT001
    calls = [
        call(tag=f"c{number}", at=round(number * apart, 6), think=think, questions=questions) for number in range(1, 9)
    ]
    outcome = played(*calls, replicas=1, kind=Kind(has_events, idle))
    assert [record.outcome for record in outcome.records] == ["result"] * len(calls)
    assert complaints(outcome) == []

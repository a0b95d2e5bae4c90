"""Stories of clients that come back with a state too late, with more to check than what they were told."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault
from tests.simulation.test_stories import story
from tests.simulation.told import call, played, replies


@pytest.mark.parametrize("ttl_seconds", [10.0, 20.0])
def test_only_a_state_that_expires_excuses_that_neither_of_two_rivals_is_served(ttl_seconds: float) -> None:
    """The run that asked was cancelled, and its server neither answers nor forgets it: it has the caller's session."""
    route = {"continuation": "replay", "sessions": {"affinity": "principal"}}
    the_call = call(1, 1, 1, think=0.2, habit="rivals", tool="search", questions=2)
    outcome = played(the_call, replicas=1, route=route, ttl_seconds=10.0)
    assert replies(outcome)[1:] == [
        "gw-1 400 invalid_request_state",
        "gw-1 503 busy",
        "gw-1 400 invalid_request_state",
    ]
    outcome.plan.config["hold"]["ttl_seconds"] = ttl_seconds
    assert any("its state is invalid" in each for each in complaints(outcome)) is (ttl_seconds > 10.0)


@pytest.mark.parametrize(
    ("change", "is_wrong"),
    [({}, True), ({"seconds": 1.1}, False), ({"kind": "part"}, False), ({"at": 5.0}, False)],
    ids=["still", "for too short a time", "cut off", "later"],
)
def test_a_client_that_came_back_to_a_replica_that_stood_still_was_not_late(
    change: dict[str, Any],
    is_wrong: bool,  # noqa: FBT001
) -> None:
    outcome = story("a client may come back while its replica stands still beyond the grace period")
    faults = outcome.faults
    outcome.faults = [replace(fault, **change) for fault in faults]
    outcome.records[0].told[-1].message = {"error": {"code": -32602, "data": {"reason": "invalid_request_state"}}}
    assert any("its state is invalid" in each for each in complaints(outcome)) == is_wrong
    outcome.faults = [*faults, *(replace(fault, kind="part") for fault in faults)]
    assert not any("its state is invalid" in each for each in complaints(outcome))


@pytest.mark.parametrize("others", [(1, 1), (1, 2), (2, 3)], ids=["at its owner", "and at another one", "elsewhere"])
def test_a_call_is_cancelled_once_both_copies_of_its_newest_request_were_left(others: tuple[int, int]) -> None:
    outcome = played(call(1, *others, think=1.0, habit="twice, then goes", questions=1, hangs=40.0))
    (run,), gone = outcome.ledger.of("c1"), outcome.records[0].gone
    assert gone is not None
    assert run.cancelled is not None
    assert gone + 5.9 < run.cancelled
    assert complaints(outcome) == []
    run.cancelled, run.ended = None, gone + 7.1
    assert [each[:14] for each in complaints(outcome)] == ["c1: run 1 went"]


def test_a_drain_cancels_a_call_that_nobody_can_resume_from_the_state_of_its_client() -> None:
    """The question came before the first event id of the call, which is known when the drain is over."""
    the_call = call(1, at=0.01, think=0.1, habit="abandons", questions=1, aside=True)
    for faults in ((Fault("slow", 0.0, 3.0),), ()):
        outcome = played(the_call, *faults, Fault("term", 2.0, 2.0))
        (parted,) = (line.fields for line in outcome.lines if line.event == "server.parted")
        (run,) = outcome.ledger.of("c1")
        said = parted["cancelled"], parted["let_go"], run.ended is not None
        assert said == ((1, 0, True) if faults else (0, 1, False))

"""Stories of tasks that outlive their calls, with more to check than what their clients were told."""

from dataclasses import replace

import pytest

from tests.simulation.history import Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault
from tests.simulation.server import Kind
from tests.simulation.told import TASKS, call, played, replies, task
from tests.simulation.world import START


def said_of(outcome: Outcome) -> list[str]:
    """What is wrong with the task."""
    return [each.removeprefix("t1: ") for each in complaints(outcome) if each.startswith("t1: ")]


@pytest.mark.parametrize(("before", "questions"), [(0.0, 1), (0.0, 2), (4.0, 1)], ids=["asks", "asks more", "works"])
def test_a_task_that_no_cancel_stops_is_cancelled_for_its_client_alone(before: float, questions: int) -> None:
    """Its server would end another session. What it still asks is refused, so that it ends soon."""
    outcome = played(task(habit="cancels", fragile=True, before=before, questions=questions), **TASKS)
    (run,) = outcome.ledger.of("t1")
    withdrawn, refused = {"action": "cancel"}, {"error": -32602}
    assert run.answers == ([refused] if before else [withdrawn, refused][:questions])
    assert run.result is not None
    assert replies(outcome) == ["cancelled"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("seconds", [0.05, 60.0], ids=["restarts", "stays away"])
def test_a_replica_that_goes_on_with_a_task_which_is_over_tells_its_end_at_once(seconds: float) -> None:
    """The replica that followed it dies just before the end, so that nobody knows of that but the server."""
    outcome = played(task(1, 1, 2, before=2.0), Fault("kill", 1.9, seconds), **TASKS)
    (record,), (run,) = outcome.tasks, outcome.ledger.of("t1")
    assert run.ended is not None
    assert {status for at, status in record.views if at > run.ended} == {"completed"}
    assert complaints(outcome) == []


@pytest.mark.parametrize(("is_heard_of", "outcome"), [(True, "broken"), (True, "cancelled"), (False, "refused")])
def test_only_a_task_that_its_client_could_not_hear_of_may_be_cancelled_for_it(
    outcome: str,
    is_heard_of: bool,  # noqa: FBT001
) -> None:
    said = "run 1 was cancelled, which its client did not want"
    found = played(task(habit="cancels", before=15.0), **TASKS)
    (record,) = found.tasks
    record.wanted_cancelled, record.outcome = None, outcome
    record.task = record.task if is_heard_of else None
    assert any(said in each for each in complaints(found))
    record.task, record.outcome = None, "broken"
    assert not any(said in each for each in complaints(found))


def test_only_a_task_that_no_cancel_stops_may_go_on_and_hear_that_nobody_answers() -> None:
    the_task = task(habit="cancels", fragile=True, before=6.0, questions=1)
    outcome = played(the_task, Fault("kill", 20.0, 6.0), **TASKS)
    (record,), (run,) = outcome.tasks, outcome.ledger.of("t1")
    record.came_back, record.ended = START, None if record.ended is None else record.ended + 30.0
    record.ended_twice = "as completed"
    assert complaints(outcome) == []
    run.is_harmed = True
    assert said_of(outcome) == ["run 1 was cancelled, which does harm"]
    run.is_harmed, faults = False, outcome.faults[:]
    outcome.faults.clear()
    goes_on, ends_twice = "was told at 0.00 that its task goes on, after its end", "ended twice: as completed"
    assert said_of(outcome) == [goes_on, ends_twice]
    outcome.faults.append(replace(faults[0], kind="stop"))
    assert said_of(outcome) == []
    outcome.faults = faults
    views, record.views = record.views, [(START, "completed")]
    assert said_of(outcome) == [goes_on, ends_twice]
    record.views = views
    record.wanted_cancelled = None
    refused, *_ = said_of(outcome)
    assert refused.startswith("run 1 got the answer {'error': -32602} to t1/0,")
    outcome_of_it, handle = record.outcome, record.task
    record.outcome, record.task = "broken", None  # then its client has not heard of it
    assert said_of(outcome) == []
    record.outcome, record.task = outcome_of_it, handle
    record.wanted_cancelled, record.call.script["fragile"] = START, False
    assert any("run 1 was not cancelled" in each for each in said_of(replace(outcome, faults=[])))


@pytest.mark.parametrize("has_events", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("tool", ["job", "chore"])
def test_a_result_of_a_task_that_no_client_has_waited_for_is_left_to_the_next_process(
    tool: str,
    replicas: int,
    has_events: bool,  # noqa: FBT001
) -> None:
    """Its server withdraws the question in the middle of a drain, and the client comes back after that.

    A tool that gives its result at once, without a task, can leave it only on a stream that can be resumed.
    """
    hold = {"ttl_seconds": 40.0, "drain_delay_seconds": 0.5, "drain_seconds": 1.0}
    the_call = call(1, replicas, tool=tool, think=6.0, questions=1, patience=0.3)
    kind = Kind(has_events=has_events, has_tasks=True, has_lasting_tasks=True)
    outcome = played(the_call, Fault("term", 0.2, 2.0), replicas=replicas, kind=kind, **hold)
    (record,) = outcome.records
    assert record.outcome == ("result" if has_events or tool == "chore" else "error")
    assert complaints(outcome) == []


def test_a_result_of_a_task_that_is_given_in_a_drain_outlives_it_unread() -> None:
    hold = {"ttl_seconds": 40.0, "drain_delay_seconds": 1.5, "drain_seconds": 1.0}
    the_call = call(1, 1, 1, 2, tool="job", think=1.0, habit="leaves unread", questions=1, between=1.0)
    kind = Kind(has_tasks=True, has_lasting_tasks=True)
    outcome = played(the_call, Fault("term", 1.2, 60.0), replicas=2, kind=kind, **hold)
    (record,) = outcome.records
    assert record.outcome == "result"
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("ttl_seconds", "hangs", "later"), [(12.5, 7.75, ()), (10.0, 15.5, (7.5,))], ids=["before", "while it asks"]
)
def test_a_former_owner_that_hears_the_result_does_not_end_its_session_under_the_replica_that_went_on(
    ttl_seconds: float, hangs: float, later: tuple[float, ...]
) -> None:
    """Both read one stream in turn, and the time of the former owner's state is over before it is the other's turn."""
    the_call = call(1, 2, 2, 2, 2, 2, at=0.5, tool="job", think=1.0, questions=1, hangs=hangs)
    faults = tuple(Fault("peers", at, 5.0, target=1, other=other) for at in (0.0, *later) for other in (2, 3))
    kind = Kind(has_events=True, has_tasks=True, idle_seconds=0.4, answers_late=True)
    # With this seed, the call goes over to the replica that the client is at.
    outcome = played(the_call, *faults, seed=2, kind=kind, ttl_seconds=ttl_seconds, legs={"limit_seconds": 4.0})
    (record,) = outcome.records
    ended = {line.process: line.at for line in outcome.lines if line.event == "exchange.finished"}
    assert ended["gw-1"] < ended["gw-2"], "the result came to the former owner first"
    assert record.outcome == "result"
    assert complaints(outcome) == []

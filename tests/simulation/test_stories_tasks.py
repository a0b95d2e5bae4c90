"""Stories of tasks that outlive their calls, and the replicas that follow them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.history import History, Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import Call, Fault, Plan
from tests.simulation.server import Kind
from tests.simulation.task_server import WITHDRAWN
from tests.simulation.world import START


def played(*faults: Fault, habit: str = "plain", replicas: tuple[int, ...] = (1, 2, 3), **script: Any) -> Outcome:
    """What became of one task in a cluster that lives through these faults."""
    hold = {"ttl_seconds": 90.0, "drain_delay_seconds": 1.0, "drain_seconds": 4.0}
    sessions, legs = {"idle_seconds": 30}, {"limit_seconds": 4.0}
    config = {"hold": hold, "sessions": sessions, "legs": legs, "tasks": {"ttl_seconds": 100}}
    task = Call("t1", 0.0, "chore", "ann", {"patience": 20.0, **script}, 2.0, habit, replicas)
    kind = Kind(has_lasting_tasks=True)
    return History(Plan(1, 3, kind, config, (), faults, tasks=(task,))).run()


def statuses(outcome: Outcome) -> list[str]:
    """What the client was told, without repetitions."""
    (record,) = outcome.tasks
    told = [status for _, status in record.views]
    return [each for each, before in zip(told, ["", *told], strict=False) if each != before]


def said_of(outcome: Outcome) -> list[str]:
    """What is wrong with the task."""
    return [each.removeprefix("t1: ") for each in complaints(outcome) if each.startswith("t1: ")]


def test_a_task_is_served_by_any_replica() -> None:
    outcome = played(questions=2, before=1.0, between=1.0)
    asked = ["input_required", "working", "input_required", "working", "completed"]
    assert statuses(outcome) == ["working", *asked]
    assert complaints(outcome) == []


def test_a_task_that_fails_says_why() -> None:
    outcome = played(questions=1, fails=True)
    assert statuses(outcome)[-1] == "failed"
    assert complaints(outcome) == []


@pytest.mark.parametrize(("before", "questions"), [(0.0, 1), (0.0, 2), (4.0, 1)], ids=["asks", "asks more", "works"])
def test_a_task_that_no_cancel_stops_is_cancelled_for_its_client_alone(before: float, questions: int) -> None:
    """Its server would end another session. What it still asks is refused, so that it ends soon."""
    outcome = played(habit="cancels", fragile=True, before=before, questions=questions)
    (run,) = outcome.ledger.of("t1")
    withdrawn, refused = {"action": "cancel"}, {"error": -32602}
    assert run.answers == ([refused] if before else [withdrawn, refused][:questions])
    assert run.result is not None
    assert statuses(outcome) == ["cancelled"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("how", ["503", "cut"])
def test_an_answer_that_the_server_refuses_is_asked_for_again(how: str) -> None:
    outcome = played(questions=2, refuses=how)
    (record,) = outcome.tasks
    assert len(record.refusals) == 2
    assert record.outcome == "result"
    assert complaints(outcome) == []


def test_an_answer_that_comes_after_the_end_of_its_task_changes_nothing() -> None:
    """The server waits for a shorter time than the user thinks."""
    outcome = played(questions=1, patience=1.0)
    assert statuses(outcome) == ["input_required", "completed"]
    assert outcome.ledger.of("t1")[0].answers == [WITHDRAWN]
    assert complaints(outcome) == []


@pytest.mark.parametrize("between", [0.0, 6.0], ids=["over", "works"])
def test_a_client_that_has_left_when_its_task_is_made_gets_it_when_it_comes_back(between: float) -> None:
    outcome = played(habit="leaves", questions=1, made=2.7, asks_first=True, between=between)
    (record,) = outcome.tasks
    assert record.outcome == "result"
    assert statuses(outcome) == (["working", "completed"] if between else ["completed"])
    assert complaints(outcome) == []


def test_a_task_that_its_client_cancels_at_another_replica_is_cancelled() -> None:
    outcome = played(habit="cancels", before=15.0)
    assert statuses(outcome) == ["cancelled"]
    assert outcome.ledger.of("t1")[0].cancelled is not None
    assert complaints(outcome) == []


@pytest.mark.parametrize("fault", ["kill", "power", "term", "int", "stop", "part"])
@pytest.mark.parametrize("at", [0.5, 2.0, 4.0])
def test_a_task_outlives_the_replica_that_follows_it(fault: str, at: float) -> None:
    """It works, then its question is open, then it works again."""
    outcome = played(Fault(fault, at, 6.0), replicas=(1, 2, 3, 2, 3, 2), questions=1, before=1.0, between=8.0)
    assert statuses(outcome)[-1] == "completed"
    assert complaints(outcome) == []


def test_a_task_fails_with_its_server() -> None:
    outcome = played(Fault("server", 3.0, 2.0), before=15.0)
    assert statuses(outcome) == ["working", "failed"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("seconds", [0.05, 60.0], ids=["restarts", "stays away"])
def test_a_replica_that_goes_on_with_a_task_which_is_over_tells_its_end_at_once(seconds: float) -> None:
    """The replica that followed it dies just before the end, so that nobody knows of that but the server."""
    outcome = played(Fault("kill", 1.9, seconds), replicas=(1, 1, 2), before=2.0)
    (record,), (run,) = outcome.tasks, outcome.ledger.of("t1")
    assert run.ended is not None
    assert {status for at, status in record.views if at > run.ended} == {"completed"}
    assert complaints(outcome) == []


@pytest.mark.parametrize("target", [1, 2, 3])
def test_a_replica_that_was_restarted_leaves_its_tasks_to_the_one_that_follows_them(target: int) -> None:
    """Its client asks all of them in turn, so that a question which two had heard would be open again at one."""
    replicas = (target, target, target % 3 + 1, *(1, 2, 3) * 4)
    outcome = played(Fault("kill", 0.6, 1.0, target=target), replicas=replicas, questions=1, before=3.0, between=8.0)
    assert statuses(outcome) == ["working", "input_required", "working", "completed"]
    assert complaints(outcome) == []


@pytest.mark.parametrize(("is_heard_of", "outcome"), [(True, "broken"), (True, "cancelled"), (False, "refused")])
def test_only_a_task_that_its_client_could_not_hear_of_may_be_cancelled_for_it(
    outcome: str,
    is_heard_of: bool,  # noqa: FBT001
) -> None:
    said = "run 1 was cancelled, which its client did not want"
    found = played(habit="cancels", before=15.0)
    (record,) = found.tasks
    record.wanted_cancelled, record.outcome = None, outcome
    record.task = record.task if is_heard_of else None
    assert any(said in each for each in complaints(found))
    record.task, record.outcome = None, "broken"
    assert not any(said in each for each in complaints(found))


def test_only_a_task_that_no_cancel_stops_may_go_on_and_hear_that_nobody_answers() -> None:
    outcome = played(Fault("kill", 20.0, 6.0), habit="cancels", fragile=True, before=6.0, questions=1)
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


@pytest.mark.parametrize("asks_first", [True, False], ids=["asks", "silent"])
@pytest.mark.parametrize("made", [0.02, 2.0, 6.0])
def test_a_task_that_is_made_late_is_given_all_the_same(made: float, *, asks_first: bool) -> None:
    """By then its client may have been asked, or be away after a round that sheds load."""
    outcome = played(questions=1, made=made, asks_first=asks_first)
    assert statuses(outcome)[-1] == "completed"
    assert complaints(outcome) == []


def test_a_replica_that_drains_while_a_task_is_made_leaves_it_to_another_one() -> None:
    outcome = played(Fault("term", 2.0, 6.0), questions=1, made=4.0, asks_first=False)
    (record,) = outcome.tasks
    assert record.outcome == "result"
    assert complaints(outcome) == []


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
    script = {"questions": 1, "patience": 0.3}
    the_call = Call("c1", 0.0, tool, "ann", script, think=6.0, habit="plain", replicas=(1, replicas))
    kind = Kind(has_events=has_events, has_tasks=True, has_lasting_tasks=True)
    config = {"hold": hold, "sessions": {"idle_seconds": 30}}
    outcome = History(Plan(1, replicas, kind, config, (the_call,), (Fault("term", 0.2, 2.0),))).run()
    (record,) = outcome.records
    assert record.outcome == ("result" if has_events or tool == "chore" else "error")
    assert complaints(outcome) == []


def test_a_result_of_a_task_that_is_given_in_a_drain_outlives_it_unread() -> None:
    hold = {"ttl_seconds": 40.0, "drain_delay_seconds": 1.5, "drain_seconds": 1.0}
    script = {"questions": 1, "between": 1.0}
    the_call = Call("c1", 0.0, "job", "ann", script, think=1.0, habit="leaves unread", replicas=(1, 1, 1, 2))
    kind = Kind(has_events=True, has_tasks=True, has_lasting_tasks=True)
    config = {"hold": hold, "sessions": {"idle_seconds": 30}}
    outcome = History(Plan(1, 2, kind, config, (the_call,), (Fault("term", 1.2, 60.0),))).run()
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
    hold = {"ttl_seconds": ttl_seconds, "drain_delay_seconds": 1.0, "drain_seconds": 4.0}
    config = {"hold": hold, "sessions": {"idle_seconds": 30}, "legs": {"limit_seconds": 4.0}}
    script = {"questions": 1, "hangs": hangs}
    the_call = Call("c1", 0.5, "job", "ann", script, think=1.0, habit="plain", replicas=(1, 2, 2, 2, 2, 2))
    faults = tuple(Fault("peers", at, 5.0, target=1, other=other) for at in (0.0, *later) for other in (2, 3))
    kind = Kind(has_events=True, has_tasks=True, idle_seconds=0.4, answers_late=True)
    outcome = History(Plan(1, 3, kind, config, (the_call,), faults)).run()
    (record,) = outcome.records
    ended = {line.process: line.at for line in outcome.lines if line.event == "exchange.finished"}
    assert ended["gw-1"] < ended["gw-2"], "the result came to the former owner first"
    assert record.outcome == "result"
    assert complaints(outcome) == []

"""Stories of clients that come back with a state too late, or with one that only seems too old."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.history import Line, Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault
from tests.simulation.test_stories_ownership import call, played, replies


@pytest.mark.parametrize(
    ("ttl_seconds", "end"),
    [(10.0, "gw-1 400 invalid_request_state"), (90.0, "gw-1 200 complete")],
)
def test_a_state_ages_on_its_way_to_its_client(ttl_seconds: float, end: str) -> None:
    """The second question comes just before its replica is cut off for 15 s, and is sealed just after that."""
    the_call = call(2, 2, 1, think=1.0, questions=2, between=0.93)
    outcome = played(the_call, Fault("part", 2.0, 15.0, target=2), ttl_seconds=ttl_seconds)
    assert replies(outcome) == ["gw-2 200 input_required", "gw-2 200 input_required", end]
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("grace_seconds", "end"),
    [(6.0, "gw-1 400 invalid_request_state"), (20.0, "gw-1 200 complete")],
)
def test_a_client_that_has_left_does_not_reach_its_replica_within_the_grace_period(
    grace_seconds: float, end: str
) -> None:
    """It comes back after 0.8 s, to a replica that is cut off just then."""
    the_call = call(1, think=1.0, habit="leaves for a moment", questions=1, between=12.0)
    outcome = played(the_call, Fault("part", 1.4, 8.0, target=1), replicas=1, grace_seconds=grace_seconds)
    assert replies(outcome) == ["gw-1 200 input_required", end]
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("grace_seconds", "end"),
    [(6.0, "gw-1 400 invalid_request_state"), (20.0, "gw-1 200 complete")],
)
def test_a_client_that_has_left_comes_back_through_a_replica_that_does_not_reach_the_owner(
    grace_seconds: float, end: str
) -> None:
    outcome = comes_back_where_no_link_leads(grace_seconds)
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 503 owner_stalled", end]
    assert complaints(outcome) == []


def test_a_replica_does_not_tell_an_owner_whose_state_is_of_the_future_that_its_client_is_back() -> None:
    outcome = comes_back_with_a_state_of_the_future()
    assert replies(outcome)[1:] == [*["gw-1 503 owner_stalled"] * 4, "gw-2 400 invalid_request_state"]
    assert complaints(outcome) == []


def comes_back_with_a_state_of_the_future() -> Outcome:
    """The clock of the owner is ahead, from before the call until after its grace period."""
    the_call = call(2, 2, 1, 1, 1, 1, 2, at=1.0, think=0.01, habit="leaves", questions=2, between=9.0)
    fault = Fault("jump", 0.0, 15.0, target=2, amount=90.0)
    return played(the_call, fault, has_events=False, ttl_seconds=120.0)


@pytest.mark.parametrize(
    ("cold_seconds", "reply"),
    [(2.0, "gw-2 400 invalid_request_state"), (0.0, "gw-2 200 input_required")],
)
def test_a_copy_of_a_request_is_refused_only_if_its_call_went_cold_meanwhile(cold_seconds: float, reply: str) -> None:
    """The replica that got the copy stands still while another one serves the request, and parks the call again."""
    outcome = copy_comes_late(cold_seconds)
    assert replies(outcome)[1:3] == ["gw-1 200 input_required", reply]
    assert replies(outcome)[-1].endswith("200 complete")
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("cold_seconds", "end"),
    [(2.0, "400 invalid_request_state"), (0.0, "200 complete")],
)
def test_a_repeat_of_a_request_whose_reply_was_lost_is_refused_only_if_its_call_went_cold(
    cold_seconds: float, end: str
) -> None:
    outcome = reply_is_lost(cold_seconds)
    assert replies(outcome)[1] == "gw-1 503 owner_stalled"
    assert replies(outcome)[-1].endswith(end)
    assert complaints(outcome) == []


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


def reply_is_lost(cold_seconds: float = 2.0) -> Outcome:
    """The owner hears the request of another replica, and then nothing that it says arrives for 2 s."""
    the_call = call(2, 1, 1, think=0.01, questions=2, between=0.05)
    return played(the_call, Fault("one way", 0.1, 2.0, target=2), cold_seconds=cold_seconds)


@pytest.mark.parametrize(
    ("cold_seconds", "end"),
    [(2.0, "400 invalid_request_state"), (0.0, "200 complete")],
)
def test_only_a_call_that_went_cold_refuses_a_client_whose_connection_broke_before_it_had_read_the_questions(
    cold_seconds: float, end: str
) -> None:
    """It reads late, and the replica that relays the owner's reply dies meanwhile."""
    the_call = call(1, 2, 2, 2, 2, 2, think=0.2, habit="reads late", tool="search", questions=2, between=0.05)
    outcome = played(the_call, Fault("kill", 1.5, 6.0, target=2), cold_seconds=cold_seconds)
    assert replies(outcome)[-1].endswith(end)
    assert complaints(outcome) == []
    if cold_seconds:
        lines = [line for line in outcome.lines if line.event != "call.cooled"]
        assert any("its state is invalid" in each for each in complaints(replace(outcome, lines=lines)))
        outcome.records[0].told[-1].unheard_since = None
        assert any("its state is invalid" in each for each in complaints(outcome))


@pytest.mark.parametrize(
    ("ttl_seconds", "end"),
    [(20.0, "gw-2 400 invalid_request_state"), (90.0, "gw-2 200 complete")],
)
def test_a_replica_that_only_asks_again_gives_its_client_no_more_time(ttl_seconds: float, end: str) -> None:
    """It does not reach the owner, which asked 8 s before; its client comes back to the owner after 12 s more."""
    the_call = call(2, 1, 2, think=8.0, habit="asks again, thinks", questions=1)
    cut_off = Fault("peers", 4.0, 6.0, target=2, other=1), Fault("peers", 4.0, 6.0, target=2, other=3)
    outcome = played(the_call, *cut_off, ttl_seconds=ttl_seconds)
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 input_required", end]
    assert complaints(outcome) == []


def copy_comes_late(cold_seconds: float = 2.0) -> Outcome:
    the_call = call(1, 2, 1, 1, 1, think=1.0, habit="twice", questions=2)
    return played(the_call, Fault("stop", 0.5, 6.0, target=2), replicas=2, cold_seconds=cold_seconds)


def comes_back_where_no_link_leads(grace_seconds: float = 6.0) -> Outcome:
    """Its client comes back after 4 s, obeys a 503, and reaches the owner some milliseconds after 6 s."""
    the_call = call(2, 1, 1, 1, think=1.0, habit="leaves", questions=1, between=12.0)
    faults = Fault("peers", 4.0, 2.0, target=2, other=1), Fault("peers", 4.0, 2.0, target=2, other=3)
    return played(the_call, *faults, has_events=False, grace_seconds=grace_seconds)


@pytest.mark.parametrize(("seconds", "end"), [(6.0, "gw-2 200 complete"), (12.0, "gw-2 200 upstream_unreachable")])
def test_a_state_of_a_modern_server_reaches_a_replica_that_cannot_ask_what_the_server_is(
    seconds: float, end: str
) -> None:
    """It stands still when the request comes, and is cut off when it goes on and asks."""
    the_call = replace(call(1, 2, think=8.0, tool="search", questions=1), path="/modern")
    outcome = played(the_call, Fault("stop", 7.5, 6.0, 2), Fault("part", 10.5, seconds, 2), replicas=2)
    assert replies(outcome) == ["gw-1 200 input_required", end]
    assert complaints(outcome) == []


def test_a_client_may_come_back_while_its_replica_stands_still_beyond_the_grace_period() -> None:
    outcome = _comes_back_to_one_that_stands_still()
    assert replies(outcome) == ["gw-1 200 input_required", "gw-1 200 complete"]
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("change", "is_wrong"),
    [({}, True), ({"seconds": 1.1}, False), ({"kind": "part"}, False), ({"at": 5.0}, False)],
    ids=["still", "for too short a time", "cut off", "later"],
)
def test_a_client_that_came_back_to_a_replica_that_stood_still_was_not_late(
    change: dict[str, Any],
    is_wrong: bool,  # noqa: FBT001
) -> None:
    outcome = _comes_back_to_one_that_stands_still()
    faults = outcome.faults
    outcome.faults = [replace(fault, **change) for fault in faults]
    outcome.records[0].told[-1].message = {"error": {"code": -32602, "data": {"reason": "invalid_request_state"}}}
    assert any("its state is invalid" in each for each in complaints(outcome)) == is_wrong
    outcome.faults = [*faults, *(replace(fault, kind="part") for fault in faults)]
    assert not any("its state is invalid" in each for each in complaints(outcome))


def _comes_back_to_one_that_stands_still() -> Outcome:
    """It comes back after 0.8 s, and is not read for 8 s."""
    the_call = call(1, think=1.0, habit="leaves for a moment", questions=1, between=12.0)
    return played(the_call, Fault("stop", 0.1, 8.0, when="detached"), replicas=1, grace_seconds=1.0)


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


def _told(reason: str, fault: Fault, **script: Any) -> Outcome:
    """What became of a call whose client was told this at its end, after a fault that had nothing to do with it."""
    outcome = played(call(1, think=1.0, questions=1, **script), replicas=1)
    assert complaints(outcome) == []
    (record,) = outcome.records
    assert record.final is not None
    record.outcome, record.final.message = (
        "error",
        {"error": {"code": -32602, "message": "", "data": {"reason": reason}}},
    )
    outcome.faults = [fault]
    return outcome


def _log(outcome: Outcome, event: str) -> None:
    """Have the log say, before the call began, that this happened to any call."""
    fields = {"owner": "", "owner_is_dead": False, "request_id": "", "round": 1}
    outcome.lines.append(Line(outcome.records[0].began, "gw-1", "info", event, fields))


def test_only_a_call_that_was_taken_over_gets_the_result_of_other_answers() -> None:
    outcome = played(call(1, think=1.0, questions=1), replicas=1)
    (record,) = outcome.records
    record.told[-1].carried, outcome.faults = {"c1/0": "c1/0=9"}, [Fault("kill", 1.0, 2.0)]
    assert complaints(outcome) == ["c1: answered c1/0=9, and got a result with c1/0=1"]
    _log(outcome, "call.taken_over")
    assert complaints(outcome) == []


def test_only_a_call_that_went_cold_excuses_that_its_client_asks_again_with_an_invalid_state() -> None:
    outcome = _told("invalid_request_state", Fault("kill", 60.0, 2.0))
    outcome.records[0].left_unread = True
    assert any("its state is invalid" in each for each in complaints(outcome))
    _log(outcome, "call.cooled")
    assert complaints(outcome) == []


def test_only_keys_that_ended_during_a_call_excuse_that_its_state_is_invalid() -> None:
    outcome = _told("invalid_request_state", Fault("kill", 60.0, 2.0))
    (record,) = outcome.records
    outcome.plan.config["state"] = {}
    outcome.deaths = [(record.began - 0.1, "gw-1")]
    assert any("its state is invalid" in each for each in complaints(outcome))
    outcome.deaths = [(record.began + 0.1, "gw-1")]
    assert complaints(outcome) == []


def test_only_a_call_that_was_taken_over_is_lost_for_a_question_of_the_side_stream() -> None:
    outcome = _told("call_lost", Fault("jump", 1.0, 2.0), aside=True)
    assert any("ended without a cause: error call_lost" in each for each in complaints(outcome))
    _log(outcome, "call.taken_over")
    assert complaints(outcome) == []


def test_a_client_whose_leg_was_given_up_may_lose_the_grace_period_at_a_replica_that_it_does_not_reach() -> None:
    outcome = is_kept_from_coming()
    assert replies(outcome)[1:] == ["gw-3 503 owner_stalled", "gw-3 400 invalid_request_state"]
    assert complaints(outcome) == []


def is_kept_from_coming() -> Outcome:
    """Its leg waits at the third replica, which gives it up. Then it asks the second one, which is cut off."""
    faults = Fault("part", 0.0, 15.0, target=2), Fault("one way", 0.3, 2.0, target=1)
    return played(call(1, 3, 2, 3, think=0.2, questions=2, between=6.0), *faults, has_events=False)


def test_a_client_may_lose_the_grace_period_where_no_link_leads_to_the_owner() -> None:
    outcome = comes_where_no_link_leads_to_the_owner()
    assert [reply.removeprefix("gw-3 ") for reply in replies(outcome)[1:]] == [
        *["503 owner_stalled"] * 4,
        "400 invalid_request_state",
    ]
    assert complaints(outcome) == []


@pytest.mark.parametrize("kind", ["peers", "part"])
def test_only_an_owner_that_hears_of_the_end_of_a_leg_may_give_up_its_client(kind: str) -> None:
    """A request of its client arrives late, and is given up at once; then no link leads to the owner again."""
    faults = Fault("one way", 0.45, 0.7, target=3), Fault(kind, 2.1, 6.0, target=1, other=3)
    the_call = call(1, *[3] * 7, think=0.2, questions=2, hangs=20.0)
    outcome = played(the_call, *faults, has_events=False)
    assert replies(outcome)[-1] == "gw-3 400 invalid_request_state"
    assert complaints(outcome) == []
    one_way, later = outcome.faults
    outcome.faults = [one_way, replace(later, at=1.9)]
    assert any("its state is invalid" in each for each in complaints(outcome))


def comes_where_no_link_leads_to_the_owner() -> Outcome:
    """The owner hears that the replica at which its leg waits gives it up, and nobody hears the owner."""
    the_call = call(1, 3, 3, 3, 3, 3, think=0.2, questions=2, between=9.0)
    return played(the_call, Fault("one way", 0.3, 7.0, target=1), has_events=False)


@pytest.mark.parametrize(
    ("age", "amount", "is_excused"),
    [(95.0, 90.0, True), (85.0, 90.0, False), (95.0, 0.0, False), (185.0, 90.0, False)],
    ids=["so it is", "the call was held still", "no clock was wrong", "the clock did not hide it"],
)
@pytest.mark.parametrize("reason", ["session_lost", "call_lost"])
def test_only_a_state_that_a_clock_made_look_valid_leads_to_a_call_that_is_over(
    reason: str,
    age: float,
    amount: float,
    is_excused: bool,  # noqa: FBT001
) -> None:
    """The owner had given the call up. It had ended its session, or another process resumed the cancelled call."""
    outcome = _told(reason, Fault("jump", 0.0, 60.0, amount=amount))
    (record,) = outcome.records
    assert record.final is not None
    assert record.final.state is not None
    record.states[record.final.state] = record.final.at - age
    assert any(reason in each for each in complaints(outcome)) is not is_excused


def test_a_drain_cancels_a_call_that_nobody_can_resume_from_the_state_of_its_client() -> None:
    """The question came before the first event id of the call, which is known when the drain is over."""
    the_call = call(1, at=0.01, think=0.1, habit="abandons", questions=1, aside=True)
    for faults in ((Fault("slow", 0.0, 3.0),), ()):
        outcome = played(the_call, *faults, Fault("term", 2.0, 2.0))
        (parted,) = (line.fields for line in outcome.lines if line.event == "server.parted")
        (run,) = outcome.ledger.of("c1")
        said = parted["cancelled"], parted["let_go"], run.ended is not None
        assert said == ((1, 0, True) if faults else (0, 1, False))


def test_a_drain_leaves_such_a_call_to_another_replica_if_its_client_waits_and_gets_a_new_state() -> None:
    the_call = call(1, 2, at=0.01, think=3.0, questions=1, aside=True, between=6.0)
    outcome = played(the_call, Fault("slow", 0.0, 3.0), Fault("term", 2.0, 2.0))
    assert replies(outcome) == ["gw-1 200 input_required", "gw-2 200 input_required", "gw-2 200 complete"]
    assert complaints(outcome) == []


def test_only_a_slow_network_excuses_that_a_question_came_before_the_first_event_id_of_its_call() -> None:
    """Its state does not say where to read on, and leads nowhere once its replica has ended in a drain."""
    the_call = call(1, 2, at=0.01, think=8.0, questions=1, aside=True)
    slow, drain = Fault("slow", 0.0, 3.0), Fault("term", 2.0, 2.0)
    outcome = played(the_call, slow, drain)
    assert replies(outcome) == ["gw-1 200 input_required", "gw-2 200 owner_lost"]
    assert complaints(outcome) == []
    quick = replace(outcome, faults=[each for each in outcome.faults if each.kind != "slow"])
    assert any("ended without a cause" in each for each in complaints(quick))
    outcome.ledger.of("c1")[0].began -= 2.0
    slow = replace(slow, at=slow.at - 2.0, seconds=slow.seconds + 2.0)
    late = replace(outcome, faults=[slow, *(each for each in outcome.faults if each.kind != "slow")])
    assert any("ended without a cause" in each for each in complaints(late)), "the id had come long before"

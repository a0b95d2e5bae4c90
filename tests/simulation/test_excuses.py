"""The oracle excuses what has a cause, and nothing else: each history here goes wrong once its cause is taken away."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import pytest

from tests.simulation.history import Line, Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault
from tests.simulation.test_stories import story
from tests.simulation.test_stories_remains import ended_under_its_call
from tests.simulation.test_stories_shared_sessions import questions_of_two_calls
from tests.simulation.told import REPLAY, TASKS, call, played, task

Change = Callable[[Outcome], object]
INVALID: Final = "its state is invalid"
LOST: Final = "session_lost"
GIVEN: Final = "to which another one gave this call"


class Excuse(NamedTuple):
    """A story, or the history of a function; the complaint that each change brings, which takes a cause away."""

    told: str | Callable[[], Outcome]
    says: str
    changes: tuple[Change, ...]


# -- changes ----------------------------------------------------------------------------------------------------------


def put(what: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(what, name, value)


def each(of: str = "", /, **values: Any) -> tuple[Change, ...]:
    """In turn, the faults of that kind, or all of them, have each of these values."""

    def changed(name: str, value: Any) -> Change:
        return lambda outcome: put(
            outcome,
            faults=[replace(each, **{name: value}) if of in ("", each.kind) else each for each in outcome.faults],
        )

    return tuple(changed(name, value) for name, value in values.items())


def without(*kinds: str) -> Change:
    """There are no such faults."""
    return lambda outcome: put(outcome, faults=[each for each in outcome.faults if each.kind not in kinds])


def instead(*others: Fault) -> Change:
    """Other faults were the only ones."""
    return lambda outcome: put(outcome, faults=list(others))


def unsaid(event: str) -> Change:
    """No log has this event."""
    return lambda outcome: put(outcome, lines=[line for line in outcome.lines if line.event != event])


def lines_of(outcome: Outcome, event: str) -> list[Line]:
    return [line for line in outcome.lines if line.event == event]


def drains_later(outcome: Outcome) -> None:
    """Each drain would have lasted for longer."""
    for line in lines_of(outcome, "server.draining"):
        line.fields["deadline_seconds"] += 5.0


def drains_earlier(outcome: Outcome) -> None:
    for line in lines_of(outcome, "server.draining"):
        line.at -= 0.2


def unscripted(word: str) -> Change:
    """The tools do not do this."""
    return lambda outcome: [call.script.pop(word, None) for call in outcome.plan.calls]


def is_heard(outcome: Outcome) -> None:
    """A replica has answered to every connection that broke."""
    for record in outcome.records:
        for told in record.told:
            told.unheard_since = None


def asks_in_vain_no_more(outcome: Outcome) -> None:
    for run in outcome.ledger.runs:
        run.is_unheard = False
    unscripted("refuses")(outcome)


def asks_after_the_death(outcome: Outcome) -> None:
    outcome.ledger.runs[0].asked_aside = outcome.deaths[0][0] + 0.1


def is_told_late(outcome: Outcome) -> None:
    final = outcome.records[0].final
    assert final is not None
    final.at += 2.0


def comes_at_once(outcome: Outcome) -> None:
    """The call that had the session before was over when the later one began."""
    former = outcome.records[0]
    assert former.final is not None
    former.final.sent = former.began


def is_never_stalled(outcome: Outcome) -> None:
    for record in outcome.records:
        record.told = [told for told in record.told if told.reason != "owner_stalled"]


def first_link_is_up(outcome: Outcome) -> None:
    outcome.faults.remove(next(fault for fault in outcome.faults if fault.kind == "part"))


def has_other_callers(outcome: Outcome) -> None:
    outcome.plan = replace(outcome.plan, calls=tuple(replace(each, caller="bob") for each in outcome.plan.calls))


def has_read_all(outcome: Outcome) -> None:
    outcome.records[0].unread.clear()


def has_no_keys(outcome: Outcome) -> None:
    outcome.own_keys.clear()


def is_not_told(number: int) -> Change:
    return lambda outcome: outcome.records[0].told.pop(number)


def fails_earlier(outcome: Outcome) -> None:
    outcome.faults = [replace(each, at=each.at - 2.0) for each in outcome.faults]


# -- histories that are no stories ------------------------------------------------------------------------------------


def left_before_a_drain() -> Outcome:
    """The session of the cold call ends with its result, and the signal comes just after that."""
    hold = {"cold_seconds": 1.0, "drain_delay_seconds": 0.1, "drain_seconds": 0.1}
    the_call = call(1, 1, 1, 1, habit="leaves unread", questions=1, between=1.0)
    return played(the_call, Fault("term", 4.2, 0.1), replicas=1, **hold)


def given_up_by_a_former_owner() -> Outcome:
    """Who took it over ends in its drain, and the client comes back with its state after that of the owner expired."""
    cut_off, drain = Fault("one way", 5.0, 6.0), Fault("term", 12.0, 1.0, target=2)
    hold = {"ttl_seconds": 16.0, "drain_delay_seconds": 0.5, "drain_seconds": 1.0}
    return played(call(1, 3, 1, think=8.0, questions=2), cut_off, drain, **hold)


def declined_in_a_drain() -> Outcome:
    """A replica declines the open questions of a run before it cancels it, and ends meanwhile."""
    the_call = call(tool="search", questions=2, refuses="late 503", **{"at once": True})
    hold = {"quiet_seconds": 2.0, "drain_seconds": 1.0}
    return played(the_call, Fault("term", 0.0, 15.0, when="asking"), replicas=1, **REPLAY, **hold)


def made_elsewhere() -> Outcome:
    return played(task(questions=1, made=8.0, asks_first=False), Fault("kill", 7.0, 6.0), **TASKS)


def ended_twice() -> Outcome:
    the_task = task(3, 3, 1, 2, 3, habit="cancels", fragile=True, before=1.0, questions=2)
    return played(the_task, Fault("one way", 0.0, 6.0, target=3), **TASKS)


def told_at_the_end(reason: str, fault: Fault, *events: str, age: float = 0.0, **script: Any) -> Outcome:
    """Its client was told this in place of its result, after a fault and lines of a log that had to do with others."""
    outcome = played(call(think=1.0, questions=1, **script), replicas=1)
    (record,) = outcome.records
    final = record.final
    assert final is not None
    assert final.state is not None
    record.outcome = "error"
    final.message = {"error": {"code": -32602, "message": "", "data": {"reason": reason}}}
    record.left_unread = True
    if age:
        record.states[final.state] = final.at - age
    fields = {"owner": "", "owner_is_dead": False, "request_id": "", "round": 1}
    outcome.lines += [Line(record.began, "gw-1", "info", event, fields) for event in events]
    outcome.faults = [fault]
    return outcome


def ages(seconds: float) -> Change:
    """The state was so old when its client came."""

    def changed(outcome: Outcome) -> None:
        final = outcome.records[0].final
        assert final is not None
        outcome.records[0].states[final.state or ""] = final.at - seconds

    return changed


def keys_end(after: float, outcome: Outcome) -> Outcome:
    """The keys of the state ended so long after the call began."""
    outcome.plan.config["state"] = {}
    outcome.deaths = [(outcome.records[0].began + after, "gw-1")]
    return outcome


def got_other_answers() -> Outcome:
    outcome = played(call(think=1.0, questions=1), replicas=1)
    (record,) = outcome.records
    record.told[-1].carried, outcome.faults = {"c1/0": "c1/0=9"}, [Fault("kill", 1.0, 2.0)]
    fields = {"owner": "", "owner_is_dead": False, "request_id": ""}
    outcome.lines.append(Line(record.began, "gw-1", "info", "call.taken_over", fields))
    return outcome


def came_long_before(outcome: Outcome) -> None:
    """The first event id, while everything was slow already."""
    outcome.ledger.runs[0].began -= 2.0
    outcome.faults = [
        replace(each, at=each.at - 2.0, seconds=each.seconds + 2.0) if each.kind == "slow" else each
        for each in outcome.faults
    ]


KILLED: Final = Fault("kill", 60.0, 2.0)
WITHOUT_COLD: Final = (unsaid("call.cooled"),)

EXCUSES: Final = (
    # a server that waits for an answer in vain
    Excuse("a_refusal_of_a_question_does_not_arrive", "silent for 60 s", (asks_in_vain_no_more,)),
    Excuse("a_question_on_the_side_stream_comes_while_no_replica_runs", "silent for 60 s", (asks_in_vain_no_more,)),
    Excuse(
        "a_question_is_withdrawn_in_each_run_before_its_client_hears_of_it",
        "ended without a cause: gave up",
        (unscripted("hangs"),),
    ),
    Excuse(
        "a_question_of_the_side_stream_is_left_unread_in_a_drain", "call_lost", (has_read_all, asks_after_the_death)
    ),
    # a client that comes back late
    Excuse("a_client_whose_replica_was_killed_asks_one_that_is_cut_off", INVALID, (is_heard,)),
    Excuse("a_leg_of_another_replica_is_cut_while_its_owner_is_cut_off", INVALID, (without("cut"), without("part"))),
    Excuse("a_leg_is_lost_with_a_replica_and_its_owner_is_cut_off_then", INVALID, (is_heard, without("part"))),
    Excuse(
        "an_owner_whose_clock_was_set_does_not_hear_of_its_client", INVALID, each(target=2, seconds=1.0, kind="stall")
    ),
    Excuse(
        "a client comes back through a replica that does not reach the owner, in a grace period of 6.0 s",
        INVALID,
        (instead(), instead(Fault("peers", 4.0, 2.0, 2, 3)), instead(Fault("stop", 4.0, 2.0, 2))),
    ),
    Excuse(
        "a replica does not tell an owner whose state is of the future that its client is back",
        INVALID,
        each(target=3, seconds=2.0, kind="stall"),
    ),
    Excuse(
        "a_replica_that_hears_nothing_of_the_owner_has_no_session_for_its_call", INVALID, (unsaid("call.taken_over"),)
    ),
    Excuse(
        "a client loses the grace period at a replica that it does not reach",
        INVALID,
        each("part", seconds=4.0, at=6.0, target=3, kind="stop"),
    ),
    Excuse(
        "a client loses the grace period where no link leads to the owner",
        INVALID,
        (*map(is_not_told, (2, 3, 4)), *each(seconds=3.0, at=4.0, target=2, kind="part")),
    ),
    # a state that is too old, or whose call went cold
    Excuse("a_client_that_lost_its_replica_waits_for_a_link_that_is_down", INVALID, (first_link_is_up,)),
    Excuse("a_call_goes_cold_whose_questions_did_not_reach_its_client", INVALID, (is_never_stalled,)),
    Excuse("the_call_of_the_faster_of_two_rivals_goes_cold", f"c10: was told at 12.80 that {INVALID}", WITHOUT_COLD),
    Excuse("a copy of a request is refused only if its call went cold meanwhile, after 2.0 s", INVALID, WITHOUT_COLD),
    Excuse(
        "a repeat of a request whose reply was lost is refused only if its call went cold, after 2.0 s",
        INVALID,
        (*WITHOUT_COLD, instead()),
    ),
    Excuse(
        "a client had not read the questions when its connection broke, and its call went cold after 2.0 s",
        INVALID,
        (*WITHOUT_COLD, is_heard),
    ),
    Excuse(partial(told_at_the_end, "invalid_request_state", KILLED, "call.cooled"), INVALID, WITHOUT_COLD),
    Excuse(
        lambda: keys_end(0.1, told_at_the_end("invalid_request_state", KILLED)),
        INVALID,
        (lambda outcome: keys_end(-0.1, outcome),),
    ),
    *(
        Excuse(
            partial(told_at_the_end, reason, Fault("jump", 0.0, 60.0, amount=90.0), age=95.0),
            reason,
            (ages(85.0), ages(185.0), *each(amount=0.0)),
        )
        for reason in ("session_lost", "call_lost")
    ),
    *(
        Excuse(f"an owner that hears of the end of a leg gives up its client: {kind}", INVALID, each(kind, at=1.9))
        for kind in ("peers", "part")
    ),
    Excuse(
        "a question comes before the first event id of its call",
        "ended without a cause",
        (without("slow"), came_long_before),
    ),
    Excuse(got_other_answers, "answered c1/0=9, and got a result with c1/0=1", (unsaid("call.taken_over"),)),
    Excuse(
        partial(told_at_the_end, "call_lost", Fault("jump", 1.0, 2.0), "call.taken_over", aside=True),
        "ended without a cause: error call_lost",
        (unsaid("call.taken_over"),),
    ),
    Excuse("a_state_whose_key_is_of_one_process_ages_on_its_way", INVALID, (has_no_keys,)),
    Excuse("a_state_whose_key_is_of_a_process_that_was_started_again_ages_on_its_way", INVALID, (has_no_keys,)),
    # a call that is given to another replica, taken over, or given up
    Excuse(
        "the_taker_of_a_call_stands_still_when_a_drain_ends", GIVEN, each("stop", target=1, seconds=4.0, kind="jump")
    ),
    Excuse(
        "the_taker_of_a_call_stands_still_as_it_is_given", GIVEN, each("stall", target=1, seconds=2.4, kind="jump")
    ),
    Excuse(
        "a_link_fails_before_the_replica_behind_it_ends_the_leg_of_a_draining_one",
        "did not complete its reply",
        (without("peers"),),
    ),
    Excuse(
        "a_replica_that_is_cut_off_hears_only_from_one_that_does_not_reach_the_owner",
        "which lives",
        (lambda outcome: put(outcome, faults=[each for each in outcome.faults if each.kind == "peers"]),),
    ),
    Excuse(
        given_up_by_a_former_owner,
        LOST,
        (
            unsaid("call.taken_over"),
            unsaid("exchange.finished"),
            lambda outcome: put(outcome, deaths=[each for each in outcome.deaths if each[0] > 1018.0]),
        ),
    ),
    # drains
    Excuse(left_before_a_drain, LOST, (*WITHOUT_COLD, drains_earlier, has_read_all)),
    Excuse(declined_in_a_drain, "is left running", (unscripted("refuses"),)),
    Excuse(
        "a_client_that_reads_nothing_until_a_drain_is_over_loses_the_reply",
        "c3: ended without a cause: broken",
        (drains_later,),
    ),
    Excuse("a_client_that_reads_nothing_until_a_drain_is_over_finds_no_session", LOST, (is_heard,)),
    Excuse("a_call_that_passes_through_a_drain_outlasts_it", "c2: ended without a cause: error st", (drains_later,)),
    Excuse(
        "a_call_begins_at_the_successor_of_a_process_whose_drain_was_cut_short",
        "which drained",
        (lambda outcome: put(outcome, deaths=[], faults=[]),),
    ),
    Excuse("an_answer_keeps_a_process_that_had_a_second_signal", "which drained", (unscripted("refuses"),)),
    Excuse(
        "a_second_signal_of_another_fault_cuts_a_drain_short",
        "c1: waited at gw-1 u",
        (lambda outcome: put(outcome, second_signals=[]),),
    ),
    # sessions and connections
    Excuse(
        "a_session_ends_with_a_call_that_had_it_before_and_came_again",
        LOST,
        (lambda outcome: put(outcome, deaths=[]), comes_at_once),
    ),
    Excuse(questions_of_two_calls, "answered for it", (has_other_callers,)),
    Excuse(
        ended_under_its_call,
        "server: a session was deleted while c1 ran in it",
        (lambda outcome: put(outcome.records[0], final=None),),
    ),
    Excuse(
        "a_replica_stands_still_for_longer_than_a_request_of_its_own_may_take",
        "left: server sessions: 1",
        each(seconds=9.9),
    ),
    Excuse("a_link_hides_that_the_server_closed_a_connection", "call_lost", (instead(),)),
    # children
    Excuse(
        "a_call_comes_in_the_pause_after_children_were_killed_in_a_row",
        "3 times in a row",
        (is_told_late, lambda outcome: outcome.faults.pop(0)),
    ),
    Excuse("a_child_is_killed_while_everything_is_slow", "ended without a cause", (without("slow"),)),
    # listeners
    Excuse(
        "a_session_subscribes_at_a_replica_that_found_its_home_silent", "l1: did not hear of change ", (fails_earlier,)
    ),
    Excuse(
        "a_listener_waits_for_a_replica_that_heard_late_of_its_drain",
        "l1: its stream from ",
        (unsaid("server.started"),),
    ),
    Excuse(
        "a_session_ends_where_a_clock_keeps_its_home_from_hearing_of_it",
        "results",
        each("jump", target=2, seconds=3.0, kind="drift"),
    ),
    # tasks
    Excuse(made_elsewhere, "was served without a task", (lambda outcome: outcome.tasks[0].requests.clear(),)),
    Excuse(ended_twice, "t1: ended twice", (instead(),)),
    Excuse(
        "an answer that comes after the end of its task changes nothing",
        "run 1 got no answer to t1/0",
        (lambda outcome: outcome.tasks[0].call.script.update(patience=3.0),),
    ),
    Excuse(
        "an answer that the server refuses is asked for again: 503",
        "was refused without a cause: another one",
        (lambda outcome: outcome.tasks[0].refusals.insert(0, "another one"),),
    ),
)


@pytest.mark.parametrize("excuse", EXCUSES, ids=range(len(EXCUSES)))
def test_what_goes_wrong_is_excused_by_its_cause_only(excuse: Excuse) -> None:
    for number, change in enumerate(excuse.changes):
        outcome = story(excuse.told) if isinstance(excuse.told, str) else excuse.told()
        # What two replicas have shared, neither of them may end.
        assert [each for each in complaints(outcome) if not each.startswith("left: server sessions")] == []
        assert not any(excuse.says in each for each in complaints(outcome))
        _ = change(outcome)
        assert any(excuse.says in each for each in complaints(outcome)), (excuse.told, number)

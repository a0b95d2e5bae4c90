"""Every history that once failed, as small as it could be made, is run again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.history import History, Outcome
from tests.simulation.oracle import complaints
from tests.simulation.plan import of_text

STORIES = sorted((Path(__file__).parent / "stories").glob("*.json"))


def story(name: str) -> Outcome:
    """What becomes of the history in a file of `stories/`."""
    return History(of_text((Path(__file__).parent / "stories" / f"{name}.json").read_text())).run()


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_that_once_went_wrong_goes_well(path: Path) -> None:
    assert complaints(story(path.stem)) == []


@pytest.mark.parametrize(
    "name", ["a_refusal_of_a_question_does_not_arrive", "a_question_on_the_side_stream_comes_while_no_replica_runs"]
)
def test_only_a_question_in_vain_excuses_the_error_that_a_server_was_silent(name: str) -> None:
    outcome = story(name)
    for run in outcome.ledger.runs:
        run.is_unheard = False
    for record in outcome.records:
        _ = record.call.script.pop("refuses", None)
    assert any("silent for 60 s" in each for each in complaints(outcome))


def test_only_a_client_that_nobody_could_answer_is_excused_for_being_away() -> None:
    outcome = story("a_client_whose_replica_was_killed_asks_one_that_is_cut_off")
    for record in outcome.records:
        for told in record.told:
            told.unheard_since = None
    assert any("its state is invalid" in each for each in complaints(outcome))


def test_only_a_replica_that_fails_itself_may_believe_one_that_does_not_reach_an_owner() -> None:
    outcome = story("a_replica_that_is_cut_off_hears_only_from_one_that_does_not_reach_the_owner")
    assert any(line.event == "call.taken_over" for line in outcome.lines)
    outcome.faults = [fault for fault in outcome.faults if fault.kind == "peers"]
    assert any("which lives" in each for each in complaints(outcome))


@pytest.mark.parametrize("is_read", [True, False])
def test_only_a_question_that_was_left_unread_before_its_replica_ended_excuses_its_loss(is_read: bool) -> None:  # noqa: FBT001
    outcome = story("a_question_of_the_side_stream_is_left_unread_in_a_drain")
    (record,), (run,) = outcome.records, outcome.ledger.runs
    if is_read:
        record.unread.clear()
    else:
        run.asked_aside = outcome.deaths[0][0] + 0.1
    assert any("call_lost" in each for each in complaints(outcome))


def test_only_a_leg_that_was_cut_while_no_link_led_to_its_owner_excuses_that_its_client_came_back_late() -> None:
    outcome = story("a_leg_of_another_replica_is_cut_while_its_owner_is_cut_off")
    assert [record.outcome for record in outcome.records].count("error") == 2, "another one has lost its answer"
    faults = outcome.faults
    for kind in ("cut", "part"):
        outcome.faults = [fault for fault in faults if fault.kind != kind]
        assert any("its state is invalid" in each for each in complaints(outcome)), kind


@pytest.mark.parametrize("is_parted", [True, False])
def test_only_a_leg_that_was_lost_before_its_owner_was_cut_off_excuses_that_its_client_came_back_late(
    is_parted: bool,  # noqa: FBT001
) -> None:
    outcome = story("a_leg_is_lost_with_a_replica_and_its_owner_is_cut_off_then")
    (record,) = outcome.records
    assert any(told.reason == "owner_stalled" and told.unheard_since is not None for told in record.told)
    if is_parted:
        for told in record.told:
            told.unheard_since = None
    else:
        outcome.faults = [fault for fault in outcome.faults if fault.kind != "part"]
    assert any("its state is invalid" in each for each in complaints(outcome))


@pytest.mark.parametrize("change", [{"target": 1}, {"seconds": 4.0}, {"kind": "jump"}])
def test_only_a_taker_that_stands_still_at_the_end_of_the_drain_excuses_that_a_call_is_lost(
    change: dict[str, Any],
) -> None:
    outcome = story("the_taker_of_a_call_stands_still_when_a_drain_ends")
    outcome.faults = [replace(fault, **change) if fault.kind == "stop" else fault for fault in outcome.faults]
    assert any("to which another one gave this call" in each for each in complaints(outcome))


@pytest.mark.parametrize("change", [{"target": 1}, {"seconds": 2.4}, {"kind": "jump"}])
def test_only_a_taker_that_stands_still_for_long_as_it_is_given_a_call_excuses_its_loss(
    change: dict[str, Any],
) -> None:
    outcome = story("the_taker_of_a_call_stands_still_as_it_is_given")
    outcome.faults = [replace(fault, **change) if fault.kind == "stall" else fault for fault in outcome.faults]
    assert any("to which another one gave this call" in each for each in complaints(outcome))


@pytest.mark.parametrize("is_late", [True, False])
def test_only_as_many_kills_just_before_a_call_excuse_that_no_child_is_started_for_it(is_late: bool) -> None:  # noqa: FBT001
    outcome = story("a_call_comes_in_the_pause_after_children_were_killed_in_a_row")
    (record,) = outcome.records
    assert ([fault.kind for fault in outcome.faults], record.outcome) == (["child"] * 3, "error")
    if is_late:
        assert record.final is not None
        record.final.at += 2.0
    else:
        outcome.faults = outcome.faults[1:]
    assert any("3 times in a row" in each for each in complaints(outcome))


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_end_of_a_child_is_heard_late_only_while_everything_is_slow(is_slow: bool) -> None:  # noqa: FBT001
    outcome = story("a_child_is_killed_while_everything_is_slow")
    if not is_slow:
        outcome.faults = [each for each in outcome.faults if each.kind != "slow"]
    assert any("ended without a cause" in each for each in complaints(outcome)) is not is_slow


@pytest.mark.parametrize("change", [{"target": 2}, {"seconds": 1.0}, {"kind": "stall"}])
def test_only_a_clock_that_differs_excuses_that_an_owner_did_not_hear_of_its_client(change: dict[str, Any]) -> None:
    outcome = story("an_owner_whose_clock_was_set_does_not_hear_of_its_client")
    (fault,) = outcome.faults
    outcome.faults = [replace(fault, **change)]
    assert any("its state is invalid" in each for each in complaints(outcome))


def test_only_a_tool_that_hangs_excuses_that_its_client_gives_up_after_many_rounds() -> None:
    """Its server withdraws a question in each run before the quiet window is over, and then asks another one."""
    outcome = story("a_question_is_withdrawn_in_each_run_before_its_client_hears_of_it")
    (record,) = outcome.records
    assert record.outcome == "gave up"
    del record.call.script["hangs"]
    assert complaints(outcome) == ["c11: ended without a cause: gave up "]

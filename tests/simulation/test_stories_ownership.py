"""Stories of who owns a call, with more to check than what its client was told."""

from dataclasses import replace

import pytest

from tests.simulation import ladder
from tests.simulation.history import History
from tests.simulation.network import Connection
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault
from tests.simulation.told import NO_EVENTS, OWN_KEYS, REPLAY, call, plan, played, replies


@pytest.mark.parametrize(("fault", "session"), [("part", "s2"), ("one way", "s2"), ("kill", "s1")])
def test_a_call_after_its_url_leaves_a_session_that_the_former_owner_still_hears(fault: str, session: str) -> None:
    """Only the former owner reads the side stream, on which this server asks; it would refuse the question."""
    the_call = call(2, 1, questions=1, aside=True, urls="later")
    outcome = played(the_call, Fault(fault, 1.0, 6.0, target=2))
    assert replies(outcome)[:2] == ["gw-2 200 input_required", "gw-1 200 input_required"]
    assert replies(outcome)[-1].endswith("200 complete")
    assert [(run.session, run.answers) for run in outcome.ledger.of("c1")] == [
        ("s1", ["c1/0=1"]),
        (session, ["c1/0=2"]),
    ]
    assert complaints(outcome) == []


def test_a_former_owner_cancels_its_run_once_the_call_was_run_again_elsewhere() -> None:
    outcome = played(call(2, 1, 2, tool="search", questions=2), Fault("part", 1.0, 6.0, target=2), kind=NO_EVENTS)
    assert replies(outcome)[1:] == ["gw-1 200 input_required", "gw-2 200 complete"]
    former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert former.cancelled is not None
    assert former.cancelled < 1015.0
    assert complaints(outcome) == []


def test_a_former_owner_cancels_its_run_though_the_next_one_has_not_begun() -> None:
    """Messages take long while the call is run again, so the client comes back with a state of no session."""
    the_call = call(2, 1, 2, 2, 2, 1, tool="search", questions=2)
    faults = Fault("part", 1.0, 4.0, target=2), Fault("slow", 3.8, 15.0)
    outcome = played(the_call, *faults, seed=9, kind=NO_EVENTS, legs={"limit_seconds": 1.0})
    former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert former.cancelled is not None
    assert former.cancelled < later.began
    assert complaints(outcome) == []


@pytest.mark.parametrize("tool", ["pay", "search"])
def test_a_call_that_a_dead_replica_may_have_sent_again_after_visits_to_urls_is_not_sent_twice(tool: str) -> None:
    """The owner dies when it has sent the call again, and its client comes with the state of before once more."""
    the_call = call(2, 2, 1, 1, think=1.0, tool=tool, questions=1, urls=True, before=1.0)
    outcome = played(the_call, Fault("kill", 2.5, 40.0, target=2))
    assert complaints(outcome) == []
    if tool == "search":
        assert replies(outcome)[-1].endswith("200 complete")
        return
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 owner_lost"]
    assert len(outcome.ledger.of("c1")) == 2
    final = outcome.records[0].final
    assert final is not None
    assert "nothing tells whether the call has been sent again since" in str(final.error)


@pytest.mark.parametrize("has_own_keys", [True, False])
def test_a_result_of_a_call_that_was_taken_over_in_a_drain_outlives_it_unread(
    has_own_keys: bool,  # noqa: FBT001
) -> None:
    """The call was cold. No other call is sent to the session where it ends, so the pool does not keep that."""
    the_call = call(1, 1, 1, 1, think=3.0, habit="leaves unread", questions=1, between=1.0)
    hold = {"cold_seconds": 1.0, "drain_delay_seconds": 1.5, "drain_seconds": 1.0}
    keys = OWN_KEYS if has_own_keys else {}
    outcome = played(the_call, Fault("term", 3.6, 2.0, target=1), replicas=1, **keys, **hold)
    assert replies(outcome)[-1].endswith("invalid_request_state" if has_own_keys else "200 complete")
    assert len(outcome.ledger.of("c1")) == 1
    assert outcome.left == [], "nobody can read in a session whose states no process can open: it is ended"
    assert complaints(outcome) == []


def test_a_drain_cancels_a_run_that_no_replica_can_resume() -> None:
    """Its client has left for a while, so no state is sealed any more; it comes back at another replica."""
    the_call = call(1, 1, 2, habit="leaves", questions=1, hangs=20.0)
    outcome = played(the_call, Fault("term", 4.0, 0.0), grace_seconds=20.0, drain_seconds=1.0, **REPLAY)
    *former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert [run.result for run in former if run.cancelled is not None] == [None, None]
    assert complaints(outcome) == []


def test_a_replica_takes_a_call_over_from_the_one_that_had_done_so_before() -> None:
    """It has passed the request on while the owner was silent; the other one is made to end when the owner is back.

    Only that excuses it: the owner lives by then, and no fault is near.
    """
    the_call = call(1, 3, think=1.0, questions=1, hangs=20.0)
    outcome = played(the_call, Fault("one way", 1.0, 6.0, target=1), Fault("term twice", 14.0, 2.0, target=2))
    took = [(line.process, line.fields["owner"]) for line in outcome.lines if line.event == "call.taken_over"]
    assert took == [("gw-2", "gw-1"), ("gw-3", "gw-1")]
    assert replies(outcome) == ["gw-1 200 input_required", "gw-3 200 complete"]
    assert complaints(outcome) == []
    survived = replace(outcome, deaths=[each for each in outcome.deaths if each[1] != "gw-2"])
    assert any("took a call of gw-1 over" in each for each in complaints(survived))


@pytest.mark.parametrize(
    ("habit", "outcome"),
    [
        ("comes back", "result"),
        ("comes back late", "result"),
        ("hangs up", "abandoned"),
        ("hangs up away", "abandoned"),
    ],
)
def test_a_mirrored_client_leaves_the_stream_of_its_call(habit: str, outcome: str) -> None:
    """It takes another stream at another replica, and leaves that one too."""
    script = {"questions": 2, "before": 1.0, "between": 1.0, "notes": True}
    played_out = played(call(1, 2, 3, habit=habit, path="/modern", is_legacy=True, **script))
    assert [record.outcome for record in played_out.records] == [outcome]
    assert complaints(played_out) == []


def test_no_error_is_written_into_a_stream_that_answers_no_request() -> None:
    """The power of its call's owner fails; the replica that relays the stream breaks it, to be asked for the rest."""
    script = {"questions": 2, "before": 1.0, "between": 1.0, "notes": True}
    mirrored = {"path": "/modern", "is_legacy": True}
    the_call = call(1, 3, 1, 2, 2, 2, think=0.2, habit="comes back", **mirrored, **script)
    outcome = played(the_call, Fault("power", 3.86, 2.0, target=1))
    assert [line.process for line in outcome.lines if line.event == "peer.failed"] == ["gw-2"]
    assert [record.outcome for record in outcome.records] == ["broken"]
    assert complaints(outcome) == []


def test_the_ended_stream_of_a_cancelled_call_is_opened_again_only_a_few_times() -> None:
    """The server cancels the call, and ends its stream without an answer, which need not mean that the call ended."""
    history = History(plan(call(think=1.0, habit="goes", questions=0, before=6.0), replicas=1))
    story, outcome = ladder.watch(history), history.run()
    assert outcome.ledger.runs[0].cancelled is not None
    assert 2 < len([line for _, line in story if "GET  from" in line]) < 12
    assert complaints(outcome) == []


def test_a_credential_is_accepted_while_its_replica_stands_still() -> None:
    """A replica that takes a call over has the server see the credential of its client, in a ping."""
    the_call, killed = call(2, 1, think=1.0, questions=1), Fault("kill", 0.5, 30.0, target=2)
    history = History(plan(the_call, killed, replicas=2))

    def watch(_connection: Connection, _: bool, data: bytes) -> None:  # noqa: FBT001
        if b'"method":"ping"' in data:
            history.network.watchers.remove(watch)
            history.gateway(1).freeze()
            history.later(12.0, history.gateway(1).thaw)

    history.network.watchers.append(watch)
    outcome = history.run()
    assert watch not in history.network.watchers
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 complete"]

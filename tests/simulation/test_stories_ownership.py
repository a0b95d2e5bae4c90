"""Stories of who owns a call: replicas that lose sight of each other, and clients that move between them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulation import oracle
from tests.simulation.history import History, Outcome
from tests.simulation.plan import Call, Fault, Plan
from tests.simulation.server import Kind


def call(
    *replicas: int, at: float = 0.0, think: float = 3.0, habit: str = "plain", tool: str = "pay", **script: Any
) -> Call:
    """A call of one client, whose requests go to these replicas in turn."""
    return Call("c1", at, tool, "ann", script, think, habit, replicas)


def played(
    the_call: Call,
    *faults: Fault,
    replicas: int = 3,
    has_events: bool = True,
    answers_late: bool = False,
    has_own_keys: bool = False,
    route: dict[str, Any] | None = None,
    **hold: Any,
) -> Outcome:
    """What became of one call in a cluster that lives through these faults."""
    settings = {"ttl_seconds": 90.0, "drain_delay_seconds": 1.0, "drain_seconds": 4.0, **hold}
    config = {"hold": settings, "sessions": {"idle_seconds": 30}, "route": route or {}}
    if has_own_keys:
        config |= {"state": {}, "replica": {"id": "gw-1"}}
    kind = Kind(has_events=has_events, answers_late=answers_late)
    return History(Plan(1, replicas, kind, config, (the_call,), faults)).run()


def replies(outcome: Outcome) -> list[str]:
    """What the client was told by each replica."""
    return [
        f"gw-{told.replica} {told.status} {told.reason or told.result.get('resultType')}"
        for told in outcome.records[0].told
    ]


def complaints(outcome: Outcome) -> list[str]:
    """Those of the oracle, but for the session that two replicas have shared: neither of them may end it."""
    return [each for each in oracle.complaints(outcome) if not each.startswith("left: server sessions")]


def test_a_former_owner_passes_a_later_round_to_the_replica_that_asked_it() -> None:
    outcome = played(call(2, 1, 2, questions=2), Fault("part", 1.0, 6.0, target=2))
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 input_required", "gw-2 200 complete"]
    assert complaints(outcome) == []


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
    outcome = played(call(2, 1, 2, tool="search", questions=2), Fault("part", 1.0, 6.0, target=2), has_events=False)
    assert replies(outcome)[1:] == ["gw-1 200 input_required", "gw-2 200 complete"]
    former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert former.cancelled is not None
    assert former.cancelled < 1015.0
    assert complaints(outcome) == []


@pytest.mark.parametrize("think", [0.2, 4.0])
def test_a_former_owner_whose_grace_has_passed_passes_the_call_on(think: float) -> None:
    """Its client has left, and comes back through a replica that hears nothing of the owner, and so runs it again."""
    the_call = call(1, 1, 2, 1, think=think, habit="leaves", tool="search", questions=2, between=6.0)
    outcome = played(the_call, Fault("one way", 1.2, 8.0, target=1), has_events=False)
    assert replies(outcome) == ["gw-1 200 input_required", "gw-2 200 input_required", "gw-1 200 complete"]
    former, later = outcome.ledger.of("c1")
    assert former.cancelled is not None
    assert later.answers == ["c1/0=1", "c1/1=2"]
    assert complaints(outcome) == []


def test_an_answer_counts_though_its_call_is_lost_before_the_server_has_said_that_it_has_it() -> None:
    the_call = call(1, think=2.0, habit="one by one", tool="search", questions=2, **{"at once": True})
    outcome = played(the_call, Fault("server", 2.2, 1.0), has_events=False, answers_late=True)
    assert replies(outcome) == ["gw-1 200 input_required", "gw-1 200 input_required", "gw-1 200 complete"]
    assert [run.answers for run in outcome.ledger.of("c1")] == [[], ["c1/0=1", "c1/1=2"]]
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("has_own_keys", "end", "runs"),
    [(True, "gw-1 400 invalid_request_state", 1), (False, "gw-1 200 complete", 2)],
)
def test_a_drain_leaves_a_lost_call_to_the_next_process_if_that_can_open_its_state(
    end: str,
    runs: int,
    has_own_keys: bool,  # noqa: FBT001
) -> None:
    """It may be run again once its client, who thinks until then, comes back."""
    cut, drain = Fault("cold cut", 1.0, 0.0), Fault("term", 2.0, 6.0)
    the_call = call(1, think=8.0, tool="search", questions=1)
    outcome = played(the_call, cut, drain, replicas=1, has_events=False, has_own_keys=has_own_keys)
    assert replies(outcome) == ["gw-1 200 input_required", end]
    assert len(outcome.ledger.of("c1")) == runs
    assert complaints(outcome) == []


def test_a_former_owner_cancels_its_run_though_the_next_one_has_not_begun() -> None:
    """Messages take long while the call is run again, so the client comes back with a state of no session."""
    the_call = call(2, 1, 2, 2, 2, 1, tool="search", questions=2)
    config = {"hold": {"ttl_seconds": 90.0}, "legs": {"limit_seconds": 1.0}}
    faults = Fault("part", 1.0, 4.0, target=2), Fault("slow", 3.8, 15.0)
    outcome = History(Plan(9, 3, Kind(has_events=False), config, (the_call,), faults)).run()
    former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert former.cancelled is not None
    assert former.cancelled < later.began
    assert complaints(outcome) == []


def test_an_owner_does_not_cancel_a_call_that_another_replica_resumed_when_its_client_left() -> None:
    """The owner learns that its client left once it is reachable again, when the call has gone on elsewhere."""
    the_call = call(2, 2, 1, 1, 3, 3, habit="leaves", questions=2, between=6.0)
    outcome = played(the_call, Fault("part", 4.05, 6.0, target=2))
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 input_required", "gw-3 200 complete"]
    assert outcome.ledger.of("c1")[0].cancelled is None
    assert complaints(outcome) == []


def test_an_owner_that_reaches_no_replica_does_not_cancel_a_call_that_its_client_may_continue_there() -> None:
    """What the owner sends does not arrive, so the client that left it is served by the replicas that miss it."""
    the_call = call(2, 2, 1, 1, 3, 3, habit="leaves", questions=2, between=6.0)
    outcome = played(the_call, Fault("one way", 2.0, 6.0, target=2))
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 input_required", "gw-3 200 complete"]
    assert len(outcome.ledger.of("c1")) == 1
    assert complaints(outcome) == []


@pytest.mark.parametrize("fault", ["part", "stop"])
def test_a_replica_that_only_asks_again_for_a_silent_owner_leaves_the_call_to_it(fault: str) -> None:
    """The first replica is down when the client begins, so that it goes on with the newer one of its two states."""
    the_call = call(3, 2, 1, 1, 1, 3, 3, at=0.6, habit="asks again", questions=1)
    faults = Fault("kill", 0.5, 0.6, target=3), Fault(fault, 3.0, 6.0, target=2)
    outcome = played(the_call, *faults, has_events=False)
    assert replies(outcome)[:2] == ["gw-2 200 input_required", "gw-1 200 input_required"]
    assert {each[5:] for each in replies(outcome)[2:-1]} == {"503 owner_stalled"}
    assert replies(outcome)[-1].endswith("200 complete")
    assert complaints(outcome) == []


@pytest.mark.parametrize("replicas", [(3, 2, 2, 1, 3), (3, 2, 2, 1, 1, 3)])
def test_a_client_that_obeys_a_503_finds_its_call_within_the_grace_period(replicas: tuple[int, ...]) -> None:
    """It leaves the owner, and comes back at once, through a replica that does not reach the owner."""
    the_call = call(*replicas, at=0.6, habit="leaves", questions=1, between=6.0)
    faults = Fault("kill", 0.5, 0.6, target=3), Fault("peers", 2.0, 15.0, target=2, other=1)
    outcome = played(the_call, *faults, has_events=False)
    assert "gw-1 503 owner_stalled" in replies(outcome)
    assert replies(outcome)[-1] == "gw-3 200 complete"
    assert complaints(outcome) == []


def test_a_dead_owners_call_that_was_cancelled_is_not_resumed_once_more() -> None:
    """The client comes back 4 s after it left the replica that had taken its call over."""
    the_call = call(2, 3, 3, 3, 1, 1, habit="leaves", questions=1, between=9.0)
    outcome = played(the_call, Fault("kill", 2.0, 40.0, target=2), grace_seconds=1.5)
    assert replies(outcome) == ["gw-2 200 input_required", "gw-3 400 invalid_request_state"]
    assert complaints(outcome) == []


def test_the_later_of_two_runs_of_a_call_that_nobody_holds_is_continued() -> None:
    """Its client leaves the first one while that works, comes back elsewhere, and answers the next round there."""
    the_call = call(1, 1, 2, 1, 2, think=0.5, habit="leaves", questions=2, between=1.0)
    outcome = played(the_call, route={"continuation": "replay"})
    assert replies(outcome)[:2] == ["gw-1 200 input_required", "gw-2 200 input_required"]
    assert replies(outcome)[-1].endswith("200 complete")
    _, left, *_, last = outcome.ledger.of("c1")
    assert left.cancelled is not None
    assert last.answers == ["c1/0=1", "c1/1=2"]
    assert complaints(outcome) == []


def test_a_result_that_no_client_has_come_for_outlives_the_drain_of_its_replica() -> None:
    """The server withdraws its question, so the call ends well, and its session would be idle."""
    the_call = call(1, 2, think=6.0, questions=1, patience=1.5)
    outcome = played(the_call, Fault("term", 1.0, 60.0, target=1), drain_seconds=2.0)
    assert replies(outcome) == ["gw-1 200 input_required", "gw-2 200 complete"]
    assert len(outcome.ledger.of("c1")) == 1
    assert complaints(outcome) == []


@pytest.mark.parametrize(
    ("replicas", "hold"),
    [((3, 1, 1, 1, 1, 1), {}), ((3, 1, 1, 1, 1, 3), {}), ((3, 1, 1, 1, 1, 1), {"ttl_seconds": 15.0})],
    ids=["comes to the former owner", "comes there later", "and that does not hear of it"],
)
def test_who_asked_for_visits_to_urls_is_the_one_that_sends_the_call_again(
    replicas: tuple[int, ...], hold: dict[str, Any]
) -> None:
    """The owner stalls, and another replica takes its call over: the stream tells both of them of the URLs.

    The client accepts what the other one asked, does not read the reply, and goes on. No session ends under the call.
    """
    script = {"questions": 1, "urls": "later", "logs": True, "between": 60.0 if hold else 1.0}
    the_call = call(*replicas, think=1.0, habit="leaves unread", **script)
    outcome = played(the_call, Fault("stop", 2.9, 6.0, target=3), **hold)
    assert [run.result is not None for run in outcome.ledger.of("c1")] == [False, True]
    assert outcome.ledger.deleted == []
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


def test_a_silent_replica_that_may_have_sent_a_call_again_after_visits_to_urls_keeps_it() -> None:
    the_call = call(2, 2, 1, 1, think=1.0, habit="leaves for a moment", questions=1, urls=True, before=4.0)
    outcome = played(the_call, Fault("stop", 5.3, 3.0, target=2))
    assert "gw-1 503 owner_stalled" in replies(outcome)
    assert replies(outcome)[-1].endswith("200 complete")
    assert len(outcome.ledger.of("c1")) == 2
    assert complaints(outcome) == []


def test_a_result_that_its_client_has_not_read_outlives_the_drain_of_its_replica() -> None:
    the_call = call(1, 1, 1, 2, think=1.0, habit="leaves unread", questions=1)
    outcome = played(the_call, Fault("term", 5.0, 60.0, target=1), drain_delay_seconds=0.5, drain_seconds=1.0)
    assert replies(outcome)[-1].endswith("200 complete")
    assert len(outcome.ledger.of("c1")) == 1
    assert complaints(outcome) == []


@pytest.mark.parametrize("has_own_keys", [True, False])
def test_a_result_of_a_call_that_was_taken_over_in_a_drain_outlives_it_unread(
    has_own_keys: bool,  # noqa: FBT001
) -> None:
    """The call was cold. No other call is sent to the session where it ends, so the pool does not keep that."""
    the_call = call(1, 1, 1, 1, think=3.0, habit="leaves unread", questions=1, between=1.0)
    hold = {"cold_seconds": 1.0, "drain_delay_seconds": 1.5, "drain_seconds": 1.0}
    outcome = played(the_call, Fault("term", 3.6, 2.0, target=1), replicas=1, has_own_keys=has_own_keys, **hold)
    assert replies(outcome)[-1].endswith("invalid_request_state" if has_own_keys else "200 complete")
    assert len(outcome.ledger.of("c1")) == 1
    assert outcome.left == [], "nobody can read in a session whose states no process can open: it is ended"
    assert oracle.complaints(outcome) == []


REPLAY = {"continuation": "replay"}


def test_a_cancellation_of_a_run_that_no_replica_can_resume_is_sent_until_it_arrives() -> None:
    """Its replica is cut off when the run is to be cancelled, because its client was asked."""
    outcome = played(call(1, 2, questions=1), Fault("part", 0.5, 15.0, target=1), route=REPLAY, quiet_seconds=2.0)
    former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert former.cancelled is not None
    assert oracle.complaints(outcome) == []


def test_a_drain_cancels_a_run_that_no_replica_can_resume() -> None:
    """Its client has left for a while, so no state is sealed any more; it comes back at another replica."""
    the_call = call(1, 1, 2, habit="leaves", questions=1, hangs=20.0)
    outcome = played(the_call, Fault("term", 4.0, 0.0, target=1), route=REPLAY, grace_seconds=20.0, drain_seconds=1.0)
    *former, later = outcome.ledger.of("c1")
    assert later.result is not None
    assert [run.result for run in former if run.cancelled is not None] == [None, None]
    assert oracle.complaints(outcome) == []


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
    script = {"before": 1.0, "between": 1.0, "notes": True}
    the_call = replace(call(1, 2, 3, habit=habit, questions=2, **script), path="/modern", is_legacy=True)
    played_out = played(the_call)
    assert [record.outcome for record in played_out.records] == [outcome]
    assert complaints(played_out) == []


def test_no_error_is_written_into_a_stream_that_answers_no_request() -> None:
    """The power of its call's owner fails; the replica that relays the stream breaks it, to be asked for the rest."""
    script = {"before": 1.0, "between": 1.0, "notes": True}
    the_call = call(1, 3, 1, 2, 2, 2, think=0.2, habit="comes back", questions=2, **script)
    outcome = played(replace(the_call, path="/modern", is_legacy=True), Fault("power", 3.86, 2.0, target=1))
    assert [line.process for line in outcome.lines if line.event == "peer.failed"] == ["gw-2"]
    assert [record.outcome for record in outcome.records] == ["broken"]
    assert complaints(outcome) == []

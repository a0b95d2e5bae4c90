"""Stories of what could be left behind once everybody is at rest: sessions, and the room that they take."""

import pytest

from tests.simulation.history import History, Line, Outcome
from tests.simulation.network import Connection
from tests.simulation.oracle import complaints
from tests.simulation.plain_http import Request
from tests.simulation.plan import Fault
from tests.simulation.test_stories import story
from tests.simulation.told import NO_EVENTS, OWN_KEYS, call, plan, played


@pytest.mark.parametrize("at", [0.0065, 0.007, 0.0075, 0.008, 0.0085, 0.009])
def test_a_client_that_leaves_while_its_session_is_prepared_leaves_no_session_at_the_server(at: float) -> None:
    """The network becomes slow while the session is opened, or while the tools are listed in it."""
    outcome = played(call(think=2.0, habit="goes"), Fault("slow", at, 10.0), replicas=1, kind=NO_EVENTS)
    assert all(run.ended is not None for run in outcome.ledger.runs)
    assert outcome.left == []


def test_a_result_that_no_other_process_can_read_leaves_no_session_after_a_drain() -> None:
    """The server withdraws its question, and the keys of the states end with the process."""
    the_call = call(think=20.0, habit="abandons", questions=1, patience=1.5)
    outcome = played(the_call, Fault("term", 4.0, 60.0), replicas=1, **OWN_KEYS)
    assert outcome.ledger.of("c1")[0].result is not None
    assert outcome.left == []


def ended_under_its_call() -> Outcome:
    """A legacy client speaks with the server itself; the connection of its call is cut before the reply begins."""
    the_call = call(1, 2, 1, 2, is_legacy=True, questions=1)
    return played(the_call, Fault("slow", 0.0, 15.0), Fault("cold cut", 0.55, 0.0), seed=26, replicas=2)


@pytest.mark.parametrize("is_cut", [True, False])
def test_only_a_session_whose_id_was_lost_between_the_hosts_may_be_left(is_cut: bool) -> None:  # noqa: FBT001
    """Its handshake is repeated in another session; a replica that closes the connection itself has lost it."""
    history = History(plan(call(think=2.0), replicas=1))

    def end(connection: Connection) -> None:
        (transport, _) = (each.transport for each in connection.ends)
        assert transport is not None
        (connection.cut if is_cut else transport.abort)()

    def watch(connection: Connection, _: bool, data: bytes) -> None:  # noqa: FBT001
        if b'"method":"initialize"' in data:
            history.network.watchers.remove(watch)
            history.later(0.0, end, connection)

    history.network.watchers.append(watch)
    outcome = history.run()
    assert outcome.records[0].outcome == "result"
    assert [each for each in outcome.left if "sessions" in each] == (
        [] if is_cut else ["server sessions: 1, at first 0"]
    )


def _at_rest(*faults: Fault) -> Outcome:
    """What became of one call, with faults that had nothing to do with it."""
    outcome = played(call(think=2.0, questions=1), replicas=1)
    assert complaints(outcome) == []
    outcome.faults = list(faults)
    return outcome


def test_only_a_host_without_power_leaves_a_stream_that_its_server_takes_for_open() -> None:
    outcome = _at_rest(*(Fault(kind, 1.0, 2.0) for kind in ("kill", "term", "part", "slow", "stop")))
    outcome.left = ["server streams: 1, at first 0"]
    assert complaints(outcome) == ["left: server streams: 1, at first 0"]
    outcome.faults.append(Fault("power", 1.0, 2.0))
    assert complaints(outcome) == []


@pytest.mark.parametrize("kind", ["peers", "one way", "stop", "stall", "jump"])
def test_only_a_call_that_was_taken_over_leaves_its_session_after_a_silence(kind: str) -> None:
    outcome = _at_rest(Fault(kind, 1.0, 2.0))
    outcome.left = ["server sessions: 1, at first 0"]
    assert complaints(outcome) == ["left: server sessions: 1, at first 0"]
    fields = {"owner": "gw-1", "owner_is_dead": False, "request_id": ""}
    outcome.lines.append(Line(outcome.records[0].began, "gw-2", "info", "call.taken_over", fields))
    assert "left: server sessions: 1, at first 0" not in complaints(outcome)


def test_only_a_reply_that_was_cut_off_excuses_a_session_that_is_left() -> None:
    outcome = story("a_request_of_a_replica_itself_is_cut_off_as_its_reply_arrives")
    assert outcome.left == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "is_reply_lost", False)
        told = complaints(story("a_request_of_a_replica_itself_is_cut_off_as_its_reply_arrives"))
    assert told == ["left: server sessions: 1, at first 0"]

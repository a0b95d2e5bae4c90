"""Stories of what could be left behind once everybody is at rest: sessions, and the room that they take."""

from typing import Any

import pytest

from tests.simulation import oracle
from tests.simulation.history import History, Line, Outcome
from tests.simulation.network import Connection
from tests.simulation.oracle import complaints
from tests.simulation.plain_http import Request
from tests.simulation.plan import Call, Fault, Plan
from tests.simulation.server import Kind
from tests.simulation.test_stories import story


def call(tool: str, *, at: float = 0.0, think: float = 2.0, habit: str = "plain", **script: Any) -> Call:
    """A call of one client, which speaks with one replica."""
    return Call("c1", at, tool, "ann", script, think, habit)


def played(
    the_call: Call, *faults: Fault, kind: Kind, replicas: int = 1, is_task: bool = False, **settings: Any
) -> Outcome:
    """What became of one call, or of one task."""
    hold = {"ttl_seconds": 90.0, "drain_delay_seconds": 1.0, "drain_seconds": 4.0}
    config = {"hold": hold, "sessions": {"idle_seconds": 30}, "tasks": {"ttl_seconds": 30}, **settings}
    calls, tasks = ((), (the_call,)) if is_task else ((the_call,), ())
    return History(Plan(1, replicas, kind, config, calls, faults, tasks=tasks)).run()


def test_a_session_that_is_lost_while_urls_are_visited_gives_its_room_back() -> None:
    """The task is called again after the visit, in another session than the one that was reserved for it."""
    the_call = call("job", questions=1, urls="first")
    outcome = played(the_call, Fault("server", 1.0, 0.5), kind=Kind(has_events=False, has_tasks=True))
    assert outcome.records[0].outcome == "result"
    assert oracle.complaints(outcome) == []


def test_the_session_of_a_task_ends_though_a_stream_broke_in_it() -> None:
    """The result of the task is asked for again, and comes."""
    task, kind = call("chore", questions=0, before=4.0), Kind(has_events=False, has_lasting_tasks=True)
    outcome = played(task, Fault("cold cut", 2.0, 0.0), kind=kind, is_task=True)
    assert outcome.tasks[0].views[-1][1] == "completed"
    assert oracle.complaints(outcome) == []


@pytest.mark.parametrize("at", [0.0065, 0.007, 0.0075, 0.008, 0.0085, 0.009])
def test_a_client_that_leaves_while_its_session_is_prepared_leaves_no_session_at_the_server(at: float) -> None:
    """The network becomes slow while the session is opened, or while the tools are listed in it."""
    outcome = played(call("pay", habit="goes"), Fault("slow", at, 10.0), kind=Kind(has_events=False))
    assert all(run.ended is not None for run in outcome.ledger.runs)
    assert outcome.left == []


def test_the_session_of_a_task_ends_once_a_client_that_was_away_has_its_result() -> None:
    """The server withdraws its question, so the result comes while no client waits."""
    the_call = call("job", think=6.0, questions=1, patience=2.0)
    outcome = played(the_call, kind=Kind(has_events=True, has_tasks=True), replicas=2)
    assert outcome.records[0].outcome == "result"
    assert oracle.complaints(outcome) == []


def test_a_result_that_no_other_process_can_read_leaves_no_session_after_a_drain() -> None:
    """The server withdraws its question, and the keys of the states end with the process."""
    the_call = call("pay", think=20.0, habit="abandons", questions=1, patience=1.5)
    settings = {"state": {}, "replica": {"id": "gw-1"}}
    outcome = played(the_call, Fault("term", 4.0, 60.0), kind=Kind(has_events=True), **settings)
    assert outcome.ledger.of("c1")[0].result is not None
    assert outcome.left == []


def ended_under_its_call() -> Outcome:
    """A legacy client speaks with the server itself; the connection of its call is cut before the reply begins."""
    the_call = Call("c1", 0.0, "pay", "ann", {"questions": 1}, 3.0, "plain", (1, 2, 1, 2), is_legacy=True)
    faults = Fault("slow", 0.0, 15.0), Fault("cold cut", 0.55, 0.0)
    config = {"hold": {"ttl_seconds": 90.0}}
    return History(Plan(26, 2, Kind(), config, (the_call,), faults)).run()


@pytest.mark.parametrize("is_cut", [True, False])
def test_only_a_session_whose_id_was_lost_between_the_hosts_may_be_left(is_cut: bool) -> None:  # noqa: FBT001
    """Its handshake is repeated in another session; a replica that closes the connection itself has lost it."""
    hold = {"ttl_seconds": 90.0}
    history = History(Plan(1, 1, Kind(), {"hold": hold, "sessions": {"idle_seconds": 30}}, (call("pay"),), ()))

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
    outcome = played(call("pay", questions=1), kind=Kind())
    assert oracle.complaints(outcome) == []
    outcome.faults = list(faults)
    return outcome


def test_only_a_host_without_power_leaves_a_stream_that_its_server_takes_for_open() -> None:
    outcome = _at_rest(*(Fault(kind, 1.0, 2.0) for kind in ("kill", "term", "part", "slow", "stop")))
    outcome.left = ["server streams: 1, at first 0"]
    assert oracle.complaints(outcome) == ["left: server streams: 1, at first 0"]
    outcome.faults.append(Fault("power", 1.0, 2.0))
    assert oracle.complaints(outcome) == []


@pytest.mark.parametrize("kind", ["peers", "one way", "stop", "stall", "jump"])
def test_only_a_call_that_was_taken_over_leaves_its_session_after_a_silence(kind: str) -> None:
    outcome = _at_rest(Fault(kind, 1.0, 2.0))
    outcome.left = ["server sessions: 1, at first 0"]
    assert oracle.complaints(outcome) == ["left: server sessions: 1, at first 0"]
    fields = {"owner": "gw-1", "owner_is_dead": False, "request_id": ""}
    outcome.lines.append(Line(outcome.records[0].began, "gw-2", "info", "call.taken_over", fields))
    assert "left: server sessions: 1, at first 0" not in oracle.complaints(outcome)


def test_a_call_that_ends_late_in_its_history_is_given_the_time_that_its_session_is_kept() -> None:
    """The client leaves, and its tool does not hear of that: the session is quarantined for a minute."""
    the_call = call("pay", at=260.0, habit="goes", questions=0, before=90.0, deaf=True)
    assert oracle.complaints(played(the_call, kind=Kind())) == []


def test_a_tool_that_hangs_in_several_runs_is_waited_for() -> None:
    """No answer arrives before its server withdraws the question, so each run gets one more from the record."""
    habits: dict[str, Any] = {"hangs": 70.0, "between": 0.2, "refuses": "late cut", "patience": 1.5}
    outcome = played(call("search", think=4.0, questions=3, **habits), kind=Kind(), legs={"limit_seconds": 1.0})
    (record,) = outcome.records
    assert len(outcome.ledger.of("c1")) > 3
    assert record.outcome == "result"
    assert oracle.complaints(outcome) == []


def test_only_a_reply_that_was_cut_off_excuses_a_session_that_is_left() -> None:
    outcome = story("a_request_of_a_replica_itself_is_cut_off_as_its_reply_arrives")
    assert outcome.left == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "is_reply_lost", False)
        told = complaints(story("a_request_of_a_replica_itself_is_cut_off_as_its_reply_arrives"))
    assert told == ["left: server sessions: 1, at first 0"]

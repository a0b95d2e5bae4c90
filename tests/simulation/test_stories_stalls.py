"""Stories of replicas that stood still: what has come meanwhile ends a wait, although its time is over."""

import pytest

from tests.simulation.history import History
from tests.simulation.network import Connection
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault, Plan
from tests.simulation.server import Kind
from tests.simulation.test_stories_ownership import call, played, replies


@pytest.mark.parametrize("kind", ["stop", "stall"])
def test_an_answer_is_accepted_while_its_replica_stands_still(kind: str) -> None:
    """The server takes 0.3 s for that, and the replica waits for 10 s."""
    the_call = call(1, think=1.0, questions=1, between=20.0)
    outcome = played(the_call, Fault(kind, 1.2, 12.0), replicas=1, answers_late=True)
    assert replies(outcome) == ["gw-1 200 input_required", "gw-1 200 complete"]
    assert complaints(outcome) == []


def test_a_credential_is_accepted_while_its_replica_stands_still() -> None:
    """A replica that takes a call over has the server see the credential of its client, in a ping."""
    config = {"hold": {"ttl_seconds": 90.0}, "sessions": {"idle_seconds": 30}}
    the_call, killed = call(2, 1, think=1.0, questions=1), Fault("kill", 0.5, 30.0, target=2)
    history = History(Plan(1, 2, Kind(), config, (the_call,), (killed,)))

    def watch(_connection: Connection, _: bool, data: bytes) -> None:  # noqa: FBT001
        if b'"method":"ping"' in data:
            history.network.watchers.remove(watch)
            history.gateway(1).freeze()
            history.later(12.0, history.gateway(1).thaw)

    history.network.watchers.append(watch)
    outcome = history.run()
    assert watch not in history.network.watchers
    assert replies(outcome) == ["gw-2 200 input_required", "gw-1 200 complete"]

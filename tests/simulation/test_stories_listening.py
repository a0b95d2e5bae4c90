"""Stories of clients that listen to changes while servers, replicas and connections come and go."""

from typing import Any

import pytest

from tests.simulation import told
from tests.simulation.history import Outcome
from tests.simulation.listening import URIS, Change, Listener
from tests.simulation.oracle import complaints
from tests.simulation.plan import Fault

_TIMES = (2.0, 5.0, 5.5, 6.5, 9.0, 14.0, 25.0, 45.0, 80.0)


def listener(*replicas: int, path: str = "/mcp", is_legacy: bool = False, **other: Any) -> Listener:
    """A client of one caller, whose requests go to these replicas in turn."""
    settings: dict[str, Any] = {"at": 0.0, "until": 130.0, "caller": "ann", "uris": URIS, **other}
    return Listener("l1", wants_lists=True, replicas=replicas, path=path, is_legacy=is_legacy, **settings)


def played(the_listener: Listener, *faults: Fault) -> Outcome:
    """What became of a listener in a cluster that lives through these faults."""
    changes = (
        Change(at + number / 100, "ann", uri, the_listener.path)
        for at in _TIMES
        for number, uri in enumerate((*URIS, ""))
    )
    return told.played(the_listener, *changes, *faults)


def ends(outcome: Outcome) -> list[str]:
    """How each stream ended."""
    return [stream.how for stream in outcome.listened[0].streams]


@pytest.mark.parametrize(("path", "is_legacy"), [("/mcp", False), ("/modern", False), ("/modern", True)])
def test_a_listener_hears_every_change_at_once(path: str, *, is_legacy: bool) -> None:
    outcome = played(listener(1, path=path, is_legacy=is_legacy))
    (listened,) = outcome.listened
    assert [heard.number for heard in listened.heard] == list(range(1, len(outcome.changed) + 1))
    assert ends(outcome) == ["left"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("fault", ["server", "cold cut", "part"])
def test_a_modern_listener_keeps_its_stream_while_its_server_cannot_be_heard(fault: str) -> None:
    outcome = played(listener(1), Fault(fault, 4.0, 6.0))
    (listened,) = outcome.listened
    assert any(heard.number is None for heard in listened.heard) == (fault != "part")
    assert ends(outcome) == ["left"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("fault", ["kill", "power", "term"])
def test_a_modern_listener_sees_its_stream_end_with_its_replica(fault: str) -> None:
    outcome = played(listener(1, 2), Fault(fault, 4.0, 6.0))
    assert ends(outcome) == [{"kill": "broken", "power": "silent", "term": "result"}[fault], "left"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("fault", ["kill", "power", "term", "part", "stop"])
@pytest.mark.parametrize("target", [1, 2, 3])
def test_a_mirrored_listener_misses_nothing_when_its_home_or_its_replica_ends(target: int, fault: str) -> None:
    """The last event id carries its subscriptions to the next home."""
    outcome = played(listener(1, 2, 3, path="/modern", is_legacy=True), Fault(fault, 4.0, 6.0, target))
    assert complaints(outcome) == []

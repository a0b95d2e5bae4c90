"""A signal at any moment ends a gateway without a failure, and a second one ends it soon."""

import signal
from typing import Any

import pytest

from tests.simulation import told
from tests.simulation.history import History
from tests.simulation.oracle import BUG_LEVELS, complaints
from tests.simulation.plan import Fault, Plan
from tests.simulation.told import NO_EVENTS, OWN_KEYS, call, played
from tests.simulation.world import START

_SOON_SECONDS = 2.1
"""`timeouts.cancel_seconds`, which cancellations of the calls may take, and a little more."""
_BEFORE = 3.0
"""When calls run, are parked, are written, and are long over."""


def _plan(**config: Any) -> Plan:
    replicas = 1 if config else 2
    calls = (
        call(
            *(1, 1, replicas),
            tag=f"c{number}",
            at=0.2 * number,
            caller=("ann", "bob", "eve")[number % 3],
            think=(0.2, 3.0, 8.0)[number % 3],
            habit=("plain", "abandons", "slow reader", "twice")[number % 4],
            questions=number % 3,
            before=6.0 if number % 4 == 0 else 0.0,
            aside=number % 5 == 0,
        )
        for number in range(1, 13)
    )
    return told.plan(*calls, replicas=replicas, **config)


def _ended(
    plan: Plan, signals: tuple[float, ...], number: signal.Signals = signal.SIGTERM, dns_seconds: float = 0.0
) -> float:
    """When the first replica ended that got signals at these times; nothing may go wrong in it."""
    history = History(plan)
    history.network.names["peers.test"] = ["10.0.0.1"]
    history.network.dns_seconds = dns_seconds
    began, ended = history.now, []

    def watch() -> None:
        history.gateway(1).when_ended.append(lambda: ended.append(history.now - began))

    history.later(0.0, watch)
    for at in signals:
        history.later(at, lambda: history.gateway(1).signal(number))
    outcome = history.run()
    assert (outcome.failures, outcome.ended_badly) == ([], [])
    assert [line for line in outcome.lines if line.level in BUG_LEVELS] == []
    return round(ended[0], 6)


@pytest.mark.parametrize(
    "after", [0.0, 0.0005, 0.5, 0.999, 1.0, 1.0005, 1.05, 2.2, 3.5, 4.5, 4.95, 5.0, 5.0005, 5.05, 5.1, 5.15]
)
def test_a_second_signal_during_a_drain_ends_the_process_soon(after: float) -> None:
    second = _BEFORE + after
    assert second <= _ended(_plan(), (_BEFORE, second)) <= second + _SOON_SECONDS


def test_a_second_signal_ends_the_process_as_soon_if_replicas_wait_there_as_well_as_clients() -> None:
    waits = call(think=0.2, questions=0, before=9.0)
    asks = call(1, 2, tag="c2", caller="bob", think=0.2, questions=2, between=9.0)
    plan = told.plan(waits, asks, replicas=2, kind=NO_EVENTS)
    second = _BEFORE + 0.5  # nothing is handed over before the drain begins
    assert second <= _ended(plan, (_BEFORE, second)) <= second + _SOON_SECONDS


@pytest.mark.parametrize("after", [0.0, 0.0005, 0.1, 1.9, 1.9995, 2.0, 2.0005])
def test_a_third_signal_while_everything_is_closed_changes_nothing(after: float) -> None:
    second = _BEFORE + 1.5
    twice = _ended(_plan(), (_BEFORE, second))
    assert _ended(_plan(), (_BEFORE, second, second + after)) == pytest.approx(twice, abs=0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("others", [(), (0.0,), (0.0005,), (0.3, 0.6)])
@pytest.mark.parametrize("first", [0.0001, 0.25, 0.4999, 0.5, 0.5005])
def test_a_signal_while_the_gateway_starts_ends_it_soon(
    first: float, others: tuple[float, ...], number: signal.Signals
) -> None:
    """The start waits half a second for the name service."""
    plan = _plan(replica={"id": "gw-1", "listen": "10.0.0.1:8081", "peers_dns": "peers.test:8081"})
    signals = first, *(first + each for each in others)
    ended = _ended(plan.without_calls({call.tag for call in plan.calls}), signals, number, dns_seconds=0.5)
    drain = 1.0 + 0.2 if first >= 0.5 else 0.0  # it was ready
    assert first <= ended <= first + drain + 0.1


def test_a_drain_sends_a_client_away_though_another_request_of_it_has_ended() -> None:
    """The copy of its retry is not read, and ends after 6 s; the drain begins after that, and lasts 4 s."""
    the_call = call(1, 1, 1, 2, think=0.2, habit="unread copy", questions=2, between=12.0, logs=True)
    history = History(told.plan(the_call, replicas=2))
    history.later(8.0, lambda: history.gateway(1).signal(signal.SIGINT))
    (record,) = history.run().records
    assert [told.result.get("inputRequests") is None for told in record.told[:2]] == [False, True]
    assert record.told[1].at - START == pytest.approx(8.0, abs=0.2)
    assert record.outcome == "result"


def test_a_second_signal_may_come_from_another_fault() -> None:
    """The replica then ends without a word to its server: whatever its client could know is excused."""
    the_call = call(1, 2, tool="search", think=0.2, questions=0, before=9.0)
    faults = Fault("term", 1.0, 60.0, target=1), Fault("term", 1.5, 60.0, target=1)
    outcome = played(the_call, *faults, replicas=2, kind=NO_EVENTS)
    assert [fault.kind for fault in outcome.faults] == ["term", "term twice"]
    assert complaints(outcome) == []


@pytest.mark.parametrize("kind", ["term", "int"])
@pytest.mark.parametrize("lost", ["reply", "session", "cancellation"])
def test_only_a_drain_that_is_cut_short_loses_what_a_whole_one_hands_over_or_cancels(kind: str, lost: str) -> None:
    kind_of_server = NO_EVENTS if lost == "cancellation" else None
    outcome = played(call(think=2.0, questions=1), replicas=1, kind=kind_of_server)
    (record,), (run,) = outcome.records, outcome.ledger.runs
    assert complaints(outcome) == []
    if lost == "cancellation":
        run.ended = None
    else:
        record.outcome = "broken" if lost == "reply" else "error"
        assert record.final is not None
        record.final.message = {"error": {"code": -32603, "message": "", "data": {"reason": "session_lost"}}}
    outcome.faults = [Fault(kind, 1.0, 2.0)]
    assert len(complaints(outcome)) == 1
    outcome.faults.append(Fault("term twice", 1.0, 2.0))
    assert complaints(outcome) == []


@pytest.mark.parametrize("cold_seconds", [0.5, 3.0], ids=["before the drain", "in the drain"])
def test_a_call_that_goes_cold_in_a_process_with_its_own_keys_may_be_answered_until_the_drain_is_over(
    cold_seconds: float,
) -> None:
    how = {"cold_seconds": cold_seconds, "drain_delay_seconds": 0.5, "drain_seconds": 10.0, **OWN_KEYS}
    outcome = played(call(think=7.0, questions=1), Fault("term", 2.0, 60.0), replicas=1, **how)
    (record,) = outcome.records
    assert [line.event for line in outcome.lines if line.event.startswith("call.")] == ["call.cooled"]
    assert record.outcome == "result"
    assert complaints(outcome) == []


def test_a_process_that_is_alone_breaks_no_new_connection_when_it_ends() -> None:
    """Of clients that come one after the other, some are told to come later, and the others find nobody there."""
    times = [_BEFORE + number / 1000 for number in range(30, 230)]
    calls = [call(tag=f"c{at}", at=at, think=0.2, questions=0) for at in times]
    outcome = played(*calls, Fault("int", _BEFORE, 2.0, 1), replicas=1, **OWN_KEYS)
    assert {record.outcome for record in outcome.records} == {"result"}
    reasons = {record.told[0].reason for record in outcome.records}
    assert reasons == {"stopping", ""}
    assert complaints(outcome) == []

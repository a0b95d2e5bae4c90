"""The small pieces alone: outbox, alarms, parking lot, guard, tasks."""

import asyncio

import pytest
from msgspec import Raw

from gateway.auth.host_check import HostCheck
from gateway.bridge import response_queue as boxes
from gateway.bridge.change_queue import ChangeQueue
from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.config import Hold, Security
from gateway.exchange.events import Leg
from gateway.protocol.errors import Busy, CallLost, Forbidden, InvalidParams, LocalProtocolError
from gateway.routes.parking import Lot
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Ending, Metrics, Outcome


def box(silence_seconds: float = 5, behind_bytes: int = 1000) -> ResponseQueue:
    return ResponseQueue(Leg(Raw(b"1")), CoarseTimer(silence_seconds, Tasks(Metrics("0")), "silence"), behind_bytes)


async def test_messages_come_out_in_order_and_the_last_one_last() -> None:
    out = box()
    for number in range(3):
        out.send(b"%d" % number)
    out.finish(FinalMessage(b"end"))
    assert [await out.take() for _ in range(3)] == [b"0", b"1", b"2"]
    assert await out.take() == FinalMessage(b"end")
    assert await out.take() == FinalMessage(b"end")


async def test_there_is_one_final_message_and_nothing_after_it() -> None:
    out = box()
    out.finish(FinalMessage(b"end"))
    with pytest.raises(LocalProtocolError):
        out.finish(FinalMessage(b"again"))
    with pytest.raises(LocalProtocolError):
        out.send(b"late")


async def test_silence_is_told_as_none_and_a_message_wakes() -> None:
    assert await box(0.01).take() is None
    out = box()
    waiting = asyncio.get_running_loop().create_task(out.take())
    await asyncio.sleep(0)
    out.send(b"x")
    assert await asyncio.wait_for(waiting, 1) == b"x"


async def test_a_taker_that_is_cancelled_loses_no_message() -> None:
    out = box()
    waiting = asyncio.get_running_loop().create_task(out.take())
    await asyncio.sleep(0)
    out.send(b"x")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await out.take() == b"x"


async def test_a_client_too_far_behind_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "_MAX_BEHIND", 2)
    out = box()
    for number in range(5):
        out.send(b"%d" % number)
    assert out.dropped == 3
    assert [await out.take(), await out.take()] == [b"3", b"4"]


async def test_a_client_that_does_not_read_costs_no_more_than_its_bytes() -> None:
    out = box(behind_bytes=10)
    for message in (b"aaaa", b"bbbb", b"cccc"):
        out.send(message)
    assert out.dropped == 1
    assert [await out.take(), await out.take()] == [b"bbbb", b"cccc"]
    out.send(b"d" * 100)  # larger than all that may wait: a client that reads gets it all the same
    assert await out.take() == b"d" * 100
    for message in (b"e" * 100, b"f" * 7, b"g" * 3):
        out.send(message)
    assert out.dropped == 2
    assert [await out.take(), await out.take()] == [b"f" * 7, b"g" * 3]


async def test_a_subscriber_that_does_not_read_hears_later_that_things_changed_and_not_how() -> None:
    out = ChangeQueue(Leg(Raw(b"1")), CoarseTimer(5, Tasks(Metrics("0")), "silence"), 10)
    out.tell(("a", ""), b"a" * 6)
    assert not out.has_room(("b", ""), b"b" * 6)
    out.tell(("b", ""), b"b")
    assert out.has_room(("a", ""), b"a" * 9)
    assert [await out.take(), await out.take()] == [b"a" * 6, b"b"]
    assert out.has_room(("b", ""), b"b" * 10)


def test_an_exception_becomes_its_response() -> None:
    last = FinalMessage.of_error(InvalidParams("no", data={"a": 1}), b'"x"', "r1")
    error = b'{"code":-32602,"message":"no","data":{"a":1,"requestId":"r1"}}'
    assert last.body == b'{"jsonrpc":"2.0","id":"x","error":%b}' % error
    assert (last.status, last.ending) == (400, Ending(Outcome.REJECTED, "-32602"))
    assert FinalMessage.of_error(CallLost("gone"), b"1", "r2").ending == Ending(Outcome.ERROR, "-32603")
    busy = FinalMessage.of_error(Busy("full", status=503, retry_after_seconds=5), None, "r3")
    assert b'"id"' not in busy.body
    assert (busy.status, busy.headers["Retry-After"]) == (503, "5")


# -- alarms -----------------------------------------------------------------------------------------------------------


async def test_an_alarm_rings_once_for_each_key_and_not_for_a_disarmed_one() -> None:
    metrics = Metrics("0")
    alarm = CoarseTimer(0.02, Tasks(metrics), "test")
    rung: list[str] = []
    all_rung = asyncio.Event()

    def ring(key: str) -> None:
        rung.append(key)
        if key == "first":
            alarm.disarm("victim")
            alarm.arm("again", lambda: ring("again"))
        elif key == "again":
            all_rung.set()

    for key in ("gone", "first", "victim", "last"):
        alarm.arm(key, lambda key=key: ring(key))  # type: ignore[misc]
    alarm.arm("gone", lambda: rung.append("never"))
    alarm.disarm("gone")
    alarm.disarm("unknown")
    await asyncio.wait_for(all_rung.wait(), 2)
    assert rung == ["first", "last", "again"]
    assert len(alarm) == 0


async def test_an_alarm_armed_anew_starts_anew() -> None:
    alarm = CoarseTimer(0.1, Tasks(Metrics("0")), "test")
    loop = asyncio.get_running_loop()
    rung = loop.create_future()
    alarm.arm("key", lambda: rung.set_result(loop.time()))
    moved = loop.create_future()
    loop.call_later(0.06, lambda: moved.set_result(None))  # the time under test
    await moved
    again = loop.time()
    alarm.arm("key", lambda: rung.set_result(loop.time()))
    assert await asyncio.wait_for(rung, 2) - again >= 0.1


async def test_an_alarms_bug_is_counted_and_the_others_still_ring() -> None:
    metrics = Metrics("0")
    alarm = CoarseTimer(0.01, Tasks(metrics), "test")
    rung = asyncio.Event()

    def fail() -> None:
        raise RuntimeError

    alarm.arm("bad", fail)
    alarm.arm("good", rung.set)
    await asyncio.wait_for(rung.wait(), 2)
    assert failures(metrics) == 1


# -- the lot ----------------------------------------------------------------------------------------------------------


class Car:
    def __init__(self, id_: str, principal: bytes = b"p") -> None:
        self.id, self.principal = id_, principal
        self.forgotten = False

    def forget(self) -> None:
        self.forgotten = True


def test_the_lot_is_bounded_per_principal_and_in_all() -> None:
    lot: Lot[Car] = Lot(Hold(max_calls=3, max_calls_per_principal=2))
    one, two = Car("1"), Car("2")
    lot.park(one)
    lot.park(two)
    lot.park(one)
    assert len(lot) == 2, "parking twice is parking once"
    with pytest.raises(Busy) as caught:
        lot.park(Car("3"))
    assert caught.value.status == 429
    lot.park(Car("4", b"q"))
    with pytest.raises(Busy) as caught:
        lot.check(b"r")
    assert caught.value.status == 503
    assert caught.value.headers["Retry-After"]
    lot.remove(one)
    lot.remove(one)
    lot.check(b"p")
    lot.park(Car("3"))
    assert lot.find("3") is not None
    assert lot.find("1") is None


def test_kept_results_make_room_and_take_none() -> None:
    lot: Lot[Car] = Lot(Hold(max_calls=2, max_calls_per_principal=2))
    cars = [Car(str(number)) for number in range(5)]
    for car in cars:
        lot.park(car)
        lot.keep(car)
    assert len(lot) == 0
    assert [car.forgotten for car in cars] == [True, True, True, False, False]
    assert [lot.find(car.id) is car for car in cars] == [False, False, False, True, True]
    assert set(lot) == set(cars[3:])
    lot.keep(Car("never parked"))
    assert lot.find("never parked") is None
    lot.remove(cars[4])
    assert set(lot) == {cars[3]}


def test_a_lot_that_is_empty_again_remembers_nobody() -> None:
    lot: Lot[Car] = Lot(Hold())
    for number in range(100):
        car = Car(str(number), b"%d" % number)
        lot.park(car)
        lot.remove(car)
    assert not lot._per_principal
    assert not list(lot)


# -- the guard --------------------------------------------------------------------------------------------------------


def allowed(guard: HostCheck, host: str | None, origin: str | None = None) -> bool:
    try:
        guard.check(host, origin)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "localhost:8080", "[::1]:8080"])
def test_a_loopback_listener_is_for_loopback_names(listen: str) -> None:
    guard = HostCheck(Security(), listen)
    assert all(allowed(guard, host) for host in ("localhost", "127.0.0.1:1", "[::1]", "LocalHost:8080"))
    assert not any(
        allowed(guard, host) for host in (None, "", "example.com", "localhost.", "127.0.0.2", "[::1", "a b")
    )


def test_a_public_listener_takes_any_host_but_only_its_own_origin() -> None:
    guard = HostCheck(Security(), "0.0.0.0:8080")
    assert allowed(guard, "gw.example:8080")
    assert allowed(guard, "gw.example", "https://gw.example")
    assert not allowed(guard, "gw.example", "https://evil.example")
    assert not allowed(guard, "gw.example", "http://localhost")
    assert not allowed(guard, None, "null")


def test_listed_names_are_the_only_ones() -> None:
    guard = HostCheck(
        Security(allowed_hosts=("gw.example", "other.example:444"), allowed_origins=("https://app.example",)),
        "127.0.0.1:8080",
    )
    assert allowed(guard, "GW.example:1", "https://app.example")
    assert allowed(guard, "other.example:444")
    assert not allowed(guard, "other.example:445")
    assert not allowed(guard, "localhost")
    for origin in ("https://app.example:8443", "http://app.example", "https://gw.example", "", "null"):
        assert not allowed(guard, "gw.example", origin)


# -- tasks ------------------------------------------------------------------------------------------------------------


def failures(metrics: Metrics) -> float | None:
    return metrics._registry.get_sample_value("mcp_gateway_task_failures_total")


async def test_what_a_task_raises_is_counted_and_a_cancellation_is_not() -> None:
    metrics = Metrics("0")
    tasks = Tasks(metrics)

    async def fail() -> None:
        raise RuntimeError

    tasks.spawn(fail(), "fails")
    waiting = tasks.start(asyncio.Event().wait(), "waits")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert failures(metrics) == 1
    assert len(tasks) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (failures(metrics), len(tasks)) == (1, 0)


async def test_a_timers_bug_is_counted() -> None:
    metrics = Metrics("0")

    def fail() -> None:
        raise RuntimeError

    Tasks(metrics).guard(fail, "timer")()
    assert failures(metrics) == 1


async def test_short_work_is_waited_for_and_the_rest_is_cancelled() -> None:
    tasks = Tasks(Metrics("0"))
    done: list[str] = []
    go = asyncio.Event()

    async def work(name: str) -> None:
        await go.wait()
        done.append(name)

    async def for_ever() -> None:
        await asyncio.Event().wait()

    tasks.spawn(work("short"), "send upstream")
    tasks.spawn(for_ever(), "side stream")
    asyncio.get_running_loop().call_soon(go.set)
    await tasks.settle(1)
    assert done == ["short"]
    await tasks.close()
    assert len(tasks) == 0

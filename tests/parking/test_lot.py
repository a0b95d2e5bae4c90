"""The parking lot: its caps, and the results that it keeps."""

import pytest

from gateway.config import Hold, InForce
from gateway.parking.lot import Lot
from gateway.protocol.errors import Busy
from gateway.runtime.budget import Budget
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.memory import left_by


class Car:
    def __init__(self, id_: str, principal: bytes = b"p", kept_bytes: int = 1) -> None:
        self.id, self.principal, self.kept_bytes = id_, principal, kept_bytes
        self.forgotten = False

    def forget(self) -> None:
        self.forgotten = True


def parking_lot(results_bytes: int = 1_000, **caps: int) -> Lot[Car]:
    return Lot(InForce(Hold(**caps)), Budget("limits.results_bytes", InForce(results_bytes)), Tasks(Metrics()))


def test_the_lot_is_bounded_per_principal_and_in_all() -> None:
    lot = parking_lot(max_calls=3, max_calls_per_principal=2)
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
    lot = parking_lot(max_calls=2, max_calls_per_principal=2)
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


def test_kept_results_share_a_budget_of_bytes_and_the_oldest_are_forgotten() -> None:
    lot = parking_lot(results_bytes=100)
    cars = [Car(str(number), kept_bytes=size) for number, size in enumerate((40, 40, 20, 50))]
    for car in cars:
        lot.park(car)
    assert lot.results.used == 0, "a call that is still waiting has no result"
    for car in cars:
        lot.keep(car)
    assert [car.forgotten for car in cars] == [True, True, False, False]
    assert [lot.find(car.id) for car in cars] == [None, None, cars[2], cars[3]]
    assert lot.results.used == 70
    lot.remove(cars[2])
    assert lot.results.used == 50
    huge = Car("huge", kept_bytes=101)
    lot.park(huge)
    lot.keep(huge)
    assert huge.forgotten
    assert lot.results.used == len(list(lot)) == 0


def test_an_empty_lot_keeps_no_principal() -> None:
    lot = parking_lot()

    def park_many() -> None:
        for number in range(1000):
            car = Car(str(number), b"%d" % number)
            lot.park(car)
            lot.remove(car)

    assert left_by(park_many) < 10_000
    assert not list(lot)


def test_an_exchange_that_is_parked_has_a_place_and_another_needs_a_free_one() -> None:
    lot = parking_lot(max_calls=1, max_calls_per_principal=1)
    parked, other = Car("1"), Car("2")
    assert lot.has_place(parked)
    lot.park(parked)
    assert lot.has_place(parked)
    assert not lot.has_place(other)
    lot.keep(parked)
    assert lot.has_place(other)


def test_the_lot_shows_its_parked_calls_and_how_many_each_principal_has() -> None:
    lot = parking_lot()
    assert lot.per_principal == {}
    cars = [Car("1", b"p"), Car("2", b"q"), Car("3", b"q"), Car("4", b"p"), Car("5", b"q")]
    for car in cars:
        lot.park(car)
    assert lot.per_principal == {b"p": 2, b"q": 3}
    lot.keep(cars[1])
    lot.remove(cars[2])
    assert lot.per_principal == {b"p": 2, b"q": 1}
    assert list(lot.waiting()) == [cars[0], cars[3], cars[4]]


def test_a_caller_that_keeps_results_evicts_no_result_of_another() -> None:
    lot = parking_lot(max_calls=4, max_calls_per_principal=4, results_bytes=1_000)
    kept = [Car("a", b"ann", 100), *(Car(f"e{number}", b"eve", 400) for number in range(6))]
    for held in kept:
        lot.park(held)
        lot.keep(held)
    assert [held.id for held in kept if lot.find(held.id)] == ["a", "e4", "e5"], "by bytes"
    lot = parking_lot(max_calls=3, max_calls_per_principal=3)
    for held in kept:
        lot.park(held)
        lot.keep(held)
    assert [held.id for held in kept if lot.find(held.id)] == ["a", "e4", "e5"], "by number"

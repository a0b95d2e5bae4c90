import pytest

from gateway.config import InForce
from gateway.runtime.rate_limit import Rate, RateLimit


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def taken(limit: RateLimit, key: object, tries: int) -> int:
    """How many of the tries found a token."""
    found = 0
    for _ in range(tries):
        if limit.wait_seconds(key) == 0:
            limit.take(key)
            found += 1
    return found


def test_a_burst_is_free_and_then_the_rate_holds(clock: FakeClock) -> None:
    limit = RateLimit(InForce(Rate(2, 10)), clock)
    assert taken(limit, "a", 100) == 10
    assert limit.wait_seconds("a") == pytest.approx(0.5)
    clock.now += 0.5
    assert taken(limit, "a", 100) == 1
    clock.now += 3
    assert taken(limit, "a", 100) == 6
    clock.now += 3600
    assert taken(limit, "a", 100) == 10


def test_each_key_has_a_bucket_of_its_own(clock: FakeClock) -> None:
    limit = RateLimit(InForce(Rate(1, 3)), clock)
    assert taken(limit, "a", 9) == 3
    assert taken(limit, "b", 9) == 3


def test_a_token_that_must_be_had_is_owed(clock: FakeClock) -> None:
    limit = RateLimit(InForce(Rate(1, 1)), clock)
    for _ in range(4):
        limit.take("a")
    assert limit.wait_seconds("a") == pytest.approx(4)


def test_another_rate_holds_at_once(clock: FakeClock) -> None:
    rate = InForce(Rate(1, 1))
    limit = RateLimit(rate, clock)
    limit.take("a")
    assert limit.wait_seconds("a") > 0
    rate.replace(Rate(1, 5))
    assert limit.wait_seconds("a") == 0


def test_full_buckets_are_forgotten(clock: FakeClock) -> None:
    limit = RateLimit(InForce(Rate(10, 5)), clock)
    for number in range(1000):
        limit.take(number)
    assert len(limit) == 1000
    clock.now += 1
    for number in range(1000, 2200):
        limit.take(number)
        clock.now += 0.01
    assert len(limit) < 30

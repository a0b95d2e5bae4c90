from types import SimpleNamespace

import pytest

from gateway import world
from gateway.config import InForce
from gateway.runtime.token_bucket import Rate, TokenBucket


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A FAKE clock, which stands still unless the test moves its `now`."""
    fake = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(world, "monotonic", lambda: fake.now)
    return fake


def taken(limit: TokenBucket, tries: int) -> int:
    """How many of the tries found a token."""
    found = 0
    for _ in range(tries):
        if limit.wait_seconds() == 0:
            limit.take()
            found += 1
    return found


def test_a_burst_is_free_and_then_the_rate_holds(clock: SimpleNamespace) -> None:
    limit = TokenBucket(InForce(Rate(2, 10)))
    assert taken(limit, 100) == 10
    assert limit.wait_seconds() == pytest.approx(0.5)
    clock.now += 0.5
    assert taken(limit, 100) == 1
    clock.now += 3
    assert taken(limit, 100) == 6
    clock.now += 3600
    assert taken(limit, 100) == 10


@pytest.mark.usefixtures("clock")
def test_a_token_that_must_be_had_is_owed() -> None:
    limit = TokenBucket(InForce(Rate(1, 1)))
    for _ in range(4):
        limit.take()
    assert limit.wait_seconds() == pytest.approx(4)


@pytest.mark.usefixtures("clock")
def test_another_rate_holds_at_once() -> None:
    rate = InForce(Rate(1, 1))
    limit = TokenBucket(rate)
    limit.take()
    assert limit.wait_seconds() > 0
    rate.replace(Rate(1, 5))
    assert limit.wait_seconds() == 0

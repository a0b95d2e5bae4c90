"""Fixtures: the replicas whose status pages show each other, and a clock that a test sets forward."""

import time

import pytest

from tests.cluster.conftest import cluster, hole

__all__ = ["cluster", "hole"]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how many seconds the gateway's monotonic clock is ahead of the machine's: its only item."""
    ahead = [0.0]
    monkeypatch.setattr("gateway.world.monotonic", lambda: time.monotonic() + ahead[0])
    return ahead

"""Gives simulated gateways the times of real ones: waiting costs nothing there."""

import pytest


@pytest.fixture(autouse=True)
def _short_times() -> None:
    """Instead of the fixture in `tests.support.stand`."""

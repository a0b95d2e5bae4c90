"""Isolates the tests from one another, and skips those whose real parts were not built.

Random tests draw the same values on every machine (`tests/support/randomness.py`).
"""

import gc
import importlib
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import structlog

from tests.parts.launch import ENVIRONMENTS, PARTS
from tests.support import randomness

pytest_plugins = [
    "tests.support.noted_connections",
    "tests.support.noted_timers",
    "tests.support.stand",
    "tests.support.turns",
]

# Describing the configuration's type takes a gateway longer than the rest of its start, and it never changes.
load = importlib.import_module("gateway.config.load")  # the package has a function of that name
load.config_shape = cache(load.config_shape)
randomness.install()  # before the test modules, whose decorators read the settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not all((PARTS / name).exists() for name in ENVIRONMENTS):
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="scripts/parts has not been run"))


def pytest_collection_finish() -> None:
    """Spare the collector the tests themselves: they outlive it, and walking them took a fifth of the whole time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)  # as `serve` does


@pytest.fixture(autouse=True)
def _logging_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the logging after each test; loggers are not cached, because a cached one would outlive the reset."""
    configure, root = structlog.configure, logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def uncached(**options: Any) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        logging.captureWarnings(capture=False)
        root.handlers[:], root.level = handlers, level

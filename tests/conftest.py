"""Isolates the tests from one another, and prints the tables of the real parts at the end of the run.

With pytest-xdist, the workers send their tables to the main process. Random tests draw the same values on every
machine (`tests/support/randomness.py`).
"""

import gc
import importlib
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from gateway.telemetry import get_logger
from tests.support import randomness, tables

pytest_plugins = ["tests.support.noted_connections", "tests.support.stand", "tests.support.turns"]

# Describing the configuration's type takes a gateway longer than the rest of its start, and it never changes.
load = importlib.import_module("gateway.config.load")  # the package has a function of that name
load.config_shape = cache(load.config_shape)
randomness.install()  # before the test modules, whose decorators read the settings


def pytest_configure(config: pytest.Config) -> None:
    tables.begin(config)


def pytest_collection_finish() -> None:
    """Spare the collector the tests themselves: they outlive it, and walking them took a fifth of the whole time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)  # as `serve` does


def pytest_sessionfinish(session: pytest.Session) -> None:
    tables.tell(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    tables.hear(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in tables.lines(config):
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """Reset the logging after each test."""
    log, root = vars(get_logger()), logging.getLogger()
    before, handlers, level = dict(log), root.handlers[:], root.level
    yield
    if log != before:
        log.clear()
        log.update(before)
        logging.captureWarnings(capture=False)
        root.handlers[:], root.level = handlers, level

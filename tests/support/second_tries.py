"""Gives tests of real programs a second try in the whole suite, and tells which ones needed it.

Such a test shares two cores with the programs of another one. When the machine stalls for seconds, a published server
or client gives up by a deadline that the test cannot set. A second failure counts. CPython's own suite does the same.
"""

from pathlib import Path
from typing import Any, Final

import pytest

_FOLDERS: Final = ("chaos", "conformance", "demo", "deploy", "e2e", "parts")
"""Where all tests start programs; elsewhere the marks single them out."""
_MARKS: Final = ("processes", "real")


def starts_programs(item: pytest.Item) -> bool:
    """Whether a test shares the machine with programs of its own."""
    folder = Path(item.path).relative_to(Path(item.config.rootpath, "tests")).parts[0]
    return folder in _FOLDERS or any(item.get_closest_marker(mark) for mark in _MARKS)


def limit(items: list[pytest.Item]) -> None:
    """Take the second try (`--reruns`) from the tests that start no program: these fail only for a reason of ours."""
    for item in items:
        if item.config.getoption("reruns", None) and not starts_programs(item):
            item.add_marker(pytest.mark.flaky(reruns=0))


def limit_time(item: pytest.Item) -> None:
    """Begin the time limit of a second try: for pytest-timeout, the limit ended when the first one failed."""
    if getattr(item, "execution_count", 1) > 1:
        plugin: Any = item.config.pluginmanager.getplugin("timeout")
        settings = plugin._get_item_settings(item)
        if settings.timeout:
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


def tell(reporter: pytest.TerminalReporter) -> None:
    """Print why each first try failed, so that a rare fault of the gateway is not lost."""
    for report in reporter.getreports("rerun"):
        reporter.section(f"failed at first: {report.nodeid}")
        reporter.write_line(report.longreprtext)

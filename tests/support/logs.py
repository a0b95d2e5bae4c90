"""Reads the gateway's log in tests."""

import io
import json
from typing import Any

from gateway.telemetry import configure_logging


class Lines:
    """The log lines so far."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def __call__(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines, all or of one event."""
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in found if event in (None, line["event"])]


def captured(level: str = "debug") -> Lines:
    """Have every module of the gateway log here until the test ends (see tests/conftest.py)."""
    lines = Lines()
    configure_logging(level, "json", lines.stream)
    return lines

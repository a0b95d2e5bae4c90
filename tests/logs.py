"""The gateway's own log, as a test reads it."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from gateway.telemetry import configure_logging


class Lines:
    """What was logged so far."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    def __call__(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the lines, all or of one event."""
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in found if event in (None, line["event"])]


@contextmanager
def captured(level: str = "debug") -> Iterator[Lines]:
    """Have every module of the gateway log here, and leave the logging as it was."""
    root = logging.getLogger()
    handlers, before = root.handlers[:], root.level
    lines = Lines()
    configure_logging(level, "json", lines.stream)
    try:
        yield lines
    finally:
        logging.captureWarnings(capture=False)
        root.handlers[:], root.level = handlers, before
        structlog.reset_defaults()

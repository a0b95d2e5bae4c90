"""The gateway's own log, as a test reads it."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from structlog._config import BoundLoggerLazyProxy  # what `get_logger` returns

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
    _forget()
    configure_logging(level, "json", lines.stream)
    try:
        yield lines
    finally:
        logging.captureWarnings(capture=False)
        root.handlers[:], root.level = handlers, before
        structlog.reset_defaults()
        _forget()


def _forget() -> None:
    """A module's logger keeps the stream that it first wrote to (`cache_logger_on_first_use`)."""
    for name, module in list(sys.modules.items()):
        logger = getattr(module, "log", None)
        if name.startswith("gateway.") and isinstance(logger, BoundLoggerLazyProxy):
            _ = vars(logger).pop("bind", None)

"""The log: its events, each declared once, with the redaction of every line.

A line holds ids, counts and durations. Anything that looks like a credential is masked, even where none is expected.
A value may quote a client, an upstream or a library, so it is bounded, and without control characters: no stranger
fills the disk, forges a line or commands the operator's terminal.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from math import inf
from typing import Final, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from gateway import world
from gateway.telemetry.redaction import REPEATED, plain, redact

Logger = FilteringBoundLogger
_NUMBERS: Final = (int, float)


class Event(StrEnum):
    """Every log event."""

    CONFIG_LOADED = "config.loaded"
    CONFIG_REJECTED = "config.rejected"
    CONFIG_CAUTION = "config.caution"
    SERVER_STARTED = "server.started"
    SERVER_DRAINING = "server.draining"
    SERVER_PARTED = "server.parted"
    SERVER_STOPPED = "server.stopped"
    SERVER_FAILED = "server.failed"
    HOST_JOINED = "host.joined"
    SUPERVISOR_STARTED = "supervisor.started"
    WORKER_STARTED = "worker.started"
    WORKER_ENDED = "worker.ended"
    EXCHANGE_FINISHED = "exchange.finished"
    STATE_REJECTED = "state.rejected"
    SESSION_LOST = "session.lost"
    RELAY_LOST = "relay.lost"
    SUBSCRIPTION_LOST = "subscription.lost"
    TOOL_LEFT_OUT = "tool.left_out"
    UPSTREAM_FAILED = "upstream.failed"
    ERA_FOUND = "era.found"
    REQUEST_FINISHED = "request.finished"
    REQUEST_MALFORMED = "request.malformed"
    ERROR_SHORTENED = "error.shortened"
    PEER_REJECTED = "peer.rejected"
    PEER_FAILED = "peer.failed"
    CALL_TAKEN_OVER = "call.taken_over"
    CALL_COOLED = "call.cooled"
    TOOL_TASK_BEGUN = "tool_task.begun"
    TOOL_TASK_TAKEN_OVER = "tool_task.taken_over"
    TOOL_TASK_ENDED = "tool_task.ended"
    TOOL_TASK_LOST = "tool_task.lost"
    KEYS_FAILED = "keys.failed"
    CHILD_ENDED = "child.ended"
    CHILD_STDERR = "child.stderr"
    TASK_FAILED = "task.failed"
    BODY = "debug.body"


class LineLimit:
    """At most so many lines a second of an event that any stranger can cause."""

    def __init__(self, per_second: int = 20) -> None:
        self._per_second = per_second
        self._began = -inf
        self._logged = 0
        self.left_out = 0
        """How many lines were left out since the last one."""

    def take(self) -> int | None:
        """Return how many lines were left out since the last one; None if this one is left out too."""
        now = world.monotonic()
        if now - self._began >= 1:
            self._began, self._logged = now, 0
        if self._logged == self._per_second:
            self.left_out += 1
            return None
        self._logged += 1
        before, self.left_out = self.left_out, 0
        return before


def configure_logging(level: str, format: str, stream: TextIO | None = None) -> None:  # noqa: A002 - the config's word
    """Write our events and the standard library's records to `stream` (stderr), one line each.

    `level`: debug, info, warning or error; fixed for the life of the process, because loggers are cached.
    `format`: json, console, or auto (console on a terminal).
    """
    stream = stream or sys.stderr
    least = logging.getLevelNamesMapping()[level.upper()]
    if format == "console" or (format == "auto" and stream.isatty()):
        trace = structlog.dev.plain_traceback  # rich prints the variables of every frame
        processors: list[Processor] = [
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,  # before redact: messages of exceptions quote what failed
            redact,
            _stamp,
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty() and not os.environ.get("NO_COLOR"), exception_formatter=trace
            ),
        ]
    else:
        processors = [_json]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    # The records of libraries (aiohttp, asyncio, warnings) get the same form.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *processors],
        )
    )
    logging.basicConfig(handlers=[handler], level=least, force=True)
    logging.captureWarnings(capture=True)


def _stamp(_: object, __: str, line: EventDict) -> EventDict:
    return {"timestamp": _now(), **line}  # behind redact, which would search the time for secrets


def _json(_: object, level: str, line: EventDict) -> str:
    """Write a line at once, with its time, its level and its event first: each call that asks is logged.

    A processor for each step, and the library's own renderer, take four times as long.
    """
    if "exc_info" in line:
        line = structlog.processors.format_exc_info(None, level, line)  # before redaction, as above
    first = _repeated("level", level), _repeated("event", line.pop("event"))
    written = [
        _repeated(key, value)
        if key in REPEATED and isinstance(value, str)
        else f"{_quoted(key)}{value!r}"
        if type(value) in _NUMBERS and -inf < value < inf  # not a bool, whose repr is no JSON
        else _member(key, plain(key, value))
        for key, value in line.items()
    ]
    return f'{{"timestamp": "{_now()}", {", ".join((*first, *written))}}}'


_second = (0, "")
"""The newest second of a line, and how it is written: that is most of the work."""


def _now() -> str:
    """The time in ISO 8601."""
    global _second  # noqa: PLW0603
    second, nanoseconds = divmod(world.wall_ns(), 1_000_000_000)
    if second != _second[0]:
        _second = second, datetime.fromtimestamp(second, UTC).isoformat()[:-6]  # without +00:00
    return f"{_second[1]}.{nanoseconds // 1000:06d}Z"


def _member(key: str, value: object) -> str:
    return _quoted(key) + (encode_basestring_ascii(value) if isinstance(value, str) else json.dumps(value))


@lru_cache(maxsize=256)
def _repeated(key: str, value: str) -> str:
    return _member(key, plain(key, value))


@lru_cache(maxsize=256)
def _quoted(key: str) -> str:
    return f"{encode_basestring_ascii(key)}: "


def get_logger() -> Logger:
    """Return a logger."""
    logger: Logger = structlog.get_logger()
    return logger

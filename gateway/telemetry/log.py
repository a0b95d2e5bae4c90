"""The log: its events, each declared once, with the redaction of every line.

A line holds ids, counts and durations. Anything that looks like a credential is masked, even where none is expected.
A value may quote a client, an upstream or a library, so it is bounded, and without control characters: no stranger
fills the disk, forges a line or commands the operator's terminal.

It is written here and not by a library because each call that asks is logged: structlog took four times as long.
"""

import json
import logging
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from math import inf
from typing import Final, TextIO

from gateway import world
from gateway.telemetry.redaction import REPEATED, plain

Fields = dict[str, object]
_NUMBERS: Final = (int, float)
_COLOURS: Final = {"debug": "2", "info": "32", "warning": "33"}
_RED: Final = "31"
_EVENT_WIDTH: Final = 30


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
    REQUEST_MALFORMED = "request.malformed"
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


def _at(level: str) -> Callable[..., None]:
    number = logging.getLevelNamesMapping()[level.upper()]

    def say(self: "Logger", event: str, **fields: object) -> None:
        if self.least <= number:
            self.write(level, event, fields)

    return say


class Logger:
    """The log of this process, which all modules share."""

    def __init__(self) -> None:
        self.configure("info", "console", None)

    def configure(self, level: str, format: str, stream: TextIO | None) -> None:  # noqa: A002
        """See `configure_logging`."""
        self.least = logging.getLevelNamesMapping()[level.upper()]
        self.stream = stream
        self.is_json = format == "json" or (format == "auto" and not (stream or sys.stderr).isatty())

    debug, info, warning, error = map(_at, ("debug", "info", "warning", "error"))

    def exception(self, event: str, **fields: object) -> None:
        """Log an error with the exception that is being handled."""
        self.error(event, exc_info=True, **fields)

    def write(self, level: str, event: str, fields: Fields) -> None:
        """Write one line, whatever its level."""
        if "exc_info" in fields:
            given = fields.pop("exc_info")
            exc = given if isinstance(given, BaseException) else sys.exception()
            if exc is not None:  # its message may quote what failed: `plain` masks it too
                fields["exception"] = "".join(traceback.format_exception(exc)).rstrip()
        stream = self.stream or sys.stderr
        line = _json(level, event, fields) if self.is_json else _for_people(level, event, fields, stream.isatty())
        _ = stream.write(f"{line}\n")
        stream.flush()


_LOG: Final = Logger()


def get_logger() -> Logger:
    """Return the logger."""
    return _LOG


class _Records(logging.Handler):
    """Writes the records of libraries (aiohttp, asyncio, warnings) in the same way."""

    def emit(self, record: logging.LogRecord) -> None:
        fields: Fields = {"logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info[1]
        _LOG.write(record.levelname.lower(), record.getMessage(), fields)


def configure_logging(level: str, format: str, stream: TextIO | None = None) -> None:  # noqa: A002 - the config's word
    """Write our events and the standard library's records to `stream` (stderr), one line each.

    `level`: debug, info, warning or error. `format`: json, console, or auto (console on a terminal).
    """
    _LOG.configure(level, format, stream)
    logging.basicConfig(handlers=[_Records()], level=_LOG.least, force=True)
    logging.captureWarnings(capture=True)


def _json(level: str, event: str, fields: Fields) -> str:
    """Write a line that begins with its time, its level and its event, where a reader looks first."""
    written = [
        _repeated(key, value)
        if key in REPEATED and isinstance(value, str)
        else f"{_quoted(key)}{value!r}"
        if type(value) in _NUMBERS and -inf < value < inf  # type: ignore[operator]
        else _member(key, plain(key, value))
        for key, value in fields.items()
    ]
    first = _repeated("level", level), _repeated("event", event)
    return f'{{"timestamp": "{_now()}", {", ".join((*first, *written))}}}'


def _for_people(level: str, event: str, fields: Fields, in_colour: bool) -> str:  # noqa: FBT001  (as `isatty` says)
    shown = {key: plain(key, value) for key, value in fields.items()}
    trace = shown.pop("exception", "")
    texts = {
        key: value if isinstance(value, str) and value and " " not in value else json.dumps(value, ensure_ascii=False)
        for key, value in shown.items()
    }
    words = " ".join(f"{key}={text}" for key, text in texts.items())
    mark = f"\033[{_COLOURS.get(level, _RED)}m{level:<8}\033[0m" if in_colour else f"{level:<8}"
    line = f"{_now()} [{mark}] {plain('event', event):<{_EVENT_WIDTH}} {words}".rstrip()
    return f"{line}\n{trace}" if trace else line


_second = (0, "")
"""The newest second of a line, and how it is written: that is most of the work."""


def _now() -> str:
    """The time in ISO 8601."""
    global _second  # noqa: PLW0603
    second, nanoseconds = divmod(world.wall_ns(), 1_000_000_000)
    if second != _second[0]:
        _second = second, datetime.fromtimestamp(second, UTC).isoformat()[:-6]
    return f"{_second[1]}.{nanoseconds // 1000:06d}Z"


def _member(key: str, value: object) -> str:
    return _quoted(key) + (encode_basestring_ascii(value) if isinstance(value, str) else json.dumps(value))


@lru_cache(maxsize=256)
def _repeated(key: str, value: str) -> str:
    return _member(key, plain(key, value))


@lru_cache(maxsize=256)
def _quoted(key: str) -> str:
    return f"{encode_basestring_ascii(key)}: "

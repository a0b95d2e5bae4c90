"""The log: its events, each declared once, with the redaction of every line.

A line holds ids, counts and durations. Anything that looks like a credential is masked, even where none is expected.
A value may quote a client, an upstream or a library, so it is bounded, and without control characters: no stranger
fills the disk, forges a line or commands the operator's terminal.
"""

import json
import logging
import sys
from enum import StrEnum
from typing import TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from gateway.telemetry.redaction import redact

Logger = FilteringBoundLogger


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


def configure_logging(level: str, format: str, stream: TextIO | None = None) -> None:  # noqa: A002 - the config's word
    """Write our events and the standard library's records to `stream` (stderr), one line each.

    `level`: debug, info, warning or error; fixed for the life of the process, because loggers are cached.
    `format`: json, console, or auto (console on a terminal).
    """
    stream = stream or sys.stderr
    ours: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,  # before redact: messages of exceptions quote what failed
    ]
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)  # behind redact, which would search it for secrets
    end: list[Processor] = [redact, stamp, _in_order, _renderer(format, stream)]
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=ours + end,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    _route_stdlib(least, stream, [structlog.stdlib.add_logger_name, *ours], end)


def _in_order(_: object, __: str, line: EventDict) -> EventDict:
    """Begin each line with its time, its level and its event, where a reader looks first."""
    first = {key: line.pop(key) for key in ("timestamp", "level", "event") if key in line}
    return {**first, **line}


def _renderer(format: str, stream: TextIO) -> Processor:  # noqa: A002
    if format == "console" or (format == "auto" and stream.isatty()):
        plain = structlog.dev.plain_traceback  # rich prints the variables of every frame
        return structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)
    return _json


_encode_json = json.JSONEncoder().encode
"""Made once, because structlog's own renderer makes an encoder for each line. Lines are plain JSON after `redact`."""


def _json(_: object, __: str, line: EventDict) -> str:
    return _encode_json(line)


def _route_stdlib(least: int, stream: TextIO, first: list[Processor], end: list[Processor]) -> None:
    """Format the records of libraries (aiohttp, asyncio, warnings) in the same way."""
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processors=[remove_meta, *end])
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=least, force=True)
    logging.captureWarnings(capture=True)


def get_logger(**bound: object) -> Logger:
    """Return a logger; each of its lines has the `bound` fields."""
    logger: Logger = structlog.get_logger(**bound)
    return logger

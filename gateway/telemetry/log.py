"""The log: its events, each declared once, with the redaction of every line.

A line holds ids, counts and durations. Anything that looks like a credential is masked, even where none is expected.
"""

import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

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
    SUPERVISOR_STARTED = "supervisor.started"
    WORKER_STARTED = "worker.started"
    WORKER_ENDED = "worker.ended"
    EXCHANGE_FINISHED = "exchange.finished"
    STATE_REJECTED = "state.rejected"
    SESSION_LOST = "session.lost"
    SUBSCRIPTION_LOST = "subscription.lost"
    TOOL_LEFT_OUT = "tool.left_out"
    UPSTREAM_FAILED = "upstream.failed"
    ERA_FOUND = "era.found"
    REQUEST_MALFORMED = "request.malformed"
    PEER_REJECTED = "peer.rejected"
    PEER_FAILED = "peer.failed"
    CALL_TAKEN_OVER = "call.taken_over"
    KEYS_FAILED = "keys.failed"
    CHILD_ENDED = "child.ended"
    CHILD_STDERR = "child.stderr"
    TASK_FAILED = "task.failed"
    BODY = "debug.body"


MASK = "[hidden]"
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:authorization|cookies?|tokens?|keys?|secrets?|passwords?|credentials?|api_?keys?|request_?state)$"
)
_BODY_KEY = re.compile(r"^(?:body|payload|params|arguments|answers|content|input_?responses)$")
_SECRET_TEXT = re.compile(
    r"(?P<scheme>\b(?:bearer|dpop|basic)\s+)[\w.~+/=-]{6,}"  # RFC 6750, 9449, 7617
    r"|(?P<seal>\bmrtr1\.)[\w.=-]+"
    r"|(?P<jwt>\beyJ)[\w-]{8,}(?:\.[\w-]*)+"
    r"|(?P<userinfo>://)[^/\s@]+(?=@)"
    r"|\b[0-9a-f]{64,}\b"
    r"|(?P<base64>(?<![\w+/-])[\w+/-]{43,}={0,2})",
    re.IGNORECASE | re.ASCII,
)
_URL_QUERY = re.compile(r"(\bhttps?://[^\s?\"'<>]*\?)[^\s\"'<>]+", re.IGNORECASE)
_NAMED_ARGUMENT = re.compile(r"([\w-]+)(?:=|: *)", re.ASCII)
_MIXED = re.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[\w+-]{12,}")
_SHORTEST_SECRET = 8


def mask(text: str) -> str:
    """Return `text` without what looks like a token, a JWT, a sealed state or a key, and of URLs the secret parts."""
    if len(text) < _SHORTEST_SECRET:
        return text
    masked = _SECRET_TEXT.sub(_masked, text)
    return _URL_QUERY.sub(rf"\1{MASK}", masked) if "?" in masked else masked


def _masked(match: re.Match[str]) -> str:
    candidate = match["base64"]
    # Tracebacks are full of long paths. Path segments are short or of one case; those of a random key are not.
    if candidate is not None and not any(map(_MIXED.fullmatch, candidate.rstrip("=").split("/"))):
        return candidate
    return (match["scheme"] or match["seal"] or match["userinfo"] or "") + MASK


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")


@lru_cache(maxsize=1024)
def names_secret(key: str) -> bool:
    """Return whether a key names a secret, in any spelling."""
    return bool(_SECRET_KEY.search(_snake(key)))


def secret_arguments(command: Sequence[str]) -> dict[int, int]:
    """Which arguments of a command look as if they hold a secret: by index, where in the text it begins.

    `--api-key=x`, `--api-key x`, `API_KEY=x`, `--header "X-Api-Key: x"`, and the query of a URL.
    """
    found: dict[int, int] = {}
    for index, text in enumerate(command[1:], start=1):
        option = command[index - 1]
        named = _NAMED_ARGUMENT.match(text)
        queried = _URL_QUERY.match(text)
        if named is not None and names_secret(named[1].lstrip("-")):
            start = named.end()
        elif option.startswith("-") and not text.startswith("-") and names_secret(option.lstrip("-")):
            start = 0
        elif queried is not None:
            start = len(queried[1])
        else:
            continue
        if text[start:] and not text[start:].isdecimal():  # --max-tokens=500
            found[index] = start
    return found


@lru_cache(maxsize=1024)
def _is_secret(key: str) -> bool:
    return names_secret(key) or bool(_BODY_KEY.match(_snake(key)))


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask secrets by key and by pattern, at every depth; the result is plain JSON."""
    return {key: _plain(key, value) for key, value in event.items()}


def _plain(key: str, value: object) -> Any:
    """Return a JSON value. A number is never a secret, whatever its key: `keys=2` is a count."""
    if value is None or (isinstance(value, bool | int | float) and math.isfinite(value)):
        return value
    return MASK if _is_secret(key) else _plain_text(key, value)


def _plain_text(key: str, value: object) -> Any:
    """Return a JSON value without secrets; bytes are a body, so only their length is logged."""
    match value:
        case bytes() | bytearray() | memoryview():
            return f"<{len(value)} bytes>"
        case Mapping():
            return {mask(str(name)): _plain(str(name), item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(key, item) for item in value]
        case _:
            return mask(str(value))


def configure_logging(level: str, format: str, stream: TextIO | None = None) -> None:  # noqa: A002 - the config's word
    """Write our events and the standard library's records to `stream` (stderr), one line each.

    `level`: debug, info, warning or error; fixed for the life of the process, because loggers are cached.
    `format`: json, console, or auto (console on a terminal).
    """
    stream = stream or sys.stderr
    ours: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,  # before redact: messages of exceptions quote what failed
    ]
    end: list[Processor] = [redact, _renderer(format, stream)]
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=ours + end,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    _route_stdlib(least, stream, [structlog.stdlib.add_logger_name, *ours], end)


def _renderer(format: str, stream: TextIO) -> Processor:  # noqa: A002
    if format == "console" or (format == "auto" and stream.isatty()):
        plain = structlog.dev.plain_traceback  # rich prints the variables of every frame
        return structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)
    return structlog.processors.JSONRenderer()


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

"""The log: each line parses."""

import io
import json
import logging
import re
import sys
from base64 import b64encode
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.log import Event, configure_logging, get_logger
from gateway.telemetry.redaction import redact

CANARY = "c4nary-7f3a9"


KEY = b64encode(bytes(range(100, 132))).decode()


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjNG5hcnkifQ.c2lnbmF0dXJl"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(exc: Exception) -> NoReturn:
    raise exc


def test_a_line_is_json_with_event_level_utc_time_and_fields() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger().info(Event.EXCHANGE_FINISHED, route="/mcp", rounds=2, seconds=0.5, ok=True, none=None)
    (line,) = lines(stream)
    stamp = datetime.fromisoformat(str(line.pop("timestamp")))
    assert stamp.utcoffset() == timedelta(0)
    assert line == {
        "event": "exchange.finished",
        "level": "info",
        "route": "/mcp",
        "rounds": 2,
        "seconds": 0.5,
        "ok": True,
        "none": None,
    }


def test_a_line_begins_with_its_time_its_level_and_its_event() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger().info(Event.EXCHANGE_FINISHED, route="/mcp", rounds=2)
    logging.getLogger("library").warning("hello")
    assert [list(line)[:3] for line in lines(stream)] == [["timestamp", "level", "event"]] * 2


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logging("warning", "json", stream)
    get_logger().info(Event.CONFIG_LOADED)
    logging.getLogger("aiohttp.server").info("hello")
    get_logger().warning(Event.SESSION_LOST)
    logging.getLogger("aiohttp.server").error("oh")
    assert [line["event"] for line in lines(stream)] == ["session.lost", "oh"]


def test_the_standard_library_speaks_the_same_form_with_its_logger_and_exception() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    try:
        fail(RuntimeError(f"Authorization: Bearer {CANARY}"))
    except RuntimeError:
        logging.getLogger("aiohttp.server").exception("failed for %s", f"Bearer {CANARY}")
    (line,) = lines(stream)
    assert (line["event"], line["level"], line["logger"]) == ("failed for Bearer [hidden]", "error", "aiohttp.server")
    assert "RuntimeError: Authorization: Bearer [hidden]" in str(line["exception"])


def test_a_warning_becomes_a_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    logging.getLogger("py.warnings").warning("careful")
    assert logging.getLogger("py.warnings").isEnabledFor(logging.WARNING)
    assert lines(stream)[0]["logger"] == "py.warnings"


def test_an_exception_is_one_line_with_its_traceback_and_no_variables() -> None:
    hidden_variable = CANARY
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    try:
        fail(ValueError(len(hidden_variable)))
    except ValueError:
        get_logger().exception(Event.TASK_FAILED)
    (line,) = lines(stream)
    assert "Traceback" in str(line["exception"])
    assert CANARY not in stream.getvalue()


@pytest.mark.parametrize(
    ("chosen", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("console", io.StringIO, False),
    ],
)
def test_auto_is_for_people_on_a_terminal_only(
    chosen: str, stream: Callable[[], io.StringIO], *, is_json: bool
) -> None:
    out = stream()
    configure_logging("info", chosen, out)
    try:
        fail(ValueError(f"Bearer {CANARY}"))
    except ValueError:
        get_logger().exception(Event.SERVER_STARTED, token=CANARY)
    assert out.getvalue().startswith("{") is is_json
    assert "server.started" in out.getvalue()
    assert CANARY not in out.getvalue()


def test_the_default_stream_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "auto")
    get_logger().info(Event.SERVER_STOPPED)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["event"] == "server.stopped"
    assert sys.stderr is not None


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=12)
    | st.binary(max_size=4)
    | st.sampled_from([JWT, f"Bearer {CANARY}", KEY, "a\nb", "\x1b[31m", "\ud83d", "\u2028", "https://a/?b=c"])
)
FOREIGN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["route", "method", "cause", "token", "params", "seconds", "exception", "requestState", "name"])


@given(st.dictionaries(KEYS, FOREIGN, max_size=5))
def test_a_line_has_the_bytes_of_pythons_encoder_after_the_redaction_of_all_fields(fields: dict[str, object]) -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger().info(Event.SESSION_LOST, **fields)
    line = stream.getvalue()
    stamp = re.match(r'\{"timestamp": "([^"]+)", ', line)
    assert stamp is not None
    shown = redact(None, "info", {"level": "info", "event": "session.lost", **fields})
    assert line == json.dumps({"timestamp": stamp[1], **shown}) + "\n"
    assert line.isascii()
    assert line[:-1].isprintable()
    assert not any(secret in line for secret in (JWT, CANARY, KEY))

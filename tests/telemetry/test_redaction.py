"""What the log shows: no secrets, no control characters, no endless text."""

import io
import json
import logging
import string
from base64 import b64encode, urlsafe_b64encode
from random import Random
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.log import Event, configure_logging, get_logger
from gateway.telemetry.redaction import MAX_CHARACTERS, mask, secret_arguments

CANARY = "c4nary-7f3a9"


KEY = b64encode(bytes(range(100, 132))).decode()


JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJjNG5hcnkifQ.c2lnbmF0dXJl"


SECRETS = [
    (f"Bearer {CANARY}", "Bearer [hidden]"),
    (f"authorization: bearer  {CANARY}, x", "authorization: bearer  [hidden], x"),
    (f"DPoP {CANARY}", "DPoP [hidden]"),
    ("Basic dXNlcjpwYXNz", "Basic [hidden]"),
    (f"state mrtr1.{CANARY}.x-_= end", "state mrtr1.[hidden] end"),
    (f"token={JWT}&a=b", "token=[hidden]&a=b"),
    (f"http://user:{CANARY}@host/x", "http://[hidden]@host/x"),
    ("at http://127.0.0.1:9000/mcp?key=a&b, x", "at http://127.0.0.1:9000/mcp?[hidden] x"),
    (f"https://u:{CANARY}@h/x?key=a", "https://[hidden]@h/x?[hidden]"),
    (f"'{KEY}'", "'[hidden]'"),
    (KEY.rstrip("=").replace("+", "-").replace("/", "_"), "[hidden]"),
    (f"key {bytes(range(32)).hex()}.", "key [hidden]."),
]


def fail(exc: Exception) -> NoReturn:
    raise exc


def logged(**fields: object) -> str:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger().info(Event.EXCHANGE_FINISHED, **fields)
    return stream.getvalue()


@pytest.mark.parametrize(
    "key",
    [
        "authorization",
        "Authorization",
        "proxy-authorization",
        "cookie",
        "Set-Cookie",
        "token",
        "access_token",
        "progressToken",
        "key",
        "keys",
        "state_keys",
        "apiKey",
        "X-Api-Key",
        "secret",
        "client_secret",
        "password",
        "credentials",
        "requestState",
        "request_state",
        "body",
        "params",
        "arguments",
        "inputResponses",
        "answers",
        "content",
    ],
)
def test_the_value_of_a_secret_key_is_hidden_at_every_depth(key: str) -> None:
    for value in (CANARY, [CANARY], {"a": CANARY}, CANARY.encode()):
        for fields in ({key: value}, {"deep": [{key: value}]}, {"deep": {"er": ({key: value},)}}):
            out = logged(**fields)
            assert CANARY not in out
            assert "[hidden]" in out


@pytest.mark.parametrize("key", ["key_id", "monkey", "tokens_per_second", "method", "keyboard", "reason", "bodies"])
def test_the_value_of_a_plain_key_is_shown(key: str) -> None:
    assert CANARY in logged(**{key: CANARY})


@pytest.mark.parametrize(("text", "masked"), SECRETS)
def test_what_looks_like_a_secret_is_masked_in_any_string(text: str, masked: str) -> None:
    assert mask(text) == masked
    assert json.loads(logged(note=text))["note"] == masked
    assert json.loads(logged(note={text: [text]}))["note"] == {masked: [masked]}


@pytest.mark.parametrize(
    "text",
    [
        "exchange.finished",
        "2026-11-21T07:32:00.000000Z",
        "/usr/lib/python3/site-packages/aiohttp/client_reqrep/connection/something.py",
        "a_very_long_identifier_that_somebody_wrote_without_any_capital_letter_at_all",
        "http://127.0.0.1:9000/mcp",
        "what is at http://127.0.0.1:9000/mcp? It works",
        "0123456789abcdef",
        "7b1f0c1e-9b0e-4a0e-8a57-0d6f1f2f3a4b",
        "",
    ],
)
def test_an_ordinary_text_is_left_alone(text: str) -> None:
    assert mask(text) == text


def test_arguments_of_a_command_that_look_like_secrets_are_found() -> None:
    command = (
        "token", "--api-key", "s3cret", "--auth-token=s3cret", "API_KEY=s3cret", "--header", "X-Api-Key: s3cret",
        "https://h/mcp?s3cret", "--max-tokens=500", "--token", "--verbose", "plain", "https://h/mcp", "--key=",
    )  # fmt: skip
    found = secret_arguments(command)
    assert [command[index][start:] for index, start in found.items()] == ["s3cret"] * 5


def test_random_keys_are_masked_in_both_alphabets() -> None:
    missed, dice = 0, Random(0)
    for _ in range(2_000):
        key = dice.randbytes(32)
        missed += mask(f"x {urlsafe_b64encode(key).decode()}") != "x [hidden]"
        missed += mask(f"x {b64encode(key).decode().rstrip('=')}") != "x [hidden]"
    assert missed <= 20  # a standard key that is all slashes passes for a path: under 1 in 200


@given(st.text(alphabet=string.ascii_letters + string.digits + "-_.", min_size=12, max_size=200))
def test_a_bearer_token_and_a_sealed_state_of_any_text_are_masked(text: str) -> None:
    assert mask(f"a Bearer {text} b") == "a Bearer [hidden] b"
    assert mask(f"a mrtr1.{text} b") == "a mrtr1.[hidden] b"


def test_bytes_are_counted_and_objects_are_masked_and_odd_numbers_are_text() -> None:
    class Request:
        def __str__(self) -> str:
            return f"<Request Bearer {CANARY}>"

    line = json.loads(
        logged(
            keys=2,
            tokens=None,
            raw=b"x" * 7,
            request=Request(),
            wait=float("nan"),
            names={"b"},
            event_kind=Event.TASK_FAILED,
        )
    )
    assert (line["keys"], line["tokens"]) == (2, None)
    assert (line["raw"], line["request"], line["wait"]) == ("<7 bytes>", "<Request Bearer [hidden]>", "nan")
    assert (line["names"], line["event_kind"]) == (["b"], "task.failed")


EVIL = "name\x1b[2J\r\n2026-01-01 forged line \u202e\ud800\x9b31m"


def test_a_value_cannot_forge_a_line_or_command_a_terminal() -> None:
    stream = io.StringIO()
    configure_logging("info", "console", stream)
    get_logger().info(Event.TOOL_LEFT_OUT, tool=EVIL, names={EVIL: [EVIL]})
    logging.getLogger("aiohttp.server").error("bad request %s", EVIL)
    assert all(letter.isprintable() for line in stream.getvalue().split("\n") for letter in line)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_traceback_keeps_its_lines_without_what_its_message_smuggles() -> None:
    stream = io.StringIO()
    configure_logging("info", "console", stream)
    try:
        fail(ValueError(EVIL))
    except ValueError:
        get_logger().exception(Event.TASK_FAILED)
    shown = stream.getvalue().split("\n")
    assert len(shown) > 4
    assert all(line.isprintable() for line in shown)


def test_a_long_value_loses_its_middle_with_both_words_beside_the_cut() -> None:
    words = [f"word-{number:05d}" for number in range(20_000)]
    shown = json.loads(logged(cause=" ".join(words)))["cause"]
    assert len(shown) <= MAX_CHARACTERS + 10
    first, _, last = shown.partition(" […] ")
    assert set(first.split()) | set(last.split()) <= set(words)
    assert (first[:10], last[-10:]) == (words[0], words[-1])
    assert json.loads(logged(cause="x" * 20_000))["cause"] == " […] "


@pytest.mark.parametrize("shift", range(24))
def test_no_secret_shows_because_a_long_value_is_cut_beside_it(shift: int) -> None:
    half = MAX_CHARACTERS // 2
    text = ("a " * half)[: half - shift] + f" Bearer {CANARY} " + "b " * half + f" Bearer {CANARY} " + "c " * half
    text = text[: len(text) - shift]
    assert CANARY not in logged(cause=text)
    end = f" Bearer {CANARY} " + ("c " * half)[: half - shift]
    assert CANARY not in logged(cause="a " * half + end)

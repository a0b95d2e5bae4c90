"""Targets that translate content: results and questions of an upstream, answers of a client, the configuration."""

import json
from typing import Any

import msgspec
from msgspec import Raw

from gateway.config import ConfigError, parse
from gateway.config.load import digest
from gateway.exchange import input_requests, results
from gateway.exchange.input_requests import MalformedQuestion, Question
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities
from tests.fuzz.protocol_targets import read_again

SERVER = b'{"name":"s","version":"1"}'
ALL = Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, True))
SECRET = "correct-horse-battery-staple-0123456789"
"""Long enough to be recognised as a key."""
ASKED = {
    mcp.ELICIT: Question("k", mcp.ELICIT, b"1", params=b"{}"),
    mcp.SAMPLE: Question("k", mcp.SAMPLE, b"1", params=b"{}"),
    mcp.ROOTS: Question("k", mcp.ROOTS, b"1", params=b"{}"),
}


def one_of_a_message(data: bytes) -> Raw | None:
    """The bytes as a part of a message; None if they are not JSON, for then no message has such a part."""
    try:
        _ = jsonrpc.message(b'{"jsonrpc":"2.0","id":1,"result":%b}' % data)
    except ValueError:
        return None
    return jsonrpc.fields(b'{"r":%b}' % data).get("r")


def result(data: bytes) -> None:
    """A method, a line end, a result or error: only ValueError; what comes out is JSON, and keeps what went in."""
    method, _, body = data.partition(b"\n")
    raw = one_of_a_message(body)
    if raw is None:
        return
    name = method.decode(errors="replace")
    _error(name, raw)
    try:
        modern = results.modern(name, raw, SERVER, (0, "private"), retried=False)
    except ValueError:
        return
    made, said = read_again(modern.body), read_again(bytes(raw))
    assert made["resultType"] == "complete"
    lost = {key for key, value in said.items() if value is not None} - set(made) - {"ttlMs", "cacheScope"}
    assert not lost, "members are lost"
    again = results.modern(name, Raw(modern.body), SERVER, (0, "private"), retried=False)
    assert read_again(again.body) == made, "a modern result is changed again"


def _error(method: str, raw: Raw) -> None:
    error = jsonrpc.error(raw)
    modern = results.modern_error(method, "file:///a", error)
    made = json.loads(jsonrpc.failure(b"1", modern))["error"]
    assert isinstance(made["code"], int)
    assert results.modern_error(method, "file:///a", modern).code == modern.code, "an error is translated twice"


def question(data: bytes) -> None:
    """A method, a line end, params: only Malformed; what a client is asked is JSON, and answers to it are checked."""
    method, _, body = data.partition(b"\n")
    name, raw = method.decode(errors="replace"), one_of_a_message(body)
    if raw is None:
        return
    if name in ASKED:
        _ask(name, raw)
        try:
            answer = input_requests.check_answer(ASKED[name], raw)
        except InvalidParams:
            return
        assert input_requests.check_answer(ASKED[name], answer) == answer, "an answer changes twice"
        return
    try:
        asked = input_requests.url_questions(raw, ())
    except MalformedQuestion:
        return
    assert set(read_again(input_requests.input_requests(asked))) == set(asked)


def _ask(method: str, params: Raw) -> None:
    try:
        asked = input_requests.read(method, params, ALL)
    except MalformedQuestion:
        return
    key = input_requests.assign_key(method, asked.hint, ())
    made = Question(key, method, b"1", params=asked.params)
    shown = read_again(input_requests.input_requests({key: made}))
    assert set(shown) == {key}, "the key is not the client's"
    assert shown[key]["method"] == method
    assert len(input_requests.question_digest(made)) == 16


def configuration(data: bytes) -> None:
    """A YAML text: only ConfigError, which shows no secret; a configuration written as JSON is the same one."""
    env = {"SECRET": SECRET}
    try:
        config = parse(data.decode(errors="replace"), "/nonexistent/gateway.yaml", env)
    except ConfigError as exc:
        assert SECRET not in str(exc), "a secret is shown"  # noqa: PT017  (this is no test)
        return
    _ = digest(config)
    if SECRET.encode() in msgspec.json.encode(config) or b"${" in data or b"$$" in data:
        return
    again = parse(json.dumps(_plain(config)), "/nonexistent/gateway.yaml", {})
    assert again == config, "a configuration changes when it is written and read"


def _plain(config: Any) -> Any:
    return msgspec.to_builtins(config)

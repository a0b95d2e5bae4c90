"""Modern requests, byte by byte, against the real gateway before a real legacy server (py130)."""

import asyncio
import base64
import io
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.cases import ENDED
from tests.e2e.wire import ACCEPT, META, NAMED, Answer, Json, Wire, check, headers_of, meta, request, wire
from tests.parts.launch import PARTS, OldServer, free_port, old_server
from tests.support.gateway_process import HELD, Gateway, gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not (PARTS / "py130").exists(), reason="scripts/parts has not been run"),
]

BOB = {"action": "accept", "content": {"name": "Bob"}}
PROMPT_SECONDS = 8.0
"""What "at once" means on a busy machine: less than any time that the gateway waits, unless a test shortens it."""
STATE_ERROR = {
    "code": -32602,
    "message": "Invalid or expired requestState",
    "data": {"reason": "invalid_request_state"},
}
IN_FLIGHT = "mcp_gateway_requests_in_flight"
REJECTED = "mcp_gateway_state_rejected_total"


@dataclass
class Setup:
    """A server, a gateway before it, and a client."""

    server: OldServer
    gw: Gateway
    wire: Wire

    def new(self, event: str | None = None, tool: str | None = None) -> list[dict[str, Any]]:
        """Read the ledger from where the test began."""
        return [
            e for e in self.server.ledger()[self.began :] if event in (None, e["event"]) and tool in (None, e["tool"])
        ]

    began: int = 0

    async def ended(self, tool: str, event: str, count: int = 1) -> None:
        """Wait for an entry of this test in the ledger."""

        async def there() -> bool:
            return len(self.new(event, tool)) >= count

        await self.gw.until(there, f"{count} {event} of {tool}; the ledger: {self.new()}")
        assert len(self.new(event, tool)) == count

    async def park(self, tool: str = "ask", arguments: Json | None = None, **options: Any) -> Answer:
        answer = await self.wire.call(tool, arguments, **options)
        assert answer.asks, answer
        return answer

    async def counted(self, name: str, value: float, **labels: str) -> None:
        async def is_so() -> bool:
            return await self.gw.metric(name, **labels) == value

        await self.gw.until(is_so, f"{name}{labels} is {value}, not {await self.gw.metric(name, **labels)}")


@asynccontextmanager
async def setup(*flags: str, server: OldServer | None = None, **config: Any) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(old_server("py130", *flags)) if server is None else server
        gw = await stack.enter_async_context(gateway(running.url, **config))
        client = await stack.enter_async_context(wire(gw.url))
        yield Setup(running, gw, client, len(running.ledger()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[OldServer]:
    async with old_server("py130") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(server: OldServer) -> AsyncIterator[Setup]:
    """A gateway for the tests that do not change it."""
    routes = [{"path": path, "upstream": {"url": server.url}} for path in ("/mcp", "/other")]
    async with setup(server=server, routes=routes, hold={"grace_seconds": 0.5}) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def s(shared: Setup) -> AsyncIterator[Setup]:
    shared.began = len(shared.server.ledger())
    yield shared
    await shared.gw.settled()


# --- bad requests ---

ECHO = request("tools/call", {"name": "echo", "arguments": {"text": "x"}}, id="e")


def without(key: str) -> Json:
    changed: Json = json.loads(json.dumps(ECHO))
    del changed["params"]["_meta"][META + key]
    return changed


def having(**params: Any) -> Json:
    return {**ECHO, "params": {**ECHO["params"], **params}}


def versioned(version: str) -> Json:
    return having(_meta={**ECHO["params"]["_meta"], META + "protocolVersion": version})


BODIES: dict[str, tuple[bytes | Json, int, int]] = {
    "no JSON": (b'{"jsonrpc":', 400, -32700),
    "no UTF-8": (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', 400, -32700),
    "NaN": (json.dumps(having(x=float("nan"))).encode(), 400, -32700),
    "too deep": (b"[" * 200 + b"]" * 200, 400, -32700),
    "batch": (json.dumps([ECHO]).encode(), 400, -32600),
    "a response": ({"jsonrpc": "2.0", "id": 1, "result": {}}, 400, -32600),
    "jsonrpc 1.0": ({**ECHO, "jsonrpc": "1.0"}, 400, -32600),
    "id null": ({**ECHO, "id": None}, 400, -32600),
    "id a fraction": ({**ECHO, "id": 1.5}, 400, -32600),
    "params a list": ({**ECHO, "params": []}, 400, -32600),
    "an id twice": (json.dumps(ECHO).replace('"id": "e"', '"id": "e", "id": "e"').encode(), 400, -32600),
    "no capabilities": (without("clientCapabilities"), 400, -32602),
    "log level": (having(_meta={**meta(), META + "logLevel": "loud"}), 400, -32602),
    "answers a list": (having(inputResponses=[]), 400, -32602),
    "state a number": (having(requestState=5), 400, -32602),
    "ping": ({**ECHO, "method": "ping"}, 404, -32601),
    "logging/setLevel": ({**ECHO, "method": "logging/setLevel"}, 404, -32601),
    "resources/subscribe": ({**ECHO, "method": "resources/subscribe"}, 404, -32601),
    "initialize": ({**ECHO, "method": "initialize"}, 404, -32601),
    "unknown method": ({**ECHO, "method": "tools/nonsense"}, 404, -32601),
}

IDS = {"an id twice": "e", "id null": None, "id a fraction": None}
"""The id of the error, if it differs from that of the request."""


@pytest.mark.parametrize("case", BODIES)
async def test_a_bad_request_is_refused_before_anything_runs(s: Setup, case: str) -> None:
    body, status, code = BODIES[case]
    headers = headers_of(ECHO if isinstance(body, bytes) else {**ECHO, "method": body.get("method", "tools/call")})
    if isinstance(body, dict):
        headers |= {"Mcp-Name": "echo"} if body.get("method", "tools/call") == "tools/call" else {}
    answer = await s.wire.raw(body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
    assert answer.refusal == (status, code)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.final.get("id") == IDS.get(case, body.get("id") if isinstance(body, dict) else None)
    assert ("id" in answer.final) == (answer.final.get("id") is not None), "an id that cannot be read is left out"
    assert not s.new("run")


HEADERS: dict[str, tuple[dict[str, str | None], tuple[str, ...]]] = {
    "version differs": ({"MCP-Protocol-Version": "2026-12-31"}, ("2026-12-31", "2026-07-28")),
    "method differs": ({"Mcp-Method": "tools/list"}, ("tools/list", "tools/call")),
    "method in other case": ({"Mcp-Method": "Tools/Call"}, ("Tools/Call", "tools/call")),
    "name differs": ({"Mcp-Name": "hang"}, ("hang", "echo")),
    "name in Base64 differs": ({"Mcp-Name": "=?base64?aGFuZw==?="}, ("hang", "echo")),
    "name in bad Base64": ({"Mcp-Name": "=?base64?aG FuZw?="}, ("Mcp-Name", "Base64")),
    "no method": ({"Mcp-Method": None}, ("Mcp-Method", "missing")),
    "no name": ({"Mcp-Name": None}, ("Mcp-Name", "missing")),
    "no version": ({"MCP-Protocol-Version": None}, ("MCP-Protocol-Version", "missing")),
}


@pytest.mark.parametrize("case", HEADERS)
async def test_a_header_that_differs_from_the_body_is_refused_and_named(s: Setup, case: str) -> None:
    changed, named = HEADERS[case]
    headers = {key: value for key, value in {**headers_of(ECHO), **changed}.items() if value is not None}
    answer = await s.wire.raw(json.dumps(ECHO).encode(), headers)
    check(answer, ECHO)
    assert answer.refusal == (400, -32020)
    assert all(word in answer.error["message"] for word in named), answer.error
    assert not s.new("run")


@pytest.mark.parametrize("name", ["MCP-Protocol-Version", "Mcp-Method", "Mcp-Name"])
async def test_a_header_that_appears_twice_is_refused(s: Setup, name: str) -> None:
    headers = headers_of(ECHO)
    answer = await s.wire.raw(json.dumps(ECHO).encode(), [*headers.items(), (name, headers[name])])
    check(answer, ECHO)
    assert answer.refusal == (400, -32020)
    assert name in answer.error["message"]


async def test_a_name_in_base64_is_decoded(s: Setup) -> None:
    encoded = f"=?base64?{base64.b64encode(b'echo').decode()}?="
    assert (await s.wire.call("echo", {"text": "x"}, headers={"Mcp-Name": encoded})).text == "x"


async def test_an_unknown_version_gets_a_list_of_the_known_ones(s: Setup) -> None:
    message = versioned("2027-01-01")
    headers = headers_of(message) | {"MCP-Protocol-Version": "2027-01-01"}
    answer = await s.wire.raw(json.dumps(message).encode(), headers)
    check(answer, message)
    assert answer.refusal == (400, -32022)
    assert answer.error["data"] == {"supported": ["2026-07-28"], "requested": "2027-01-01"}


async def test_the_first_failed_check_decides_the_error(s: Setup) -> None:
    """JSON, shape, `_meta`, headers, version, method: the order is part of the protocol."""
    message = {**versioned("2027-01-01"), "method": "nonsense"}
    headers = {**headers_of(message), "MCP-Protocol-Version": "2027-01-01"}
    body = json.dumps(message).encode()
    assert (await s.wire.raw(body, headers)).refusal == (400, -32022)
    assert (await s.wire.raw(body, {**headers, "Mcp-Method": "other"})).refusal == (400, -32020)
    del message["params"]["_meta"][META + "clientCapabilities"]
    body = json.dumps(message).encode()
    assert (await s.wire.raw(body, {**headers, "Mcp-Method": "other"})).refusal == (400, -32602)
    assert (await s.wire.raw(json.dumps({**message, "id": None}).encode(), headers)).refusal == (400, -32600)


async def test_a_body_over_the_limit_is_413(s: Setup) -> None:
    answer = await s.wire.raw(io.BytesIO(b" " * 4_194_305), headers_of(ECHO))
    assert answer.refusal == (413, -32600)
    assert "limits.body_bytes" in answer.error["message"]


async def test_a_notification_is_accepted_even_without_headers(s: Setup) -> None:
    message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"_meta": meta(), "requestId": 1}}
    answer = await s.wire.raw(json.dumps(message).encode(), {"Content-Type": "application/json"})
    assert (answer.status, answer.body) == (202, b"")


async def test_a_foreign_host_or_origin_is_refused(s: Setup) -> None:
    for headers in ({"Host": "evil.example.com"}, {"Origin": "http://evil.example.com"}):
        answer = await s.wire.raw(json.dumps(ECHO).encode(), headers_of(ECHO) | headers)
        assert answer.status == 403
    assert not s.new("run")


# --- replies ---


async def test_a_plain_result_is_json_and_progress_makes_it_a_stream(s: Setup) -> None:
    plain = await s.wire.call("progress", {"steps": 2})
    assert (plain.is_stream, len(plain.messages)) == (False, 1)
    quiet = await s.wire.call("echo", {"text": "x"}, progress="p")
    assert not quiet.is_stream
    stream = await s.wire.call("progress", {"steps": 2}, progress="token", id="7")
    assert stream.is_stream
    assert stream.headers["X-Accel-Buffering"] == "no"
    assert [m["params"]["progressToken"] for m in stream.messages[:-1]] == ["token"] * 2
    assert [m["params"]["progress"] for m in stream.messages[:-1]] == [1, 2]


async def test_progress_has_the_token_of_its_round(s: Setup) -> None:
    first = await s.wire.call("progress_ask", {"steps": 1}, progress=1)
    assert [m["params"]["progressToken"] for m in first.messages[:-1]] == [1]
    last = await s.wire.call(
        "progress_ask", {"steps": 1}, progress="two", id=2, state=first.state, answers={"Name": ACCEPT}
    )
    assert [m["params"]["progressToken"] for m in last.messages[:-1]] == ["two"]
    assert last.text == NAMED


async def test_logs_come_only_at_the_level_asked(s: Setup) -> None:
    logged = await s.wire.call("logs", log_level="error")
    assert [m["params"]["level"] for m in logged.messages[:-1]] == ["error"]
    assert len((await s.wire.call("logs")).messages) == 1


async def test_a_big_result_is_json(s: Setup) -> None:
    answer = await s.wire.call("big", {"bytes": 2_000_000}, progress=1)
    assert not answer.is_stream
    assert len(answer.text) == 2_000_000


async def test_discover_describes_the_legacy_server(s: Setup) -> None:
    result = (await s.wire.send("server/discover", id="d")).result
    assert result["supportedVersions"] == ["2026-07-28"]
    assert result["_meta"][META + "serverInfo"]["name"] == "old-py"
    assert result["instructions"] == "An old server for the tests."
    assert result["cacheScope"] == "private"


async def test_lists_state_their_freshness(s: Setup) -> None:
    for method in ("tools/list", "prompts/list", "resources/list", "resources/templates/list"):
        result = (await s.wire.send(method)).result
        assert (result["ttlMs"], result["cacheScope"]) == (0, "private")


async def test_an_unknown_resource_is_named(s: Setup) -> None:
    answer = await s.wire.send("resources/read", {"uri": "nope://x"})
    assert answer.refusal == (200, -32602)
    assert answer.error["data"] == {"uri": "nope://x"}


# --- requestState ---

Send = Callable[[Setup, str], Any]
ARGUMENTS = {"question": "Who?"}
ANSWERS = {"Name": ACCEPT}


async def retry(s: Setup, state: object, caller: Wire | None = None, **options: Any) -> Answer:
    """Answer with this state; the id is always the same, so that whole replies can be compared."""
    tool, arguments = options.pop("tool", "ask"), options.pop("arguments", ARGUMENTS)
    return await (caller or s.wire.on(Authorization="Bearer ann")).call(
        tool, arguments, **{"id": "same", "state": state, "answers": ANSWERS, **options}
    )


def flipped(state: str, at: int) -> str:
    return state[:at] + ("A" if state[at] != "A" else "B") + state[at + 1 :]


BAD_STATES: dict[str, Send] = {
    "forged in the middle": lambda s, state: retry(s, flipped(state, len(state) // 2)),
    "forged at the end": lambda s, state: retry(s, flipped(state, -2)),
    "forged key id": lambda s, state: retry(s, flipped(state, 8)),
    "another prefix": lambda s, state: retry(s, "x" + state),
    "cut": lambda s, state: retry(s, state[:-5]),
    "cut to its head": lambda s, state: retry(s, state[:14]),
    "longer": lambda s, state: retry(s, state + "-TAMPERED"),
    "too long": lambda s, state: retry(s, state + "A" * 70_000),
    "empty": lambda s, _: retry(s, ""),
    "a number": lambda s, _: retry(s, 5),
    "another user's": lambda s, state: retry(s, state, s.wire.on(Authorization="Bearer bob")),
    "nobody's": lambda s, state: retry(s, state, s.wire),
    "other arguments": lambda s, state: retry(s, state, arguments={"question": "Why?"}),
    "other tool": lambda s, state: retry(s, state, tool="ask_get"),
    "other route": lambda s, state: retry(s, state, s.wire.on(s.gw.base + "/other", Authorization="Bearer ann")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refused(shared: Setup) -> bytes:
    """The one reply to every state that is not accepted."""
    return (await retry(shared, "nonsense")).nameless


@pytest.mark.parametrize("case", BAD_STATES)
async def test_every_invalid_state_gets_the_same_error_and_harms_nothing(s: Setup, refused: bytes, case: str) -> None:
    ann = s.wire.on(Authorization="Bearer ann")
    state = (await ann.call("ask", ARGUMENTS)).state
    answer = await BAD_STATES[case](s, state)
    assert answer.status == 400
    assert answer.error == STATE_ERROR
    assert answer.nameless == refused
    assert await s.gw.metric(HELD) == 1
    assert (await retry(s, state)).text == NAMED
    await s.ended("ask", "finished")
    assert len(s.new("run")) == len(s.new("answered")) == 1


async def test_a_state_is_good_only_for_its_method(s: Setup) -> None:
    first = await s.wire.send("prompts/get", {"name": "ask_prompt"})
    answer = await s.wire.call("ask_prompt", state=first.state, answers=ANSWERS)
    assert answer.error == STATE_ERROR
    last = await s.wire.send("prompts/get", {"name": "ask_prompt"}, state=first.state, answers=ANSWERS)
    assert last.result["messages"][0]["content"]["text"] == NAMED


async def test_a_state_of_another_gateways_key_is_refused(s: Setup, refused: bytes) -> None:
    async with setup(server=s.server, state={"keys": ["ab" * 32]}) as other:
        first = await other.wire.on(Authorization="Bearer ann").call("ask", ARGUMENTS)
        assert (await retry(s, first.state)).nameless == refused
        assert (await retry(other, first.state)).text == NAMED


async def test_a_state_expires(server: OldServer, refused: bytes) -> None:
    async with setup(server=server, state={"ttl_seconds": 0.4}, hold={"ttl_seconds": 0.4}) as s:
        state = (await s.wire.on(Authorization="Bearer ann").call("ask", ARGUMENTS)).state
        await asyncio.sleep(0.5)
        assert (await retry(s, state)).nameless == refused
        assert await s.gw.metric(REJECTED, reason="expired") == 1


async def test_a_state_of_an_exchange_that_is_over_is_refused(server: OldServer, refused: bytes) -> None:
    async with setup(server=server, hold={"linger_seconds": 0.1}) as s:
        state = (await s.wire.on(Authorization="Bearer ann").call("ask", ARGUMENTS)).state
        assert (await retry(s, state)).text == NAMED
        await asyncio.sleep(0.3)
        assert (await retry(s, state)).nameless == refused
        assert await s.gw.metric(REJECTED, reason="ended") == 1
        assert len(s.new("run")) == len(s.new("answered")) == 1


async def test_an_expired_call_is_cancelled_and_leaves_nothing_behind(server: OldServer, refused: bytes) -> None:
    async with setup(server=server, hold={"ttl_seconds": 0.4}) as s:
        state = (await s.wire.on(Authorization="Bearer ann").call("ask", ARGUMENTS)).state
        await s.counted(HELD, 1)
        await s.gw.settled()
        await s.ended("ask", "answered")
        assert s.new("answered")[0]["result"] == {"action": "cancel"}
        assert (await retry(s, state)).nameless == refused


def jwt(**claims: str) -> str:
    parts = [json.dumps(part).encode() for part in ({"alg": "none"}, claims)]
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "c2ln"])


async def test_a_refreshed_token_is_the_same_principal(s: Setup) -> None:
    first = s.wire.on(Authorization="Bearer " + jwt(iss="i", sub="ann", jti="1"))
    fresh = s.wire.on(Authorization="Bearer " + jwt(iss="i", sub="ann", jti="2"))
    other = s.wire.on(Authorization="Bearer " + jwt(iss="i", sub="bob", jti="3"))
    state = (await first.call("ask", ARGUMENTS)).state
    assert (await retry(s, state, other)).error == STATE_ERROR
    assert (await retry(s, state, fresh)).text == NAMED


async def test_arguments_may_be_spelled_differently_in_a_retry(s: Setup) -> None:
    first = await s.park("ask", {"question": "é", "title": "Name"})
    message = request(
        "tools/call", {"name": "ask", "arguments": {"title": "Name", "question": "é"}}, state=first.state
    )
    message["params"]["inputResponses"] = ANSWERS
    answer = await s.wire.raw(json.dumps(message, ensure_ascii=False).encode(), headers_of(message))
    assert answer.text == NAMED


# --- answers ---


async def test_a_wrong_answer_is_refused_and_the_call_still_waits(s: Setup) -> None:
    state = (await s.park()).state
    wrongs: list[Json] = [{"action": "perhaps"}, {"roots": []}, {}, {"action": "accept", "content": {"name": {}}}]
    for wrong in wrongs:
        answer = await s.wire.call("ask", state=state, answers={"Name": wrong})
        assert answer.refusal == (400, -32602)
        assert "Name" in answer.error["message"]
    assert await s.gw.metric(HELD) == 1
    assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED
    assert len(s.new("answered")) == len(s.new("run")) == 1


async def test_a_missing_answer_is_asked_again_and_an_unknown_key_ignored(server: OldServer) -> None:
    async with setup(server=server, hold={"quiet_seconds": 1}) as s:  # a slow server's three are one round, too
        first = await s.park("ask_many")
        keys = set(first.asks)
        assert len(keys) == 3
        again = await s.wire.call("ask_many", state=first.state, answers={"Name": ACCEPT, "nobody": ACCEPT})
        assert set(again.asks) == keys - {"Name"}
        rest: Json = {
            key: {"roots": []}
            if asked["method"] == "roots/list"
            else {"role": "assistant", "model": "m", "content": {"type": "text", "text": "words"}}
            for key, asked in again.result["inputRequests"].items()
        }
        last = await s.wire.call("ask_many", state=again.state, answers=rest)
        assert json.loads(last.text) == {"elicit": NAMED, "sample": "words", "roots": []}
        assert len(s.new("run")) == 1
        assert len(s.new("answered")) == 3


async def test_answers_given_in_advance_are_taken(s: Setup) -> None:
    assert (await s.wire.call("ask", answers={"Name": BOB, "nobody": {}})).text == 'accept:{"name":"Bob"}'
    assert len(s.new("run")) == 1


async def test_two_identical_retries_at_once_get_the_same_result(s: Setup) -> None:
    state = (await s.park()).state
    retries = [s.wire.call("ask", state=state, answers=ANSWERS, id=number) for number in range(5)]
    replies = await asyncio.gather(*retries)
    assert [reply.text for reply in replies] == [NAMED] * 5
    assert len(s.new("answered")) == len(s.new("run")) == 1


async def test_a_retry_repeated_after_its_result_gets_it_again(s: Setup) -> None:
    state = (await s.park()).state
    first = await s.wire.call("ask", state=state, answers=ANSWERS, id="first")
    again = await s.wire.call("ask", state=state, answers=ANSWERS, id="again")
    assert first.result == again.result
    assert len(s.new("answered")) == len(s.new("run")) == 1


async def test_other_answers_to_an_answered_state_are_refused(s: Setup, refused: bytes) -> None:
    state = (await s.park()).state
    assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED
    other = await s.wire.call("ask", state=state, answers={"Name": BOB}, id="same")
    assert (other.status, other.nameless) == (400, refused)
    assert [entry["result"] for entry in s.new("answered")] == [ACCEPT]


async def test_two_different_answers_at_once_deliver_one(s: Setup) -> None:
    state = (await s.park()).state
    replies = await asyncio.gather(
        s.wire.call("ask", state=state, answers=ANSWERS), s.wire.call("ask", state=state, answers={"Name": BOB})
    )
    refusals = [reply for reply in replies if reply.status == 400]
    assert len(refusals) == 1
    assert refusals[0].error == STATE_ERROR
    assert len(s.new("answered")) == len(s.new("run")) == 1


async def test_a_retry_of_an_earlier_round_gets_the_open_questions(s: Setup) -> None:
    first = await s.park("ask_sequence", {"n": 2})
    second = await s.wire.call("ask_sequence", {"n": 2}, state=first.state, answers=ANSWERS)
    repeated = await s.wire.call("ask_sequence", {"n": 2}, state=first.state, answers=ANSWERS)
    assert repeated.asks == second.asks
    other = await s.wire.call("ask_sequence", {"n": 2}, state=first.state, answers={"Name": BOB})
    assert other.error == STATE_ERROR
    key = second.asks[0]
    last = await s.wire.call("ask_sequence", {"n": 2}, state=second.state, answers={key: BOB})
    assert last.text == f'{NAMED}, accept:{{"name":"Bob"}}'
    assert len(s.new("answered")) == 2


async def test_an_undeclared_question_ends_the_call(s: Setup) -> None:
    for tool, required in (
        ("ask", {"elicitation": {"form": {}}}),
        ("ask_url", {"elicitation": {"url": {}}}),
        ("sample", {"sampling": {}}),
        ("roots", {"roots": {}}),
    ):
        arguments = (
            {"url": "https://example.com/"} if tool == "ask_url" else {"prompt": "x"} if "sample" in tool else {}
        )
        answer = await s.wire.call(tool, arguments, capabilities={}, progress=1)
        assert answer.refusal == (400, -32021)
        assert answer.error["data"]["requiredCapabilities"] == required
        await s.gw.settled()
        assert len(s.new("run", tool)) == 1


# --- clients that go away ---


async def leave(s: Setup, seconds: float, tool: str, arguments: Json | None = None, **options: Any) -> None:
    """Send a call and close the connection after so long."""

    async def go() -> None:
        async with s.wire.open(tool, arguments, **options):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(go(), seconds)


async def leave_once_it_runs(s: Setup, tool: str, arguments: Json | None = None, **options: Any) -> None:
    """Send a call and close the connection when the server runs it."""

    async def go() -> None:
        async with s.wire.open(tool, arguments, **options) as response:
            await response.read()

    call = asyncio.get_running_loop().create_task(go())
    await s.ended(tool, "run")
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


async def leave_once_it_came(s: Setup, tool: str, arguments: Json | None = None, **options: Any) -> None:
    """Send a call and close the connection when the gateway has the call; return when the gateway has noticed."""
    call = asyncio.get_running_loop().create_task(s.wire.call(tool, arguments, **options))
    await s.counted(IN_FLIGHT, 1)
    call.cancel()
    await s.counted(IN_FLIGHT, 0)


async def test_a_client_that_disconnects_in_the_first_round_cancels_the_call_at_once(server: OldServer) -> None:
    async with setup(server=server, hold={"grace_seconds": 600}) as s:  # for a retry, which this is not
        await leave_once_it_runs(s, "hang")
        await s.ended("hang", "cancelled")
        await leave_once_it_runs(s, "progress", {"steps": 1000, "delay_seconds": 0.05}, progress=1)
        await s.ended("progress", "cancelled")


async def test_a_disconnected_retry_may_be_repeated_within_the_grace_period(server: OldServer) -> None:
    async with setup(server=server, hold={"grace_seconds": 600}) as s:
        state = (await s.park()).state
        s.server.send(signal.SIGSTOP)
        try:
            await leave_once_it_came(s, "ask", state=state, answers=ANSWERS)
            repeated = asyncio.get_running_loop().create_task(s.wire.call("ask", state=state, answers=ANSWERS))
            await s.counted(IN_FLIGHT, 1)
        finally:
            s.server.send(signal.SIGCONT)
        assert (await repeated).text == NAMED
        assert len(s.new("answered")) == len(s.new("run")) == 1


async def test_a_disconnected_retry_is_cancelled_after_the_grace_period(s: Setup) -> None:
    first = await s.park("ask_sequence", {"n": 2})
    s.server.send(signal.SIGSTOP)
    try:
        await leave_once_it_came(s, "ask_sequence", {"n": 2}, state=first.state, answers=ANSWERS)
        await asyncio.sleep(0.8)
    finally:
        s.server.send(signal.SIGCONT)
    await s.gw.settled()
    await s.gw.until(lambda: over(s, "ask_sequence"), "ask_sequence is over")
    assert len(s.new("run")) == 1


async def over(s: Setup, tool: str) -> bool:
    return any(entry["event"] in ENDED for entry in s.new(tool=tool))


async def test_a_result_that_arrives_without_a_client_is_kept(server: OldServer) -> None:
    """Both legs have left when the result arrives; a later retry still gets it."""
    async with setup(server=server, hold={"grace_seconds": 600}) as s:
        state = (await s.park()).state
        s.server.send(signal.SIGSTOP)
        try:
            await leave_once_it_came(s, "ask", state=state, answers=ANSWERS)
        finally:
            s.server.send(signal.SIGCONT)
        await s.ended("ask", "finished")
        assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED
        assert len(s.new("answered")) == 1


# --- long calls ---


async def test_a_long_leg_ends_early_and_the_next_one_continues(server: OldServer) -> None:
    async with setup(server=server, legs={"limit_seconds": 0.3, "rounds": 2}) as s:
        answer = await s.wire.call("sleep", {"seconds": 1.2})
        for number in range(2):
            assert answer.asks == []
            assert "inputRequests" not in answer.result
            answer = await s.wire.call("sleep", {"seconds": 1.2}, state=answer.state, id=number)
        assert answer.text == "slept 1.2"
        assert len(s.new("run")) == 1


async def test_a_silent_call_is_kept_alive_by_comments(server: OldServer) -> None:
    async with setup(server=server, timeouts={"keepalive_seconds": 0.2}) as s:
        answer = await s.wire.call("sleep", {"seconds": 0.7})
        assert answer.is_stream
        assert answer.body.count(b"\n:") + answer.body.startswith(b":") >= 2
        assert answer.text == "slept 0.7"


async def test_a_call_of_a_silent_server_times_out(server: OldServer) -> None:
    async with setup(server=server, timeouts={"idle_seconds": 0.5}) as s:
        started = time.monotonic()
        answer = await s.wire.call("hang")
        assert time.monotonic() - started < PROMPT_SECONDS
        assert answer.status == 200
        assert "timeouts.idle_seconds" in answer.error["message"]
        await s.ended("hang", "cancelled")


# --- caps ---


@pytest.mark.parametrize(("cap", "status"), [("max_calls", 503), ("max_calls_per_principal", 429)])
async def test_a_call_over_the_cap_is_refused_and_harms_no_other(server: OldServer, cap: str, status: int) -> None:
    async with setup(server=server, hold={cap: 1}) as s:
        state = (await s.park()).state
        answer = await s.wire.call("ask")
        assert answer.status == status
        assert int(answer.headers["Retry-After"]) >= 1
        assert cap in answer.error["message"]
        if status == 429:
            other = await s.wire.on(Authorization="Bearer other").call("ask")
            await s.wire.on(Authorization="Bearer other").call("ask", state=other.state, answers=ANSWERS)
        assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED
        await s.gw.settled()
        assert (await s.wire.call("ask", answers=ANSWERS)).text == NAMED


# --- upstreams that are away ---


async def test_the_error_names_an_upstream_that_is_down(server: OldServer) -> None:
    dead = f"http://127.0.0.1:{free_port()}/mcp"
    async with gateway(dead) as gw, wire(gw.url) as client:
        for answer in (
            await client.send("server/discover", id="d"),
            await client.call("echo", {"text": "x"}, id=7),
            await client.send("tools/list", id="list"),
        ):
            assert answer.refusal == (200, -32603)
            assert dead in answer.error["message"]
            assert "check" in answer.error["message"]
            assert answer.error["data"]["reason"] == "upstream_unreachable"
        causes = [line["cause"] for line in gw.log() if "cause" in line]
        assert len(causes) == 3, "the operator hears of each"
        assert all(dead in cause for cause in causes)


async def test_the_next_call_after_a_restart_works_and_runs_once() -> None:
    async with setup() as s:
        assert (await s.wire.call("echo", {"text": "1"})).text == "1"
        await s.server.restart()
        assert (await s.wire.call("echo", {"text": "2"})).text == "2"
        assert [entry["arguments"] for entry in s.new("run")] == [{"text": "1"}, {"text": "2"}]
        assert await s.gw.metric("mcp_gateway_sessions_opened_total") == 2
        assert (await s.wire.call("ask", answers=ANSWERS)).text == NAMED
        await s.gw.settled()


async def test_many_calls_at_once_after_a_restart_run_once_each() -> None:
    async with setup() as s:
        await asyncio.gather(*(s.wire.call("sleep", {"seconds": 0.1}) for _ in range(5)))
        await s.server.restart()
        texts = [str(number) for number in range(10)]
        replies = await asyncio.gather(*(s.wire.call("echo", {"text": text}) for text in texts))
        assert [reply.text for reply in replies] == texts
        assert sorted(entry["arguments"]["text"] for entry in s.new("run", "echo")) == texts


async def test_an_upstream_that_dies_in_a_call_is_one_prompt_error() -> None:
    async with setup() as s:
        call = asyncio.get_running_loop().create_task(s.wire.call("hang", id="h"))
        await s.ended("hang", "run")
        await s.server.kill()
        started = time.monotonic()
        answer = await call
        assert time.monotonic() - started < PROMPT_SECONDS
        assert answer.refusal == (200, -32603)
        assert answer.error["data"]["reason"] == "call_lost"
        assert "may have had effects" in answer.error["message"]
        await s.gw.settled()
        await s.server.start()
        assert (await s.wire.call("echo", {"text": "back"})).text == "back"
        assert len(s.new("run", "hang")) == 1


async def test_an_upstream_that_dies_in_a_stream_is_one_prompt_error() -> None:
    async with setup() as s:
        arguments = {"steps": 100, "delay_seconds": 0.1}
        call = asyncio.get_running_loop().create_task(s.wire.call("progress", arguments, progress=1))
        await s.ended("progress", "run")

        async def streams() -> bool:
            return await s.gw.metric("mcp_gateway_notifications_total", outcome="forwarded") > 0

        await s.gw.until(streams, "progress has come")
        await s.server.kill()
        answer = await asyncio.wait_for(call, PROMPT_SECONDS)
        assert answer.is_stream
        assert answer.error["data"]["reason"] == "call_lost"


async def test_an_upstream_that_dies_while_a_call_is_parked_is_one_prompt_error() -> None:
    async with setup() as s:
        state = (await s.park()).state
        await s.server.kill()
        answer = await asyncio.wait_for(s.wire.call("ask", state=state, answers=ANSWERS, id="r"), PROMPT_SECONDS)
        assert answer.refusal == (200, -32603)
        assert answer.error["data"]["reason"] == "call_lost"
        await s.gw.settled()
        again = await s.wire.call("ask", state=state, answers=ANSWERS, id="r")
        assert again.nameless == answer.nameless


async def test_an_upstream_that_was_restarted_while_a_call_was_parked_is_one_prompt_error() -> None:
    async with setup() as s:
        state = (await s.park()).state
        await s.server.restart()
        answer = await asyncio.wait_for(s.wire.call("ask", state=state, answers=ANSWERS), PROMPT_SECONDS)
        assert answer.error["data"]["reason"] == "call_lost"
        assert len(s.new("run")) == 1
        assert (await s.wire.call("ask", answers=ANSWERS)).text == NAMED


async def test_an_upstream_that_hangs_ends_in_a_timeout() -> None:
    async with setup(timeouts={"handshake_seconds": 0.5, "answer_seconds": 0.5}) as s:
        state = (await s.park()).state
        s.server.send(signal.SIGSTOP)
        try:
            started = time.monotonic()
            fresh = s.wire.on(Authorization="Bearer fresh").send("server/discover", id="d")
            discovered, answered = await asyncio.gather(fresh, s.wire.call("ask", state=state, answers=ANSWERS))
            assert time.monotonic() - started < PROMPT_SECONDS
            assert "timeouts.handshake_seconds" in discovered.error["message"]
            assert "timeouts.answer_seconds" in answered.error["message"]
        finally:
            s.server.send(signal.SIGCONT)


async def test_a_question_of_a_stateless_server_is_explained() -> None:
    async with setup("--stateless") as s:
        assert (await s.wire.call("echo", {"text": "x"})).text == "x"
        answer = await asyncio.wait_for(s.wire.call("ask"), PROMPT_SECONDS)
        assert answer.error["data"]["reason"] == "upstream_cannot_ask"
        await s.gw.settled()


# --- the end of the gateway ---


async def test_a_gateway_that_stops_lets_a_parked_call_complete(server: OldServer) -> None:
    async with setup(server=server, hold={"drain_seconds": 20}) as s:
        state = (await s.park()).state
        s.gw.terminate()
        started = time.monotonic()
        await s.gw.until(lambda: status_is(s.gw, 503), "/readyz 503")
        fresh = await s.wire.call("echo", {"text": "x"})
        assert fresh.status == 503
        assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED
        assert await s.gw.exited() == 0
        assert time.monotonic() - started < 20, "it waits for what is parked, not for the whole drain"
        assert len(s.new("run")) == len(s.new("answered")) == 1


async def status_is(gw: Gateway, status: int) -> bool:
    return await gw.ready() == status


async def test_a_stopping_gateway_cancels_calls_at_its_deadline_and_exits(server: OldServer) -> None:
    async with setup(server=server, hold={"drain_seconds": 1}) as s:
        await s.park()
        running = asyncio.get_running_loop().create_task(s.wire.call("hang"))
        await s.ended("hang", "run")
        s.gw.terminate()
        started = time.monotonic()
        answer = await running
        assert await s.gw.exited() == 0
        assert time.monotonic() - started > 0.9
        assert answer.status == 503
        assert "may have had effects" in answer.error["message"]
        await s.ended("hang", "cancelled")
        await s.ended("ask", "answered")
        assert s.new("answered")[0]["result"] == {"action": "cancel"}
        await s.gw.until(lambda: over(s, "ask"), "ask is over")


async def test_an_idle_gateway_exits_at_once(server: OldServer) -> None:
    async with setup(server=server, hold={"drain_seconds": 20}) as s:
        await s.wire.call("echo", {"text": "x"})
        s.gw.terminate()
        started = time.monotonic()
        assert await s.gw.exited() == 0
        assert time.monotonic() - started < 20


async def test_a_call_in_flight_at_sigterm_gets_its_result(server: OldServer) -> None:
    async with setup(server=server, hold={"drain_seconds": 20}) as s:
        call = asyncio.get_running_loop().create_task(s.wire.call("sleep", {"seconds": 0.6}))
        await s.ended("sleep", "run")
        s.gw.terminate()
        assert (await call).text == "slept 0.6"
        assert await s.gw.exited() == 0


async def test_a_reload_of_the_same_file_ends_nothing(server: OldServer) -> None:
    async with setup(server=server) as s:
        state = (await s.park()).state
        (line,) = await s.gw.reload()
        assert (line["event"], line["note"]) == ("config.loaded", "nothing changed")
        assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED


async def test_a_call_parked_in_a_killed_gateway_is_reported_lost(server: OldServer) -> None:
    async with setup(server=server) as s:
        state = (await s.park()).state
        await s.gw.kill()
        await s.gw.start()
        answer = await asyncio.wait_for(s.wire.call("ask", state=state, answers=ANSWERS), PROMPT_SECONDS)
        assert answer.error["data"]["reason"] == "owner_lost"
        assert "may have had effects" in answer.error["message"]
        assert len(s.new("run")) == 1


async def test_secrets_stay_out_of_log_and_metrics(s: Setup) -> None:
    canary = "canary-8c1f2b7d0e"
    caller = s.wire.on(Authorization=f"Bearer {canary}")
    first = await caller.call("ask", {"question": canary})
    await caller.call("ask", {"question": canary}, state=first.state, answers={"Name": {"action": "decline"}})
    await caller.call("ask", {"question": canary}, state=first.state + "x", answers={})
    async with s.gw.http.get(f"{s.gw.admin}/metrics") as response:
        assert canary not in await response.text()
    assert canary not in s.gw.stderr
    assert first.state not in s.gw.stderr


# --- many things at once ---


async def test_a_client_that_disconnects_at_the_start_ends_the_call_upstream(server: OldServer) -> None:
    """At any moment: in the handshake, with the call in flight, when the server has just taken it."""
    async with setup(server=server) as s:
        await asyncio.gather(*(s.wire.call("sleep", {"seconds": 0.1}) for _ in range(5)))
        for number in range(80):
            await leave(s, 0.002 + number % 16 * 0.0015, "hang")
        await s.gw.settled()
        await s.counted("mcp_gateway_sessions", 0, state="quarantined")

        async def all_cancelled() -> bool:  # the server accepts a cancellation before it carries it out
            return len(s.new("cancelled", "hang")) == len(s.new("run", "hang"))

        await s.gw.until(all_cancelled, "every call is cancelled")
        assert len(s.new("run", "hang")) > 0


STORM = 80
TOOLS_OF_THE_STORM: dict[str, Json] = {
    "ask": {},
    "ask_get": {},
    "ask_many": {},
    "ask_sequence": {"n": 2},
    "progress_ask": {"steps": 2},
    "logs": {},
    "echo": {},
    "sleep": {"seconds": 0.05},
}


@pytest.mark.parametrize("seed", range(2))
async def test_many_concurrent_calls_mix_nothing_and_leave_nothing_behind(server: OldServer, seed: int) -> None:
    """Retries are repeated, dropped or never sent; every result belongs to its call, and every call ends once."""
    async with setup(
        server=server, hold={"ttl_seconds": 4, "grace_seconds": 0.3}, sessions={"max_per_principal": 500}
    ) as s:
        results = await asyncio.gather(*(weather(s, Random(f"{seed} {number}"), number) for number in range(STORM)))
        assert results.count(True) > STORM / 2
        await s.gw.settled()

        async def have_ended() -> bool:
            # The server accepts a cancellation before it carries it out.
            events = Counter(entry["event"] for entry in s.new())
            return sum(events[end] for end in ENDED) >= events["run"]

        await s.gw.until(have_ended, "every call has ended at the server", 10)
        runs, ends = Counter[str](), Counter[str]()
        for entry in s.new():
            runs[entry["tool"]] += entry["event"] == "run"
            ends[entry["tool"]] += entry["event"] in ENDED
        assert runs == ends
        assert runs.total() == STORM, "nothing ran twice, and nothing not at all"


async def weather(s: Setup, dice: Random, number: int) -> bool:
    """Make one of many calls; return whether it got its result."""
    marker = f"marker {number}."
    tool = dice.choice(list(TOOLS_OF_THE_STORM))
    text = {"ask": {"question": marker}, "ask_get": {"question": marker}, "echo": {"text": marker}}.get(tool, {})
    arguments = {**TOOLS_OF_THE_STORM[tool], **text}
    caller = s.wire.on(Authorization=f"Bearer {dice.randrange(3)}")
    await asyncio.sleep(dice.random())
    answer = await caller.call(
        tool, arguments, progress=dice.choice([None, "p"]), log_level=dice.choice([None, "info"])
    )
    while answer.result["resultType"] == "input_required":
        asked = answer.result["inputRequests"]
        assert tool not in {"ask", "ask_get"} or [q["params"]["message"] for q in asked.values()] == [marker]
        again = {"state": answer.state, "answers": {key: said(q["method"], marker) for key, q in asked.items()}}
        fate = dice.random()
        if fate < 0.1:
            return False
        if fate < 0.2:
            with suppress(TimeoutError):
                await asyncio.wait_for(caller.call(tool, arguments, **again), dice.choice([0.001, 0.005, 0.02]))
        if fate > 0.8:
            both = await asyncio.gather(*(caller.call(tool, arguments, **again) for _ in range(2)))
            assert both[0].result["resultType"] == both[1].result["resultType"]
        answer = await caller.call(tool, arguments, **again)
    assert is_of(tool, answer.text, marker), (tool, answer.text, marker)
    return True


def said(method: str, marker: str) -> Json:
    """Answer a question of any kind with the marker."""
    if method == "roots/list":
        return {"roots": [{"uri": "file:///", "name": marker}]}
    if method == "sampling/createMessage":
        return {"role": "assistant", "model": "m", "content": {"type": "text", "text": marker}}
    return {"action": "accept", "content": {"name": marker}}


def is_of(tool: str, text: str, marker: str) -> bool:
    """Whether a result can only have come from the answers with that marker."""
    counts = {"ask_many": 2, "ask_sequence": 2, "logs": 0, "sleep": 0}
    return text.count(marker) == counts.get(tool, 1)


# --- sessions ---


async def test_a_session_is_shared_only_by_one_principal_with_the_same_capabilities(server: OldServer) -> None:
    async with setup(server=server) as s:
        ann, bob = (s.wire.on(Authorization=f"Bearer {name}") for name in ("ann", "bob"))
        assert [(await caller.call("counter")).text for caller in (ann, bob, ann, s.wire)] == ["1", "1", "2", "1"]
        assert (await ann.call("counter", capabilities={})).text == "1"
        assert json.loads((await ann.call("whoami", capabilities={"roots": {}})).text)["capabilities"] == {"roots": {}}
        assert (await ann.call("counter")).text == "3"


async def test_idle_sessions_are_closed(server: OldServer) -> None:
    async with setup(server=server, sessions={"idle_seconds": 0.2}) as s:
        assert (await s.wire.call("counter")).text == "1"
        await s.counted("mcp_gateway_sessions", 0)
        assert (await s.wire.call("counter")).text == "1"


async def test_a_call_waits_for_a_session_and_gets_an_error_if_none_becomes_free(server: OldServer) -> None:
    async with setup(server=server, sessions={"max": 1}, timeouts={"session_wait_seconds": 0.3}) as s:
        state = (await s.park()).state
        busy = await s.wire.call("echo", {"text": "x"})
        assert busy.status == 503
        assert "sessions.max" in busy.error["message"]
        assert int(busy.headers["Retry-After"]) >= 1
        assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED
    async with setup(server=server, sessions={"max": 1}, timeouts={"session_wait_seconds": 60}) as s:
        callers = [s.wire.on(Authorization=f"Bearer {number % 3}") for number in range(9)]
        replies = await asyncio.gather(*(caller.call("echo", {"text": "x"}) for caller in callers))
        assert [reply.text for reply in replies] == ["x"] * 9


async def test_a_call_that_waits_for_its_client_is_not_silent(server: OldServer) -> None:
    async with setup(server=server, timeouts={"idle_seconds": 0.3}) as s:
        state = (await s.park()).state
        await asyncio.sleep(0.8)
        assert (await s.wire.call("ask", state=state, answers=ANSWERS)).text == NAMED


async def test_a_session_id_from_the_client_is_ignored(s: Setup) -> None:
    headers = {"Mcp-Session-Id": "guess", "Last-Event-ID": "1", "X-Forwarded-For": "192.0.2.1", "Cookie": "a=b"}
    told = json.loads((await s.wire.call("whoami", headers=headers)).text)
    assert told["session"] != "guess"
    assert told["headers"] == {"host": f"127.0.0.1:{s.server.port}", "user-agent": "mrtr-gateway"}


async def test_without_a_quiet_window_every_question_still_arrives(server: OldServer) -> None:
    async with setup(server=server, hold={"quiet_seconds": 0}) as s:
        answer = await s.wire.call("ask_many")
        rounds = 0
        while answer.result["resultType"] == "input_required":
            rounds += 1
            asked = answer.result["inputRequests"]
            answers = {key: said(question["method"], "x") for key, question in asked.items()}
            answer = await s.wire.call("ask_many", state=answer.state, answers=answers)
        assert rounds <= 3
        assert json.loads(answer.text)["sample"] == "x"
        assert len(s.new("answered")) == 3


@pytest.mark.parametrize("id_", [2**53 + 1, -5, "", "zoë \u2028", "a" * 3000])
async def test_ids_and_tokens_come_back_unchanged(s: Setup, id_: object) -> None:
    answer = await s.wire.call("progress", {"steps": 1}, id=id_, progress=id_)
    assert answer.final["id"] == id_
    assert answer.messages[0]["params"]["progressToken"] == id_


async def test_a_required_url_becomes_a_round(server: OldServer) -> None:
    arguments = {"url": "https://example.com/sign-in"}
    async with setup(server=server, hold={"ttl_seconds": 1}) as s:
        first = await s.wire.call("url_required", arguments)
        (key,) = first.asks
        assert first.result["inputRequests"][key]["params"]["url"] == "https://example.com/sign-in"
        assert (await s.wire.call("url_required", arguments, state=first.state, answers={})).asks == [key]
        accepted = {"state": first.state, "answers": {key: {"action": "accept"}}}
        assert (await s.wire.call("url_required", arguments, **accepted)).text == "done"
        assert (await s.wire.call("url_required", arguments, **accepted)).text == "done"
        assert len(s.new("run")) == 2
        assert len({entry["session"] for entry in s.new("run")}) == 1

        # No client comes back, so the reserved session is free again.
        other = s.wire.on(Authorization="Bearer other")
        await other.call("url_required", arguments)
        await s.counted(HELD, 1)
        await s.gw.settled()

        without = await s.wire.on(Authorization="Bearer third").call(
            "url_required", arguments, capabilities={"elicitation": {"form": {}}}
        )
        assert without.refusal == (400, -32021)
        assert without.error["data"]["requiredCapabilities"] == {"elicitation": {"url": {}}}


async def test_an_early_end_during_the_handshake_names_no_server(server: OldServer) -> None:
    async with setup(server=server, legs={"limit_seconds": 0.3}) as s:
        server.send(signal.SIGSTOP)
        try:
            first = await s.wire.send("prompts/get", {"name": "ask_prompt"})
        finally:
            server.send(signal.SIGCONT)
        second = await s.wire.send("prompts/get", {"name": "ask_prompt"}, state=first.state)
        await s.wire.send("prompts/get", {"name": "ask_prompt"}, state=second.state, answers=ANSWERS)
        assert len(s.new("run")) == 1
        assert first.result.get("_meta", {}).get(META + "serverInfo", {"name": "none"}).get("name")


async def test_a_client_that_leaves_in_the_handshake_leaves_no_session(server: OldServer) -> None:
    async with setup(server=server) as s:
        server.send(signal.SIGSTOP)
        try:
            await leave(s, 0.2, "echo", {"text": "x"})
            await leave(s, 0.2, "echo", {"text": "x"}, log_level="info")
        finally:
            server.send(signal.SIGCONT)
        await s.gw.settled()
        assert not s.new("run")
        assert (await s.wire.call("echo", {"text": "y"})).text == "y"


async def test_a_draining_gateway_still_asks_and_repeats_lost_replies(server: OldServer) -> None:
    async with setup(server=server, hold={"drain_seconds": 20}) as s:
        first = await s.park("ask_sequence", {"n": 2})
        s.gw.terminate()
        await s.gw.until(lambda: status_is(s.gw, 503), "/readyz 503")
        second = await s.wire.call("ask_sequence", {"n": 2}, state=first.state, answers=ANSWERS)
        answers = {second.asks[0]: ACCEPT}
        assert (await s.wire.call("ask_sequence", {"n": 2}, state=second.state, answers=answers)).text
        assert await s.gw.exited() == 0


async def test_a_second_signal_ends_the_gateway_at_once(server: OldServer) -> None:
    async with setup(server=server, hold={"drain_seconds": 20, "ttl_seconds": 5}) as s:
        await s.park()
        s.gw.terminate()
        await s.gw.until(lambda: status_is(s.gw, 503), "/readyz 503")
        s.gw.terminate()
        assert await s.gw.exited(PROMPT_SECONDS) == 0

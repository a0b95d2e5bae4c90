"""The old TypeScript server, spoken to with raw 2025-11-25 HTTP: it asks, waits and is cancelled as real ones are."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.parts.launch import NODE, OldServer, old_server

Json = dict[str, Any]
ACCEPT = {"Accept": "application/json, text/event-stream"}
ANN: Json = {"action": "accept", "content": {"name": "Ann"}}
SAMPLED: Json = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "sampled"}}
ANSWERS: Json = {
    "elicitation/create": ANN,
    "sampling/createMessage": SAMPLED,
    "roots/list": {"roots": [{"uri": "file:///project"}]},
    "ping": {},
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not NODE.exists(), reason="scripts/parts has not been run"),
]


class OldClient:
    """One session: a GET stream and any number of POSTs; `asked` has what was asked, and on which stream."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url
        self.headers = dict(ACCEPT)
        self.ids = itertools.count(1)
        self.asked: list[tuple[str, Json]] = []
        self.notified: list[Json] = []
        self.event_ids: list[str] = []
        self.answers = dict(ANSWERS)

    async def post(self, message: Json) -> aiohttp.ClientResponse:
        response = await self.http.post(self.url, json={"jsonrpc": "2.0", **message}, headers=self.headers)
        response.raise_for_status()
        return response

    async def initialize(self, capabilities: Json) -> None:
        info = {"name": "raw", "version": "0"}
        params = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "clientInfo": info}
        async with await self.post({"id": 0, "method": "initialize", "params": params}) as response:
            self.headers["Mcp-Session-Id"] = response.headers["Mcp-Session-Id"]
            self.headers["MCP-Protocol-Version"] = "2025-11-25"
            await self.answer_of(response, 0, "initialize")

    async def listen(self, opened: asyncio.Event) -> None:
        """Read the GET stream; the POST of `initialized` follows once it is open."""
        async with self.http.get(self.url, headers=self.headers) as response:
            response.raise_for_status()
            opened.set()
            await self.answer_of(response, None, "GET")

    async def request(self, method: str, params: Json, number: int | None = None) -> Json:
        number = next(self.ids) if number is None else number
        async with await self.post({"id": number, "method": method, "params": params}) as response:
            return await self.answer_of(response, number, "POST")

    async def call(self, tool: str, arguments: Json | None = None) -> Json:
        meta = {"progressToken": "token"}
        answer = await self.request("tools/call", {"name": tool, "arguments": arguments or {}, "_meta": meta})
        result: Json = answer.get("result", answer)
        return result

    async def answer_of(self, response: aiohttp.ClientResponse, number: int | None, stream: str) -> Json:
        """Read events up to the response with this id; answer the requests among them."""
        async for line in response.content:
            if line.startswith(b"id: "):
                self.event_ids.append(line[4:].strip().decode())
            if not line.startswith(b"data: ") or not line[6:].strip():
                continue
            message: Json = json.loads(line[6:])
            if "method" not in message:
                assert message["id"] == number, message
                return message
            if "id" not in message:
                self.notified.append(message)
                continue
            self.asked.append((stream, message))
            result = self.answers.get(message["method"])
            if result is not None:
                async with await self.post({"id": message["id"], "result": result}) as accepted:
                    assert accepted.status == 202
        assert number is None, "the stream ended without a response"
        return {}


def text(result: Json) -> str:
    words: str = result["content"][0]["text"]
    return words


@pytest.fixture
async def server() -> AsyncIterator[OldServer]:
    async with old_server("ts132-store") as started:
        yield started


@asynccontextmanager
async def session(url: str, capabilities: Json | None = None) -> AsyncIterator[OldClient]:
    everything: Json = {"elicitation": {"form": {}, "url": {}}, "sampling": {"tools": {}}, "roots": {}}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http, asyncio.TaskGroup() as tasks:
        client = OldClient(http, url)
        await client.initialize(everything if capabilities is None else capabilities)
        opened = asyncio.Event()
        listening = tasks.create_task(client.listen(opened))
        await opened.wait()
        (await client.post({"method": "notifications/initialized"})).close()
        try:
            yield client
        finally:
            listening.cancel()


@pytest.fixture
async def client(server: OldServer) -> AsyncIterator[OldClient]:
    async with session(server.url) as opened:
        yield opened


async def test_a_question_comes_on_the_post_stream(client: OldClient, server: OldServer) -> None:
    assert text(await client.call("ask", {"question": "Who?"})) == 'accept:{"name":"Ann"}'
    [(stream, request)] = client.asked
    assert (stream, request["method"], request["params"]["message"]) == ("POST", "elicitation/create", "Who?")
    assert request["params"]["requestedSchema"]["properties"]["name"] == {"type": "string", "title": "Name"}
    assert [line["event"] for line in server.ledger(tool="ask")] == ["run", "answered", "finished"]
    assert len(client.event_ids) >= 3


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_question_is_refused(client: OldClient, action: str) -> None:
    client.answers["elicitation/create"] = {"action": action}
    assert text(await client.call("ask", {"question": "Who?"})) == action


@pytest.mark.parametrize(
    ("tool", "arguments", "method"),
    [
        ("ask_get", {"question": "Who?"}, "elicitation/create"),
        ("sample", {"prompt": "Speak"}, "sampling/createMessage"),
        ("roots", {}, "roots/list"),
        ("ping_me", {}, "ping"),
    ],
)
async def test_what_names_no_call_comes_on_the_get_stream(
    client: OldClient, tool: str, arguments: Json, method: str
) -> None:
    assert "isError" not in await client.call(tool, arguments)
    assert [(stream, request["method"]) for stream, request in client.asked] == [("GET", method)]


async def test_many_questions_are_asked_at_once(client: OldClient) -> None:
    summary = json.loads(text(await client.call("ask_many")))
    assert summary == {"elicit": 'accept:{"name":"Ann"}', "sample": "sampled", "roots": ["file:///project"]}
    assert {stream for stream, _ in client.asked} == {"POST"}
    assert [request["id"] for _, request in client.asked] == [0, 1, 2]


async def test_questions_one_after_the_other(client: OldClient) -> None:
    assert text(await client.call("ask_sequence", {"n": 2})) == 'accept:{"name":"Ann"}, accept:{"name":"Ann"}'


async def test_sampling_with_tools(client: OldClient) -> None:
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bern"}}
    client.answers["sampling/createMessage"] = {**SAMPLED, "content": [use], "stopReason": "toolUse"}
    assert json.loads(text(await client.call("sample_tools", {"prompt": "Weather?"}))) == ["tool_use"]
    [(_, request)] = client.asked
    assert request["params"]["toolChoice"] == {"mode": "auto"}


async def test_a_page_is_opened(client: OldClient) -> None:
    client.answers["elicitation/create"] = {"action": "accept"}
    assert text(await client.call("ask_url", {"url": "https://example.com/"})) == "accept"
    [(stream, request)] = client.asked
    assert (stream, request["params"]["mode"], request["params"]["url"]) == ("POST", "url", "https://example.com/")


async def test_a_url_is_required_before_the_call(client: OldClient) -> None:
    refused = await client.call("url_required", {"url": "https://example.com/"})
    assert refused["error"]["code"] == -32042
    [elicitation] = refused["error"]["data"]["elicitations"]
    assert (elicitation["mode"], elicitation["url"]) == ("url", "https://example.com/")
    assert text(await client.call("url_required", {"url": "https://example.com/"})) == "done"


async def test_the_server_gives_up_on_its_own_question(client: OldClient) -> None:
    del client.answers["elicitation/create"]
    assert text(await client.call("give_up", {"seconds": 0.2})) == "gave up"
    [cancelled] = [it for it in client.notified if it["method"] == "notifications/cancelled"]
    assert cancelled["params"]["requestId"] == client.asked[0][1]["id"]


async def test_a_cancelled_call_stops_and_gets_no_answer(client: OldClient, server: OldServer) -> None:
    async with asyncio.TaskGroup() as tasks:
        hanging = tasks.create_task(client.request("tools/call", {"name": "hang", "arguments": {}}, 77))
        await server.wait_for("run", "hang")
        cancelled = {"method": "notifications/cancelled", "params": {"requestId": 77}}
        (await client.post(cancelled)).close()
        await server.wait_for("cancelled", "hang")
        done, _ = await asyncio.wait({hanging}, timeout=0.2)
        assert not done
        hanging.cancel()


async def test_a_late_question_is_not_part_of_a_call(client: OldClient, server: OldServer) -> None:
    assert text(await client.call("late", {"delay_seconds": 0.1})) == "done"
    [answered] = await server.wait_for("answered", "late")
    assert answered["result"] == ANN
    assert [stream for stream, _ in client.asked] == ["GET"]


async def test_the_rest_of_the_tools(client: OldClient) -> None:
    assert text(await client.call("echo", {"text": "zoë"})) == "zoë"
    assert len(text(await client.call("big", {"bytes": 100_000}))) == 100_000
    assert (await client.call("fail", {"message": "no"}))["isError"] is True
    assert (await client.call("structured", {"n": 4}))["structuredContent"] == {"n": 4, "square": 16}
    assert [text(await client.call("counter")) for _ in range(2)] == ["1", "2"]
    assert text(await client.call("sleep", {"seconds": 0.01})) == "slept 0.01"
    assert text(await client.call("sample_related", {"prompt": "Speak"})) == "sampled"
    seen = json.loads(text(await client.call("whoami")))
    assert seen["session"] == client.headers["Mcp-Session-Id"]
    assert seen["clientInfo"]["name"] == "raw"


async def test_progress_and_logs_come_on_the_post_stream(client: OldClient) -> None:
    assert text(await client.call("progress", {"steps": 2})) == "done"
    assert text(await client.call("progress_ask", {"steps": 1})) == 'accept:{"name":"Ann"}'
    assert [it["params"]["progress"] for it in client.notified] == [1, 2, 1, 2]
    client.notified.clear()
    await client.call("logs")
    await client.request("logging/setLevel", {"level": "warning"})
    await client.call("logs")
    levels = [it["params"]["level"] for it in client.notified]
    assert levels == ["debug", "info", "warning", "error", "warning", "error"]


async def test_prompts_and_resources(client: OldClient) -> None:
    greeting = await client.request("prompts/get", {"name": "greet", "arguments": {"name": "Ann"}})
    assert greeting["result"]["messages"][0]["content"]["text"] == "Hello, Ann!"
    asked = await client.request("prompts/get", {"name": "ask_prompt"})
    assert asked["result"]["messages"][0]["content"]["text"] == 'accept:{"name":"Ann"}'
    contents = {}
    for uri in ("note://static", "note://blob", "note://7", "ask://form"):
        answer = await client.request("resources/read", {"uri": uri})
        contents[uri] = answer["result"]["contents"][0].get("text")
    assert contents["note://static"] == "a static note"
    assert contents["note://blob"] is None
    assert contents["note://7"] == "note 7"
    assert contents["ask://form"] == 'accept:{"name":"Ann"}'


async def test_a_question_is_resumed_from_the_event_store(client: OldClient) -> None:
    params = {"name": "ask", "arguments": {"question": "Later?"}}
    async with await client.post({"id": 88, "method": "tools/call", "params": params}) as response:
        async with asyncio.timeout(5):
            events = [line async for line in take_until(response, b'"elicitation/create"')]
    cursor = [line for line in events if line.startswith(b"id: ")][-1][4:].strip().decode()
    question = json.loads(events[-1][6:])
    assert text(await client.call("echo", {"text": "meanwhile"})) == "meanwhile"
    headers = {**client.headers, "Last-Event-ID": cursor}
    async with client.http.get(client.url, headers=headers) as resumed:
        (await client.post({"id": question["id"], "result": ANN})).close()
        answer = await client.answer_of(resumed, 88, "resumed")
    assert text(answer["result"]) == 'accept:{"name":"Ann"}'


async def take_until(response: aiohttp.ClientResponse, words: bytes) -> AsyncIterator[bytes]:
    async for line in response.content:
        yield line
        if words in line:
            return


async def test_a_client_that_cannot_answer_is_asked_on_the_post_stream_only(server: OldServer) -> None:
    async with session(server.url, {}) as client:
        refused = await client.call("ask_get", {"question": "Who?"})
        assert refused["isError"] is True
        assert text(await client.call("ask", {"question": "Who?"})) == 'accept:{"name":"Ann"}'


async def test_unknown_sessions_and_modern_requests_are_refused(client: OldClient) -> None:
    async def status(method: str, headers: dict[str, str], body: Json | None) -> int:
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async with client.http.request(method, client.url, headers=ACCEPT | headers, json=body) as response:
                return response.status
        return 0

    ping: Json = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    discover: Json = {"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {}}
    known = {"Mcp-Session-Id": client.headers["Mcp-Session-Id"]}
    assert await status("POST", {"Mcp-Session-Id": "unknown"}, ping) == 404
    assert await status("GET", {}, None) == 400
    assert await status("POST", {}, ping) == 400
    assert await status("POST", {"MCP-Protocol-Version": "2026-07-28"}, discover) == 400
    assert await status("DELETE", known, None) == 200
    assert await status("POST", known, ping) == 404

"""The old servers do what the other tests take for granted: here nothing stands between them and a client."""

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.parts.launch import NODE, PARTS, REPOSITORY, OldServer, old_server

pytestmark = pytest.mark.real

VERSION = "2025-11-25"
CAPABILITIES = {"elicitation": {"form": {}, "url": {}}, "sampling": {"tools": {}}, "roots": {}}
PYTHON = ["py130", "py110", "fm3"]
ALL = [*PYTHON, "ts132"]
URL_MODE = ["py130", "fm3", "ts132"]

# What the client answers, by method, unless a test says otherwise.
ANSWERS: dict[str, Any] = {
    "elicitation/create": {"action": "accept", "content": {"name": "Ann"}},
    "sampling/createMessage": {
        "role": "assistant",
        "content": {"type": "text", "text": "words"},
        "model": "m",
        "stopReason": "endTurn",
    },
    "roots/list": {"roots": [{"uri": "file:///home", "name": "home"}]},
    "ping": {},
}


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str | None, dict[str, Any]]]:
    """Read SSE: (event id, message), without the priming events that have no data."""
    event_id, data = None, ""
    async for raw in response.content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            data += line[5:].strip()
        elif not line:
            if data:
                yield event_id, json.loads(data)
            event_id, data = None, ""


class RawSession:
    """A client of 2025-11-25 on bare HTTP that remembers on which stream each message came."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url
        self.headers = {"Accept": "application/json, text/event-stream"}
        self.ids = itertools.count(1)
        self.answers = dict(ANSWERS)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.notified: list[tuple[str, str, dict[str, Any]]] = []
        self.event_ids: list[str] = []

    async def open(self) -> None:
        info = {"name": "raw", "version": "1"}
        params = {"protocolVersion": VERSION, "capabilities": CAPABILITIES, "clientInfo": info}
        self.initialized = (await self.request("initialize", params))["result"]
        self.headers["MCP-Protocol-Version"] = self.initialized["protocolVersion"]
        listening = asyncio.Event()
        self.listener = asyncio.ensure_future(self._listen(listening))
        await listening.wait()
        await self.post({"method": "notifications/initialized"})

    async def close(self) -> None:
        self.listener.cancel()
        with suppress(asyncio.CancelledError, aiohttp.ClientError):  # the server may have ended it before
            await self.listener

    async def post(self, message: dict[str, Any]) -> int:
        async with self.http.post(self.url, json={"jsonrpc": "2.0", **message}, headers=self.headers) as response:
            return response.status

    async def _listen(self, listening: asyncio.Event) -> None:
        async with self.http.get(self.url, headers=self.headers) as response:
            assert response.status == 200
            listening.set()
            async for _, message in events(response):
                await self._receive("get", message)

    async def _receive(self, stream: str, message: dict[str, Any]) -> None:
        method, params = message["method"], message.get("params", {})
        if "id" not in message:
            self.notified.append((stream, method, params))
            return
        self.asked.append((stream, method, params))
        answer = self.answers[method]
        reply = answer(params) if callable(answer) else answer
        if reply is not None:
            key = "error" if "code" in reply else "result"
            assert await self.post({"id": message["id"], key: reply}) == 202

    async def request(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        message_id = next(self.ids)
        body = {"jsonrpc": "2.0", "id": message_id, "method": method, "params": params or {}}
        async with self.http.post(self.url, json=body, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            if session := response.headers.get("mcp-session-id"):
                self.headers["mcp-session-id"] = session
            if response.content_type == "application/json":
                return await response.json()
            async for event_id, message in events(response):
                if event_id:
                    self.event_ids.append(event_id)
                if message.get("id") == message_id and "method" not in message:
                    return message
                await self._receive("post", message)
        raise AssertionError(f"{method}: the stream ended without a response")

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": f"p-{tool}"}}
        reply = await self.request("tools/call", params)
        return reply.get("result") or {"error": reply["error"]}

    async def text(self, tool: str, **arguments: Any) -> str:
        result = await self.call(tool, **arguments)
        assert not result.get("isError"), result
        return result["content"][0]["text"]


@asynccontextmanager
async def raw_session(url: str) -> AsyncIterator[RawSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
        session = RawSession(http, url)
        await session.open()
        try:
            yield session
        finally:
            await session.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def talking_to(name: str, *flags: str) -> AsyncIterator[tuple[OldServer, RawSession]]:
    wanted = NODE if name in {"ts132", "everything"} else PARTS / name / "bin" / "python"
    if not wanted.exists():
        pytest.skip("scripts/parts has not built it")
    async with old_server(name, *flags) as server, raw_session(server.url) as session:
        yield server, session


@pytest.mark.parametrize("name", ALL)
async def test_plain_tools_answer(name: str) -> None:
    async with talking_to(name) as (server, session):
        assert await session.text("echo", text="hello") == "hello"
        assert await session.text("big", bytes=200_000) == "x" * 200_000
        assert (await session.call("fail", message="no luck"))["isError"]
        structured = await session.call("structured", n=3)
        assert structured["structuredContent"] == {"n": 3, "square": 9}
        assert [entry["tool"] for entry in server.ledger("run")] == ["echo", "big", "fail", "structured"]
        assert (await session.call("nonsense")).keys() & {"isError", "error"}
        assert [await session.text("counter") for _ in range(2)] == ["1", "2"]
        async with raw_session(server.url) as other:
            assert await other.text("counter") == "1"


@pytest.mark.parametrize("name", PYTHON)
async def test_an_image_is_returned(name: str) -> None:
    async with talking_to(name) as (_, session):
        assert (await session.call("image"))["content"][0]["mimeType"] == "image/png"


@pytest.mark.parametrize("name", ALL)
async def test_a_question_of_the_call_comes_on_its_stream(name: str) -> None:
    async with talking_to(name) as (server, session):
        assert await session.text("ask", question="Who?") == 'accept:{"name":"Ann"}'
        ((stream, method, params),) = session.asked
        assert (stream, method, params["message"]) == ("post", "elicitation/create", "Who?")
        assert params["requestedSchema"]["required"] == ["name"]
        session.answers["elicitation/create"] = {"action": "decline"}
        assert await session.text("ask", question="Who?") == "decline"
        session.answers["elicitation/create"] = {"action": "cancel"}
        assert await session.text("ask", question="Who?") == "cancel"
        assert len(server.ledger("answered", "ask")) == len(server.ledger("finished", "ask")) == 3


@pytest.mark.parametrize("name", ["py130", "py110", "ts132"])
@pytest.mark.parametrize("tool", ["ask_slow", "ask_read"])
async def test_a_call_is_held_before_its_question_and_after_its_answer(name: str, tool: str, tmp_path: Path) -> None:
    async with talking_to(name) as (server, session):
        listed = {entry["name"]: entry for entry in (await session.request("tools/list"))["result"]["tools"]}
        assert bool((listed[tool].get("annotations") or {}).get("readOnlyHint")) == (tool == "ask_read")
        before, after = tmp_path / "before", tmp_path / "after"
        given = {"question": "Who?", "before": str(before), "after": str(after)}
        call = asyncio.ensure_future(session.text(tool, **given))
        (run,) = await server.wait_for("run", tool)
        assert run["arguments"] == given
        assert not session.asked
        before.touch()
        await server.wait_for("answered", tool)
        assert not server.ledger("finished", tool)
        after.touch()
        assert await call == 'accept:{"name":"Ann"}'


@pytest.mark.parametrize("name", PYTHON)
async def test_the_title_of_a_form_can_be_chosen(name: str) -> None:
    async with talking_to(name) as (_, session):
        await session.text("ask")
        await session.text("ask", title="Alias")
        assert [params["requestedSchema"]["title"] for _, _, params in session.asked] == ["Name", "Alias"]


@pytest.mark.parametrize("name", ALL)
async def test_a_question_without_a_call_comes_on_the_get_stream(name: str) -> None:
    async with talking_to(name) as (_, session):
        assert await session.text("ask_get", question="Who?") == 'accept:{"name":"Ann"}'
        assert [stream for stream, _, _ in session.asked] == ["get"]


@pytest.mark.parametrize("name", ALL)
async def test_three_kinds_of_question_at_once(name: str) -> None:
    async with talking_to(name) as (_, session):
        summary = json.loads(await session.text("ask_many"))
        assert summary == {"elicit": 'accept:{"name":"Ann"}', "sample": "words", "roots": ["file:///home"]}
        streams = {method: stream for stream, method, _ in session.asked}
        related = name == "ts132"
        assert streams == {
            "elicitation/create": "post",
            "sampling/createMessage": "post" if related or name == "fm3" else "get",
            "roots/list": "post" if related else "get",
        }


@pytest.mark.parametrize("name", ALL)
async def test_forms_can_follow_each_other(name: str) -> None:
    async with talking_to(name) as (server, session):
        assert "Ann" in await session.text("ask_sequence", n=3)
        assert [params["message"] for _, _, params in session.asked] == [f"question {i}" for i in (1, 2, 3)]
        assert len(server.ledger("answered", "ask_sequence")) == 3


@pytest.mark.parametrize("name", ALL)
async def test_sampling_roots_and_ping(name: str) -> None:
    async with talking_to(name) as (_, session):
        assert await session.text("sample", prompt="Say") == "words"
        assert await session.text("sample_related", prompt="Say") == "words"
        assert json.loads(await session.text("roots")) == ["file:///home"]
        assert await session.text("ping_me") == "pong"
        default = "post" if name == "fm3" else "get"
        assert [stream for stream, _, _ in session.asked] == [default, "post", "get", "get"]


@pytest.mark.parametrize("name", URL_MODE)
async def test_sampling_with_tools(name: str) -> None:
    async with talking_to(name) as (_, session):
        use = {"type": "tool_use", "id": "u1", "name": "weather", "input": {"city": "Ulm"}}
        session.answers["sampling/createMessage"] = {
            "role": "assistant",
            "content": [{"type": "text", "text": "looking"}, use],
            "model": "m",
            "stopReason": "toolUse",
        }
        assert json.loads(await session.text("sample_tools", prompt="Weather?")) == ["text", "tool_use"]
        assert session.asked[0][2]["tools"][0]["name"] == "weather"


@pytest.mark.parametrize("name", URL_MODE)
async def test_url_mode(name: str) -> None:
    async with talking_to(name) as (_, session):
        session.answers["elicitation/create"] = {"action": "accept"}
        assert await session.text("ask_url", url="https://example.com/a") == "accept"
        assert session.asked[0][2]["mode"] == "url"
        refused = await session.call("url_required", url="https://example.com/b")
        assert refused["error"]["code"] == -32042
        (elicitation,) = refused["error"]["data"]["elicitations"]
        assert elicitation["url"] == "https://example.com/b"
        assert await session.text("url_required", url="https://example.com/b") == "done"


async def test_py110_has_no_url_mode() -> None:
    async with talking_to("py110") as (_, session):
        names = {tool["name"] for tool in (await session.request("tools/list"))["result"]["tools"]}
        assert not names & {"ask_url", "url_required", "sample_tools"}


@pytest.mark.parametrize("name", ALL)
async def test_progress_is_sent_with_the_token(name: str) -> None:
    async with talking_to(name) as (_, session):
        await session.text("progress", steps=3, delay_seconds=0.01)
        assert [params["progress"] for _, _, params in session.notified] == [1, 2, 3]
        assert {params["progressToken"] for _, _, params in session.notified} == {"p-progress"}
        assert {stream for stream, _, _ in session.notified} == {"get" if name == "py110" else "post"}
        assert await session.text("progress_ask", steps=2) == 'accept:{"name":"Ann"}'
        # On two streams the last ones may still be on their way.
        await until(lambda: len(session.notified) == 7)


@pytest.mark.parametrize("name", ALL)
async def test_logs_obey_the_level(name: str) -> None:
    async with talking_to(name) as (_, session):
        await session.request("logging/setLevel", {"level": "warning"})
        await session.text("logs")
        assert [params["level"] for _, _, params in session.notified] == ["warning", "error"]


@pytest.mark.parametrize("name", ALL)
async def test_a_call_can_end_while_its_question_is_open(name: str) -> None:
    async with talking_to(name) as (_, session):
        session.answers["elicitation/create"] = lambda _params: None
        assert await session.text("give_up", seconds=0.2) == "gave up"


@pytest.mark.parametrize("name", ALL)
async def test_a_hanging_call_can_be_cancelled(name: str) -> None:
    async with talking_to(name) as (server, session):
        call = asyncio.ensure_future(session.call("hang"))
        await server.wait_for("run", "hang")
        await session.post({"method": "notifications/cancelled", "params": {"requestId": 2}})
        await server.wait_for("cancelled", "hang")
        assert server.ledger("finished", "hang") == []
        call.cancel()


@pytest.mark.parametrize("name", ALL)
async def test_a_late_question_is_nobodys(name: str) -> None:
    async with talking_to(name) as (server, session):
        session.answers["elicitation/create"] = {"code": -32602, "message": "no call in flight"}
        await session.text("late", delay_seconds=0.05)
        (entry,) = await server.wait_for("refused", "late")
        assert entry["code"] == -32602
        assert session.asked[0][0] == "get"
        session.answers["elicitation/create"] = ANSWERS["elicitation/create"]
        await session.text("late", delay_seconds=0.05)
        await server.wait_for("answered", "late")


@pytest.mark.parametrize("name", ALL)
async def test_whoami_tells_what_the_server_saw(name: str) -> None:
    async with talking_to(name) as (server, session):
        session.headers |= {"Authorization": "Bearer t", "X-Team": "red"}
        told = json.loads(await session.text("whoami"))
        assert told["headers"]["authorization"] == "Bearer t"
        assert told["headers"]["x-team"] == "red"
        assert told["headers"]["host"] == f"127.0.0.1:{server.port}"
        assert told["clientInfo"]["name"] == "raw"
        assert told["capabilities"]["elicitation"] is not None
        assert told["session"] == session.headers["mcp-session-id"]


@pytest.mark.parametrize("name", ALL)
async def test_prompts_resources_and_completion(name: str) -> None:
    async with talking_to(name) as (_, session):
        greeting = await session.request("prompts/get", {"name": "greet", "arguments": {"name": "Bob"}})
        assert greeting["result"]["messages"][0]["content"]["text"] == "Hello, Bob!"
        asked = await session.request("prompts/get", {"name": "ask_prompt"})
        assert "Ann" in asked["result"]["messages"][0]["content"]["text"]
        text = await session.request("resources/read", {"uri": "note://static"})
        assert text["result"]["contents"][0]["text"] == "a static note"
        blob = await session.request("resources/read", {"uri": "note://blob"})
        assert blob["result"]["contents"][0]["blob"] == "AAEC/w=="
        note = await session.request("resources/read", {"uri": "note://7"})
        assert note["result"]["contents"][0]["text"] == "note 7"
        form = await session.request("resources/read", {"uri": "ask://form"})
        assert form["result"]["contents"][0]["text"] == 'accept:{"name":"Ann"}'
        assert "error" in await session.request("resources/read", {"uri": "no://such"})
        if "completions" in session.initialized["capabilities"]:
            ref = {"type": "ref/prompt", "name": "greet"}
            argument = {"name": "name", "value": "An"}
            found = await session.request("completion/complete", {"ref": ref, "argument": argument})
            assert found["result"]["completion"]["values"] == ["Ann", "Anna"]


@pytest.mark.parametrize("name", ["py130", "py110"])
async def test_changes_are_announced(name: str) -> None:
    async with talking_to(name) as (_, session):
        await session.text("touch", uri="note://static")
        assert session.notified == []
        await session.request("resources/subscribe", {"uri": "note://static"})
        await session.text("touch", uri="note://static")
        await session.text("change_tools")
        await until(lambda: len(session.notified) == 2)
        assert [(stream, method) for stream, method, _ in session.notified] == [
            ("get", "notifications/resources/updated"),
            ("get", "notifications/tools/list_changed"),
        ]


@pytest.mark.parametrize("name", PYTHON)
async def test_tools_come_in_pages(name: str) -> None:
    async with talking_to(name, "--page-size", "10") as (_, session):
        names: list[str] = []
        params: dict[str, Any] = {}
        while True:
            page = (await session.request("tools/list", params))["result"]
            names += [tool["name"] for tool in page["tools"]]
            if "nextCursor" not in page:
                break
            assert len(page["tools"]) == 10
            params = {"cursor": page["nextCursor"]}
        assert len(names) == len(set(names)) > 20
        assert await session.text("echo", text="after") == "after"


@pytest.mark.parametrize("name", PYTHON)
async def test_events_have_ids_only_with_a_store(name: str) -> None:
    async with talking_to(name) as (_, session):
        await session.text("ask")
        assert session.event_ids == []
    async with talking_to(name, "--event-store") as (_, session):
        await session.text("ask")
        assert len(session.event_ids) >= 2


@pytest.mark.parametrize("name", PYTHON)
async def test_without_sessions_no_id_is_given(name: str) -> None:
    async with old_server(name, "--stateless", "--json") as server, aiohttp.ClientSession() as http:
        session = RawSession(http, server.url)
        assert await session.text("echo", text="hello") == "hello"
        assert "mcp-session-id" not in session.headers


async def resume(session: RawSession, cursor: str) -> dict[str, Any] | None:
    """Read what followed the cursor, as far as it comes within a second."""
    headers = {**session.headers, "Last-Event-ID": cursor}
    with suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(1), session.http.get(session.url, headers=headers) as response:
            # 409: the server still takes the stream that we dropped for an open one.
            assert response.status in {200, 409}
            if response.status == 200:
                _, message = await anext(events(response))
                return message
    return None


@pytest.mark.parametrize("name", ALL)
async def test_a_dropped_stream_can_be_resumed_from_the_store(name: str) -> None:
    async with talking_to(name, "--event-store") as (server, session):
        params = {"name": "ask", "arguments": {"question": "Who?"}}
        body = {"jsonrpc": "2.0", "id": "held", "method": "tools/call", "params": params}
        async with (
            aiohttp.ClientSession() as dropped,
            dropped.post(session.url, json=body, headers=session.headers) as response,
        ):
            cursor, question = await anext(events(response))
        assert cursor is not None
        # The first GET may come before the server has seen the stream drop, and a result that comes between the
        # replay and the live stream is only stored. So: GET, answer, and GET from the same place again.
        first = asyncio.ensure_future(resume(session, cursor))
        await asyncio.sleep(0.1)
        assert await session.post({"id": question["id"], "result": ANSWERS["elicitation/create"]}) == 202
        message = await first
        async with asyncio.timeout(5):
            while message is None:
                message = await resume(session, cursor)
        assert message["id"] == "held"
        assert message["result"]["content"][0]["text"] == 'accept:{"name":"Ann"}'
        assert len(server.ledger("run", "ask")) == 1


@pytest.mark.parametrize("name", PYTHON)
async def test_only_the_newer_sdk_refuses_a_foreign_host(name: str) -> None:
    async with talking_to(name) as (_, session):
        # The slash, because the redirect of py110 names the host of the request.
        url = f"{session.url}/" if name == "py110" else session.url
        headers = {**session.headers, "Host": "evil.example.com"}
        body = {"jsonrpc": "2.0", "id": 5, "method": "tools/list"}
        async with session.http.post(url, json=body, headers=headers) as response:
            assert response.status == (421 if name == "py130" else 200)


@pytest.mark.parametrize("name", PYTHON)
async def test_sigterm_ends_a_server_that_is_busy(name: str) -> None:
    async with talking_to(name) as (server, session):
        call = asyncio.ensure_future(session.call("hang"))
        await server.wait_for("run", "hang")
        await server.kill(signal.SIGTERM)
        assert [entry["event"] for entry in server.ledger(tool="hang")] == ["run", "cancelled"]
        with suppress(aiohttp.ClientError, AssertionError):
            await call


@pytest.mark.parametrize("name", ALL)
async def test_a_restart_forgets_the_sessions(name: str) -> None:
    async with talking_to(name) as (server, session):
        await session.close()
        url = server.url
        await server.restart()
        assert server.url == url
        body = {"jsonrpc": "2.0", "id": 9, "method": "tools/list", "params": {}}
        async with session.http.post(url, json=body, headers=session.headers) as response:
            assert response.status == (400 if name == "py110" else 404)
        async with raw_session(url) as fresh:
            assert await fresh.text("echo", text="again") == "again"


async def test_the_everything_server_asks_for_roots_by_itself() -> None:
    async with talking_to("everything") as (_, session):
        await until(lambda: bool(session.asked))
        assert session.asked[0][:2] == ("get", "roots/list")
        assert "Echo" in await session.text("echo", message="hello")


async def test_a_server_dies_with_the_process_that_started_it() -> None:
    if not (PARTS / "py130").exists():
        pytest.skip("scripts/parts has not built it")
    program = """
import asyncio
from tests.parts.launch import old_server

async def main():
    async with old_server("py130") as server:
        print(server.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=REPOSITORY
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        # An orphan may stay a zombie where nobody is there to reap it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.conformance
async def test_the_conformance_server_passes_the_suite_of_its_own_time() -> None:
    if not NODE.exists():
        pytest.skip("scripts/parts has not built it")
    async with old_server("conformance") as server:
        suite = await asyncio.create_subprocess_exec(
            REPOSITORY / "tests" / "parts" / "conformance",
            server.url,
            "--spec=2025-11-25",
            "--strict",
            "--verbose",
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await suite.communicate()
    assert suite.returncode == 0, printed.decode()
    assert printed.decode().splitlines()[-1] == "33 of 33 scenarios passed"

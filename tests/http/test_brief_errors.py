"""`errors: brief` on each way to a client: no byte tells of the inside, and the log has it beside the request id."""

import asyncio
import json
import os
from typing import Any, Final

import aiohttp
import pytest

from gateway.protocol import mcp
from gateway.protocol.errors import CallLost
from tests.parts.launch import free_port
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, breaks_when_answered
from tests.support.legacy_client import Address, SseClient, Stream
from tests.support.logs import Lines
from tests.support.paper_client import PaperClient
from tests.support.stand import Start
from tests.support.workbench import Stand

HOST: Final = "127.0.0.2"
"""No address of the gateway's own, which its replies may name."""
INSIDE: Final = (HOST, "inside", "gw-", "refused)", os.environ["PATH"])
MINE: Final = {"X-Request-Id": "mine"}
ROUTES: Final[dict[str, dict[str, Any]]] = {
    "/any": {},
    "/bridge": {"era": "bridge"},
    "/mirror": {"era": "mirror"},
    "/sse": {"upstream": {"transport": "sse"}},
    "/streamable": {"upstream": {"transport": "streamable-http"}},
    "/paper": {"dialects": ["sep-1442"]},
    "/child": {"upstream": {"command": ["inside-program", "inside-argument"], "warm": 0}},
    "/child-bridge": {"era": "bridge", "upstream": {"command": ["inside-program", "inside-argument"], "warm": 0}},
}
LEGACY: Final[dict[str, dict[str, Any]]] = {
    "initialize": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}},
    "tools/call": {"name": "tool", "arguments": {}},
}


def routes() -> list[dict[str, Any]]:
    """The same upstream, which is dead, in each way that a route may lead to it."""
    dead = f"http://{HOST}:{free_port()}/inside"
    return [
        {**more, "path": path, "upstream": {**({} if "child" in path else {"url": dead}), **more.get("upstream", {})}}
        for path, more in ROUTES.items()
    ]


@pytest.fixture
async def brief(log_lines: Lines, begin: Start) -> Stand:
    return await begin(errors="brief", routes=routes())


def check(lines: Lines, told: str, *, request_id: str = "mine") -> None:
    """What a client got has nothing of the inside, but the id of log lines that have it all."""
    assert [word for word in INSIDE if word in told] == [], told
    assert f"(requestId {request_id})" in told, told
    said = {line["cause"] for line in lines("error.shortened") if line["request_id"] == request_id}
    assert any(word in cause for cause in said for word in (HOST, "inside", "gw-")), said


async def asked(stand: Stand, method: str, path: str, **options: Any) -> str:
    """The whole reply to a request: status, headers and body."""
    url = f"http://{stand.gateway.listen}{path}"
    headers = {**MINE, "Accept": "application/json, text/event-stream", **options.pop("headers", {})}
    timeout = aiohttp.ClientTimeout(DEADLINE)
    async with stand.http.request(method, url, headers=headers, timeout=timeout, **options) as response:
        assert response.headers["X-Request-Id"] == "mine"
        return f"{response.status} {dict(response.headers)} {await response.text()}"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["tools/call", "tools/list", "server/discover", "subscriptions/listen"])
async def test_a_modern_client(brief: Stand, log_lines: Lines, path: str, method: str) -> None:
    params = {"name": "tool"} if method == "tools/call" else {"notifications": {}}
    headers, body = brief.client().build(method, params)
    check(log_lines, await asked(brief, "POST", path, headers=headers, data=body))


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", LEGACY)
async def test_a_legacy_client(brief: Stand, log_lines: Lines, path: str, method: str) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": LEGACY[method]}
    told = await asked(brief, "POST", path, json=message)
    if "session" in told:  # the request needed one, which is no secret
        assert [word for word in INSIDE if word in told] == [], told
    else:
        check(log_lines, told)


@pytest.mark.parametrize("path", ["/streamable", "/mirror", "/child", "/child-bridge"])
async def test_a_client_of_http_sse(brief: Stand, log_lines: Lines, path: str) -> None:
    client = SseClient(brief, headers=MINE)
    client.url = f"http://{brief.gateway.listen}{path}"
    _ = await client.connect()
    try:
        assert (await client.post(client.begin_message()))[0] == 202
        check(log_lines, json.dumps(await client.stream.message()))
    finally:
        client.stream.close()


@pytest.mark.parametrize("path", ["/any", "/bridge", "/sse"])
async def test_a_client_of_http_sse_whose_stream_does_not_begin(brief: Stand, log_lines: Lines, path: str) -> None:
    check(log_lines, await asked(brief, "GET", path, headers={"Accept": "text/event-stream"}))


@pytest.mark.parametrize("method", [mcp.TOOLS_CALL, mcp.INITIALIZE])
async def test_a_client_of_sep_1442(brief: Stand, log_lines: Lines, method: str) -> None:
    client = PaperClient([Address(brief.http, f"http://{brief.gateway.listen}/paper")], headers=MINE)
    async with client.request(method, LEGACY[method]) as stream:
        check(log_lines, json.dumps(await stream.message()))


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/.well-known/oauth-protected-resource/any"), ("POST", "/token/any"), ("GET", "/authorize/any")],
)
async def test_a_client_that_signs_in(brief: Stand, log_lines: Lines, method: str, path: str) -> None:
    check(log_lines, await asked(brief, method, path))


async def test_an_error_on_a_stream_that_has_begun(log_lines: Lines, begin: Start, upstream: FakeUpstream) -> None:
    heard = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.notify(mcp.LOG, {"level": "info", "data": "it goes on"})
        await heard.wait()
        await turn.reset()

    upstream.tool(tool)
    client = (await begin(errors="brief")).client()
    meta = {mcp.META_LOG_LEVEL: "info"}
    async with client.open(mcp.TOOLS_CALL, {"name": "tool"}, meta=meta, headers=MINE) as response:
        stream = Stream(response)
        assert (await stream.message())["method"] == mcp.LOG
        heard.set()
        (ended,) = await stream.rest()
    assert ended["error"]["message"] == f"{CallLost.brief} (requestId mine)"
    assert ended["error"]["data"] == {"reason": "call_lost", "requestId": "mine"}
    (line,) = log_lines("error.shortened")
    assert upstream.url in line["cause"]


async def test_what_the_server_itself_says_is_passed_on(begin: Start, upstream: FakeUpstream) -> None:
    upstream.tool(lambda turn: turn.error(-32000, "no file /srv/inside/a", None))
    reply = await (await begin(errors="brief")).client().call()
    assert reply.error["message"] == "no file /srv/inside/a"


async def test_a_reload_changes_the_words_at_once(begin: Start, upstream: FakeUpstream) -> None:
    stand = await begin()
    upstream.tool(breaks_when_answered)
    asked = [await stand.client().call() for _ in range(2)]
    stand.reload(upstream.url, errors="brief")
    brief = await stand.client().answer(asked[0])
    assert brief.error["message"].startswith(CallLost.brief)
    stand.reload(upstream.url)
    full = await stand.client().answer(asked[1])
    assert upstream.url in full.error["message"]

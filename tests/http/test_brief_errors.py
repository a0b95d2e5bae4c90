"""`errors: brief` on each way to a client: no byte tells of the inside, and the log has it beside the request id."""

import asyncio
import json
import os
from typing import Any, Final

import aiohttp
import pytest

from gateway.http.error_texts import texts
from gateway.parking import orphans
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, Refused, Unreachable
from gateway.telemetry import LineLimit
from tests.cluster.conftest import cluster
from tests.legacy_front.test_replica_forwarding import begun_at
from tests.mirror.conftest import ask as asks_again
from tests.mirror.streamable.test_replica_routing import asked as asked_on
from tests.parts.launch import free_port
from tests.support.fake_modern import FakeModern
from tests.support.fake_peer import Asked, Silent
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, ask, breaks_when_answered
from tests.support.legacy_client import Address, LegacyClient, SseClient, Stream
from tests.support.logs import Lines
from tests.support.paper_client import PaperClient
from tests.support.replicas import STALLED, TWICE, Cluster, drop, facing, orphan
from tests.support.stand import Start
from tests.support.status import told
from tests.support.task_client import TaskClient
from tests.support.workbench import Stand, eventually
from tests.tasks.test_live_task import TaskServer

__all__ = ["cluster"]

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


@pytest.fixture(autouse=True)
def _full_for_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "are_brief", False)  # one per process; the gateways set it
    monkeypatch.setattr(texts, "refusals", LineLimit())


@pytest.fixture
async def brief(log_lines: Lines, begin: Start) -> Stand:
    return await begin(errors="brief", routes=routes())


def check(lines: Lines, told: str, *, is_known: bool = True) -> None:
    """What a client got has nothing of the inside, but the id of lines that have it all, and whose it is."""
    assert [word for word in INSIDE if word in told] == [], told
    assert "(requestId mine)" in told, told
    said = [line for line in lines("error.shortened") if line["request_id"] == "mine"]
    assert any(word in line["cause"] for line in said for word in (HOST, "inside", "gw-")), said
    assert all((line["route"] is not None, line["caller"] is not None) == (is_known, is_known) for line in said), said


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


@pytest.mark.parametrize("path", ["/mirror", "/streamable", "/child"])
async def test_a_client_of_http_sse_that_is_told_all_finds_the_line_of_its_request(
    log_lines: Lines, begin: Start, path: str
) -> None:
    stand = await begin(routes=routes())
    client = SseClient(stand, headers=MINE)
    client.url = f"http://{stand.gateway.listen}{path}"
    _ = await client.connect()
    try:
        assert (await client.post(client.begin_message()))[0] == 202
        error = (await client.stream.message())["error"]
    finally:
        client.stream.close()
    (line,) = [line for line in log_lines("upstream.failed") if line["request_id"] == error["data"]["requestId"]]
    assert (line["level"], line["route"], line["cause"]) == ("warning", path, error["message"])
    assert line["fix"]


@pytest.mark.parametrize("path", ["/any", "/bridge", "/sse"])
async def test_a_client_of_http_sse_whose_stream_does_not_begin(brief: Stand, log_lines: Lines, path: str) -> None:
    check(log_lines, await asked(brief, "GET", path, headers={"Accept": "text/event-stream"}))


@pytest.mark.parametrize("method", [mcp.TOOLS_CALL, mcp.INITIALIZE, "messages/listen"])
async def test_a_client_of_sep_1442(brief: Stand, log_lines: Lines, method: str) -> None:
    client = PaperClient([Address(brief.http, f"http://{brief.gateway.listen}/paper")], headers=MINE)
    async with client.request(method, LEGACY.get(method, {})) as stream:
        check(log_lines, json.dumps(await stream.message()))


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/.well-known/oauth-protected-resource/any"), ("POST", "/token/any"), ("GET", "/authorize/any")],
)
async def test_a_client_that_signs_in(brief: Stand, log_lines: Lines, method: str, path: str) -> None:
    check(log_lines, await asked(brief, method, path), is_known=False)


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


async def test_a_call_in_a_relayed_session(log_lines: Lines, begin: Start, old: FakeSse) -> None:
    async def ends_its_stream(_: FakeSse, stream: Any, __: Any) -> None:
        stream.end()

    old.tool = ends_its_stream
    stand = await begin(errors="brief", route={"upstream": {"url": old.url, "transport": "sse"}})
    client = await LegacyClient(stand).initialize()
    client.headers |= MINE
    (ended,) = (await client.post(client.call_message()))[2]
    assert ended["error"]["message"] == f"{CallLost.brief} (requestId mine)"
    assert ended["error"]["data"] == {"reason": "call_lost", "requestId": "mine"}
    assert "ended the session" in log_lines("error.shortened")[0]["cause"]


async def test_a_call_in_a_mirrored_session(log_lines: Lines, begin: Start) -> None:
    async with FakeModern() as server:
        client = await SseClient(await begin(url=server.url, errors="brief", route={"era": "mirror"})).initialize()
        await server.close()
        client.headers |= MINE
        try:
            assert (await client.post(client.call_message()))[0] == 202
            said = json.dumps(await client.stream.message())
        finally:
            client.stream.close()
    assert str(server.url.split("/")[2]) not in said
    assert "(requestId mine)" in said
    (line,) = log_lines("error.shortened")
    assert (line["request_id"], server.url in line["cause"]) == ("mine", True)
    assert None not in (line["route"], line["caller"])


async def test_a_mirrored_call_and_a_stream_of_sep_1442_whose_server_died(log_lines: Lines, begin: Start) -> None:
    async with FakeModern() as server:
        stand = await begin(url=server.url, errors="brief", route={"era": "mirror", "dialects": ["sep-1442"]})
        client, paper = await LegacyClient(stand).initialize(), PaperClient([stand], headers=MINE)
        await server.close()
        client.headers |= MINE
        (said,) = (await client.post(client.call_message()))[2]
        async with paper.request("messages/listen", {}) as stream:
            for each in (said, await stream.message()):
                assert "(requestId mine)" in each["error"]["message"]
    first, second = log_lines("error.shortened")
    assert (first["route"], second["route"]) == ("/mcp", "/mcp")
    assert None not in (first["caller"], second["caller"])


async def test_the_end_of_a_task(log_lines: Lines, begin: Start, upstream: FakeUpstream) -> None:
    server = TaskServer(upstream)
    stand = await begin(errors="brief")
    task = await TaskClient(stand.client(headers=MINE)).task()
    server.result = {"content": [], "_meta": 5}
    server.done.set()
    failed = await task.until("failed")
    assert failed["error"]["message"] == f"{CallLost.brief} (requestId mine)"
    (line,) = log_lines("error.shortened")
    assert "malformed result" in line["cause"]
    assert None not in (line["route"], line["caller"])
    stand.gateway.task_table.leave(is_resumable=False)


async def test_a_call_whose_replica_died(log_lines: Lines, upstream: FakeUpstream, cluster: Cluster) -> None:
    upstream.tool(ask)
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", errors="brief")
    await cluster.crash(one)
    reply = await two.client().answer(asked, headers=MINE)
    assert reply.outcome == (200, -32603, "owner_lost")
    check(log_lines, json.dumps(reply.messages))


async def test_a_call_whose_replica_does_not_react(log_lines: Lines, upstream: FakeUpstream, cluster: Cluster) -> None:
    async def stays_silent(peer_request: Asked) -> None:
        await peer_request.silence()

    upstream.tool(ask)
    one, _ = await facing(cluster, stays_silent, errors="brief")
    reply = await one.client().answer(await orphan(one, "gw-2"), headers=MINE)
    assert reply.outcome == STALLED
    check(log_lines, json.dumps(reply.messages))


async def test_an_error_that_another_replica_made(log_lines: Lines, upstream: FakeUpstream, cluster: Cluster) -> None:
    upstream.tool(breaks_when_answered)
    asked, (_, two) = await cluster.asked("gw-1", "gw-2", errors="brief")
    reply = await two.client().answer(asked, headers=MINE)
    assert reply.error["message"] == f"{CallLost.brief} (requestId mine)"
    (line,) = log_lines("error.shortened")
    assert (line["request_id"], upstream.url in line["cause"]) == ("mine", True)


async def test_a_request_that_a_client_of_http_sse_sends_in_vain(log_lines: Lines, begin: Start) -> None:
    async with FakeModern() as server:
        limits = {"calls_bytes_per_principal": 4_000}
        stand = await begin(url=server.url, errors="brief", limits=limits, route={"era": "mirror"})
        client = await SseClient(stand).initialize()
        client.headers |= MINE
        try:
            assert (await client.post(client.call_message(arguments={"text": "x" * 4_000})))[0] == 202
            said = await client.stream.message()
        finally:
            client.stream.close()
    assert "4000" not in said["error"]["message"]
    assert said["error"]["data"] == {"reason": "busy", "requestId": "mine"}
    assert "4000 bytes" in log_lines("error.shortened")[0]["cause"]


async def test_a_status_with_which_sep_1442_answers(begin: Start, upstream: FakeUpstream) -> None:
    upstream.on(mcp.INITIALIZE, lambda turn: turn.reply(401))
    stand = await begin(errors="brief", route={"dialects": ["sep-1442"]})
    async with PaperClient([stand], headers=MINE).call("tool") as stream:
        assert stream.status == 401
        assert (await stream.message())["error"]["message"] == f"{Refused.brief} (requestId mine)"


async def test_a_session_whose_replica_does_not_react(
    log_lines: Lines, cluster: Cluster, old: FakeSse, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await begun_at(cluster, old, Silent())
    monkeypatch.setattr(texts, "are_brief", True)
    client.headers |= MINE
    (error,) = (await client.post(client.call_message()))[2]
    assert "send the request again" in error["error"]["message"]
    check(log_lines, json.dumps(error))


async def test_a_mirrored_call_whose_replica_died(log_lines: Lines, cluster: Cluster) -> None:
    async with FakeModern() as server:
        server.tools["ask"] = asks_again
        cluster.url = server.url
        sections: dict[str, Any] = {"errors": "brief", "log": {"access": True}}
        one, two = await cluster.begin("gw-1", "gw-2", **sections, route={"era": "mirror"})
        client = await LegacyClient(one).initialize()
        async with client.call("ask", {"text": "x" * 5_000}) as stream:
            _, place = await asked_on(stream)
            await cluster.crash(one)
        client.headers |= MINE
        async with client.listen(place, url=two.url) as stream:
            said = await stream.message()
        assert said["error"]["data"] == {"reason": "owner_lost", "requestId": "mine"}
        check(log_lines, json.dumps(said))
        await eventually(lambda: any(line["request_id"] == "mine" for line in log_lines("request.finished")))
        (line,) = (line for line in log_lines("request.finished") if line["request_id"] == "mine")
        assert (line["reason"], "gw-1 ended" in line["cause"]) == ("owner_lost", True)
        (lost,) = log_lines("peer.failed")
        assert (lost["reason"], lost["cause"], lost["request_id"]) == ("owner_lost", line["cause"], "mine")
        assert [error.kind for error in (await told(two)).errors] == ["owner_lost"]


async def test_a_retry_of_which_nothing_was_run(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "CANCEL_AGAIN_SECONDS", ())
    upstream.tool(ask)
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", errors="brief", **TWICE)
    await cluster.crash(one)
    await upstream.close()
    reply = await two.client().answer(asked, headers=MINE)
    said = "Nothing was run: call again with the same requestState and inputResponses (requestId mine)"
    assert reply.error["message"] == f"{Unreachable.brief}. {said}"
    await drop(two)  # it waits for another retry

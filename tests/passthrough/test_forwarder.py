"""What is not bridged: old clients to an old server as if nothing stood between, modern ones to a modern server."""

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from multidict import CIMultiDict

from gateway.config import parse
from gateway.protocol import mcp
from gateway.server.drain import drain
from gateway.upstream.http import era_probe
from tests.support.fake_http import fake_wire
from tests.support.fake_upstream import FakeUpstream, Turn, asks, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.state_keeper import CAPABILITY
from tests.support.workbench import ALL, Client, Stand, configuration, eventually

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 7,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
OLD = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "tool"}}


def passed(stand: Stand, outcome: str, kind: str = "legacy") -> float:
    return stand.metric("mcp_gateway_passed_through_total", era=kind, outcome=outcome)


def probes(stand: Stand, found: str) -> float:
    return stand.metric("mcp_gateway_era_probes_total", era=found)


async def error(response: aiohttp.ClientResponse) -> tuple[int, Any, int]:
    message = await response.json(content_type=None)
    return response.status, message.get("id"), message["error"]["code"]


# -- old clients ------------------------------------------------------------------------------------------------------


async def test_a_request_goes_up_as_it_came_and_its_reply_comes_down_as_it_is(
    upstream: FakeUpstream, stand: Stand
) -> None:
    odd = b' {"jsonrpc" : "2.0", "id":1e0, "method":"initialize","x\\u0000":[1,{}] ,"x":"\xc3\xa9"}\n'
    sent = CIMultiDict(OLD)
    kept = {
        "Mcp-Session-Id": "abc",
        "MCP-Protocol-Version": "2025-06-18",
        "Authorization": "Bearer t",
        "Last-Event-ID": "e1",
        "X-Api-Key": "k",
        "Cookie": "a=b",
        "User-Agent": "old/1",
    }
    sent.update(kept)
    dropped = {
        "Origin": "http://localhost",
        "Connection": "X-Hop, keep-alive",
        "X-Hop": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
        "X-Forwarded-For": "10.0.0.1",
        "Forwarded": "for=10.0.0.1",
    }
    sent.update(dropped)
    sent.add("X-Twice", "1")
    sent.add("X-Twice", "2")

    async def answer(turn: Turn) -> None:
        headers = {
            "Mcp-Session-Id": "s1",
            "X-Own": "1",
            "Connection": "X-Hop",
            "X-Hop": "1",
            "Keep-Alive": "timeout=5",
        }
        turn.reply(418, b"  teapot\n", headers | {"Content-Type": "text/x-tea; charset=utf-8"})

    upstream.on("initialize", answer)
    async with stand.http.post(f"{stand.url}?key=%2Fa&b", data=odd, headers=sent) as response:
        assert (response.status, await response.read()) == (418, b"  teapot\n")
        assert response.headers["Content-Type"] == "text/x-tea; charset=utf-8"
        assert (response.headers["Mcp-Session-Id"], response.headers["X-Own"]) == ("s1", "1")
        assert not {"X-Hop", "Keep-Alive"} & set(response.headers)
    [seen] = upstream.seen
    assert seen.data == odd
    assert seen.query == "key=/a&b"
    assert {name: seen.headers[name] for name in kept} == kept
    assert seen.headers.getall("X-Twice") == ["1", "2"]
    assert seen.headers["Host"] in upstream.url
    assert not (dropped.keys() - {"Connection"}) & set(seen.headers)
    assert upstream.probes == []
    assert passed(stand, "refused") == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS", "PUT", "PATCH"])
async def test_every_method_gets_the_upstreams_answer(upstream: FakeUpstream, stand: Stand, method: str) -> None:
    upstream.on(method, lambda turn: turn.reply(405, b"no", {"Allow": "POST"}))
    async with stand.http.request(method, stand.url) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert await response.read() == (b"" if method == "HEAD" else b"no")
    assert upstream.words == [method]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'[{"jsonrpc":"2.0","method":"x"}]', b"\xff"])
async def test_the_upstream_judges_a_body_that_is_not_a_single_request(
    upstream: FakeUpstream, stand: Stand, body: bytes
) -> None:
    upstream.on("raw", lambda turn: turn.reply(400, b"bad"))
    async with stand.http.post(stand.url, data=body, headers=OLD) as response:
        assert (response.status, await response.read()) == (400, b"bad")
    assert upstream.seen[0].data == body


async def test_a_stream_comes_event_by_event(upstream: FakeUpstream, stand: Stand) -> None:
    steps: asyncio.Queue[None] = asyncio.Queue()

    async def tool(turn: Turn) -> None:
        for number in range(3):
            await turn.raw(b"data: %d\n\n" % number)
            await steps.get()

    upstream.known.add("s")
    upstream.on("tools/call", tool)
    async with stand.http.post(stand.url, json=CALL, headers=OLD | {"Mcp-Session-Id": "s"}) as response:
        assert response.content_type == "text/event-stream"
        for number in range(3):
            # Each is here before the next is written: nothing is gathered.
            assert await response.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            steps.put_nowait(None)
        assert await response.content.read() == b""
    assert passed(stand, "answered") == 1


@pytest.mark.parametrize("word", ["tools/call", "GET", "initialize"])
async def test_the_upstream_sees_that_the_client_left(upstream: FakeUpstream, stand: Stand, word: str) -> None:
    """With and without a head (`initialize`) that has come already."""

    async def script(turn: Turn) -> None:
        if word != "initialize":
            await turn.raw(b": here\n\n")
        await turn.for_ever()

    upstream.on(word, script)
    method, body = ("GET", None) if word == "GET" else ("POST", INITIALIZE | {"method": word})

    async def client() -> None:
        async with stand.http.request(method, stand.url, json=body) as response:
            await response.content.read()

    task = asyncio.get_running_loop().create_task(client())
    [seen] = await upstream.saw(word)
    task.cancel()
    async with asyncio.timeout(3):
        await seen.cut.wait()
    await eventually(lambda: passed(stand, "left") == 1)


async def test_a_redirect_within_the_origin_is_followed_and_remembered(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(url=upstream.url.removesuffix("/mcp") + "/old")

    async def move(turn: Turn) -> None:
        if turn.seen.path == "/old":
            turn.reply(307, headers={"Location": "/mcp"})
        else:
            await upstream.initialize(turn)

    upstream.on("initialize", move)
    for _ in range(2):
        async with stand.http.post(stand.url, json=INITIALIZE) as response:
            assert response.status == 200
    assert [(seen.path, seen.body["id"]) for seen in upstream.seen] == [("/old", 7), ("/mcp", 7), ("/mcp", 7)]


async def test_a_redirect_to_another_origin_is_not(upstream: FakeUpstream, stand: Stand) -> None:
    async with FakeUpstream() as other:
        upstream.on("initialize", lambda turn: turn.reply(307, headers={"Location": other.url}))
        async with stand.http.post(stand.url, json=INITIALIZE, headers={"Authorization": "Bearer t"}) as response:
            assert await error(response) == (502, 7, -32603)
        assert passed(stand, "unreachable") == 1
        assert other.seen == []


async def test_a_bare_get_never_hangs(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"answer_seconds": 0.1})
    upstream.on("GET", Turn.for_ever)
    async with stand.http.get(stand.url, headers={"Accept": "text/event-stream"}) as response:
        assert await error(response) == (504, None, -32603)
    assert "if it is only slow, raise timeouts.answer_seconds" in stand.gateway.recent_errors.told()[0].fix


@pytest.mark.parametrize(("session", "status"), [({}, 504), ({"Mcp-Session-Id": "s"}, 200)], ids=["none", "one"])
async def test_a_call_without_a_head_is_given_up_as_late_as_a_bridged_one_and_costs_no_session(
    upstream: FakeUpstream, begin: Start, session: dict[str, str], status: int
) -> None:
    stand = await begin(timeouts={"answer_seconds": 0.001, "idle_seconds": 0.2})
    upstream.on("tools/call", Turn.for_ever)
    async with stand.http.post(stand.url, json=CALL, headers=session) as response:
        assert await error(response) == (status, 3, -32603)


async def test_a_forwarding_loop_is_refused(upstream: FakeUpstream, stand: Stand) -> None:
    async with stand.http.post(stand.url, json=INITIALIZE, headers={"Via": "1.0 other"}) as response:
        assert response.status == 200
    via = upstream.seen[0].headers.getall("Via")
    assert via[0] == "1.0 other"
    assert len(via) == 2
    async with stand.http.post(stand.url, json=INITIALIZE, headers={"Via": ", ".join(via)}) as response:
        assert (await error(response))[0] == 508
    assert len(upstream.seen) == 1


async def test_a_legacy_request_without_a_session_gets_an_error_before_a_transport_without_passthrough(
    upstream: FakeUpstream, stand: Stand
) -> None:
    live = stand.gateway.routes.live
    without_probe = msgspec.structs.replace(live["/mcp"].upstream, era=None)
    live["/mcp"] = msgspec.structs.replace(live["/mcp"], upstream=without_probe)
    async with stand.http.post(stand.url, json={**INITIALIZE, "method": "ping"}) as response:
        message = await response.json()
        assert (response.status, message["id"], message["error"]["code"]) == (400, 7, mcp.INVALID_REQUEST)
        assert "begin with `initialize`" in message["error"]["message"]
    for body, code in ((b"{", mcp.PARSE_ERROR), (b"[]", mcp.INVALID_REQUEST)):
        async with stand.http.post(stand.url, data=body) as response:
            assert (await error(response))[2] == code
    for method in ("GET", "DELETE"):
        async with stand.http.request(method, stand.url) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert upstream.seen == []
    assert (await stand.client().call()).text == "done"


# -- drain and reload -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def side_stream(stand: Stand, upstream: FakeUpstream) -> AsyncIterator[aiohttp.ClientResponse]:
    """The GET stream of an old client, heard once."""
    upstream.known.add("s")
    upstream.side("s").put_nowait(b"data: 1\n\n")
    async with stand.http.get(stand.url, headers={"Mcp-Session-Id": "s"}) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        yield response


async def test_a_drain_ends_side_streams_and_waits_for_calls(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 30})
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b"data: asked\n\n")
        await go.wait()
        await turn.result(text("ok"))

    upstream.tool(tool)
    async with (
        side_stream(stand, upstream) as side,
        stand.http.post(stand.url, json=CALL, headers={"Mcp-Session-Id": "s"}) as call,
    ):
        draining = asyncio.get_running_loop().create_task(drain(stand.gateway, delay_seconds=0))
        assert await side.content.read() == b"", "a clean end: the client opens it again, elsewhere"
        async with stand.http.get(stand.url, headers={"Mcp-Session-Id": "s"}) as again:
            assert (again.status, again.headers["Retry-After"]) == (503, "1")
        # The answer to what the call asks has to get through.
        answer = {"jsonrpc": "2.0", "id": 0, "result": {}}
        async with stand.http.post(stand.url, json=answer, headers={"Mcp-Session-Id": "s"}) as accepted:
            assert accepted.status == 202
        assert not draining.done()
        go.set()
        assert b'"ok"' in await call.content.read()
    async with asyncio.timeout(3):
        await draining
    assert passed(stand, "ended") == 1


async def test_a_call_without_a_reply_at_the_end_of_a_drain_ends_with_an_error(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"drain_seconds": 0})
    upstream.tool(Turn.for_ever)
    call = asyncio.get_running_loop().create_task(stand.http.post(stand.url, json=CALL))
    await upstream.saw("tools/call")
    await drain(stand.gateway, delay_seconds=0)
    await stand.gateway.close()
    async with await call as response:
        assert response.status == 503
        error = (await response.json())["error"]
    assert (error["data"]["reason"], "may have had effects" in error["message"]) == ("stopping", True)
    assert passed(stand, "ended") == 1


async def test_a_side_stream_that_has_no_head_yet_does_not_hold_up_a_drain(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"drain_seconds": 30})
    upstream.on("GET", Turn.for_ever)

    async def listen() -> None:
        async with stand.http.get(stand.url, headers={"Mcp-Session-Id": "s"}):
            pass

    client = asyncio.get_running_loop().create_task(listen())
    await upstream.saw("GET")
    async with asyncio.timeout(3):
        await drain(stand.gateway, delay_seconds=0)
    client.cancel()


async def test_a_reload_ends_the_side_streams_of_a_removed_upstream(upstream: FakeUpstream, stand: Stand) -> None:
    async with side_stream(stand, upstream) as side:
        stand.gateway.apply(parse(configuration(upstream.url), "same", {}))
        upstream.side("s").put_nowait(b"data: 2\n\n")
        assert await side.content.readuntil(b"\n\n") == b"data: 2\n\n"
        stand.gateway.apply(parse(configuration("http://127.0.0.1:9/mcp"), "other", {}))
        assert await side.content.read() == b""


# -- modern upstreams -------------------------------------------------------------------------------------------------


async def discovered(turn: Turn) -> None:
    await turn.result({"resultType": "complete", "supportedVersions": [mcp.MODERN], "capabilities": {}})


async def modern_tool(turn: Turn) -> None:
    await turn.result({"resultType": "complete", **text("modern")})


async def modern_completion(turn: Turn) -> None:
    await turn.result({"resultType": "complete", "completion": {"values": ["modern"]}})


def make_modern(upstream: FakeUpstream) -> None:
    upstream.has_sessions = False
    upstream.on("server/discover", discovered)
    upstream.on("tools/call", modern_tool)


async def test_a_modern_upstream_is_probed_once_and_gets_requests_as_they_are(
    upstream: FakeUpstream, stand: Stand
) -> None:
    make_modern(upstream)
    gate = upstream.holding("server/discover", discovered)
    client = stand.client("Bearer t")
    headers, body = client.build("tools/call", {"name": "tool", "requestState": "theirs"}, {"com.example/x": 1})
    headers |= {"Mcp-Param-Region": "eu", "traceparent": "00-1-1-01"}

    async def call() -> tuple[int, Any]:
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            return response.status, await response.json()

    calls = [asyncio.get_running_loop().create_task(call()) for _ in range(5)]
    await eventually(lambda: stand.gateway.downstream.in_flight == 5 and upstream.probes)
    gate.set()
    for status, message in await asyncio.gather(*calls):
        assert (status, message["result"]["content"][0]["text"]) == (200, "modern")
    [probe] = upstream.probes
    assert probe.headers["Authorization"] == "Bearer t"
    assert upstream.words == ["tools/call"] * 5
    assert {seen.data for seen in upstream.seen} == {body}
    for name, value in headers.items():
        assert upstream.seen[0].headers[name] == value
    assert passed(stand, "answered", "modern") == 5
    assert probes(stand, "modern") == 1


async def test_an_old_upstream_is_probed_once(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    await asyncio.gather(*(client.call() for _ in range(3)))
    assert (await client.call()).text == "done"
    assert len(upstream.probes) == 1
    assert probes(stand, "legacy") == 1


@pytest.mark.parametrize("status", [200, 401, 403, 503])
async def test_a_probe_that_says_nothing_is_asked_again(
    upstream: FakeUpstream, stand: Stand, client: Client, status: int
) -> None:
    upstream.on("server/discover", lambda turn: turn.reply(status))
    assert (await client.call()).text == "done"
    make_modern(upstream)
    assert (await client.call()).text == "modern"
    assert probes(stand, "unknown") == probes(stand, "modern") == 1


@pytest.mark.parametrize("state", ["theirs", "mrtr1.0123abcd.AAAA", "long" * 20_000])
async def test_a_state_of_a_modern_upstream_is_no_invalid_one_as_long_as_no_probe_has_said_anything(
    upstream: FakeUpstream, begin: Start, state: str
) -> None:
    stand = await begin(limits={"state_bytes": 65_536})
    make_modern(upstream)
    client, probed = stand.client(), 0

    async def nothing(turn: Turn) -> None:
        nonlocal probed
        probed += 1
        turn.reply(503)

    upstream.on("server/discover", nothing)
    refused = await client.post("tools/call", {"name": "tool", "requestState": state})
    assert refused.error["data"]["reason"] == "upstream_unreachable"
    assert "send the same request again" in refused.error["message"]
    assert probed == 2, "one probe more before it is refused"
    assert upstream.words == []

    async def first_nothing(turn: Turn) -> None:
        upstream.on("server/discover", discovered)
        await nothing(turn)

    upstream.on("server/discover", first_nothing)
    passed_on = await client.post("tools/call", {"name": "tool", "requestState": state})
    assert passed_on.text == "modern"


@pytest.mark.parametrize("known", ["legacy", "bridge"])
async def test_a_state_of_nobody_is_invalid_where_the_upstream_is_legacy(
    upstream: FakeUpstream, begin: Start, known: str
) -> None:
    stand = await begin(route={"era": "bridge"} if known == "bridge" else {})
    client = stand.client()
    for _ in range(2):
        refused = await client.post("tools/call", {"name": "tool", "requestState": "theirs"})
        assert refused.error["data"]["reason"] == "invalid_request_state"
    assert len(upstream.probes) == (known == "legacy")


async def test_a_changed_state_is_invalid_even_before_a_probe_has_said_anything(
    upstream: FakeUpstream, client: Client
) -> None:
    upstream.on("server/discover", lambda turn: _refuse(turn, 503))
    upstream.tool(asks("answered"))
    asked = await client.call()
    changed = asked.state[:-8] + ("B" if asked.state[-8] == "A" else "A") + asked.state[-7:]
    refused = await client.post("tools/call", {"name": "tool", "requestState": changed})
    assert refused.error["data"]["reason"] == "invalid_request_state"
    assert (await client.answer(asked)).text == "answered"


async def test_a_task_of_a_modern_upstream_is_no_unknown_one_as_long_as_no_probe_has_said_anything(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin()
    make_modern(upstream)
    upstream.on("tasks/get", lambda turn: turn.error(-32602, "theirs to judge"))
    upstream.on("server/discover", lambda turn: _refuse(turn, 503))
    client = stand.client(capabilities={**ALL, "extensions": {mcp.TASKS: {}}})
    refused = await client.post("tasks/get", {"taskId": "theirs"})
    assert refused.error["data"]["reason"] == "upstream_unreachable"
    upstream.on("server/discover", discovered)
    assert (await client.post("tasks/get", {"taskId": "theirs"})).error["message"] == "theirs to judge"


@pytest.fixture
def probes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(era_probe, "PAUSE_SECONDS", 1000)


@pytest.mark.usefixtures("probes_once")
@pytest.mark.parametrize("status", [401, 503])
async def test_callers_that_come_one_after_the_other_cause_one_probe_and_decide_nothing(
    upstream: FakeUpstream, begin: Start, status: int
) -> None:
    stand = await begin()
    upstream.on("server/discover", lambda turn: _refuse(turn, status))
    for number in range(10):
        assert (await stand.client(f"Bearer {number}").call()).text == "done"
    assert len(upstream.probes) == 1
    era = stand.gateway.routes.live["/mcp"].upstream.era
    assert era is not None
    assert era.known is None


@pytest.mark.usefixtures("probes_once")
async def test_callers_that_come_at_once_cause_one_probe(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    gate = upstream.holding("server/discover", lambda turn: turn.reply(401))
    loop = asyncio.get_running_loop()
    calls = [loop.create_task(stand.client(f"Bearer {number}").call()) for number in range(10)]
    await eventually(lambda: stand.gateway.downstream.in_flight == 10)
    gate.set()
    assert [reply.text for reply in await asyncio.gather(*calls)] == ["done"] * 10
    assert len(upstream.probes) == 1


async def test_a_caller_that_a_modern_upstream_accepts_waits_for_its_turn_to_probe(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = {"upstream": {"url": upstream.url, "transport": "streamable-http"}}
    monkeypatch.setattr(era_probe, "PAUSE_SECONDS", 0.3)
    stand = await begin(route=route)
    make_modern(upstream)

    async def checked(turn: Turn) -> None:
        if turn.seen.headers["Authorization"] != "Bearer good":
            turn.reply(401)
        else:
            await discovered(turn)

    async def handshake(turn: Turn) -> None:
        await _refuse(turn, 400 if turn.seen.headers["Authorization"] == "Bearer good" else 401)

    upstream.on("server/discover", checked)
    upstream.on("initialize", handshake)
    good = stand.client("Bearer good")

    async def knock() -> None:
        headers, body = stand.client("Bearer bad").build("tools/list")
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            _ = await response.read()

    await knock()
    calls = [asyncio.get_running_loop().create_task(good.call()) for _ in range(3)]
    while not all(call.done() for call in calls):
        await knock()
    assert [call.result().text for call in calls] == ["modern"] * 3
    assert [probe.headers["Authorization"] for probe in upstream.probes] == ["Bearer bad", "Bearer good"]


@pytest.mark.usefixtures("probes_once")
async def test_a_caller_that_waits_for_its_turn_to_probe_comes_before_others_until_it_leaves(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await begin()
    upstream.on("server/discover", lambda turn: _refuse(turn, 401))
    era = stand.gateway.routes.live["/mcp"].upstream.era
    assert era is not None
    assert not await era.is_modern({"Authorization": "Bearer one"})
    waiting = asyncio.get_running_loop().create_task(era.is_modern({"Authorization": "Bearer good"}, waits=True))
    await asyncio.sleep(0)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000)
    monkeypatch.setattr("gateway.upstream.http.era_probe.world", later)  # but the task has not run yet
    assert not await era.is_modern({"Authorization": "Bearer two"})
    assert len(upstream.probes) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not await era.is_modern({"Authorization": "Bearer three"})
    assert len(upstream.probes) == 2


async def test_a_probe_that_hangs_is_given_up(
    upstream: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(era_probe, "PROBE_SECONDS", 0.05)
    upstream.on("server/discover", Turn.for_ever)
    assert (await client.call()).text == "done"
    async with asyncio.timeout(3):
        await upstream.probes[0].cut.wait()


async def test_a_refused_credential_does_not_decide_the_era_for_other_callers(
    upstream: FakeUpstream, stand: Stand
) -> None:
    make_modern(upstream)
    gate = asyncio.Event()

    async def checked(turn: Turn) -> None:
        if turn.seen.headers["Authorization"] != "Bearer good":
            await gate.wait()
            turn.reply(401)
        else:
            await discovered(turn)

    upstream.on("server/discover", checked)
    upstream.on("initialize", lambda turn: _refuse(turn, 401))
    bad, good = stand.client("Bearer bad"), stand.client("Bearer good")
    first = asyncio.get_running_loop().create_task(bad.call())
    await eventually(lambda: upstream.probes)
    second = asyncio.get_running_loop().create_task(good.call())
    await eventually(lambda: stand.gateway.downstream.in_flight == 2)
    gate.set()
    assert (await first).status == 401
    assert (await second).text == "modern"


async def _refuse(turn: Turn, status: int) -> None:
    turn.reply(status, {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "no"}})


@pytest.fixture
def _quick_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(era_probe, "_DOUBT_SECONDS", 0.0)


@pytest.mark.usefixtures("_quick_doubt")
@pytest.mark.parametrize("dialects", [[], ["sep-1655"]])
@pytest.mark.parametrize("method", ["tools/call", "server/discover", "tools/list"])
async def test_an_upstream_that_became_modern_is_found_out_by_the_request_it_refused(
    upstream: FakeUpstream, begin: Start, method: str, dialects: list[str]
) -> None:
    stand = await begin(sessions={"idle_seconds": 0}, route={"dialects": dialects})
    client = stand.client()
    assert (await client.call()).text == "done"
    await upstream.saw("DELETE")
    make_modern(upstream)
    upstream.on("initialize", lambda turn: _refuse(turn, 400))
    upstream.on("GET", lambda turn: _refuse(turn, 405))
    upstream.on("tools/list", modern_tool)
    another = stand.client(info={"name": "another", "version": "1"}, capabilities={**ALL, **CAPABILITY})
    headers, body = another.build(method, {"name": "tool"})
    async with stand.http.post(stand.url, headers=headers, data=body) as response:
        assert (response.status, (await response.json())["result"]["resultType"]) == (200, "complete")
    assert probes(stand, "modern") == 1
    assert (await client.call()).text == "modern"


@pytest.mark.usefixtures("_quick_doubt")
async def test_an_upstream_that_became_old_is_found_out_too(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    make_modern(upstream)
    assert (await client.call()).text == "modern"

    async def old(turn: Turn) -> None:
        if "MCP-Protocol-Version" in turn.seen.headers and turn.seen.headers["MCP-Protocol-Version"] == mcp.MODERN:
            await _refuse(turn, 400)
        else:
            await turn.result(text("old"))

    upstream.on("server/discover", lambda turn: _refuse(turn, 400))
    upstream.on("tools/call", old)
    assert (await client.call()).text == "old"
    assert passed(stand, "bridged", "modern") == 1
    assert probes(stand, "legacy") == 1


@pytest.mark.usefixtures("_quick_doubt")
async def test_a_call_that_was_answered_is_not_bridged_when_the_upstream_turns_out_old(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    make_modern(upstream)
    assert (await client.call()).text == "modern"
    runs = 0

    async def fail(turn: Turn) -> None:
        nonlocal runs
        runs += 1
        turn.reply(404, {"jsonrpc": "2.0", "id": turn.id, "error": {"code": -32000, "message": "No such file"}})

    upstream.on("server/discover", lambda turn: _refuse(turn, 400))
    upstream.on("tools/call", fail)
    reply = await client.call()
    assert (reply.status, reply.error["message"]) == (404, "No such file")
    assert runs == 1
    upstream.on("tools/call", lambda turn: turn.result(text("old")))
    assert (await client.call()).text == "old"
    assert probes(stand, "legacy") == 1


async def test_a_modern_servers_refusals_are_passed_on_and_probe_nothing(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    make_modern(upstream)
    upstream.on("tools/call", lambda turn: turn.error(-32602, "Unknown tool"))
    for _ in range(2):
        assert (await client.call()).error["message"] == "Unknown tool"
    assert len(upstream.probes) == 1
    # Asked a moment ago: whatever this is, the client gets it.
    upstream.on("tools/call", lambda turn: _refuse(turn, 404))
    assert (await client.call()).status == 404
    assert len(upstream.probes) == 1


async def test_a_call_that_is_held_goes_on_when_the_upstream_turns_out_modern(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.on("server/discover", lambda turn: turn.reply(503))
    upstream.tool(asks("answered"))
    asked = await client.call()
    upstream.on("server/discover", discovered)
    upstream.on("completion/complete", modern_completion)
    assert (await client.post("completion/complete")).result["completion"] == {"values": ["modern"]}
    assert probes(stand, "modern") == 1
    assert (await client.answer(asked)).text == "answered"


async def test_a_held_calls_state_with_another_key_is_not_served_when_the_upstream_turns_out_modern(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(route={"forward_headers": ["x-api-key"]})
    mine, other = (stand.client(headers={"X-Api-Key": key}) for key in ("mine", "another"))
    upstream.tool(asks("answered"))
    asked = await mine.call()
    make_modern(upstream)
    stand.gateway.routes.live["/mcp"].upstream.era.known = True  # type: ignore[union-attr]
    upstream.tool(modern_tool)
    foreign = await other.answer(asked)
    assert foreign.text == "modern", "it is the upstream's to judge, as any state that is not of this caller"
    assert (await mine.answer(asked)).text == "answered"


async def test_a_modern_upstreams_subscription_does_not_hold_up_a_drain(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 30})
    make_modern(upstream)

    async def listen(turn: Turn) -> None:
        await turn.notify(mcp.ACKNOWLEDGED, {"notifications": {}})
        await turn.for_ever()

    upstream.on("subscriptions/listen", listen)
    async with stand.client().open("subscriptions/listen", {"notifications": {}}) as response:
        assert b"acknowledged" in await response.content.readuntil(b"\n\n")
        async with asyncio.timeout(3):
            await drain(stand.gateway, delay_seconds=0)
        with pytest.raises(aiohttp.ClientPayloadError):  # its last message never came
            await response.content.read()


async def test_a_modern_call_during_a_drain_is_refused_by_its_id(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 30})
    make_modern(upstream)
    client = stand.client()
    assert (await client.call()).text == "modern"
    stand.gateway.draining.begin(None)
    refused = await client.call()
    assert (refused.status, refused.error["data"]["reason"], refused.final["id"]) == (503, "stopping", "c2")


async def test_a_compressed_reply_is_passed_on_as_it_is(upstream: FakeUpstream, stand: Stand) -> None:
    packed = gzip.compress(b"x" * 10_000_000)

    upstream.on("initialize", lambda turn: turn.reply(200, packed, {"Content-Encoding": "gzip"}))
    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        http.post(stand.url, headers=OLD, json=INITIALIZE) as response,
    ):
        assert (response.headers["Content-Encoding"], await response.read()) == ("gzip", packed)


# -- bytes that no HTTP library would send ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 10\r\n",
        b"Content-Length: +5\r\n",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n",
        b"Content-Length : 5\r\n",
        b"X-A: a\rContent-Length: 5\r\n",
    ],
)
async def test_a_reply_of_an_ambiguous_length_is_not_passed_on(begin: Start, lines: bytes) -> None:
    """Its end might be taken for the reply to the next request of another client behind the same proxy."""
    async with fake_wire(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n5\r\nHELLO\r\n0\r\n\r\n") as url:
        stand = await begin(url=url)
        async with stand.http.post(stand.url, headers=OLD, json=INITIALIZE) as response:
            assert response.status == 502


async def test_a_head_that_http_forbids_is_passed_on_without_what_is_forbidden(begin: Start, log_lines: Lines) -> None:
    said = (
        b"HTTP/1.1 200 O\x01K\x1b[2J\xff\r\nContent-Type: text/plain\r\nX-Bad: a\x01b\r\nX-Worse: \xff\r\n"
        b"X-Good: a\tb\r\nMcp-Session-Id: \x02\r\nWWW-Authenticate: Bearer \x7f\r\nContent-Length: 2\r\n\r\nhi"
    )
    async with fake_wire(said) as url:
        stand = await begin(url=url)
        async with stand.http.post(stand.url, headers=OLD, json=INITIALIZE) as response:
            assert (response.status, response.reason, await response.text()) == (200, "OK", "hi")
            assert response.headers["X-Good"] == "a\tb"
            assert not {"X-Bad", "X-Worse", "Mcp-Session-Id", "WWW-Authenticate"} & set(response.headers)
    assert not log_lines("task.failed")


async def test_a_content_type_that_http_forbids_is_left_out(begin: Start) -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Type: text/\x01event-stream\r\nContent-Length: 2\r\n\r\nhi"
    async with fake_wire(said) as url:
        stand = await begin(url=url)
        async with stand.http.post(stand.url, headers=OLD, json=INITIALIZE) as response:
            assert (response.status, await response.read()) == (200, b"hi")
            assert "\x01" not in response.headers.get("Content-Type", "")

"""With `era: bridge`, modern clients use the legacy side of a server that speaks both protocols."""

from typing import Any, Final

import pytest

from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, Turn, ask, asks
from tests.support.host import initialize
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Stand

BRIDGE: Final = {"era": "bridge"}
ANSWERED: Final = '{"action": "accept", "content": {"name": "Ada"}}'
ACCEPTS: Final = {"Accept": "application/json, text/event-stream"}
INITIALIZE: Final = initialize(7)


@pytest.fixture
def dual(upstream: FakeUpstream) -> FakeUpstream:
    """A server that speaks both protocols, whose tool can ask legacy clients only."""

    async def discovered(turn: Turn) -> None:
        await turn.result({"resultType": "complete", "supportedVersions": [mcp.MODERN], "capabilities": {}})

    async def tool(turn: Turn) -> None:
        if turn.seen.headers.get(mcp.PROTOCOL_VERSION) == mcp.MODERN:
            await turn.error(-32600, "this transport context has no back-channel for server-initiated requests")
        else:
            await ask(turn)

    upstream.on("server/discover", discovered)
    upstream.tool(tool)
    return upstream


def probes(stand: Stand) -> float:
    return sum(stand.metric("mcp_gateway_era_probes_total", era=era) for era in ("legacy", "modern", "unknown"))


async def test_without_the_key_a_dual_era_server_gets_modern_requests_unchanged(
    dual: FakeUpstream, stand: Stand
) -> None:
    """This is the symptom by which docs/clients-and-servers.md recognises a server that needs `era: bridge`."""
    reply = await stand.client().call()
    assert reply.error["code"] == -32600
    assert "no back-channel" in reply.error["message"]
    assert dual.words == ["tools/call"]


async def test_a_bridged_route_uses_the_legacy_side_without_a_probe(dual: FakeUpstream, begin: Start) -> None:
    stand = await begin(route=BRIDGE)
    client = stand.client()
    assert (await client.answer(await client.call())).text == ANSWERED
    assert dual.probes == []
    assert probes(stand) == 0
    assert dual.words[0] == "initialize"
    assert dual.words.count("tools/call") == 1
    assert stand.metric("mcp_gateway_passed_through_total", era="modern", outcome="answered") == 0


async def test_a_bridged_route_passes_legacy_clients_through(dual: FakeUpstream, begin: Start) -> None:
    stand = await begin(route=BRIDGE)
    async with stand.http.post(stand.url, json=INITIALIZE) as response:
        assert response.status == 200
        assert (await response.json())["id"] == 7
        assert response.headers["Mcp-Session-Id"] in dual.known
    assert dual.words == ["initialize"]
    assert dual.probes == []
    assert stand.metric("mcp_gateway_passed_through_total", era="legacy", outcome="answered") == 1
    assert stand.metric("mcp_gateway_sessions_opened_total") == 0


@pytest.mark.parametrize("method", ["tools/call", "tools/list", "server/discover"])
@pytest.mark.parametrize("status", [200, 400, 404])
async def test_a_bridged_server_that_refuses_initialize_gets_an_error_that_names_the_key(
    dual: FakeUpstream, begin: Start, log_lines: Lines, status: int, method: str
) -> None:
    async def refuse(turn: Turn) -> None:
        unsupported = {"supported": [mcp.MODERN], "requested": "2025-11-25"}
        error = {"code": mcp.UNSUPPORTED_VERSION, "message": "Unsupported protocol version", "data": unsupported}
        turn.reply(status, {"jsonrpc": "2.0", "id": turn.id, "error": error})

    dual.on("initialize", refuse)
    dual.on("GET", lambda turn: turn.reply(405))
    stand = await begin(route=BRIDGE)
    reply = await stand.client().post(method, {"name": "tool"} if method == "tools/call" else None)
    assert reply.outcome == (200, mcp.INTERNAL_ERROR, "upstream_unreachable")
    assert "The upstream" in reply.error["message"]
    assert "of route /mcp" in reply.error["message"]
    assert "The route has era: bridge" in reply.error["message"]
    assert "set era: auto" in reply.error["message"]
    (line,) = log_lines("upstream.failed")
    assert "set era: auto" in line["fix"]
    assert "tools/call" not in dual.words
    assert dual.probes == [], "a refused handshake causes no probe either"


async def test_another_failure_of_a_bridged_server_does_not_blame_the_key(dual: FakeUpstream, begin: Start) -> None:
    dual.on("initialize", lambda turn: turn.reply(401))
    stand = await begin(route=BRIDGE)
    assert "era" not in (await stand.client().call()).error["message"]


async def test_the_sessions_of_a_dual_era_server_are_its_own(dual: FakeUpstream, begin: Start) -> None:
    async def refused(turn: Turn) -> None:
        turn.reply(400, {"jsonrpc": "2.0", "id": turn.id, "error": {"code": -32000, "message": "Bad Request"}})

    dual.on("GET", lambda turn: turn.reply(405))
    dual.on("tools/list", refused)
    stand = await begin()
    _ = await stand.client().call()
    assert len(dual.probes) == 1, "the server is known to be modern"
    async with stand.http.post(stand.url, json=INITIALIZE, headers=ACCEPTS) as response:
        session = {mcp.SESSION_ID: response.headers[mcp.SESSION_ID], mcp.PROTOCOL_VERSION: "2025-06-18", **ACCEPTS}
    async with stand.http.get(stand.url, headers=session) as response:
        assert response.status == 405
    async with stand.http.post(stand.url, json={**INITIALIZE, "method": "tools/list"}, headers=session) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, -32000)


async def test_a_modern_server_that_learns_the_legacy_era_has_sessions_from_then_on(
    dual: FakeUpstream, begin: Start
) -> None:
    stand = await begin()
    refusal = {"code": mcp.UNSUPPORTED_VERSION, "message": "no", "data": {"supported": [mcp.MODERN]}}

    dual.on("GET", lambda turn: turn.reply(405))
    dual.on("tools/list", lambda turn: turn.reply(400, {"jsonrpc": "2.0", "id": turn.id, "error": refusal}))
    session = {mcp.SESSION_ID: "s", mcp.PROTOCOL_VERSION: "2025-06-18", **ACCEPTS}
    listed = {**INITIALIZE, "method": "tools/list"}
    for allowed in (False, True):
        if allowed:
            async with stand.http.post(stand.url, json=INITIALIZE, headers=ACCEPTS) as response:
                session[mcp.SESSION_ID] = response.headers[mcp.SESSION_ID]
        else:
            async with stand.http.post(stand.url, json=listed, headers=session) as response:
                assert response.status == 404
        async with stand.http.get(stand.url, headers=session) as response:
            assert response.status == (405 if allowed else 404)


async def test_a_reload_to_bridge_holds_for_the_next_request(dual: FakeUpstream, stand: Stand) -> None:
    client = stand.client()
    assert (await client.call()).error["code"] == -32600
    stand.reload(dual.url, route=BRIDGE)
    assert (await client.answer(await client.call())).text == ANSWERED
    assert len(dual.probes) == 1, "the one from before the reload"


async def test_a_call_that_is_held_goes_on_when_a_reload_ends_the_bridge(dual: FakeUpstream, begin: Start) -> None:
    stand = await begin(route=BRIDGE)
    client = stand.client()
    asked = await client.call()
    stand.reload(dual.url)
    assert (await client.call()).error["code"] == -32600, "new calls are passed through"
    assert (await client.answer(asked)).text == ANSWERED


async def test_a_task_goes_on_when_a_reload_ends_the_bridge(dual: FakeUpstream, begin: Start) -> None:
    dual.on(mcp.TASKS_GET, lambda turn: turn.result({"of": turn.seen.body["params"]["taskId"]}))
    dual.capabilities = {"tools": {}, "tasks": {"requests": {"tools": {"call": {}}}}}
    dual.tools = [{"name": "tool", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}]
    dual.tool(lambda turn: turn.result({"task": {"taskId": "t", "status": "working", "ttl": 60_000}}))
    dual.on(mcp.TASKS_RESULT, asks("done"))
    stand = await begin(route=BRIDGE)
    client = stand.client(capabilities={"elicitation": {}, "extensions": {mcp.TASKS: {}}})

    async def ask(method: str, **params: Any) -> dict[str, Any]:
        async with client.open(method, params) as response:
            result: dict[str, Any] = (await response.json())["result"]
            return result

    task_id = (await ask("tools/call", name="tool", arguments={}))["taskId"]
    stand.reload(dual.url)

    async def until(status: str) -> dict[str, Any]:
        while (found := await ask(mcp.TASKS_GET, taskId=task_id))["status"] != status:
            pass
        return found

    asked = (await until("input_required"))["inputRequests"]
    _ = await ask(mcp.TASKS_UPDATE, taskId=task_id, inputResponses=dict.fromkeys(asked, ACCEPT))
    found = await until("completed")
    assert found["result"]["content"][0]["text"] == "done"
    assert await ask(mcp.TASKS_GET, taskId="another") == {"of": "another"}, (
        "the task of the modern side passes through"
    )


async def test_a_state_of_a_child_that_did_not_answer_a_probe_is_no_invalid_one(begin: Start) -> None:
    stand = await begin(route={"upstream": {"command": ["false"], "warm": 0}})
    refused = await stand.client().post("tools/call", {"name": "tool", "requestState": "theirs"})
    assert refused.error["data"]["reason"] == "upstream_unreachable"
    assert "send the same request again" in refused.error["message"]

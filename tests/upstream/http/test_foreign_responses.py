"""A legacy server, or a proxy before it, that answers a request with the response to another one."""

import json
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.support import copies
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Client, Stand

SHAKEN = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
FOREIGN: list[Any] = [1, "1", "another"]


def response(id_: Any, result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id_, "result": result}).encode()


@pytest.mark.parametrize("body", [*(response(id_, text("for another caller")) for id_ in FOREIGN), b"<html>"])
async def test_a_body_that_is_not_the_result_ends_its_connection(
    upstream: FakeUpstream, stand: Stand, body: bytes
) -> None:
    client = stand.client()
    assert (await client.call()).text == "done"

    upstream.once("tools/call", lambda turn: turn.reply(200, body))
    reply = await client.call()
    assert reply.outcome == (200, -32603, "call_lost")
    seen = upstream.of("tools/call")[-1]
    assert (await client.call()).text == "done"
    later = upstream.seen[upstream.seen.index(seen) + 1 :]
    assert seen.peer not in [each.peer for each in later], "the next response on it could be foreign too"


async def test_a_refused_call_leaves_nothing_in_its_idle_session(upstream: FakeUpstream, client: Client) -> None:
    async def refuse(turn: Turn) -> None:
        turn.reply(400, {"jsonrpc": "2.0", "id": turn.id, "error": {"code": -32602, "message": "x" * 60_000}})

    upstream.once("tools/call", refuse)
    with copies.counted() as kept:
        assert (await client.call(arguments=copies.LARGE)).error["code"] == -32602
        assert kept() == 0


@pytest.mark.parametrize("id_", FOREIGN)
@pytest.mark.parametrize("status", [400, 404, 500])
async def test_the_error_of_another_request_does_not_answer_a_call(
    upstream: FakeUpstream, client: Client, status: int, id_: Any
) -> None:
    async def foreign(turn: Turn) -> None:
        error = {"code": -32602, "message": "for another caller"}
        turn.reply(status, {"jsonrpc": "2.0", "id": id_, "error": error})

    upstream.once("tools/call", foreign)
    reply = await client.call()
    assert reply.error["data"]["reason"] == "call_lost"
    assert "for another caller" not in reply.error["message"]


@pytest.mark.parametrize("id_", FOREIGN)
async def test_initialize_is_not_answered_by_the_response_to_another_request(
    upstream: FakeUpstream, client: Client, id_: Any
) -> None:
    async def stream(turn: Turn) -> None:
        turn.upstream.known.add("s8")
        await turn.raw(b"data: " + response(id_, {**SHAKEN, "protocolVersion": "1999-01-01"}) + b"\n\n")
        await turn.raw(b"data: " + response(turn.id, SHAKEN) + b"\n\n")

    upstream.once("initialize", lambda turn: turn.reply(200, response(id_, SHAKEN), {mcp.SESSION_ID: "s9"}))
    reply = await client.call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    upstream.has_sessions = False
    upstream.once("initialize", stream)
    assert (await client.call()).text == "done"


@pytest.mark.parametrize("sent", [b"", b"data: "])
async def test_a_ping_is_not_answered_by_the_response_to_another_request(
    upstream: FakeUpstream, client: Client, sent: bytes
) -> None:
    """Without the answer, the ping proves nothing of the session: the call counts as lost, not its session."""

    async def pong(turn: Turn) -> None:
        if sent:
            await turn.raw(sent + response("another", {}) + b"\n\n")
        else:
            turn.reply(200, response("another", {}))

    upstream.once("tools/call", lambda turn: turn.reply(404, b"no session"))
    upstream.on(mcp.PING, pong)
    assert (await client.call()).error["data"]["reason"] == "call_lost"
    assert len(upstream.of(mcp.PING)) == 1
    assert (await client.call()).text == "done"


async def test_the_probe_of_the_era_is_not_answered_by_another_response(upstream: FakeUpstream, begin: Start) -> None:
    async def foreign(turn: Turn) -> None:
        modern = {"resultType": "complete", "supportedVersions": [mcp.MODERN], "capabilities": {}}
        turn.reply(200, response("another", modern))

    upstream.on("server/discover", foreign)
    stand = await begin(route={"era": "auto"})
    assert (await stand.client().call()).text == "done", "served as if the server were legacy"
    era = stand.gateway.routes.live["/mcp"].upstream.era
    assert era is not None
    assert era.known is None

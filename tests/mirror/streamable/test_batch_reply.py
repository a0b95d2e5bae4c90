"""JSON-RPC batches of legacy clients before a modern server."""

import asyncio
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.mirror.conftest import Begin
from tests.mirror.streamable.test_front import ACCEPT, ask, text
from tests.support.fake_modern import Call, FakeModern, Json
from tests.support.mirrored_client import LegacyClient
from tests.support.workbench import Stand

PING: Json = {"jsonrpc": "2.0", "id": "p", "method": "ping"}


async def old(stand: Stand, version: str = "2025-03-26", **headers: str) -> LegacyClient:
    client = LegacyClient(stand.http, stand.url, version=version, headers=headers)
    _ = await client.initialize()
    return client


def call(id_: Any, tool: str, **arguments: Any) -> Json:
    return {"jsonrpc": "2.0", "id": id_, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


async def test_a_batch_runs_at_the_same_time_and_each_request_gets_one_response(
    begin: Begin, server: FakeModern
) -> None:
    both = asyncio.Barrier(2)

    async def meet(given: Call) -> Json:
        await both.wait()
        return given.text(given.params["arguments"]["n"])

    server.tools["meet"] = meet
    client = await old(await begin())
    notice = {"jsonrpc": "2.0", "method": mcp.INITIALIZED}
    batch = [call(1, "meet", n=1), notice, call("1", "meet", n=2), PING, call(4, "no_such_method") | {"method": "x"}]
    async with client.post(batch) as stream:
        assert stream.response.content_type == "text/event-stream"
        found = {(type(one["id"]), one["id"]): one for one in [await stream.message() for _ in range(4)]}
        with pytest.raises(EOFError):
            _ = await stream.event()
    assert (text(found[int, 1]), text(found[str, "1"]), found[str, "p"]["result"]) == (1, 2, {})
    assert found[int, 4]["error"]["code"] == mcp.METHOD_NOT_FOUND


async def test_a_request_of_a_batch_asks_and_a_batch_may_answer(begin: Begin, server: FakeModern) -> None:
    server.tools["ask"] = ask
    client = await old(await begin())
    async with client.post([call(1, "ask"), call(2, "ask")]) as stream:
        questions = [await stream.message(), await stream.message()]
        answers = [{"jsonrpc": "2.0", "id": each["id"], "result": ACCEPT} for each in questions]
        async with client.post(answers) as posted:
            assert (posted.response.status, await posted.response.read()) == (202, b"")
        ends = [await stream.message(), await stream.message()]
    assert sorted(end["id"] for end in ends) == [1, 2]
    assert [text(end) for end in ends] == [{"name": ACCEPT}] * 2
    assert len(server.of("tools/call")) == 4


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([], id="empty"),
        pytest.param([PING] * 101, id="too many"),
        pytest.param([PING, PING], id="one id twice"),
        pytest.param([PING, 5], id="no message"),
        pytest.param([PING, {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}], id="initialize"),
    ],
)
async def test_a_batch_that_is_refused_has_no_effect(begin: Begin, server: FakeModern, batch: list[Any]) -> None:
    server.tools["ask"] = ask
    client = await old(await begin())
    async with client.post([call(1, "ask"), *batch] if batch else batch) as stream:
        assert stream.response.status == 200
        assert (await stream.message())["error"]["code"] == mcp.INVALID_REQUEST
    assert server.of("tools/call") == []


async def test_a_batch_of_a_version_without_batches_is_refused(begin: Begin, server: FakeModern) -> None:
    client = await old(await begin(), "2025-06-18")
    async with client.post([PING]) as stream:
        assert stream.response.status == 200
        assert "2025-06-18" in (await stream.message())["error"]["message"]


async def test_a_refused_credential_is_the_status_of_the_whole_batch(begin: Begin, server: FakeModern) -> None:
    server.tools["ask"] = ask
    client = await old(await begin(), Authorization="Bearer a")
    server.credential = "Bearer other"
    async with client.post([call(1, "ask"), call(2, "ask")]) as stream:
        assert stream.response.status == 401
        assert "WWW-Authenticate" in stream.response.headers

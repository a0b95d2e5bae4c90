"""JSON-RPC batches of legacy clients whose sessions are relayed."""

import json
from typing import Any

import pytest

from gateway.legacy_front import batch
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidRequest, ParseError
from tests.legacy_front.test_front import answer, ask, before, finish, silent
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream
from tests.support.legacy_client import LegacyClient, SseClient, later
from tests.support.stand import Start
from tests.support.workbench import Stand

Json = dict[str, Any]


def body(*messages: Json) -> bytes:
    return json.dumps([{"jsonrpc": "2.0", **each} for each in messages]).encode()


@pytest.fixture
async def stand(begin: Start, sse_server: FakeSse) -> Stand:
    sse_server.version = batch.VERSION
    return await begin(**before(sse_server))


async def test_the_responses_of_a_batch_come_on_one_stream(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand, batch.VERSION).initialize()
    one, two = client.call_message(), client.call_message()
    stream = await client.open(body(one, {"method": "notifications/roots/list_changed"}, two))
    _ = await sse_server.heard(mcp.TOOLS_CALL, 2)
    finish(sse_server, 2)
    assert await stream.message() == answer(2)
    ask(sse_server)
    question = await stream.message()
    assert question["id"] == "q"
    assert (await client.post(body({"id": "q", "result": {"action": "decline"}})))[0] == 202
    finish(sse_server, 1)
    assert await stream.rest() == [answer(1)]
    assert await client.end() == 200


async def test_a_batch_over_http_sse_is_answered_on_the_one_stream(begin: Start, upstream: FakeUpstream) -> None:
    upstream.version = batch.VERSION
    client = await SseClient(await begin(), batch.VERSION).initialize()
    assert (await client.post(body({"id": 1, "method": "ping"}, {"id": 2, "method": "ping"})))[0] == 202
    assert {(await client.stream.message())["id"] for _ in range(2)} == {1, 2}
    client.stream.close()


async def test_a_batch_that_repeats_an_open_id_has_no_effect(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand, batch.VERSION).initialize()
    first = later(client.post(client.call_message()))
    _ = await sse_server.heard(mcp.TOOLS_CALL)
    other, same = {"id": 7, "method": "ping"}, {"id": 1, "method": "ping"}
    status, _, (refused,) = await client.post(body(other, same))
    assert (status, refused["error"]["code"]) == (200, mcp.INVALID_REQUEST)
    assert (await client.post(other))[0] == 200, "its id is free"
    finish(sse_server, 1)
    assert (await first)[2] == [answer(1)]
    assert await client.end() == 200


async def test_a_version_without_batches_refuses_one(begin: Start, sse_server: FakeSse) -> None:
    stand = await begin(**before(sse_server))
    client = await LegacyClient(stand).initialize()
    status, _, (refused,) = await client.post(body({"id": 1, "method": "ping"}))
    assert (status, refused["error"]["code"]) == (200, mcp.INVALID_REQUEST)
    assert await client.end() == 200


async def test_the_end_of_a_session_answers_each_request_of_a_batch(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand, batch.VERSION).initialize()
    stream = await client.open(body(client.call_message(), client.call_message()))
    _ = await sse_server.heard(mcp.TOOLS_CALL, 2)
    assert await client.end() == 200
    assert sorted(each["id"] for each in await stream.rest() if "error" in each) == [1, 2]


@pytest.mark.parametrize("data", [b'[{"jsonrpc":', b"[" * 600 + b"]" * 600])
def test_an_array_that_is_not_json_is_a_parse_error(data: bytes) -> None:
    with pytest.raises(ParseError):
        _ = batch.members(data, 512, batch.VERSION)


@pytest.mark.parametrize("data", [b"[]", b"[1]", b"[[]]", b'["x"]'])
def test_members_that_are_no_messages_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        _ = batch.members(data, 512, batch.VERSION)

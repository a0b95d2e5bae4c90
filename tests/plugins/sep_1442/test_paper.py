"""SEP-1442 by a client that follows the paper line by line: before servers of both eras, one replica or three."""

import json
from typing import Any, Final

import pytest

from gateway.protocol import mcp
from tests.plugins.sep_1442.conftest import LOG, ROUTE, Tools, client_of
from tests.support.fake_upstream import FakeUpstream
from tests.support.legacy_client import Json
from tests.support.paper_client import VERSION, PaperClient
from tests.support.replicas import Cluster, operations
from tests.support.workbench import Stand, eventually, jwt

ACCEPT: Final[Json] = {"action": "accept", "content": {"name": "Ann"}}
ROOT: Final[Json] = {"uri": "file:///a", "name": "a"}
CLIENT_INFO: Final = {"name": "old", "version": "1"}


def text(message: Json) -> Any:
    return json.loads(message["result"]["content"][0]["text"])


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"])
async def test_a_request_needs_no_other_one_before_it(stands: list[Stand], version: str) -> None:
    async with client_of(stands, version=version).call("plain") as stream:
        assert stream.response.status == 200
        message = await stream.message()
        assert message["result"] == {"content": [{"type": "text", "text": '"done"'}]}


@pytest.mark.parametrize("version", ["2026-07-28", "2099-01-01", "1.0", ""])
async def test_an_unsupported_version_is_refused(stands: list[Stand], tools: Tools, version: str) -> None:
    client = client_of(stands, version=version)
    status, message = await client.ask("tools/call", {"name": "plain"})
    error = message["error"]
    assert (status, error["code"], error["message"]) == (400, -32000, "Unsupported protocol version")
    assert error["data"]["supportedVersions"] == ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"]
    assert message["id"] == 1
    assert tools.calls() == 0


async def test_a_missing_version_header_is_refused(client: PaperClient, tools: Tools) -> None:
    del client.headers[mcp.PROTOCOL_VERSION]
    status, message = await client.ask("tools/call", {"name": "plain"})
    assert (status, message["error"]["code"]) == (400, -32000)
    assert tools.calls() == 0


@pytest.mark.parametrize("named", ["2025-11-25", 7, None])
async def test_a_header_that_differs_from_meta_is_refused(client: PaperClient, tools: Tools, named: Any) -> None:
    params = {"name": "plain", "_meta": {VERSION: named}}
    async with client.open({"id": 1, "method": "tools/call", "params": params}) as stream:
        assert (stream.response.status, (await stream.message())["error"]["code"]) == (400, -32600)
    assert tools.calls() == 0


# -- discovery --------------------------------------------------------------------------------------------------------


async def test_discover_has_its_own_shape(client: PaperClient, tools: Tools) -> None:
    told = {}
    if isinstance(tools.server, FakeUpstream):
        tools.server.instructions = "Be kind"
        told = {"instructions": "Be kind"}
    _, message = await client.ask("server/discover")
    assert message["result"] == told | {
        "supportedVersions": ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"],
        "capabilities": {"tools": {"listChanged": True}, "logging": {}, "resources": {}},
        "serverInfo": {"name": "fake" if tools.is_legacy else "fake-modern", "version": "1"},
    }


@pytest.mark.parametrize(
    "method",
    ["logging/setLevel", "resources/subscribe", "subscriptions/listen", "tasks/get", "sessions/create", "no/such"],
)
async def test_an_unknown_method_is_refused(client: PaperClient, method: str) -> None:
    status, message = await client.ask(method)
    assert (status, message["error"]["code"]) == (404, -32601)


async def test_a_ping_is_answered(client: PaperClient) -> None:
    assert await client.ask("ping") == (200, {"jsonrpc": "2.0", "id": 1, "result": {}})


# -- questions --------------------------------------------------------------------------------------------------------


async def test_a_question_is_a_request_on_the_response_stream(client: PaperClient, tools: Tools) -> None:
    async with client.call("both") as stream:
        assert stream.response.content_type == "text/event-stream"
        questions = {each["method"]: each for each in [await stream.message(), await stream.message()]}
        assert questions.keys() == {mcp.ELICIT, mcp.ROOTS}
        assert await client.answer(questions[mcp.ELICIT], ACCEPT) == 202
        assert await client.answer(questions[mcp.ROOTS], {"roots": [ROOT]}) == 202
        assert text(await stream.message()) == {"name": ACCEPT, "roots": {"roots": [ROOT]}}
        with pytest.raises(EOFError):
            await stream.message()
    assert tools.calls() == 1


async def test_a_client_is_asked_only_what_it_declared(stands: list[Stand], tools: Tools) -> None:
    client = client_of(stands, capabilities={"elicitation": {}})
    async with client.call("roots") as stream:
        message = await stream.message()
        assert "method" not in message
        assert message["result"]["isError"] is True


async def test_a_request_without_capabilities_gets_one_json_body(stands: list[Stand], tools: Tools) -> None:
    client = client_of(stands, capabilities=None)
    for name in ("tell", "ask"):
        async with client.call(name, {"logLevel": "debug", "progressToken": 1}) as stream:
            assert stream.response.content_type == "application/json"
            assert (await stream.message())["result"].get("isError") is (True if name == "ask" else None)


async def test_a_client_may_refuse_a_question(client: PaperClient) -> None:
    async with client.call("ask") as stream:
        assert await client.refuse(await stream.message()) == 202
        message = await stream.message()
        assert message["result"]["isError"] is True
        assert "Method not found" in message["result"]["content"][0]["text"]


@pytest.mark.parametrize("key", ["roots", "modelcontextprotocol.io/roots"])
async def test_roots_that_came_with_the_request_are_not_asked_for(stands: list[Stand], key: str) -> None:
    client = client_of(stands, capabilities={"elicitation": {}})
    async with client.call("both", {key: [ROOT]}) as stream:
        question = await stream.message()
        assert question["method"] == mcp.ELICIT
        assert await client.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT, "roots": {"roots": [ROOT]}}


async def test_roots_alone_allow_a_call_that_asks_for_them(stands: list[Stand]) -> None:
    client = client_of(stands, capabilities=None)
    async with client.call("roots", {"roots": [ROOT]}) as stream:
        assert stream.response.content_type == "application/json"
        assert text(await stream.message()) == {"roots": {"roots": [ROOT]}}


@pytest.mark.parametrize("key", ["logLevel", "modelcontextprotocol.io/logLevel"])
async def test_the_log_level_is_that_of_the_request(client: PaperClient, key: str) -> None:
    async with client.call("tell", {key: "info"}) as stream:
        log = await stream.message()
        assert (log["method"], log["params"]) == (mcp.LOG, LOG)
        assert text(await stream.message()) == "told"
    async with client.call("tell") as stream:
        assert text(await stream.message()) == "told"


async def test_a_call_counts_once_for_the_operator(stands: list[Stand], tools: Tools) -> None:
    async with client_of(stands[:1]).call("ask") as stream:
        assert await client_of(stands[-1:]).answer(await stream.message(), ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    assert stands[0].nested(mcp.ELICIT, "asked") == stands[0].nested(mcp.ELICIT, "answered") == 1
    await eventually(lambda: operations(stands[0], "complete") == 1)


async def test_the_call_ends_with_its_stream(client: PaperClient, tools: Tools) -> None:
    async with client.call("wait", {"logLevel": "info"}) as stream:
        assert (await stream.message())["method"] == mcp.LOG
    await eventually(tools.left.is_set, "the server's request is cut")


async def test_a_question_is_withdrawn_with_its_stream(client: PaperClient, tools: Tools) -> None:
    async with client.call("ask") as stream:
        _ = await stream.message()
    if isinstance(tools.server, FakeUpstream):
        assert await tools.server.saw(mcp.CANCELLED), "the legacy server holds nothing for a client that left"


# -- the background stream --------------------------------------------------------------------------------------------


async def test_a_background_stream_begins_with_its_notification(client: PaperClient, tools: Tools) -> None:
    async with client.request("messages/listen") as stream:
        assert stream.response.content_type == "text/event-stream"
        assert await stream.message() == {"jsonrpc": "2.0", "method": "notifications/messages/listen"}
        await tools.change()
        message = await stream.message()
        assert message["method"] == mcp.TOOLS_CHANGED
        assert not message.get("params", {}).get("_meta")


# -- sessions ---------------------------------------------------------------------------------------------------------


async def test_initialize_gives_a_session_id(client: PaperClient, tools: Tools) -> None:
    result = await client.initialize()
    assert result.keys() == {"sessionId", "protocolVersion", "capabilities", "serverInfo"}
    assert result["protocolVersion"] == "2025-06-18"
    assert result["capabilities"]["tools"] == {"listChanged": True}


async def test_a_session_goes_with_any_request(client: PaperClient, tools: Tools) -> None:
    await client.initialize()
    async with client.call("ask") as stream:
        assert await client.answer(await stream.message(), ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    called = tools.server.of(mcp.INITIALIZE if tools.is_legacy else mcp.TOOLS_CALL)[-1]
    body = called if isinstance(called, dict) else called.body
    info = body["params"]["clientInfo"] if tools.is_legacy else body["params"]["_meta"][mcp.META_CLIENT_INFO]
    assert info == CLIENT_INFO


async def test_the_session_of_the_header_counts(client: PaperClient) -> None:
    await client.initialize()
    assert (await client.ask("ping", meta={"modelcontextprotocol.io/sessionId": "other"}))[0] == 200


async def test_an_invalid_session_is_refused(stands: list[Stand], tools: Tools) -> None:
    ada, eve = (client_of(stands, headers={"Authorization": jwt(iss="i", sub=sub)}) for sub in ("ada", "eve"))
    await ada.initialize()
    sealed = ada.headers[mcp.SESSION_ID]
    for session in (sealed, sealed[:-2], "none", ""):
        eve.headers[mcp.SESSION_ID] = session
        status, message = await eve.ask("tools/call", {"name": "plain"})
        error = message["error"]
        assert (status, error["code"], error["message"]) == (400, -32001, "Invalid Session ID")
    assert tools.calls() == 0


@pytest.mark.parametrize("id_", ["mine", "caf\u00e9"])  # which the client escapes
async def test_a_call_of_a_session_can_be_cancelled(
    client: PaperClient, stands: list[Stand], tools: Tools, id_: str
) -> None:
    await client.initialize()
    async with client.call("wait", {"logLevel": "info"}, id_=id_) as stream:
        assert (await stream.message())["method"] == mcp.LOG
        assert any(stand.gateway.calls.used for stand in stands)
        assert await client.notify(mcp.CANCELLED, {"requestId": id_}) == 202
        assert not any(stand.gateway.calls.used for stand in stands), "wherever it is"
        with pytest.raises(EOFError):
            await stream.message()
    await eventually(tools.left.is_set, "the server's request is cut")


async def test_two_open_calls_of_a_session_cannot_have_the_same_id(stands: list[Stand], tools: Tools) -> None:
    client = client_of(stands[:1])
    await client.initialize()
    async with client.call("wait", {"logLevel": "info"}, id_="mine") as stream:
        assert (await stream.message())["method"] == mcp.LOG
        async with client.call("plain", id_="mine") as refused:
            message = await refused.message()
            assert (refused.response.status, message["id"]) == (200, "mine")
            assert message["error"]["code"] == mcp.INVALID_REQUEST
        session = client.headers.pop(mcp.SESSION_ID)
        async with client.call("plain", id_="mine") as served:
            assert "result" in await served.message(), "without a session, no id is compared"
        client.headers[mcp.SESSION_ID] = session
        assert await client.notify(mcp.CANCELLED, {"requestId": "mine"}) == 202
    await eventually(tools.left.is_set, "the server's request is cut")
    assert tools.calls() == 2


@pytest.mark.parametrize("method", [mcp.INITIALIZED, "notifications/roots/list_changed", mcp.CANCELLED])
async def test_notifications_without_a_meaning_are_accepted(client: PaperClient, tools: Tools, method: str) -> None:
    assert await client.notify(method, {"requestId": 1}) == 202
    await client.initialize()
    assert await client.notify(method, {"requestId": 1}) == 202
    seen = tools.server.words if tools.is_legacy else [body["method"] for body in tools.server.requests]  # type: ignore[union-attr]
    assert "notifications/roots/list_changed" not in seen


# -- who may answer ---------------------------------------------------------------------------------------------------


async def test_an_answer_of_another_caller_is_refused(stands: list[Stand]) -> None:
    ada, eve = (client_of(stands, headers={"Authorization": jwt(iss="i", sub=sub)}) for sub in ("ada", "eve"))
    async with ada.call("ask") as stream:
        question = await stream.message()
        assert await eve.answer(question, {"action": "decline"}) == 400
        assert await ada.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_calls_that_wait_have_a_cap(cluster: Cluster) -> None:
    client = client_of(await cluster.begin("gw-1", route=ROUTE, hold={"max_calls_per_principal": 1}))
    async with client.call("ask") as stream:
        question = await stream.message()
        async with client.call("ask") as refused:
            assert refused.response.status == 429
        assert await client.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_other_clients_notice_nothing(stands: list[Stand]) -> None:
    modern = stands[0].client()
    assert (await modern.call("plain")).text == '"done"'
    assert (await modern.post("no/such")).error["code"] == -32601
    unknown = await modern.post("tools/list", headers={mcp.PROTOCOL_VERSION: "2099-01-01"})
    assert unknown.error["code"] in (-32020, -32022)

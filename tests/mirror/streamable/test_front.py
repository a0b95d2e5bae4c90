"""Legacy clients of streamable HTTP before a modern server, in front of one replica."""

import asyncio
import json

import pytest
from msgspec.structs import replace

from gateway.protocol import mcp
from tests.mirror.conftest import Begin, sealed
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.legacy_client import LegacyClient
from tests.support.status import told
from tests.support.workbench import KEY, jwt

ACCEPT: Json = {"action": "accept", "content": {"name": "Ann"}}


def text(message: Json) -> object:
    return json.loads(message["result"]["content"][0]["text"])


async def test_an_answer_counts_once(client: LegacyClient, server: FakeModern) -> None:
    async with client.call("ask") as stream:
        question = await stream.message()
        assert await client.answer(question, ACCEPT) == 202
        assert await client.answer(question, {"action": "decline"}) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    assert await client.answer(question, ACCEPT) == 202, "the call is over"
    assert len(server.of("tools/call")) == 2


async def test_an_older_client_gets_no_event_ids(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin(), version="2025-06-18").initialize()
    async with client.call("ask") as stream:
        event = await stream.event()
        assert event.id is None
        question = json.loads(event.data)
        assert "mode" not in question["params"]
        _ = await client.answer(question, ACCEPT)
        last = await stream.event()
        assert (last.id, text(json.loads(last.data))) == (None, {"name": ACCEPT})


@pytest.mark.parametrize("taken", [1, "a"])
async def test_two_open_calls_of_a_session_cannot_have_the_same_id(
    client: LegacyClient, server: FakeModern, taken: int | str
) -> None:
    began, opened = asyncio.Event(), asyncio.Event()

    async def wait(call: Call) -> Json:
        began.set()
        await opened.wait()
        return call.text("waited")

    server.tools["wait"], server.tools["echo"] = wait, lambda call: call.text("x")
    echo = {"name": "echo", "arguments": {}}
    async with client.request("tools/call", {"name": "wait", "arguments": {}}, id_=taken) as stream:
        await began.wait()
        for method, params in (("tools/call", echo), ("ping", {}), ("resources/subscribe", {"uri": "a://b"})):
            async with client.request(method, params, id_=taken) as refused:
                message = await refused.message()
                assert (refused.response.status, message["id"]) == (200, taken)
                assert message["error"]["code"] == mcp.INVALID_REQUEST
        again = json.dumps({"jsonrpc": "2.0", "id": taken, "method": "tools/call", "params": echo})
        _, _, (message,) = await client.post(again.replace('"a"', '"\\u0061"').encode())
        assert message["error"]["code"] == mcp.INVALID_REQUEST
        for other in ("1" if taken == 1 else "A", 2):
            async with client.request("tools/call", echo, id_=other) as served:
                assert text(await served.message()) == "x"
        stranger = await LegacyClient(client).initialize()
        async with stranger.request("tools/call", echo, id_=taken) as served:
            assert text(await served.message()) == "x"
        opened.set()
        assert text(await stream.message()) == "waited"
    async with client.request("tools/call", echo, id_=taken) as served:
        assert text(await served.message()) == "x", "the id is free again"
    assert [body["params"]["name"] for body in server.of("tools/call")] == ["wait", *["echo"] * 4]


async def test_the_id_of_a_call_has_a_limit(client: LegacyClient, server: FakeModern) -> None:
    server.tools["echo"] = lambda call: call.text("x")
    async with client.request("tools/call", {"name": "echo", "arguments": {}}, id_="i" * 1_000) as stream:
        assert stream.response.status == 200
        assert (await stream.message())["error"]["code"] == mcp.INVALID_REQUEST
    assert not server.of("tools/call")


async def test_an_annotated_argument_goes_into_its_header(client: LegacyClient, server: FakeModern) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "x-mcp-header": "City"}}}
    server.listed = [{"name": "weather", "inputSchema": schema}]
    server.tools["weather"] = lambda call: call.text(call.headers.get("Mcp-Param-City"))
    async with client.call("weather", {"city": "Zürich"}) as stream:
        assert text(await stream.message()) == "=?base64?WsO8cmljaA==?="
    assert [body["method"] for body in server.requests].count(mcp.TOOLS_LIST) == 1
    assert server.headers[-1][mcp.NAME_HEADER] == "weather"


async def test_a_tool_whose_schema_changed_is_listed_again(client: LegacyClient, server: FakeModern) -> None:
    def weather(call: Call) -> Json:
        sent = call.headers.get("Mcp-Param-City")
        return call.text(sent) if sent else call.error(mcp.HEADER_MISMATCH, "Header mismatch")

    server.tools["weather"] = weather
    _ = await client.ask("tools/list")
    schema = {"type": "object", "properties": {"city": {"type": "string", "x-mcp-header": "City"}}}
    server.listed = [{"name": "weather", "inputSchema": schema}]
    async with client.call("weather", {"city": "Bern"}) as stream:
        assert text(await stream.message()) == "Bern"


async def test_modern_methods_are_unknown_to_a_legacy_client(client: LegacyClient, server: FakeModern) -> None:
    for method in ("tasks/get", "server/discover", "subscriptions/listen"):
        assert (await client.ask(method))["error"]["code"] == -32601
    assert (await client.ask("ping"))["result"] == {}


async def test_a_request_of_a_modern_server_reaches_nobody(begin: Begin, server: FakeModern) -> None:
    """SEP-2260: modern servers send none, and legacy clients hear only of what belongs to their calls."""
    stand = await begin()
    client = await LegacyClient(stand).initialize()
    odd = {"jsonrpc": "2.0", "id": "odd", **FORM}

    async def ask_oddly(call: Call) -> Json:
        await call.send(odd)
        return call.text("done")

    server.tools["odd"] = ask_oddly
    async with client.listen() as standalone:
        await server.listeners[0](odd)
        await server.listeners[0]({"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED})
        assert (await standalone.message())["method"] == mcp.TOOLS_CHANGED
        async with client.call("odd") as stream:
            assert text(await stream.message()) == "done"
    assert stand.nested(mcp.ELICIT, "refused_unsolicited") == 2


async def test_a_challenge_that_clients_could_not_receive_is_left_out(begin: Begin, server: FakeModern) -> None:
    stand = await begin()
    client = await LegacyClient(stand, headers={"Authorization": "Bearer good"}).initialize()
    server.credential, server.challenge = "Bearer other", 'Bearer scope="' + "x" * 8190 + '"'
    async with client.call("ask") as stream:
        assert (stream.response.status, "WWW-Authenticate" in stream.response.headers) == (401, False)


@pytest.mark.parametrize("made_up", ["made-up", "mrtr1.00000000.AAAA"])
async def test_auto_knows_no_session_that_no_gateway_sealed(begin: Begin, server: FakeModern, made_up: str) -> None:
    stand = await begin(route={"era": "auto"})
    client = await LegacyClient(stand).initialize()
    sealed, client.headers[mcp.SESSION_ID] = client.headers[mcp.SESSION_ID], made_up
    async with client.call("echo") as stream:
        assert stream.response.status == 404
        message = await stream.message()
        assert (message["id"], message["error"]["data"]["reason"]) == (1, "no_session")
    async with client.listen() as stream:
        assert stream.response.status == 404
    async with stand.http.delete(stand.url, headers={mcp.SESSION_ID: made_up}) as response:
        assert response.status == 404
    client.headers[mcp.SESSION_ID] = sealed
    assert (await client.ask("ping"))["result"] == {}


async def test_auto_finds_out_that_a_session_cannot_be_the_servers(begin: Begin, server: FakeModern) -> None:
    """A client whose session id outlived the keys may be the first one that a new process meets."""
    stand = await begin(route={"era": "auto"})
    client = LegacyClient(stand)
    client.headers[mcp.SESSION_ID] = "mrtr1.00000000.AAAA"
    async with client.listen() as stream:
        assert stream.response.status == 405, "the server may have sessions, and no standalone stream"
    async with client.call("echo") as stream:
        assert stream.response.status == 404
    async with client.listen() as stream:
        assert stream.response.status == 404
    del client.headers[mcp.SESSION_ID]
    greeting = await LegacyClient(stand).ask(mcp.INITIALIZE, client.begin_message()["params"])
    assert greeting["result"]["serverInfo"]["name"] == "fake-modern"


async def test_a_client_comes_back_for_its_question_and_its_result(client: LegacyClient, server: FakeModern) -> None:
    go = asyncio.Event()

    async def slow(call: Call) -> Json:
        if not call.answers:
            return call.ask(name=FORM)
        await go.wait()
        return call.text(call.answers)

    server.tools["slow"] = slow
    async with client.call("slow") as stream:
        primed = await stream.event()
        while not primed.data:
            primed = await stream.event()
        question = json.loads(primed.data)
        assert primed.id is not None
        place = primed.id
    async with client.listen(place) as stream:
        assert not (await stream.event()).data, "the question is not asked twice"
        _ = await client.answer(question, ACCEPT)
        go.set()
        assert text(await stream.message()) == {"name": ACCEPT}
        place = str(stream.last)
    async with client.listen(place) as stream:
        assert stream.response.status == 405, "everything has arrived"
    assert len(server.of("tools/call")) == 2


async def test_an_expired_session_does_not_exist(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin(state={"keys": [KEY], "session_ttl_seconds": 60})).initialize()
    tokens = sealed()
    session = tokens.sessions.open(client.headers[mcp.SESSION_ID])
    client.headers[mcp.SESSION_ID] = tokens.sessions.seal(replace(session, issued=session.issued - 61))
    async with client.request("ping") as stream:
        assert stream.response.status == 404
    client.headers[mcp.SESSION_ID] = tokens.sessions.seal(replace(session, issued=session.issued - 50))
    assert (await client.ask("ping"))["result"] == {}


@pytest.mark.parametrize("forged", [7, "7", "mrtr1.00000000.AAAA", "x" * 5_000, "\ud83d"])
async def test_a_forged_answer_reaches_no_call(client: LegacyClient, server: FakeModern, forged: object) -> None:
    async with client.call("ask") as stream:
        question = await stream.message()
        async with client.open({"id": forged, "result": {"action": "decline"}}) as refused:
            assert refused.response.status == 200, "the session goes on"
            assert (await refused.message())["error"]["code"] == mcp.INVALID_REQUEST
        assert await client.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_an_answer_from_another_session_reaches_no_call(begin: Begin, server: FakeModern) -> None:
    stand = await begin()
    mine, other = await LegacyClient(stand).initialize(), await LegacyClient(stand).initialize()
    async with mine.call("ask") as stream:
        question = await stream.message()
        place = str(stream.last)
        async with other.open({"id": question["id"], "result": {"action": "decline"}}) as refused:
            assert (await refused.message())["error"]["code"] == mcp.INVALID_REQUEST
        async with other.listen(place) as stolen:
            assert stolen.response.status == 400
        assert await mine.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_a_kept_result_goes_only_to_a_credential_that_the_server_accepts(
    begin: Begin, server: FakeModern
) -> None:
    client = await LegacyClient(await begin(), headers={"Authorization": jwt(iss="i", sub="ada")}).initialize()
    async with client.call("ask") as stream:
        _ = await stream.message()
        place = str(stream.last)
    server.credential = "another"
    client.headers["Authorization"] = jwt(iss="i", sub="ada", iat=1)
    async with client.listen(place) as stream:
        assert stream.response.status == 401
    async with client.open({"method": mcp.CANCELLED, "params": {"requestId": 1}}) as stream:
        assert stream.response.status == 202


@pytest.mark.parametrize(
    "body",
    [
        *("[]", '[{"jsonrpc":"2.0","id":1,"method":"ping"}]', "7", "{"),
        *('{"jsonrpc":"2.0"}', '{"jsonrpc":"2.0","id":null,"method":"ping"}', "[" * 1_000),
    ],
)
async def test_a_body_that_is_no_message_is_refused(client: LegacyClient, body: str) -> None:
    status, _, (refused,) = await client.post(body.encode())
    assert status == 200, "the session goes on"
    assert refused["error"]["code"] in (-32700, -32600)
    client.headers[mcp.SESSION_ID] = "made-up"
    assert (await client.post(body.encode()))[0] in (400, 404)
    del client.headers[mcp.SESSION_ID]
    assert (await client.post(body.encode()))[0] in (400, 404)


async def test_params_of_modern_rounds_are_not_a_clients_to_give(client: LegacyClient, server: FakeModern) -> None:
    server.tools["echo"] = lambda call: call.text([call.answers, call.state])
    params = {"name": "echo", "arguments": {}, "inputResponses": {"name": ACCEPT}, "requestState": "mine"}
    async with client.request("tools/call", params) as stream:
        assert text(await stream.message()) == [{}, None]


async def test_ending_a_session_ends_its_calls(client: LegacyClient, server: FakeModern) -> None:
    async with client.call("ask") as stream:
        _ = await stream.message()
        assert await client.end() == 200
        assert await stream.event() is None
    async with client.request("ping") as stream:
        assert stream.response.status == 404


async def test_a_question_that_was_answered_is_not_asked_again(client: LegacyClient, server: FakeModern) -> None:
    answered, go = asyncio.Event(), asyncio.Event()

    async def slow(call: Call) -> Json:
        if not call.answers:
            await call.notify(mcp.LOG, {"level": "info", "data": 1})
            return call.ask(name=FORM)
        answered.set()
        await go.wait()
        return call.text(call.answers)

    server.tools["slow"] = slow
    async with client.call("slow") as stream:
        before = await stream.place()
        assert (await stream.message())["method"] == mcp.LOG
        assert await client.answer(await stream.message(), ACCEPT) == 202
        await answered.wait()
    async with client.listen(before) as stream:
        _ = await stream.place()
        go.set()
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_an_answer_of_an_earlier_round_counts_for_no_later_one(client: LegacyClient, server: FakeModern) -> None:
    def twice(call: Call) -> Json:
        if call.state == "second":
            return call.text(call.answers)
        return call.ask("second" if call.answers else "first", name=FORM)

    server.tools["twice"] = twice
    async with client.call("twice") as stream:
        first = await stream.message()
        assert await client.answer(first, {"action": "decline"}) == 202
        second = await stream.message()
        assert await client.answer(first, {"action": "decline"}) == 202
        assert await client.answer(second, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    assert len(server.of("tools/call")) == 3


async def test_each_token_that_is_not_accepted_counts_once(begin: Begin) -> None:
    stand = await begin()

    def rejected(reason: str) -> float:
        return stand.metric("mcp_gateway_state_rejected_total", reason=reason)

    client = await LegacyClient(stand, headers={"Authorization": "Bearer ada"}).initialize()
    assert await client.answer({"id": "mrtr1.00000000." + "A" * 80}, {}) == 200
    assert rejected("unknown_key") == 1
    async with client.listen("not a place") as stream:
        assert stream.response.status == 400
    assert rejected("malformed") == 1
    client.headers["Authorization"] = "Bearer eve"
    async with client.request("ping") as stream:
        assert stream.response.status == 404
    assert rejected("other_principal") == 1
    client.headers["Authorization"] = "Bearer ada"
    assert await client.end() == 200
    async with client.request("ping") as stream:
        assert stream.response.status == 404
    assert rejected("ended") == 1


async def test_a_caller_is_shown_with_its_mirrored_calls(begin: Begin) -> None:
    stand = await begin(hold={"max_calls": 1})
    client = await LegacyClient(stand).initialize()
    async with client.call("ask") as stream:
        question = await stream.message()
        async with client.call("ask") as other:
            assert (await other.message())["error"]["data"]["reason"] == "busy"
        status = await told(stand)
        assert status.errors[0].fix.startswith("See Callers")
        assert [(each.held, each.most_held.used) for each in status.callers] == [(1, 1)]
        assert await client.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    assert (await told(stand)).callers == ()

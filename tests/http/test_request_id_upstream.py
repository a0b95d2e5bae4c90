"""The id of a client's request, upstream: in each message that the request causes, and in no session's key."""

from typing import Any

import pytest

from gateway.protocol import mcp
from tests.support.fake_modern import FORM, Call, FakeModern
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream, text
from tests.support.known_calls import arguments, known, reply, request
from tests.support.legacy_client import LegacyClient
from tests.support.raw_connection import raw_connection
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Stand

HEADER = "X-Request-Id"
SENT = {"request_id_header": HEADER}


async def named(begin: Start, server: FakeUpstream | FakeSse | FakeModern, **route: Any) -> Stand:
    """A gateway before a server that gets the ids."""
    return await begin(route={"upstream": {"url": server.url, **SENT}, **route})


def ids(upstream: FakeUpstream) -> list[tuple[str, str | None]]:
    """Each message with the id that came with it."""
    return [(turn.word, turn.headers.get(HEADER)) for turn in upstream.seen if turn.http_method == "POST"]


async def test_each_message_of_a_call_has_the_id_of_its_round(upstream: FakeUpstream, begin: Start) -> None:
    Gate(upstream).go.set()
    client = (await named(begin, upstream, era="bridge")).client()
    asked = await client.call(headers={HEADER: "first"})
    _ = await client.answer(asked, headers={HEADER: "second"})
    sent = ids(upstream)
    assert {word for word, id_ in sent if id_ == "first"} >= {mcp.INITIALIZE, mcp.INITIALIZED, mcp.TOOLS_CALL}
    assert [word for word, id_ in sent if id_ != "first"] == ["answer"]
    assert sent[-1] == ("answer", "second")


async def test_the_session_of_a_call_that_is_given_up_hears_so_with_its_id(
    upstream: FakeUpstream, begin: Start
) -> None:
    Gate(upstream)
    stand = await named(begin, upstream, era="bridge", hold={"ttl_seconds": 0.1})
    _ = await stand.client().call(headers={HEADER: "first"})
    await upstream.saw(mcp.CANCELLED)
    assert ids(upstream)[-1] == (mcp.CANCELLED, "first")


async def test_requests_with_different_ids_share_a_session(upstream: FakeUpstream, begin: Start) -> None:
    stand = await named(begin, upstream)
    upstream.tool(lambda turn: turn.result(text("x")))
    for number in range(3):
        _ = await stand.client().call(headers={HEADER: f"r{number}"})
    assert [id_ for word, id_ in ids(upstream) if word == mcp.TOOLS_CALL] == ["r0", "r1", "r2"]
    assert stand.metric("mcp_gateway_sessions_opened_total") == 1


async def test_a_call_that_no_coroutine_serves_has_its_own_id(
    monkeypatch: pytest.MonkeyPatch, upstream: FakeUpstream, begin: Start
) -> None:
    monkeypatch.setitem(arguments, "arguments", {"a": 1})
    stand = await named(begin, upstream)
    upstream.tool(lambda turn: turn.result(text("x")))
    sent = request(stand)
    async with raw_connection(stand) as raw:
        await known(stand, raw, sent)
        await raw.send(sent)
        head, _ = await reply(raw)
    (own,) = [line.partition(b": ")[2].decode() for line in head.split(b"\r\n") if line.startswith(HEADER.encode())]
    assert ids(upstream)[-1] == (mcp.TOOLS_CALL, own)
    assert len({id_ for _, id_ in ids(upstream)}) >= 4


async def test_a_bridged_call_has_no_id_unless_that_is_configured(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(lambda turn: turn.result(text("x")))
    _ = await (await begin(route={"era": "bridge"})).client().call(headers={HEADER: "first"})
    assert {id_ for _, id_ in ids(upstream)} == {None}


async def test_a_server_of_http_and_sse_gets_it_with_each_message(old: FakeSse, begin: Start) -> None:
    stand = await named(begin, old)
    _ = await stand.client().post(mcp.TOOLS_LIST, headers={HEADER: "first"})
    assert {headers.get(HEADER) for headers, _ in old.posts} == {"first"}


@pytest.mark.parametrize("given", ["mine", "not one word", None])
async def test_a_passed_through_request_has_the_id_that_its_reply_names(
    upstream: FakeUpstream, begin: Start, given: str | None
) -> None:
    client = LegacyClient(await named(begin, upstream), headers={HEADER: given} if given else None)
    _ = await client.initialize()
    for _ in range(3):  # a head that came before is remembered
        _, headers, _ = await client.post({"id": 1, "method": mcp.TOOLS_LIST})
        assert ids(upstream)[-1] == (mcp.TOOLS_LIST, headers[HEADER])
        assert (headers[HEADER] == given) is (given == "mine")


async def test_a_relayed_message_has_the_id_of_the_request_that_brought_it(old: FakeSse, begin: Start) -> None:
    client = LegacyClient(await named(begin, old), headers={HEADER: "first"})
    _ = await client.initialize()
    client.headers[HEADER] = "second"
    _ = await client.ask(mcp.TOOLS_LIST)
    found = {message["method"]: headers.get(HEADER) for headers, message in old.posts}
    assert found == {mcp.INITIALIZE: "first", mcp.INITIALIZED: "first", mcp.TOOLS_LIST: "second"}


async def test_a_round_of_a_mirrored_call_has_the_id_of_the_request_that_causes_it(begin: Start) -> None:
    def ask(call: Call) -> Any:
        return call.text(call.answers) if call.answers else call.ask(name=FORM)

    async with FakeModern() as server:
        server.tools["ask"] = ask
        client = LegacyClient(await named(begin, server, era="mirror"))
        _ = await client.initialize()
        client.headers[HEADER] = "the-call"
        async with client.request(mcp.TOOLS_CALL, {"name": "ask", "arguments": {}}) as stream:
            question = await stream.message()
            client.headers[HEADER] = "the-answer"
            assert await client.answer(question, ACCEPT) == 202
            _ = await stream.message()
        calls = [headers.get(HEADER) for headers in server.headers if headers.get(mcp.METHOD_HEADER) == mcp.TOOLS_CALL]
    assert calls == ["the-call", "the-answer"]

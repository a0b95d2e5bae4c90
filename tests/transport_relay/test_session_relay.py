"""One client session and its upstream session, message by message, between plain clients and fake servers."""

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec import Raw

from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc, mcp
from gateway.runtime.tasks import Tasks
from gateway.transport_relay.session_relay import SessionRelay
from gateway.upstream.http import reply_reader
from tests.support.fake_sse import FakeSse, Message
from tests.support.fake_sse import Stream as Upstream
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.legacy_client import ANSWER, LegacyClient, SseClient
from tests.support.stand import Start
from tests.support.status import fetch, told
from tests.support.turns import gives_way
from tests.support.workbench import Stand, eventually, jwt, later

DONE = {"content": [{"type": "text", "text": "done"}]}


async def before_sse(begin: Start, server: FakeSse, **sections: Any) -> Stand:
    upstream = {"url": server.url, "transport": "sse"}
    return await begin(route={"upstream": upstream, **sections.pop("route", {})}, **sections)


async def before_http(begin: Start, upstream: FakeUpstream, **sections: Any) -> Stand:
    return await begin(route={"upstream": {"url": upstream.url, "transport": "streamable-http"}}, **sections)


def client_sessions(stand: Stand) -> int:
    return int(stand.metric("mcp_gateway_client_sessions"))


async def silent(_fake: FakeSse, _stream: Upstream, _message: Message) -> None:
    """Accept a call and say nothing."""


# -- messages ---------------------------------------------------------------------------------------------------------


async def test_the_messages_of_both_sides_pass_unchanged(begin: Start, sse_server: FakeSse) -> None:
    stand = await before_sse(begin, sse_server)
    client = await LegacyClient(stand).initialize()
    odd = b' {"jsonrpc":"2.0", "id" : "\\u0061","method":"x/y","params":{"n":1e2, "s":"\xc3\xa9"}}'
    status, _, (answer,) = await client.post(odd)
    assert (status, answer["id"], answer["result"]) == (200, "a", DONE)
    assert sse_server.posts[-1][1] == json.loads(odd)
    assert [each["method"] for _, each in sse_server.posts[:2]] == [mcp.INITIALIZE, mcp.INITIALIZED]
    assert sse_server.posts[0][1]["params"] == client.begin_message()["params"]
    assert await client.end() == 200


async def test_a_caller_is_shown_with_its_relayed_sessions(begin: Start, sse_server: FakeSse) -> None:
    stand = await before_sse(begin, sse_server)
    clients = [await LegacyClient(stand).initialize() for _ in range(2)]
    assert [each.sessions for each in (await told(stand)).callers] == [2]
    assert '\nmcp_gateway_sessions_of_one_caller{route="/mcp"} 2.0\n' in (await fetch(stand, "/metrics"))[1]
    assert [await client.end() for client in clients] == [200, 200]
    assert (await told(stand)).callers == ()


async def test_progress_reaches_the_call_whose_token_it_has(begin: Start, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    stand = await before_sse(begin, sse_server)
    client = await LegacyClient(stand).initialize()
    calls = []
    for token in ("1", 1):
        posting = later(client.open(client.call_message(progressToken=token)))
        await sse_server.heard(mcp.TOOLS_CALL, len(calls) + 1)
        calls.append(posting)
    for token in ("1", 1):
        sse_server.streams[0].say(method=mcp.PROGRESS, params={"progressToken": token, "progress": 1})
    for number, token in ((1, "1"), (2, 1)):
        sse_server.streams[0].say(id=number, result=DONE)
        progress, answer = await (await calls[number - 1]).rest()
        assert (progress["params"]["progressToken"], answer["id"]) == (token, number)
    assert await client.end() == 200


async def test_what_belongs_to_no_call_goes_to_the_standalone_stream(begin: Start, sse_server: FakeSse) -> None:
    stand = await before_sse(begin, sse_server)
    client = await LegacyClient(stand).initialize()
    sse_server.streams[0].say(method=mcp.TOOLS_CHANGED)
    stream = await client.listen()
    assert (await stream.message())["method"] == mcp.TOOLS_CHANGED
    sse_server.streams[0].say(id=5, method="roots/list")
    assert (await stream.message())["method"] == "roots/list"
    assert await client.answer({"id": 5}, {"roots": []}) == 202
    (answer,) = await sse_server.heard("answer")
    assert answer["result"] == {"roots": []}
    assert await client.end() == 200
    assert await stream.rest() == []


async def test_a_response_to_no_open_request_is_dropped(begin: Start, sse_server: FakeSse) -> None:
    async def answers_twice(_: FakeSse, stream: Upstream, message: Message) -> None:
        for _ in range(2):
            stream.say(id=message["id"], result=DONE)
        stream.say(id="never asked", result=DONE)
        stream.raw(b"data: not json\n\n")

    sse_server.tool = answers_twice
    stand = await before_sse(begin, sse_server)
    client = await LegacyClient(stand).initialize()
    stream = await client.listen()
    for number in (1, 2):
        assert (await client.post(client.call_message()))[2] == [{"jsonrpc": "2.0", "id": number, "result": DONE}]
    await eventually(lambda: stand.metric("mcp_gateway_upstream_errors_total", kind="malformed") == 2)
    assert await client.end() == 200
    assert await stream.rest() == []


async def test_what_waits_for_a_server_that_does_not_read_is_bounded(begin: Start, sse_server: FakeSse) -> None:
    """One call is on its way and one waits. There is no room for three more, whichever came first."""
    reads = asyncio.Event()

    async def read_later(message: Message) -> None:
        if message.get("method") == mcp.TOOLS_CALL:
            _ = await reads.wait()

    sse_server.post = read_later
    stand = await before_sse(begin, sse_server, limits={"body_bytes": 1000})
    client = await LegacyClient(stand).initialize()
    calls = [client.call_message(arguments={"pad": "x" * 600}) for _ in range(5)]
    posts = [later(client.post(calls[0]))]
    await eventually(lambda: any(each.get("method") == mcp.TOOLS_CALL for _, each in sse_server.posts), "one is sent")
    posts += [later(client.post(call)) for call in calls[1:]]
    await eventually(lambda: sum(post.done() for post in posts) == 3, "three are refused")
    refused = [post.result()[2][0]["error"] for post in posts if post.done()]
    assert [error["data"]["reason"] for error in refused] == ["busy"] * 3
    assert all("limits.body_bytes" in error["message"] for error in refused)
    reads.set()
    answers = [(await post)[2] for post in posts]
    assert [answer for (answer,) in answers if "result" in answer] == [
        {"jsonrpc": "2.0", "id": each["id"], "result": DONE} for each in await sse_server.heard(mcp.TOOLS_CALL, 2)
    ]
    assert len(await sse_server.heard(mcp.TOOLS_CALL)) == 2
    assert await client.end() == 200


# -- a server of streamable HTTP --------------------------------------------------------------------------------------


async def test_a_client_of_http_sse_plays_with_a_server_of_streamable_http(
    begin: Start, upstream: FakeUpstream
) -> None:
    @upstream.tool
    async def tool(turn: Turn) -> None:
        answers = [await turn.elicit("post"), await turn.elicit("get", side=True)]
        await turn.result(text(json.dumps(answers)))

    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    assert (await client.post(client.call_message()))[0] == 202
    for _ in range(2):
        asked = await client.stream.message()
        assert await client.answer(asked) == 202
    answer = await client.stream.message()
    assert answer == {"jsonrpc": "2.0", "id": 1, "result": text(json.dumps([ANSWER, ANSWER]))}
    client.stream.close()
    await upstream.saw("DELETE")
    assert upstream.words.count(mcp.INITIALIZE) == 1
    await eventually(lambda: client_sessions(stand) == 0)


async def test_what_is_sent_without_a_client_has_its_newest_credential(begin: Start, upstream: FakeUpstream) -> None:
    stand = await before_http(begin, upstream)
    client = await SseClient(stand, authorization=jwt(iss="i", sub="ann", exp=1)).initialize()
    await upstream.saw(mcp.INITIALIZED)
    client.headers["Authorization"] = newest = jwt(iss="i", sub="ann", exp=2)
    assert (await client.post({"id": 9, "method": mcp.TOOLS_LIST}))[0] == 202
    assert (await client.stream.message())["id"] == 9
    client.stream.close()
    (delete,) = await upstream.saw("DELETE")
    assert delete.headers["Authorization"] == newest
    await eventually(lambda: client_sessions(stand) == 0)


async def test_calls_of_one_session_run_at_once(begin: Start, upstream: FakeUpstream) -> None:
    running: list[Turn] = []

    @upstream.tool
    async def tool(turn: Turn) -> None:
        running.append(turn)
        await eventually(lambda: len(running) == 2, "both run")
        await turn.result(text(str(turn.id)))

    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    for _ in range(2):
        assert (await client.post(client.call_message()))[0] == 202
    found = {answer["id"]: answer for answer in [await client.stream.message() for _ in range(2)]}
    assert {id_: answer["result"] for id_, answer in found.items()} == {1: text("1"), 2: text("2")}
    assert len({turn.session for turn in running}) == 1
    client.stream.close()
    await eventually(lambda: client_sessions(stand) == 0)


async def test_the_reply_of_an_answered_call_may_come_to_its_end(
    begin: Start, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    @upstream.tool
    async def tool(turn: Turn) -> None:
        await turn.say({"id": turn.id, "result": text("done")})
        await may_end.wait()

    may_end = asyncio.Event()
    monkeypatch.setattr(reply_reader, "DRAIN_SECONDS", 60)
    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    for _ in range(2):
        assert (await client.post(client.call_message()))[0] == 202
        assert (await client.stream.message())["result"] == text("done")
    first, _ = upstream.of(mcp.TOOLS_CALL)
    assert not first.cut.is_set()
    may_end.set()
    client.stream.close()
    await eventually(lambda: client_sessions(stand) == 0)


async def test_an_error_status_of_one_call_ends_that_call_only(begin: Start, upstream: FakeUpstream) -> None:
    @upstream.tool
    async def tool(turn: Turn) -> None:
        turn.reply(500, b"oops")

    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    assert (await client.post(client.call_message()))[0] == 202
    failed = await client.stream.message()
    assert (failed["id"], failed["error"]["data"]["reason"]) == (1, "call_lost")
    assert (await client.post({"id": 9, "method": mcp.TOOLS_LIST}))[0] == 202
    assert (await client.stream.message())["id"] == 9
    client.stream.close()
    await eventually(lambda: client_sessions(stand) == 0)


async def test_a_session_that_the_server_forgot_ends(begin: Start, upstream: FakeUpstream) -> None:
    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    await upstream.saw(mcp.INITIALIZED)
    upstream.forget()
    assert (await client.post({"id": 9, "method": mcp.TOOLS_LIST}))[0] == 202
    messages = await client.stream.rest()
    assert [(each["id"], each["error"]["data"]["reason"]) for each in messages] == [(9, "session_lost")]
    assert client_sessions(stand) == 0
    assert (await client.post({"id": 10, "method": mcp.TOOLS_LIST}))[0] == 404


async def test_a_session_whose_answer_is_lost_is_not_deleted_upstream_while_its_call_may_run(
    begin: Start, upstream: FakeUpstream
) -> None:
    @upstream.tool
    async def tool(turn: Turn) -> None:
        await turn.elicit()

    upstream.on("answer", lambda turn: turn.reply(500, b"oops"))
    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    assert (await client.post(client.call_message()))[0] == 202
    assert await client.answer(await client.stream.message()) == 202
    (failed,) = await client.stream.rest()
    assert failed["id"] == 1
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == 1
    await eventually(lambda: "close session" not in stand.tasks())
    assert "DELETE" not in upstream.words


async def test_a_server_that_takes_no_cancellation_does_not_keep_a_session_for_long(
    begin: Start, upstream: FakeUpstream
) -> None:
    upstream.tool(Turn.for_ever)
    upstream.on(mcp.CANCELLED, Turn.for_ever)
    stand = await before_http(begin, upstream, timeouts={"cancel_seconds": 0.05})
    client = await SseClient(stand).initialize()
    for _ in range(3):
        assert (await client.post(client.call_message()))[0] == 202
    await upstream.saw(mcp.TOOLS_CALL, 3)
    client.stream.close()
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: client_sessions(stand) == 0)
    await eventually(lambda: "close session" not in stand.tasks())
    assert "DELETE" not in upstream.words, "the calls may run"


# -- cancellation -----------------------------------------------------------------------------------------------------


async def test_a_cancelled_call_that_the_server_never_answers_ends_with_one_error(
    begin: Start, sse_server: FakeSse
) -> None:
    sse_server.tool = silent
    stand = await before_sse(begin, sse_server, timeouts={"cancel_seconds": 0.05})
    client = await LegacyClient(stand).initialize()
    call = later(client.post(client.call_message()))
    await sse_server.heard(mcp.TOOLS_CALL)
    assert (await client.post({"method": mcp.CANCELLED, "params": {"requestId": 1}}))[0] == 202
    assert (await sse_server.heard(mcp.CANCELLED))[0]["params"] == {"requestId": 1}
    _, _, messages = await call
    assert [(each["id"], each["error"]["code"]) for each in messages] == [(1, 0)]
    sse_server.streams[0].say(id=1, result=DONE)  # too late
    stream = await client.listen()
    sse_server.streams[0].say(method=mcp.TOOLS_CHANGED)
    assert (await stream.message())["method"] == mcp.TOOLS_CHANGED
    assert await client.end() == 200


async def test_a_cancelled_call_that_is_never_answered_leaves_no_request_open(
    begin: Start, upstream: FakeUpstream
) -> None:
    @upstream.tool
    async def tool(turn: Turn) -> None:
        await turn.for_ever()

    stand = await before_http(begin, upstream, timeouts={"cancel_seconds": 0.05})
    client = await SseClient(stand).initialize()
    assert (await client.post(client.call_message()))[0] == 202
    await upstream.saw(mcp.TOOLS_CALL)
    assert (await client.post({"method": mcp.CANCELLED, "params": {"requestId": 1}}))[0] == 202
    assert (await client.stream.message())["error"]["message"] == "Request cancelled"
    await eventually(lambda: "relayed call" not in stand.tasks())
    client.stream.close()
    await eventually(lambda: client_sessions(stand) == 0)


async def test_a_cancelled_call_ends_with_the_servers_own_answer(begin: Start, upstream: FakeUpstream) -> None:
    cancelled = asyncio.Event()

    @upstream.tool
    async def tool(turn: Turn) -> None:
        await cancelled.wait()
        await turn.error(0, "Request cancelled by me")

    async def cancel(turn: Turn) -> None:
        turn.reply(202)
        cancelled.set()

    upstream.on(mcp.CANCELLED, cancel)
    stand = await before_http(begin, upstream)
    client = await SseClient(stand).initialize()
    assert (await client.post(client.call_message()))[0] == 202
    await upstream.saw(mcp.TOOLS_CALL)
    assert (await client.post({"method": mcp.CANCELLED, "params": {"requestId": 1}}))[0] == 202
    assert (await client.stream.message())["error"]["message"] == "Request cancelled by me"
    client.stream.close()
    await eventually(lambda: client_sessions(stand) == 0)


@pytest.mark.usefixtures("busy_clock")
async def test_many_messages_that_waited_let_others_run() -> None:
    tasks, channel = Tasks(Mock()), AsyncMock()
    channel.open.return_value = channel, Raw(b"{}")
    live = Mock(process=Mock(tasks=tasks))
    live.config.limits.body_bytes, live.config.timeouts.handshake_seconds = 1_000_000, 1
    live.upstream.stdio, live.upstream.pool.connect.return_value = None, channel
    relay = SessionRelay(live, Mock())
    greeting = jsonrpc.request(b"1", mcp.INITIALIZE, {})
    relay.receive(ClientMessage(greeting, jsonrpc.message(greeting)))
    await eventually(lambda: len(tasks) == 0, "the session is open")
    data = b'{"jsonrpc":"2.0","method":"x"}'
    for _ in range(100):
        relay.receive(ClientMessage(data, jsonrpc.message(data)))
    assert await gives_way(lambda: channel.send.await_count == 100)
    await eventually(lambda: channel.send.await_count == 100)
    await tasks.close()

"""Upstreams that break, hang, refuse or babble: each ends in the result or in one clear error, never in a hang."""

import asyncio
import gzip
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.exchange.commands import TTL
from gateway.protocol import mcp
from gateway.seal.keyring import Keyring
from gateway.seal.request_state import Envelope
from tests.parts.launch import free_port
from tests.support.black_hole import black_hole
from tests.support.fake_http import fake_wire
from tests.support.fake_upstream import FORM, FakeUpstream, Script, Turn, ask_action, event, gives_up, play, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import DECLINE, Client, Stand, eventually, jwt, later


def body(turn: Turn, result: object, **more: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": turn.id, "result": result, **more}, ensure_ascii=False).encode()


def raw(said: bytes, *, then_resets: bool = False) -> Script:
    async def script(turn: Turn) -> None:
        await turn.raw(said)
        if then_resets:
            await turn.reset()

    return script


def replied(status: int, said: bytes | None = None, headers: dict[str, str] | None = None) -> Script:
    return lambda turn: turn.reply(status, said, headers)


def as_json(pattern: bytes, result: object) -> Script:
    return lambda turn: turn.reply(body=pattern % body(turn, result))


END_OF_STREAM, RESET_MID_STREAM = raw(b": hello\n\n"), raw(b": hello\n\ndata: {", then_resets=True)
DAMAGED: dict[str, Script] = {
    "bad JSON": raw(b"data: {not json}\n\n"),
    "not an object": raw(b"data: 5\n\n"),
    "bad UTF-8": raw(b'data: {"jsonrpc":"2.0","id":1,"result":{"a":"\xff"}}\n\n'),
    "cut in the event": lambda turn: turn.raw(b"data: " + body(turn, text("x"))),
    "oversized": raw(b"data: " + b"x" * 70_000 + b"\n\n"),
    "oversized JSON": as_json(b"%b", text("x" * 70_000)),
    "endless array": replied(200, b"[" * 30_000),
    "batch": lambda turn: turn.raw(b"data: [%b]\n\n" % body(turn, text("x"))),
    "batch as JSON": as_json(b"[%b]", text("x")),
    "nothing": replied(202),
    "HTML": replied(200, b"<html>", {"Content-Type": "text/html"}),
    "a result that is no object": as_json(b"%b", [1]),
    "server error": replied(500, b"Traceback: secret"),
    "reset": Turn.reset,
    "reset in mid-stream": RESET_MID_STREAM,
    "end of stream": END_OF_STREAM,
    "redirect": replied(307, headers={"Location": "http://127.0.0.2:1/mcp"}),
}


@pytest.mark.parametrize("script", DAMAGED.values(), ids=DAMAGED)
async def test_a_call_whose_answer_is_damaged_ends_with_one_error_and_is_not_sent_again(
    upstream: FakeUpstream, begin: Start, script: Script
) -> None:
    stand = await begin(limits={"event_bytes": 65_536})
    client = stand.client()
    upstream.once("tools/call", script)
    reply = await client.call()
    assert reply.outcome == (200, -32603, "call_lost")
    assert "may have had effects" in reply.error["message"]
    assert "secret" not in reply.error["message"]
    assert len(upstream.of("tools/call")) == 1
    await eventually(lambda: not stand.busy_tasks())
    is_answered = script is DAMAGED["a result that is no object"]
    assert ("DELETE" in upstream.words) == is_answered, "else the call may still run in the session"
    assert stand.sessions("busy") + stand.sessions("idle") + stand.sessions("quarantined") == 0
    assert (await client.call()).text == "done", "the next call works"


async def test_foreign_and_duplicate_ids_are_ignored_and_counted(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        for id_ in ("foreign", 0, None, 1.5, [turn.id]):
            await turn.say({"id": id_, "result": text("wrong")})
        await turn.say({"id": turn.id, "result": text("right")})
        await turn.say({"id": turn.id, "result": text("late")})
        await turn.say({"id": turn.id, "result": text("late")}, side=True)
        await turn.say({"id": turn.id, "error": {"code": 1, "message": "later"}}, side=True)

    upstream.tool(tool)
    assert (await client.call()).text == "right"
    await eventually(lambda: stand.metric("mcp_gateway_upstream_errors_total", kind="unknown_id") >= 4)
    upstream.tool(lambda turn: turn.result(text("second")))
    assert (await client.call()).text == "second"


async def test_a_damaged_side_stream_harms_no_call(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(limits={"event_bytes": 65_536})
    client = stand.client()
    await client.call()
    for data in (b"data: {oops\n\n", b"data: " + b"x" * 70_000 + b"\n\n"):
        upstream.side("s1").put_nowait(data)
    await upstream.saw("GET", 2)

    async def tool(turn: Turn) -> None:
        answer = await turn.elicit("side", side=True)
        await turn.result(text(answer["action"]))

    upstream.tool(tool)
    assert (await client.answer(await client.call())).text == "accept"


@pytest.mark.parametrize("status", [405, 404, 400, 500])
async def test_a_server_without_a_side_stream_is_served(upstream: FakeUpstream, client: Client, status: int) -> None:
    upstream.on("GET", replied(status))
    upstream.tool(ask_action)
    assert (await client.answer(await client.call())).text == "accept"
    assert len(upstream.of("GET")) == 1


async def test_a_compressed_stream_or_answer_is_not_inflated(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    """48 KiB may become 50 MB. The gateway asks for plain bytes and reads what comes as such."""
    question = event({"jsonrpc": "2.0", "id": 1, "method": "elicitation/create", "params": FORM}, None)

    async def compressed(turn: Turn) -> None:
        turn.reply(200, gzip.compress(question), {"Content-Type": "text/event-stream", "Content-Encoding": "gzip"})

    upstream.once("GET", compressed)
    assert (await client.call()).text == "done"
    seen = await upstream.saw("GET", 2)  # so the first one was read to its end
    assert [each.headers["Accept-Encoding"] for each in seen] == ["identity"] * 2
    assert "answer" not in upstream.words
    assert stand.nested("elicitation/create", "refused_unsolicited") == 0

    async def bomb(turn: Turn) -> None:
        turn.reply(200, gzip.compress(body(turn, text("x" * 10_000_000))), {"Content-Encoding": "gzip"})

    upstream.once("tools/call", bomb)
    assert (await client.call()).outcome == (200, -32603, "call_lost")


async def test_a_session_in_which_a_request_of_the_gateway_was_not_answered_is_not_ended(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(timeouts={"handshake_seconds": 0.05})
    upstream.once("tools/list", lambda turn: turn.for_ever())
    reply = await stand.client().call()
    assert reply.outcome == (200, -32603, "call_lost")
    assert "tools/list in 0.05 s (timeouts.handshake_seconds)" in reply.error["message"]
    assert (await stand.client().call()).text == "done"
    await stand.gateway.close()
    assert [seen.session for seen in upstream.of("DELETE")] == ["s2"]


# -- the handshake ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["initialize", mcp.INITIALIZED])
async def test_a_handshake_that_never_ends_is_given_up(upstream: FakeUpstream, begin: Start, word: str) -> None:
    stand = await begin(timeouts={"handshake_seconds": 0.5})  # enough for the second call on a busy machine
    upstream.once(word, lambda turn: turn.for_ever())
    reply = await stand.client().call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "timeouts.handshake_seconds" in reply.error["message"]
    assert "tools/call" not in upstream.words
    assert (await stand.client().call()).text == "done"


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (200, b'{"jsonrpc":"2.0","id":"init","result":{"protocolVersion":"1999-01-01"}}'),
        (200, b'{"jsonrpc":"2.0","id":"init","result":[]}'),
        (200, b'{"jsonrpc":"2.0","id":"init","error":{"code":-32602,"message":"no"}}'),
        (200, b"<html>"),
        (200, b""),
        (200, b"[" * 30_000),
        (404, b"nothing here"),
        (500, b"oops"),
        (400, b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"bad"}}'),
        (302, b""),
    ],
)
async def test_an_invalid_handshake_is_one_clear_error(
    upstream: FakeUpstream, client: Client, status: int, sent: bytes
) -> None:
    upstream.on("initialize", lambda turn: turn.reply(status, sent.replace(b'"init"', json.dumps(turn.id).encode())))
    reply = await client.call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert upstream.url in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        (mcp.TOOLS_CALL, {"name": "run", "arguments": {}}),  # its tool is looked up before
        (mcp.TOOLS_LIST, {}),
        (mcp.DISCOVER, {}),
        (mcp.LISTEN, {"notifications": {"toolsListChanged": True}}),
    ],
)
@pytest.mark.parametrize("refuses", [False, True])
async def test_each_failure_is_counted_once_wherever_it_is_met(
    upstream: FakeUpstream, begin: Start, method: str, params: dict[str, Any], *, refuses: bool
) -> None:
    """A refused handshake goes up to whoever asks whether the upstream is modern after all, counted or not."""
    stand = await begin()
    if refuses:
        upstream.on("initialize", replied(404, b"nothing here"))
    else:
        await upstream.close()
    reply = await stand.client().post(method, params)
    assert reply.outcome[2] == "upstream_unreachable"
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="upstream_unreachable") == 1


async def test_an_upstream_that_swallows_connections_harms_no_other_route(
    upstream: FakeUpstream, begin: Start
) -> None:
    address = f"127.0.0.1:{free_port()}"
    routes = [
        {"path": "/mcp", "upstream": {"url": upstream.url}},
        {"path": "/gone", "upstream": {"url": f"http://{address}/mcp"}},
    ]
    with black_hole(address):
        stand = await begin(routes=routes, timeouts={"connect_seconds": 0.5})
        gone = Client(stand.http, stand.url.replace("/mcp", "/gone"))
        waiting = later(gone.call())
        await eventually(lambda: stand.gateway.downstream.in_flight == 1)
        assert (await stand.client().call()).text == "done"
        assert not waiting.done()
        async with stand.http.get(f"http://{stand.gateway.admin}/readyz") as response:
            assert response.status == 200
        reply = await waiting
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "within timeouts.connect_seconds" in reply.error["message"]


# -- credentials ------------------------------------------------------------------------------------------------------


def challenge(status: int, only: str | None = None, plain: Script | None = None) -> Script:
    """Refuses every credential but one."""

    async def script(turn: Turn) -> None:
        if only is not None and turn.seen.headers.get("Authorization") == only:
            await play(plain or turn.upstream.plain, turn)
        else:
            turn.reply(status, b"", {"WWW-Authenticate": 'Bearer realm="mcp"'})

    return script


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("word", ["initialize", mcp.INITIALIZED, "tools/list", "tools/call"])
async def test_refused_credentials_reach_the_client_with_their_challenge(
    upstream: FakeUpstream, stand: Stand, status: int, word: str
) -> None:
    upstream.on(word, challenge(status))
    reply = await stand.client("Bearer bad-credential").call()
    assert reply.outcome == (status, -32603, "upstream_refused")
    assert reply.headers["WWW-Authenticate"] == 'Bearer realm="mcp"'
    assert upstream.of(word)[0].headers["Authorization"] == "Bearer bad-credential"


async def test_a_refused_answer_leaves_the_call_parked_and_the_right_credential_completes_it(
    upstream: FakeUpstream, stand: Stand
) -> None:
    claims = {"iss": "i", "sub": "ada", "client_id": "c"}
    old, stale, fresh = (jwt(**claims, jti=name) for name in ("old", "stale", "fresh"))
    upstream.tool(ask_action)
    upstream.on("answer", challenge(401, only=fresh))
    asked = await stand.client(old).call()
    for _ in range(2):
        refused = await stand.client(stale).answer(asked)
        assert refused.outcome == (401, -32603, "upstream_refused")
        assert refused.headers["WWW-Authenticate"] == 'Bearer realm="mcp"'
        assert stand.held == 1
    assert (await stand.client(fresh).answer(asked)).text == "accept"
    assert [seen.headers["Authorization"] for seen in upstream.of("answer")] == [stale, stale, fresh]
    assert len(upstream.of("tools/call")) == 1


# -- redirects --------------------------------------------------------------------------------------------------------


async def test_a_redirect_within_the_origin_is_followed_and_remembered(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(url=upstream.url)

    upstream.once("initialize", replied(307, headers={"Location": "/mcp/"}))
    assert (await stand.client("Bearer x").call()).text == "done"
    assert (await stand.client("Bearer y").call()).text == "done"
    assert [seen.path for seen in upstream.of("initialize")] == ["/mcp", "/mcp/", "/mcp/"]
    assert {seen.path for seen in upstream.seen[1:]} == {"/mcp/"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_another_origin_is_never_followed_and_hears_no_credential(
    upstream: FakeUpstream, stand: Stand, status: int
) -> None:
    async with FakeUpstream() as other:
        for word in ("initialize", "tools/list", "tools/call"):
            upstream.once(word, replied(status, headers={"Location": other.url}))
        reasons = [(await stand.client("Bearer secret").call()).outcome[2] for _ in range(3)]
        assert reasons[0] == "upstream_unreachable"
        assert set(reasons[1:]) <= {"call_lost", "upstream_unreachable"}
        assert other.seen == []


@pytest.mark.parametrize("location", ["/mcp", "mailto:a@b", "//evil.example/mcp", "http://[bad", "http://[]@", ""])
async def test_redirects_in_a_circle_or_to_nowhere_end(upstream: FakeUpstream, client: Client, location: str) -> None:
    upstream.on("initialize", replied(307, headers={"Location": location}))
    assert (await client.call()).outcome[2] == "upstream_unreachable"
    assert len(upstream.of("initialize")) <= 2


# -- forgotten sessions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["tools/list", mcp.SET_LEVEL])
async def test_a_session_forgotten_before_a_request_of_the_gateways_own_is_opened_again(
    upstream: FakeUpstream, client: Client, first: str
) -> None:
    upstream.capabilities["logging"] = {}
    if first == "tools/list":
        await client.post("server/discover")
    else:
        await client.call()
    upstream.forget()
    reply = await client.call(meta={mcp.META_LOG_LEVEL: "info"})
    assert reply.text == "done"
    assert [seen.session for seen in upstream.of("tools/call")][-1] == "s2"


# -- breaks at each stage ---------------------------------------------------------------------------------------------


async def test_a_client_that_retries_learns_that_its_parked_call_broke(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    cut = asyncio.Event()
    upstream.tool(gives_up(cut, Turn.reset))
    asked = await client.call()
    await eventually(lambda: stand.held == 1)
    cut.set()
    await eventually(lambda: stand.held == 0)
    await upstream.saw(mcp.CANCELLED)
    assert (await client.answer(asked)).outcome == (200, -32603, "call_lost")
    assert (await client.answer(asked)).outcome == (200, -32603, "call_lost"), "a repeat hears the same"
    (withdrawal,) = upstream.of("answer")
    assert withdrawal.body["result"] == {"action": "cancel"}, "what the client says comes too late"


@pytest.mark.parametrize("how", ["reset", "hang", "500", "404"])
async def test_an_answer_that_cannot_be_delivered_ends_the_call(
    upstream: FakeUpstream, begin: Start, how: str
) -> None:
    stand = await begin(timeouts={"answer_seconds": 0.3 if how == "hang" else 10})
    client = stand.client()

    async def refuse(turn: Turn) -> None:
        if how == "reset":
            await turn.reset()
        elif how == "hang":
            await turn.for_ever()
        turn.reply(int(how), b"oops")

    upstream.tool(ask_action)
    upstream.on("answer", refuse)
    asked = await client.call()
    reply = await client.answer(asked)
    assert reply.outcome == (200, -32603, "call_lost")
    tried = 2 if how == "reset" else 1  # a connection that ends without a word may have ended before
    assert len(upstream.of("answer")) == tried
    assert len(await upstream.saw(mcp.CANCELLED)) == 1
    assert (await client.answer(asked)).outcome == (200, -32603, "call_lost")
    assert len(upstream.of("answer")) == tried


async def _leave_open(turn: Turn) -> None:
    await turn.begin()
    await turn.for_ever()


async def _leave_stream_open(turn: Turn) -> None:
    await turn.begin(200, is_stream=True)
    await turn.raw(b": hello\n\n")
    await turn.for_ever()


async def _cut(turn: Turn) -> None:
    await turn.begin()
    await turn.reset()


@pytest.mark.parametrize("script", [_leave_open, _leave_stream_open, _cut])
async def test_an_answer_is_delivered_by_the_head_of_its_acceptance(
    upstream: FakeUpstream, client: Client, script: Script
) -> None:
    async def accept(turn: Turn) -> None:
        upstream.accept(turn)
        await play(script, turn)

    upstream.tool(ask_action)
    upstream.on("answer", accept)
    assert (await client.answer(await client.call())).text == "accept"
    if script is not _cut:
        await asyncio.wait_for(upstream.of("answer")[0].cut.wait(), 5)


@pytest.mark.parametrize("script", [_leave_open, _leave_stream_open, _cut])
async def test_notifications_are_delivered_by_the_head_of_their_acceptance(
    upstream: FakeUpstream, begin: Start, script: Script
) -> None:
    stand = await begin(timeouts={"answer_seconds": 60, "cancel_seconds": 60})
    for word in (mcp.INITIALIZED, mcp.CANCELLED):
        upstream.on(word, script)
    client = stand.client()
    assert (await client.call()).text == "done"
    if script is not _cut:
        await asyncio.wait_for(upstream.of(mcp.INITIALIZED)[0].cut.wait(), 5)
    upstream.tool(lambda turn: turn.for_ever())
    leaving = later(client.call())
    _ = await upstream.saw(mcp.TOOLS_CALL, 2)
    _ = leaving.cancel()
    _ = await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: not stand.busy_tasks())


async def test_a_silent_upstream_is_given_up(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.1})
    upstream.tool(lambda turn: turn.for_ever())
    reply = await stand.client().call()
    assert reply.outcome == (200, -32603, "call_lost")
    assert "timeouts.idle_seconds" in reply.error["message"]
    assert len(await upstream.saw(mcp.CANCELLED)) == 1
    assert len(upstream.of("tools/call")) == 1
    await upstream.of("tools/call")[0].cut.wait()
    assert "DELETE" not in upstream.words


async def test_a_call_whose_session_came_late_is_given_up_when_it_is_silent(
    upstream: FakeUpstream, begin: Start
) -> None:
    is_late = asyncio.Event()

    async def late(turn: Turn) -> None:
        asyncio.get_running_loop().call_later(0.4, is_late.set)  # the limits of leg and silence pass meanwhile
        await is_late.wait()
        await upstream.initialize(turn)

    upstream.on("initialize", late)
    upstream.on("prompts/get", lambda turn: turn.for_ever())
    limits: Any = {"timeouts": {"idle_seconds": 0.1}, "legs": {"limit_seconds": 0.05}}
    stand = await begin(route={"continuation": "replay"}, **limits)
    reply = await stand.client().post("prompts/get", {"name": "p"})
    assert reply.outcome == (200, -32603, "call_lost")
    assert "timeouts.idle_seconds" in reply.error["message"]


def of_a_dead_process(state: str, session: str, cursor: str) -> str:
    """The same state, as a process that is gone would have sealed it of a call in another session."""
    ring = Keyring((bytes(range(32)),), "state")
    envelope = msgspec.msgpack.Decoder(Envelope).decode(ring.open(state))
    assert envelope.upstream is not None
    upstream = replace(envelope.upstream, session=session, cursor=cursor)
    gone = replace(envelope, exchange="x1", epoch="gone", upstream=upstream)
    return ring.seal(msgspec.msgpack.encode(gone))


@pytest.mark.parametrize("rounds", [0, 4])
async def test_a_call_taken_over_from_a_dead_process_is_given_up_when_it_is_silent(
    log_lines: Lines, upstream: FakeUpstream, begin: Start, rounds: int
) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.1}, legs={"rounds": rounds, "limit_seconds": 0.05})
    client = stand.client()
    upstream.tool(ask_action)
    asked = await client.call()
    for driver in list(stand.gateway.lot):
        driver.fire(TTL)
    state = of_a_dead_process(asked.state, session="s0", cursor="e1")
    upstream.known.add("s0")

    async def silent(turn: Turn) -> None:
        await turn.raw(b": here\n\n")
        await turn.for_ever()

    upstream.on("resume", silent)
    reply = await client.call(state=state, answers=dict.fromkeys(asked.questions, DECLINE))
    while reply.final.get("result", {}).get("resultType") == "input_required":  # a round that only sheds load
        reply = await client.call(state=reply.state)
    assert reply.outcome == (200, -32603, "call_lost")
    assert "timeouts.idle_seconds" in reply.error["message"]
    assert upstream.of("resume")[0].headers["Last-Event-ID"] == "e1"
    line = log_lines("call.taken_over")[0]
    assert (line["owner"], line["owner_is_dead"], line["round"], line["resumable"]) == ("gw-1", True, 1, True)


async def test_a_call_that_waits_for_its_client_is_not_silent(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.2})
    upstream.tool(ask_action)
    asked = await stand.client().call()
    waited = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, waited.set)  # the time under test
    await waited.wait()
    assert (await stand.client().answer(asked)).text == "accept"


async def test_progress_keeps_a_call_alive(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.2})
    loop = asyncio.get_running_loop()

    async def tool(turn: Turn) -> None:
        for _ in range(8):
            ticked = asyncio.Event()
            loop.call_later(0.06, ticked.set)  # the time under test
            await ticked.wait()
            await turn.notify(mcp.PROGRESS, {"progressToken": "x", "progress": 1})
        await turn.result(text("slow but alive"))

    upstream.tool(tool)
    assert (await stand.client().call()).text == "slow but alive"


# -- servers that ask and do not listen -------------------------------------------------------------------------------


async def test_a_flood_of_pings_costs_one_connection(
    log_lines: Lines, upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    listens = upstream.holding("answer")
    await client.call()
    side = upstream.side("s1")
    for number in range(3000):
        side.put_nowait(event({"jsonrpc": "2.0", "id": number, "method": "ping"}))
    side.put_nowait(event({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}))
    await eventually(lambda: stand.group().tools.by_name is None, "all pings were heard")
    assert stand.busy_tasks().count("answer without a client") == 1
    assert len(upstream.of("answer")) <= 1
    (line,) = [line for line in log_lines("upstream.failed") if "pings" in line["cause"]]
    assert line["fix"]
    listens.set()
    await eventually(lambda: not stand.busy_tasks(), "those that could wait are answered")
    answered = [seen.body["id"] for seen in upstream.of("answer")]
    assert answered == sorted(answered)
    assert 0 < len(answered) <= 65
    assert (await client.call()).text == "done"


async def test_an_oversized_id_of_a_ping_is_not_kept(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    await client.call()
    for id_ in ("x" * 100_000, "small"):
        upstream.side("s1").put_nowait(event({"jsonrpc": "2.0", "id": id_, "method": "ping"}))
    (answer,) = await upstream.saw("answer")
    assert answer.body == {"jsonrpc": "2.0", "id": "small", "result": {}}


async def test_a_call_that_floods_with_what_it_may_not_ask_is_refused_a_bounded_number_of_times(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    listens = upstream.holding("answer")

    async def tool(turn: Turn) -> None:
        for number in range(1000):
            await turn.say({"id": number, "method": "no/such"})
        answer = await turn.ask(mcp.ELICIT, FORM, id_=1000)
        await turn.result(text(answer["result"]["action"]))

    upstream.tool(tool)
    asked = await client.call()
    assert len(upstream.of("answer")) <= 1
    listens.set()
    assert (await client.answer(asked)).text == "accept"
    answers = upstream.of("answer")
    assert answers[-1].body["id"] == 1000
    assert 0 < len(answers) <= 258


# -- bytes that no HTTP library would send ----------------------------------------------------------------------------


def head(status: str, *lines: bytes, body: bytes = b"") -> bytes:
    """A reply as bytes, so that its head may hold anything."""
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join([b"HTTP/1.1 " + status.encode(), b"Connection: close", length, *lines, b"", b""]) + body


@pytest.mark.parametrize(
    ("challenges", "shown"),
    [
        ([b"Bearer \xff"], None),
        ([b"Bearer \xff", b'Basic realm="x"'], 'Basic realm="x"'),
        ([b"Bearer " + b"x" * 5000, b"Basic " + b"x" * 5000], None),
    ],
)
async def test_a_refusal_reaches_the_client_without_challenges_that_http_forbids(
    begin: Start, log_lines: Lines, challenges: list[bytes], shown: str | None
) -> None:
    lines = [b"WWW-Authenticate: " + value for value in challenges]
    async with fake_wire(head("401 Unauthorized", *lines)) as url:
        reply = await (await begin(url=url)).client().call()
    assert reply.outcome == (401, -32603, "upstream_refused")
    assert reply.headers.get("WWW-Authenticate") == shown
    assert not log_lines("task.failed")


@pytest.mark.parametrize("line", [b'WWW-Authenticate: Bearer a="\x01\x7f"', b"Mcp-Session-Id: a\x1b[2J", b"X: \x00"])
async def test_a_reply_with_a_control_character_in_its_head_is_one_clear_error(
    begin: Start, log_lines: Lines, line: bytes
) -> None:
    async with fake_wire(head("401 Unauthorized", line)) as url:
        reply = await (await begin(url=url)).client().call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "sent a reply that is not valid HTTP/1.1" in reply.error["message"]
    assert not log_lines("task.failed")


def shaken(id_: bytes) -> bytes:
    """The response to `initialize`."""
    info = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (id_, json.dumps(info).encode())


@pytest.mark.parametrize("given", [b"a b", "é".encode(), b"\xff", b"x" * 4097])
async def test_a_session_id_that_the_specification_forbids_is_one_clear_error(
    begin: Start, log_lines: Lines, given: bytes
) -> None:
    lines = b"Content-Type: application/json", b"Mcp-Session-Id: " + given
    async with fake_wire(lambda id_: head("200 OK", *lines, body=shaken(id_))) as url:
        reply = await (await begin(url=url)).client().call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "gave an Mcp-Session-Id that is not visible ASCII" in reply.error["message"]
    assert not log_lines("task.failed")
    assert all("specification" in str(line["fix"]) for line in log_lines("upstream.failed"))


@pytest.mark.parametrize("given", ["x" * 4096, "!~", ""])
async def test_the_longest_session_id_is_sent_back_and_an_empty_one_counts_as_none(
    upstream: FakeUpstream, client: Client, given: str
) -> None:
    async def shake(turn: Turn) -> None:
        upstream.known.add(given)
        turn.reply(200, shaken(json.dumps(turn.id).encode()), {"Mcp-Session-Id": given})

    upstream.on("initialize", shake)
    reply = await client.call()
    assert ("result" in reply.final) == bool(given), "the fake serves only requests with a session"
    assert upstream.of(mcp.INITIALIZED)[-1].headers.get("Mcp-Session-Id") == (given or None)


async def test_an_upstream_that_switches_protocols_gets_one_clear_error(begin: Start) -> None:
    said = head("101 Switching Protocols", b"Upgrade: websocket", b"Connection: upgrade")
    async with fake_wire(said, stays=True) as url:
        reply = await (await begin(url=url)).client().call()
    assert reply.outcome[1:] == (-32603, "upstream_unreachable")
    assert "status 101, which was not asked for" in reply.error["message"]


async def test_a_text_of_the_upstream_is_quoted_as_one_printable_line(
    upstream: FakeUpstream, client: Client, log_lines: Lines
) -> None:
    async def refuse(turn: Turn) -> None:
        evil = "no\x1b[2J\r\nforged \u202e line" + "x" * 5000
        turn.reply(500, {"jsonrpc": "2.0", "id": None, "error": {"code": 1, "message": evil}})

    upstream.on("initialize", refuse)
    message = (await client.call()).error["message"]
    assert "no?[2J  forged ? line" in message
    assert message.isprintable()
    assert len(message) < 500
    assert [line["cause"] for line in log_lines("upstream.failed")] == [message]

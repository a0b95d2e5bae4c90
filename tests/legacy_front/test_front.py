"""Client sessions that end at the gateway: their ids, their streams, their ends."""

import asyncio
import base64
import json
from typing import Any

import pytest

from gateway.config import parse
from gateway.legacy_front import session_ids
from gateway.legacy_front.session_ids import QUERY
from gateway.protocol import mcp
from gateway.seal.keyring import Keyring
from gateway.server.drain import drain
from tests.support import workbench
from tests.support.fake_peer import KEY
from tests.support.fake_sse import FakeSse, Message
from tests.support.fake_sse import Stream as Upstream
from tests.support.fake_upstream import FakeUpstream, Turn
from tests.support.legacy_client import LegacyClient, SseClient
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import Stand, configuration, eventually, later

DONE = {"content": [{"type": "text", "text": "done"}]}
SESSIONS = "mcp_gateway_client_sessions"


async def silent(_fake: FakeSse, _stream: Upstream, _message: Message) -> None:
    """Accept a call; the test says the rest."""


@pytest.fixture
async def stand(begin: Start, sse_server: FakeSse) -> Stand:
    return await begin(**before(sse_server))


@pytest.fixture
def nothing_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the largest event fill what is kept for clients."""
    monkeypatch.setattr("gateway.legacy_front.session_table.REPLAY_BYTES", 1)


def before(server: FakeSse, **more: Any) -> dict[str, Any]:
    """The sections of a gateway before a server of HTTP+SSE."""
    return {"route": {"upstream": {"url": server.url, "transport": "sse"}}, **more}


def ask(server: FakeSse, id_: Any = "q", stream: int = 0) -> None:
    server.streams[stream].say(id=id_, method="elicitation/create", params={"message": "Who?"})


def finish(server: FakeSse, id_: int = 1, stream: int = 0) -> None:
    server.streams[stream].say(id=id_, result=DONE)


def answer(id_: int = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "result": DONE}


# -- ids --------------------------------------------------------------------------------------------------------------


async def test_a_session_of_another_caller_does_not_exist(stand: Stand, sse_server: FakeSse) -> None:
    client = await LegacyClient(stand, authorization="Bearer ann").initialize()
    for authorization in ("Bearer bob", None):
        client.headers["Authorization"] = authorization or ""
        if authorization is None:
            del client.headers["Authorization"]
        assert (await client.post({"id": 1, "method": "ping"}))[0] == 404
        assert (await client.listen()).status == 404
        assert await client.end() == 404
    client.headers["Authorization"] = "Bearer ann"
    assert (await client.post({"id": 1, "method": "ping"}))[0] == 200
    assert await client.end() == 200


def forged() -> list[str]:
    ring = Keyring((KEY,), session_ids.PURPOSE)
    other = Keyring((bytes(32),), session_ids.PURPOSE)
    return [
        "mrtr1.",
        "mrtr1.x.y",
        "mrtr1." + "a" * 5000,
        ring.seal(b""),
        ring.seal(b"\x93\x01\x02\x03"),
        other.seal(b"x"),
        Keyring((KEY,), "state").seal(b"x"),
        "abc",
    ]


@pytest.mark.parametrize("id_", forged(), ids=range(len(forged())))
async def test_a_made_up_id_names_no_session(id_: str, stand: Stand, sse_server: FakeSse) -> None:
    client = LegacyClient(stand)
    client.headers[mcp.SESSION_ID] = id_
    status, _, _ = await client.post({"id": 1, "method": "ping"})
    assert status == 404
    assert (await client.listen()).status == 404
    if id_.startswith("mrtr1."):
        del client.headers[mcp.SESSION_ID]
        assert (await client.post({"id": 1, "method": "ping"}, f"{client.url}?{QUERY}={id_}"))[0] == 404
    assert sse_server.streams == []


async def test_an_id_is_good_on_its_own_route_only(begin: Start, sse_server: FakeSse) -> None:
    upstream = {"url": sse_server.url, "transport": "sse"}
    stand = await begin(routes=[{"path": "/mcp", "upstream": upstream}, {"path": "/two", "upstream": upstream}])
    client = await LegacyClient(stand).initialize()
    status, _, _ = await client.post({"id": 1, "method": "ping"}, stand.url.replace("/mcp", "/two"))
    assert status == 404
    assert await client.end() == 200
    assert (await client.post({"id": 1, "method": "ping"}))[0] == 404
    assert stand.metric("mcp_gateway_state_rejected_total", reason="other_route") == 1


async def test_a_key_that_was_rotated_out_goes_on_opening_ids(begin: Start, sse_server: FakeSse) -> None:
    stand = await begin(**before(sse_server))
    client = await LegacyClient(stand).initialize()
    keys = {"keys": [base64.b64encode(bytes(range(1, 33))).decode()], "session_keys": [workbench.KEY]}
    for state, status in ((keys, 200), ({"keys": keys["keys"]}, 404)):
        tree = configuration(sse_server.url, **before(sse_server, state=state))
        stand.gateway.apply(parse(tree, "test", {}))
        assert (await client.post({"id": 1, "method": "ping"}))[0] == status


async def test_an_id_of_a_server_behind_the_gateway_passes_through(begin: Start, upstream: FakeUpstream) -> None:
    """The server may be a gateway itself, whose ids look like ours."""
    stand = await begin()
    client = LegacyClient(stand)
    client.headers[mcp.SESSION_ID] = Keyring((bytes(32),), session_ids.PURPOSE).seal(b"x")
    _ = await client.post({"id": 1, "method": "ping"})
    assert upstream.seen[-1].headers[mcp.SESSION_ID] == client.headers[mcp.SESSION_ID]


# -- messages of clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", mcp.PARSE_ERROR),
        (b"[" * 1000, mcp.PARSE_ERROR),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","result":{}}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","result":{}}', mcp.INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}', mcp.INVALID_REQUEST),
    ],
)
async def test_a_message_that_is_none_never_reaches_the_server(
    body: bytes, code: int, stand: Stand, sse_server: FakeSse
) -> None:
    client = await LegacyClient(stand).initialize()
    await sse_server.heard(mcp.INITIALIZED)
    found, _, (error,) = await client.post(body)
    assert (found, error["error"]["code"]) == (200, code)
    assert len(sse_server.posts) == 2
    assert await client.end() == 200


async def test_two_open_requests_cannot_have_the_same_id(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand).initialize()
    first = later(client.post({"id": "a", "method": mcp.TOOLS_CALL, "params": {}}))
    await sse_server.heard(mcp.TOOLS_CALL)
    status, _, (error,) = await client.post(b'{"jsonrpc":"2.0","id":"\\u0061","method":"tools/call","params":{}}')
    assert (status, error["id"], error["error"]["code"]) == (200, "a", mcp.INVALID_REQUEST)
    sse_server.streams[0].say(id="a", result=DONE)
    assert (await first)[2][0]["result"] == DONE
    assert len(await sse_server.heard(mcp.TOOLS_CALL)) == 1
    assert await client.end() == 200


async def test_over_http_sse_an_id_in_use_is_refused_beside_the_stream_and_all_else_on_it(
    begin: Start, upstream: FakeUpstream
) -> None:
    """On the stream, the refusal of an id in use would end the request that has it."""
    began, opened = asyncio.Event(), asyncio.Event()

    async def wait(turn: Turn) -> None:
        began.set()
        await opened.wait()
        await turn.result(DONE)

    upstream.tool(wait)
    route = {"upstream": {"url": upstream.url, "transport": "streamable-http"}}
    client = await SseClient(await begin(route=route)).initialize()
    assert (await client.post(client.call_message()))[0] == 202
    await began.wait()
    status, _, (refused,) = await client.post({"id": 1, "method": "ping"})
    assert (status, refused["error"]["code"]) == (200, mcp.INVALID_REQUEST)
    assert (await client.post(client.begin_message() | {"id": 7}))[0] == 202
    told = await client.stream.message()
    assert (told["id"], told["error"]["code"]) == (7, mcp.INVALID_REQUEST)
    status, _, (refused,) = await client.post(b"{")
    assert (status, refused["error"]["code"]) == (200, mcp.PARSE_ERROR)
    opened.set()
    assert await client.stream.message() == answer()
    client.stream.close()


async def test_requests_of_a_session_are_weighed(begin: Start, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    stand = await begin(**before(sse_server, limits={"calls_bytes": 50_000, "calls_bytes_per_principal": 30_000}))
    client = await LegacyClient(stand).initialize()
    large = {"text": "x" * 10_000}
    first = later(client.post(client.call_message("tool", large)))
    _ = await sse_server.heard(mcp.TOOLS_CALL)
    assert 20_000 < stand.gateway.calls.used < 21_000
    status, headers, (refused,) = await client.post(client.call_message("tool", large))
    assert (status, refused["error"]["data"]["reason"], "Retry-After" in headers) == (200, "busy", True)
    assert "limits.calls_bytes" in refused["error"]["message"]
    finish(sse_server)
    assert (await first)[2] == [answer()]
    assert stand.gateway.calls.used == 0
    second = later(client.post(client.call_message("tool", large)))
    _ = await sse_server.heard(mcp.TOOLS_CALL, 2)
    assert await client.end() == 200
    _ = await second
    assert stand.gateway.calls.used == 0


async def test_a_session_over_http_sse_begins_with_initialize(begin: Start, upstream: FakeUpstream) -> None:
    stand = await begin(route={"upstream": {"url": upstream.url, "transport": "streamable-http"}})
    client = await SseClient(stand).connect()
    assert (await client.post({"id": 1, "method": "ping"}))[0] == 400
    assert (await client.post({"method": mcp.INITIALIZE}))[0] == 202, "a notification gets no answer to wait for"
    assert upstream.seen == []
    client.stream.close()
    await eventually(lambda: stand.metric(SESSIONS) == 0)


async def test_a_stream_on_which_no_session_begins_ends(begin: Start, upstream: FakeUpstream) -> None:
    http = {"route": {"upstream": {"url": upstream.url, "transport": "streamable-http"}}}
    stand = await begin(**http, limits={"receive_seconds": 0.01})
    client = await SseClient(stand).connect()
    assert await client.stream.rest() == []
    assert stand.metric(SESSIONS) == 0


# -- streams ----------------------------------------------------------------------------------------------------------


async def test_a_client_of_2025_11_25_comes_back_for_what_it_missed(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand).initialize()
    calling = later(client.call())
    await sse_server.heard(mcp.TOOLS_CALL)
    ask(sse_server)
    call = await calling
    priming = await call.event()
    assert priming is not None
    assert (priming.data, bool(priming.id)) == (b"", True)
    asked = await call.message()
    call.close()
    sse_server.streams[0].say(method=mcp.LOG, params={"level": "info", "data": "missed"})
    again = await client.listen(call.last)
    assert (await again.message())["params"]["data"] == "missed"
    again.close()
    assert await client.answer(asked) == 202
    await sse_server.heard("answer")
    await eventually(lambda: stand.gateway.draining.unawaited == 0, "the gateway has noticed")
    finish(sse_server)
    await eventually(lambda: stand.gateway.sessions.open_requests == 0)
    for _ in range(2):  # the end of the stream may be lost too
        assert await (await client.listen(again.last)).rest() == [answer()]
    assert [each["id"] for each in await (await client.listen(priming.id)).rest() if "id" in each] == ["q", 1]
    assert await client.end() == 200


async def test_an_older_client_gets_no_event_ids_and_its_questions_on_the_stream_that_it_has(
    begin: Start, sse_server: FakeSse
) -> None:
    sse_server.tool, sse_server.version = silent, "2025-06-18"
    stand = await begin(**before(sse_server))
    client = await LegacyClient(stand, "2025-06-18").initialize()
    calling = later(client.call())
    await sse_server.heard(mcp.TOOLS_CALL)
    sse_server.streams[0].say(method=mcp.LOG, params={"level": "info", "data": "x"})
    call = await calling
    event = await call.event()
    assert event is not None
    assert (bool(event.data), event.id) == (True, None)
    call.close()
    stream = await client.listen()
    await eventually(lambda: stand.gateway.draining.unawaited == 1)
    ask(sse_server)
    assert (await stream.message())["id"] == "q"
    finish(sse_server)
    assert (await client.post({"id": 2, "method": "ping"}))[0] == 200
    assert await client.end() == 200
    assert await stream.rest() == [], "the answer to the call that the client left is dropped"


@pytest.mark.parametrize("place", ["0", "0-", "-1", "9-1", "1-99", "1-1-1", "x" * 9000, "0-" + "9" * 5000, "²-1"])
async def test_an_event_id_that_names_nothing_gets_no_stream(place: str, stand: Stand) -> None:
    client = await LegacyClient(stand).initialize()
    assert (await client.listen(place)).status in (400, 405)
    assert await client.end() == 200


async def test_a_new_standalone_stream_takes_over_from_the_one_before(stand: Stand, sse_server: FakeSse) -> None:
    client = await LegacyClient(stand).initialize()
    first = await client.listen()
    assert await first.event() is not None
    second = await client.listen()
    assert await first.rest() == []
    ask(sse_server)
    assert (await second.message())["id"] == "q"
    assert await client.end() == 200


@pytest.mark.usefixtures("nothing_to_replay")
async def test_messages_that_no_client_reads_end_the_session_at_the_limit(begin: Start, sse_server: FakeSse) -> None:
    limits = {"event_bytes": 20_000, "body_bytes": 20_000}
    stand = await begin(**before(sse_server, limits=limits))
    client = await LegacyClient(stand).initialize()
    other = await LegacyClient(stand).initialize()
    await sse_server.heard(mcp.INITIALIZED, 2)
    for number in range(3):
        sse_server.streams[0].say(id=number, method="roots/list", params={"x": "x" * 9000})
    await sse_server.streams[0].closed.wait()
    assert (await client.post({"id": 1, "method": "ping"}))[0] == 404
    assert (await other.post({"id": 1, "method": "ping"}))[0] == 200
    assert stand.gateway.metrics.budgets()["limits.replay_bytes"].given_way == 1
    assert await other.end() == 200


@pytest.mark.usefixtures("nothing_to_replay")
async def test_messages_that_one_caller_does_not_read_end_no_session_of_another(
    begin: Start, sse_server: FakeSse
) -> None:
    stand = await begin(**before(sse_server, limits={"event_bytes": 20_000}))
    ann = await LegacyClient(stand, authorization="Bearer ann").initialize()
    eves = [await LegacyClient(stand, authorization="Bearer eve").initialize() for _ in range(2)]
    await sse_server.heard(mcp.INITIALIZED, 3)
    ask(sse_server, "ann")
    for stream, number in enumerate((9_000, 18_000), 1):
        sse_server.streams[stream].say(id="eve", method="roots/list", params={"x": "x" * number})
    await sse_server.streams[1].closed.wait()
    assert (await (await ann.listen()).message())["id"] == "ann"
    assert await ann.end() == 200
    assert [await eve.end() for eve in eves] == [404, 200]


@pytest.mark.usefixtures("nothing_to_replay")
async def test_what_was_delivered_is_forgotten_before_any_session_ends(begin: Start, sse_server: FakeSse) -> None:
    limits = {"event_bytes": 20_000, "body_bytes": 20_000}
    stand = await begin(**before(sse_server, limits=limits))
    client = await LegacyClient(stand).initialize()
    stream = await client.listen()
    for number in range(5):
        sse_server.streams[0].say(id=number, method="roots/list", params={"x": "x" * 9000})
        assert (await stream.message())["id"] == number
    first = stream.last.partition("-")[0] + "-0"
    stream.close()
    assert (await client.listen(first)).status == 405
    again = await client.listen(stream.last)
    assert again.status == 200
    assert await client.end() == 200
    assert await again.rest() == []


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_delete_answers_each_open_request_with_one_error(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand).initialize()
    call = later(client.post(client.call_message()))
    await sse_server.heard(mcp.TOOLS_CALL)
    stream = await client.listen()
    assert await client.end() == 200
    assert [(each["id"], "error" in each) for each in (await call)[2]] == [(1, True)]
    assert await stream.rest() == []
    await sse_server.streams[0].closed.wait()
    assert await client.end() == 404


async def test_a_client_that_leaves_while_it_initializes_leaves_nothing(begin: Start, sse_server: FakeSse) -> None:
    async def never(message: Message) -> None:
        if message["method"] == mcp.INITIALIZE:
            await asyncio.get_running_loop().create_future()

    sse_server.post = never
    stand = await begin(**before(sse_server, timeouts={"handshake_seconds": 60}))
    client = LegacyClient(stand)
    posting = later(client.post(client.begin_message()))
    await eventually(lambda: sse_server.posts)
    posting.cancel()
    await eventually(sse_server.streams[0].closed.is_set)
    await eventually(lambda: stand.metric(SESSIONS) == 0)


async def test_the_end_of_the_servers_stream_ends_the_session(stand: Stand, sse_server: FakeSse) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand).initialize()
    call = later(client.post(client.call_message()))
    await sse_server.heard(mcp.TOOLS_CALL)
    stream = await client.listen()
    sse_server.streams[0].end()
    assert [each["error"]["data"]["reason"] for each in (await call)[2]] == ["call_lost"]
    assert await stream.rest() == []
    assert (await client.post({"id": 2, "method": "ping"}))[0] == 404
    assert stand.metric(SESSIONS) == 0


async def test_a_drain_begins_no_session_serves_those_that_live_and_ends_them(
    stand: Stand, sse_server: FakeSse
) -> None:
    sse_server.tool = silent
    client = await LegacyClient(stand).initialize()
    call = later(client.post(client.call_message()))
    await sse_server.heard(mcp.TOOLS_CALL)
    stream = await client.listen()
    assert (await told(stand)).processes[0].lost_at_end == 1
    draining = later(drain(stand.gateway, delay_seconds=0))
    await eventually(lambda: stand.gateway.draining.has_begun)
    other = LegacyClient(stand)
    status, _, (refused,) = await other.post(other.begin_message())
    assert (status, refused["error"]["data"]["reason"]) == (503, "stopping")
    assert (await client.post({"id": 2, "method": "ping"}))[0] == 200
    assert not draining.done()
    finish(sse_server)
    assert (await call)[2] == [answer()]
    await draining
    assert await stream.rest() == []
    assert stand.metric(SESSIONS) == 0


async def test_a_reload_keeps_sessions_and_ends_those_of_a_removed_route(begin: Start, sse_server: FakeSse) -> None:
    routes = [{"path": path, "upstream": {"url": sse_server.url, "transport": "sse"}} for path in ("/mcp", "/two")]
    stand = await begin(routes=routes)
    kept = await LegacyClient(stand).initialize()
    ended = await LegacyClient(stand, url=stand.url.replace("/mcp", "/two")).initialize()
    tree = json.loads(configuration(sse_server.url, routes=[routes[0] | {"forward_headers": ["x-new"]}]))
    stand.gateway.apply(parse(json.dumps(tree), "test", {}))
    assert (await kept.post({"id": 1, "method": "ping"}))[0] == 200
    await sse_server.streams[1].closed.wait()
    assert (await ended.post({"id": 1, "method": "ping"}))[0] == 404
    assert await kept.end() == 200


# -- credentials ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LegacyClient, SseClient])
async def test_a_refused_credential_is_a_status_so_that_the_client_signs_in(
    kind: type[LegacyClient], begin: Start, sse_server: FakeSse, upstream: FakeUpstream
) -> None:
    sse_server.get_status = 401

    async def refuse(turn: Any) -> None:
        turn.reply(401, headers={"WWW-Authenticate": 'Bearer realm="x"'})

    upstream.once(mcp.INITIALIZE, refuse)
    over_http = {"route": {"upstream": {"url": upstream.url, "transport": "streamable-http"}}}
    stand = await begin(**(before(sse_server) if kind is LegacyClient else over_http))
    client = kind(stand)
    if isinstance(client, SseClient):
        await client.connect()
    status, headers, _ = await client.post(client.begin_message())
    assert status == 401
    if isinstance(client, SseClient):
        assert headers["WWW-Authenticate"] == 'Bearer realm="x"'
        assert (await client.post(client.begin_message()))[0] == 202
        assert "result" in await client.stream.message()
        client.stream.close()
    await eventually(lambda: stand.metric(SESSIONS) == 0)


@pytest.mark.parametrize(("cap", "status"), [("max", 503), ("max_per_principal", 429)])
async def test_a_client_learns_which_limit_of_sessions_is_reached(
    begin: Start, sse_server: FakeSse, cap: str, status: int
) -> None:
    stand = await begin(**before(sse_server, sessions={cap: 1}))
    _ = await LegacyClient(stand).initialize()
    second = LegacyClient(stand)
    code, _, (refused,) = await second.post(second.begin_message())
    assert (code, refused["error"]["data"]["reason"]) == (status, "busy")
    assert f"(sessions.{cap})" in refused["error"]["message"]
    assert stand.metric("mcp_gateway_sessions_refused_total", limit=f"sessions.{cap}") == 1


async def test_streams_without_a_session_leave_places_for_others(begin: Start, upstream: FakeUpstream) -> None:
    over_http = {"route": {"upstream": {"url": upstream.url, "transport": "streamable-http"}}}
    stand = await begin(**over_http, sessions={"max": 20})
    strangers = [await SseClient(stand, authorization=f"Bearer {number}").connect() for number in range(8)]
    refused = await SseClient(stand).http.get(stand.url, headers={"Accept": "text/event-stream"})
    assert refused.status == 503
    refused.close()
    assert (await strangers[0].post(strangers[0].begin_message()))[0] == 202
    assert "result" in await strangers[0].stream.message()
    other = await SseClient(stand).initialize()
    for client in (*strangers, other):
        client.stream.close()
    await eventually(lambda: stand.metric(SESSIONS) == 0)


async def test_a_stream_whose_session_was_refused_does_not_stay_for_ever(begin: Start, upstream: FakeUpstream) -> None:
    async def refuse(turn: Any) -> None:
        turn.reply(401)

    upstream.once(mcp.INITIALIZE, refuse)
    over_http = {"route": {"upstream": {"url": upstream.url, "transport": "streamable-http"}}}
    stand = await begin(**over_http, sessions={"client_idle_seconds": 0.05})
    client = await SseClient(stand).connect()
    assert (await client.post(client.begin_message()))[0] == 401
    assert await client.stream.rest() == []
    assert stand.metric(SESSIONS) == 0


async def test_a_session_is_not_idle_while_its_stream_is_open(begin: Start, upstream: FakeUpstream) -> None:
    over_http = {"route": {"upstream": {"url": upstream.url, "transport": "streamable-http"}}}
    stand = await begin(**over_http, sessions={"client_idle_seconds": 0.05})
    client = await SseClient(stand).initialize()
    await asyncio.sleep(0.3)
    assert stand.metric(SESSIONS) == 1
    client.stream.close()
    await eventually(lambda: stand.metric(SESSIONS) == 0)

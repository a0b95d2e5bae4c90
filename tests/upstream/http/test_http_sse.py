"""HTTP+SSE of 2024-11-05 towards a fake that breaks the rules on command."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from gateway.protocol import mcp
from gateway.upstream.http import http_sse
from tests.support.fake_sse import FakeSse, Message, Stream
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually, jwt, later


@pytest.fixture
async def stand(old: FakeSse, begin: Start) -> Stand:
    """A gateway that was told the transport."""
    return await sse(begin, old)


async def sse(begin: Start, old: FakeSse, **sections: Any) -> Stand:
    return await begin(route={"upstream": {"url": old.url, "transport": "sse"}}, **sections)


async def auto(begin: Start, url: str, **sections: Any) -> Stand:
    return await begin(route={"upstream": {"url": url}}, **sections)


async def asking(_: FakeSse, stream: Stream, message: Message) -> None:
    stream.say(id=0, method="elicitation/create", params=FORM)


async def parked(old: FakeSse, client: Client) -> Any:
    old.tool = asking
    return await client.call()


# --- the session ---


async def test_the_handshake_opens_the_stream_and_posts_where_it_says(old: FakeSse, stand: Stand) -> None:
    client = stand.client("Bearer ann")
    assert (await client.call()).text == "done"
    assert old.seen[0] == ("GET", "/sse"), "a configured transport is not looked for"
    methods = [message.get("method") for _, message in old.posts]
    assert methods == ["initialize", "notifications/initialized", "tools/list", "tools/call"]
    assert {headers["Authorization"] for headers, _ in old.posts} == {"Bearer ann"}
    assert old.streams[0].headers["Authorization"] == "Bearer ann"
    assert (await client.call()).text == "done"
    assert len(old.streams) == 1, "the session is used again"


async def test_a_session_that_is_given_up_is_closed(old: FakeSse, begin: Start) -> None:
    stand = await sse(begin, old, sessions={"idle_seconds": 0})
    assert (await stand.client().call()).text == "done"
    await asyncio.wait_for(old.streams[0].closed.wait(), 5)


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_any_old_version_is_negotiated(old: FakeSse, client: Client, version: str) -> None:
    old.version = version
    assert (await client.call()).text == "done"
    assert {headers.get(mcp.PROTOCOL_VERSION) for headers, _ in old.posts[1:]} == {version}


async def test_a_ping_between_two_calls_is_answered(old: FakeSse, client: Client) -> None:
    _ = await client.call()
    old.streams[0].say(id="p", method="ping")
    answer = (await old.heard("answer"))[0]
    assert (answer["id"], answer["result"]) == ("p", {})


async def test_a_subscription_hears_what_changes_though_its_stream_ends(old: FakeSse, client: Client) -> None:
    old.capabilities = {"tools": {"listChanged": True}}
    async with client.open(mcp.LISTEN, {"notifications": {"toolsListChanged": True}}) as response:

        async def told() -> Any:
            return json.loads((await response.content.readuntil(b"\n\n")).partition(b"data: ")[2])

        assert (await told())["params"]["notifications"] == {"toolsListChanged": True}
        old.streams[0].say(method=mcp.TOOLS_CHANGED)
        assert (await told())["method"] == mcp.TOOLS_CHANGED
        old.streams[0].end()
        assert (await told())["method"] == mcp.TOOLS_CHANGED, "it may have changed while nobody heard it"
        old.streams[1].say(method=mcp.TOOLS_CHANGED)
        assert (await told())["method"] == mcp.TOOLS_CHANGED


# --- where messages go ---


@pytest.mark.parametrize("place", ["/messages?session=%d", "messages?session=%d", "ORIGIN/messages?session=%d"])
async def test_an_endpoint_within_the_origin_is_used(old: FakeSse, client: Client, place: str) -> None:
    old.endpoint = place.replace("ORIGIN", old.origin).encode()
    assert (await client.call()).text == "done"


@pytest.mark.parametrize(
    "place",
    [
        b"http://127.0.0.2:9/messages",
        b"//evil.example/messages",
        b"https://127.0.0.1/messages",
        b"http://[nonsense",
        b"http://[]@",
        b"//\xff\x00\x1b[2J",
        b"file:///etc/passwd",
        b"http://127.0.0.1:1@evil.example/",
    ],
)
async def test_an_endpoint_elsewhere_is_refused_and_gets_no_credential(
    old: FakeSse, stand: Stand, place: bytes
) -> None:
    old.endpoint = place + b"?token=secret"
    reply = await stand.client("Bearer ann").call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "not at the origin" in reply.error["message"]
    assert "secret" not in reply.error["message"]
    assert old.posts == []


async def test_a_redirect_of_messages_within_the_origin_is_followed(old: FakeSse, client: Client) -> None:
    places = []

    async def slash(_: Message) -> web.Response | None:
        places.append(len(places))
        # As Starlette answers at /messages when the application is mounted at /messages/.
        number = len(old.streams) - 1
        redirect = {"Location": f"/messages/?session={number}"}
        return web.Response(status=307, headers=redirect) if len(places) == 1 else None

    old.post = slash
    assert (await client.call()).text == "done"
    assert [path for _, path in old.seen].count("/messages") == 1, "it is remembered"


async def test_a_redirect_of_messages_elsewhere_is_refused(old: FakeSse, client: Client) -> None:
    async def away(_: Message) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://127.0.0.2:9/"})

    old.post = away
    reply = await client.call()
    assert "another origin" in reply.error["message"]


# --- what goes wrong ---


async def test_a_stream_that_ends_while_the_post_hangs_ends_the_call_at_once(old: FakeSse, begin: Start) -> None:
    async def cut(fake: FakeSse, stream: Stream, _message: Message) -> None:
        stream.end()
        await asyncio.get_running_loop().create_future()

    old.tool = cut
    stand = await sse(begin, old, timeouts={"answer_seconds": 600, "idle_seconds": 600})
    reply = await stand.client().call()
    assert reply.outcome == (200, -32603, "call_lost")


async def test_a_stream_that_ends_under_a_parked_call_is_told_to_the_retry(old: FakeSse, client: Client) -> None:
    asked = await parked(old, client)
    old.streams[0].end()
    await asyncio.wait_for(old.streams[0].closed.wait(), 5)
    reply = await client.answer(asked)
    assert reply.outcome == (200, -32603, "call_lost")
    assert len(await old.heard("tools/call")) == 1


async def test_a_lost_call_that_may_run_twice_is_run_again(old: FakeSse, begin: Start) -> None:
    stand = await begin(
        route={"upstream": {"url": old.url, "transport": "sse"}, "ephemeral": ["tool"]},
    )
    client = stand.client()
    asked = await parked(old, client)
    old.streams[0].end()
    await asyncio.wait_for(old.streams[0].closed.wait(), 5)

    async def again(_: FakeSse, stream: Stream, message: Message) -> None:
        stream.say(id=7, method="elicitation/create", params=FORM)

    old.tool = again
    answering = later(client.answer(asked))
    answer = (await old.heard("answer"))[0]
    assert answer["id"] == 7, "the recorded answer, to the question of the second run"
    second = (await old.heard("tools/call", 2))[1]
    # The tool list is fetched anew at the same time, in a session of its own.
    [stream] = [each for each in old.streams if second in each.heard]
    stream.say(id=second["id"], result=text("again"))
    assert (await answering).text == "again"


async def test_a_call_is_lost_with_its_replica(old: FakeSse, begin: Start) -> None:
    one, two = await sse(begin, old), await sse(begin, old)
    asked = await parked(old, one.client())
    reply = await two.client().answer(asked)
    assert reply.outcome == (200, -32603, "owner_lost")
    assert "gw-1 that held this call is gone" in reply.error["message"]
    assert len(await old.heard("tools/call")) == 1
    answering = later(one.client().answer(asked))
    _ = await old.heard("answer")
    old.streams[0].say(id=(await old.heard("tools/call"))[0]["id"], result=text("still here"))
    assert (await answering).text == "still here"


@pytest.mark.parametrize(
    ("status", "body"), [(404, "Could not find session"), (400, "No transport found for sessionId")]
)
async def test_a_server_that_forgot_the_session_gets_the_call_in_a_new_one(
    old: FakeSse, client: Client, status: int, body: str
) -> None:
    _ = await client.call()

    async def forgot(_: Message) -> web.Response | None:
        return web.Response(status=status, text=body) if len(old.streams) == 1 else None

    old.post = forgot
    assert (await client.call()).text == "done"
    assert len(old.streams) == 2
    assert len(await old.heard("tools/call", 2)) == 2


async def test_a_credential_is_checked_beside_a_call_and_the_pong_is_dropped(old: FakeSse, stand: Stand) -> None:
    one, fresh = (stand.client(jwt(iss="i", sub="ada", client_id="c", jti=jti)) for jti in ("one", "fresh"))
    asked = await parked(old, one)
    again = await fresh.call(state=asked.state, answers={})
    assert again.questions == asked.questions
    assert len(old.streams) == 1
    assert [headers["Authorization"] for headers, message in old.posts if message.get("method") == mcp.PING] == [
        fresh.build("ping")[0]["Authorization"]
    ]
    answering = later(fresh.answer(asked))
    (call,) = await old.heard("tools/call")
    await old.heard("answer")
    old.streams[0].say(id=call["id"], result=text("done"))
    assert (await answering).text == "done"
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="unknown_id") == 0


async def test_an_error_says_that_the_servers_replicas_lack_sticky_sessions(old: FakeSse, client: Client) -> None:
    async def other(_: Message) -> web.Response:
        return web.Response(status=404, text="Could not find session")

    old.post = other
    reply = await client.call()
    assert reply.outcome == (200, -32603, "upstream_unreachable")
    assert "sticky load balancer" in reply.error["message"]
    await asyncio.wait_for(old.streams[0].closed.wait(), 5)


@pytest.mark.parametrize("is_answer", [False, True])
async def test_a_post_that_is_never_answered_ends_the_call_in_time(
    old: FakeSse, begin: Start, *, is_answer: bool
) -> None:
    stand = await sse(begin, old, timeouts={"answer_seconds": 0.2})
    client = stand.client()
    asked = await parked(old, client) if is_answer else None
    if asked is None:
        _ = await client.call()

    async def never(_: Message) -> web.Response:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    old.post = never
    reply = await (client.call() if asked is None else client.answer(asked))
    assert reply.outcome == (200, -32603, "call_lost")
    assert "timeouts.answer_seconds" in reply.error["message"]
    assert "if it is only slow, raise timeouts.answer_seconds" in stand.gateway.recent_errors.told()[0].fix


async def test_a_result_that_overtakes_its_post_is_the_result(old: FakeSse, stand: Stand, client: Client) -> None:
    async def early(_: FakeSse, stream: Stream, message: Message) -> None:
        stream.say(id=message["id"], result=text("early"))
        await asyncio.get_running_loop().create_future()

    old.tool = early
    assert (await client.call()).text == "early"
    assert (await client.call()).text == "early", "the session is free although its POST is not over"
    await eventually(lambda: not stand.busy_tasks(), "nobody waits for the POSTs any more")
    assert (await client.call()).text == "early"
    assert len(old.streams) == 1, "and the session is as good as before"


@pytest.mark.parametrize(
    ("said", "cause"), [(b"data: {no json\n\n", ""), (b"data: " + b"x" * 70_000, "limits.event_bytes")]
)
async def test_what_is_no_message_on_the_stream_ends_the_call(
    old: FakeSse, begin: Start, said: bytes, cause: str
) -> None:
    async def babble(_: FakeSse, stream: Stream, _message: Message) -> None:
        stream.raw(said)

    old.tool = babble
    reply = await (await sse(begin, old, limits={"event_bytes": 65_536})).client().call()
    assert reply.outcome == (200, -32603, "call_lost")
    assert cause in reply.error["message"]


async def test_credentials_that_are_refused_are_told_to_the_client(old: FakeSse, stand: Stand) -> None:
    async def refuse(_: Message) -> web.Response:
        return web.Response(status=401, headers={"WWW-Authenticate": 'Bearer realm="x"'})

    client = stand.client("Bearer ann")
    old.get_status = 401
    assert (await client.call()).status == 401
    old.get_status = 200
    _ = await client.call()
    old.post = refuse
    reply = await client.call()
    assert (reply.status, reply.headers["WWW-Authenticate"]) == (401, 'Bearer realm="x"')


# --- which transport it is ---


async def test_the_transport_is_found_out_once(old: FakeSse, begin: Start) -> None:
    stand = await auto(begin, old.url)
    assert (await stand.client("Bearer ann").call()).text == "done"
    assert old.seen[:3] == [("POST", "/sse"), ("POST", "/sse"), ("GET", "/sse")], "its era, and then its transport"
    assert (await stand.client("Bearer bob").call()).text == "done"
    assert old.seen.count(("POST", "/sse")) == 2


@pytest.mark.parametrize("status", [400, 404, 405])
async def test_what_refuses_initialize_as_an_older_server_would_is_asked_for_its_stream(
    old: FakeSse, begin: Start, status: int
) -> None:
    old.post_sse_status = status
    assert (await (await auto(begin, old.url)).client().call()).text == "done"


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_upstream_in_trouble_proves_nothing(old: FakeSse, begin: Start, status: int) -> None:
    old.post_sse_status = status
    stand = await auto(begin, old.url)
    assert f"HTTP {status}" in (await stand.client().call()).error["message"]
    assert ("GET", "/sse") not in old.seen
    old.post_sse_status = 405
    assert (await stand.client().call()).text == "done", "and nothing was remembered"


async def test_what_speaks_neither_says_so(upstream: FakeUpstream, begin: Start) -> None:
    async def refuse(turn: Turn) -> None:
        turn.reply(405)

    upstream.on("initialize", refuse)
    upstream.on("GET", refuse)
    client = (await auto(begin, upstream.url)).client()
    for _ in range(2):
        reply = await client.call()
        assert reply.outcome == (200, -32603, "upstream_unreachable")
        assert "HTTP 405" in reply.error["message"]
        assert "nor does it speak HTTP+SSE" in reply.error["message"]
    assert upstream.words == ["initialize", "GET"] * 2


async def test_a_stream_that_names_no_endpoint_does_not_count_as_http_sse(
    old: FakeSse, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.endpoint = None
    monkeypatch.setattr(http_sse, "ENDPOINT_SECONDS", 0.1)
    stand = await auto(begin, old.url)
    reply = await stand.client().call()
    assert "did not name an endpoint" in reply.error["message"]
    await asyncio.wait_for(old.streams[0].closed.wait(), 5)


async def test_a_message_behind_the_end_of_its_session_in_one_packet_is_not_heard(old: FakeSse, begin: Start) -> None:
    stand = await sse(begin, old, limits={"event_bytes": 10_000})
    client = stand.client()
    answering = later(parked(old, client))
    call = (await old.heard("tools/call"))[0]
    _ = await answering
    result = json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": text("late")})
    old.streams[0].raw(b"data: %b\n\ndata: %b\n\n" % (b"x" * 20_000, result.encode()))
    await asyncio.wait_for(old.streams[0].closed.wait(), 5)
    assert (await client.answer(await answering)).outcome == (200, -32603, "call_lost")


async def test_a_finding_that_proves_wrong_is_replaced(old: FakeSse, upstream: FakeUpstream, begin: Start) -> None:
    """The server is upgraded behind its URL."""
    stand = await auto(begin, old.url, sessions={"idle_seconds": 0})
    client = stand.client()
    assert (await client.call()).text == "done"
    old.instead = upstream.handle
    assert (await client.call()).text == "done"
    assert upstream.words[:2] == ["GET", "initialize"], "what was found is tried first"
    assert (await client.call()).text == "done"
    tried = [seen for seen in upstream.of("GET") if seen.session is None]
    assert len(tried) == 1, "and then what was found instead"
    old.instead = None
    assert (await client.call()).text == "done", "and back"


async def test_a_call_that_another_process_holds_over_streamable_http_is_not_lost_by_a_finding(
    old: FakeSse, begin: Start
) -> None:
    """A channel that finds its transport is one of streamable HTTP until `open` says otherwise."""
    stand = await auto(begin, old.url)
    _ = await stand.client().call()
    channel = stand.gateway.routes.live["/mcp"].upstream.pool.connect()
    channel.adopt("s1", "2025-11-25")
    assert channel.session_id == "s1"


async def test_a_header_that_cannot_be_sent_is_what_keeps_a_session_from_being_opened(
    old: FakeSse, stand: Stand
) -> None:
    channel = stand.gateway.routes.live["/mcp"].upstream.pool.connect()
    with pytest.raises(ValueError, match="header"):
        _ = await channel.initialize(b"{}", {"A": "b\r\nc"})
    assert old.seen == []
    await channel.close(end_session=True)

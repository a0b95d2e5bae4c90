"""subscriptions/listen: acknowledged, filtered, passed on, ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.bridge import subscription
from gateway.protocol import mcp, sse
from gateway.server.drain import drain
from tests.support.fake_upstream import FakeUpstream, Turn, event
from tests.support.schema import assert_modern_message
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually, later

EVERYTHING = {
    "toolsListChanged": True,
    "promptsListChanged": True,
    "resourcesListChanged": True,
    "resourceSubscriptions": ["file:///a", "file:///b"],
}
OFFERED = {
    "tools": {"listChanged": True},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True, "subscribe": True},
}


@pytest.fixture(autouse=True)
def _offers_everything(upstream: FakeUpstream) -> None:
    upstream.capabilities = OFFERED


class Stream:
    """The messages of one subscription."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.acknowledged: dict[str, Any]
        """The first message."""
        self._response = response
        self._parser = sse.Parser(1 << 20)
        self._messages: list[dict[str, Any]] = []

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(3):
            while not self._messages:
                chunk = await self._response.content.readany()
                assert chunk, "the stream ended"
                for heard in self._parser.feed(chunk):
                    self._messages.append(assert_modern_message(heard.data, mcp.LISTEN))
        return self._messages.pop(0)


@asynccontextmanager
async def listening(client: Client, chosen: dict[str, Any] = EVERYTHING) -> AsyncIterator[Stream]:
    """A subscription that was acknowledged."""
    async with client.open(mcp.LISTEN, {"notifications": chosen}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        stream = Stream(response)
        stream.acknowledged = await stream.next()
        yield stream


def change(method: str, **params: Any) -> bytes:
    return event({"jsonrpc": "2.0", "method": f"notifications/{method}", **({"params": params} if params else {})})


async def test_the_acknowledgement_names_what_the_upstream_can_tell(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities = {"tools": {"listChanged": True}, "resources": {"subscribe": True}, "prompts": {}}

    async def subscribe(turn: Any) -> None:
        if turn.body["params"]["uri"].endswith("b"):
            await turn.error(-32002, "no such resource")
        else:
            await turn.result()

    upstream.on(mcp.SUBSCRIBE, subscribe)
    async with listening(client) as stream:
        first = stream.acknowledged
    assert first["method"] == mcp.ACKNOWLEDGED
    assert first["params"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1"}
    assert first["params"]["notifications"] == {"toolsListChanged": True, "resourceSubscriptions": ["file:///a"]}


async def test_what_was_chosen_is_passed_on_and_nothing_else(upstream: FakeUpstream, client: Client) -> None:
    chosen = {"toolsListChanged": True, "resourceSubscriptions": ["file:///a"]}
    async with listening(client, chosen) as stream:
        side = upstream.side("s1")
        for sent in (
            change("prompts/list_changed"),
            change("resources/list_changed"),
            change("resources/updated", uri="file:///b"),
            change("message", level="error", data="x"),
            change("tools/list_changed"),
            change("resources/updated", uri="file:///a", _meta={"x/y": 1}),
        ):
            side.put_nowait(sent)
        one, two = await stream.next(), await stream.next()
    assert one["method"] == mcp.TOOLS_CHANGED
    assert one["params"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1"}
    assert two["method"] == mcp.RESOURCE_UPDATED
    assert two["params"] == {"uri": "file:///a", "_meta": {"x/y": 1, mcp.META_SUBSCRIPTION: "c1"}}


async def test_damaged_changes_harm_nothing(upstream: FakeUpstream, client: Client) -> None:
    async with listening(client) as stream:
        for params in ("5", "[]", '{"_meta":5}', '{"uri":7}'):
            upstream.side("s1").put_nowait(
                b'data: {"jsonrpc":"2.0","method":"notifications/resources/updated","params":%b}\n\n' % params.encode()
            )
        upstream.side("s1").put_nowait(change("tools/list_changed"))
        while (await stream.next())["method"] != mcp.TOOLS_CHANGED:
            pass


async def test_closing_the_stream_frees_the_session(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    async with listening(client):
        assert stand.sessions("busy") == 1
        assert stand.metric("mcp_gateway_subscriptions") == 1
    assert (await upstream.saw("DELETE"))[0].session == "s1"
    await eventually(lambda: stand.sessions("busy") == 0)
    assert not stand.gateway.routes.live["/mcp"].upstream.subscriptions
    assert stand.metric("mcp_gateway_subscriptions") == 0
    taken_back = [seen.body["params"]["uri"] for seen in upstream.of(mcp.UNSUBSCRIBE)]
    assert taken_back == EVERYTHING["resourceSubscriptions"]
    assert upstream.words.index("DELETE") > upstream.words.index(mcp.UNSUBSCRIBE)


async def test_a_server_that_does_not_take_subscriptions_back_holds_nothing_up(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.on(mcp.UNSUBSCRIBE, Turn.for_ever)
    async with listening(client):
        pass
    await upstream.saw(mcp.UNSUBSCRIBE)
    await eventually(lambda: stand.sessions("busy") == 0)
    assert "DELETE" not in upstream.words, "not under a request that may still run"


async def test_a_subscription_to_nothing_holds_no_session(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.capabilities = {"tools": {}}
    async with listening(client):
        assert (stand.sessions("busy"), stand.sessions("idle")) == (0, 1)
        await client.call()
        assert upstream.words.count("initialize") == 1, "it serves calls"


async def test_a_drain_ends_subscriptions_gracefully(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    async with listening(client) as stream:
        draining = later(drain(stand.gateway, delay_seconds=0))
        last = await stream.next()
        upstream.side("s1").put_nowait(change("tools/list_changed"))
        await asyncio.wait_for(draining, 2)
    assert last["id"] == "c1"
    assert last["result"]["resultType"] == "complete"
    assert last["result"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1"}


async def test_a_drain_sends_a_subscription_away_that_is_just_opening(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.on(mcp.SUBSCRIBE, Turn.for_ever)
    opening = later(stand.client().post(mcp.LISTEN, {"notifications": EVERYTHING}))
    await upstream.saw(mcp.SUBSCRIBE)
    await asyncio.wait_for(drain(stand.gateway, delay_seconds=0), 2)
    reply = await opening
    assert reply.status == 503, "an acknowledgement of what it has by now would be false"
    assert reply.headers["Retry-After"] == "1"


# -- the upstream's stream is lost ---------------------------------------------------------------------------------

EVERY_CHANGE = {
    (mcp.TOOLS_CHANGED, None),
    (mcp.PROMPTS_CHANGED, None),
    (mcp.RESOURCES_CHANGED, None),
    (mcp.RESOURCE_UPDATED, "file:///a"),
    (mcp.RESOURCE_UPDATED, "file:///b"),
}


async def everything_once(stream: Stream) -> None:
    """The next messages say of everything, once, that it may have changed."""
    heard = [await stream.next() for _ in EVERY_CHANGE]
    assert {(one["method"], one["params"].get("uri")) for one in heard} == EVERY_CHANGE
    assert all(one["params"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1"} for one in heard)


async def test_a_stream_opened_again_in_the_same_session_announces_what_may_be_missed(
    upstream: FakeUpstream, client: Client
) -> None:
    async with listening(client) as stream:
        upstream.side("s1").put_nowait(None)
        await everything_once(stream)
        upstream.side("s1").put_nowait(change("tools/list_changed"))
        assert (await stream.next())["method"] == mcp.TOOLS_CHANGED
    assert upstream.words.count("initialize") == 1
    assert len(upstream.of(mcp.SUBSCRIBE)) == 2


async def test_a_stream_that_ends_before_the_subscription_costs_no_topic(
    upstream: FakeUpstream, client: Client
) -> None:
    go_on: list[asyncio.Event] = []

    async def lose_the_stream(turn: Turn) -> None:
        go_on.append(upstream.holding("GET"))
        upstream.side("s1").put_nowait(None)
        await upstream.saw("GET", 2)
        turn.reply(202)

    upstream.once("notifications/initialized", lose_the_stream)
    async with listening(client) as stream:
        assert stream.acknowledged["params"]["notifications"] == EVERYTHING
        go_on[0].set()
        await everything_once(stream)


async def test_a_server_that_was_restarted_is_subscribed_to_anew(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    failing = [503, 503]

    async def start_slowly(turn: Turn) -> None:
        if failing:
            turn.reply(failing.pop())
        else:
            await upstream.initialize(turn)

    async with listening(client) as stream:
        upstream.on("initialize", start_slowly)
        upstream.forget()
        upstream.side("s1").put_nowait(None)
        await everything_once(stream)
        assert not failing
        assert [seen.session for seen in upstream.of(mcp.SUBSCRIBE)] == ["s1", "s1", "s2", "s2"]
        upstream.side("s2").put_nowait(change("resources/updated", uri="file:///b"))
        assert (await stream.next())["params"]["uri"] == "file:///b"
        assert stand.sessions("busy") == 1
        assert stand.metric("mcp_gateway_subscriptions_lost_total", outcome="reopened") == 1
    assert (await upstream.saw("DELETE"))[0].session == "s2", "the one that the server does not know is not ended"


@pytest.mark.parametrize("word", ["401", "less", "gone", "no stream"])
async def test_what_cannot_be_kept_ends_the_subscription(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    async with listening(client) as stream:
        if word == "less":
            upstream.capabilities = {**OFFERED, "tools": {}}
        elif word == "no stream":
            upstream.on("GET", lambda turn: turn.reply(405))
        else:
            upstream.on("initialize", lambda turn: turn.reply(401 if word == "401" else 503))
            if word == "gone":
                monkeypatch.setattr(subscription, "_GIVE_UP_SECONDS", 0.05)
        upstream.forget()
        upstream.side("s1").put_nowait(None)
        last = await stream.next()
    assert last["id"] == "c1"
    assert last["result"]["resultType"] == "complete", "rather an end than changes that are missed"
    assert stand.metric("mcp_gateway_subscriptions_lost_total", outcome="ended") == 1
    await eventually(lambda: stand.sessions("busy") == 0)


async def test_a_stream_that_was_taken_for_open_and_never_was_ends_the_subscription(
    upstream: FakeUpstream, client: Client
) -> None:
    go_on = upstream.holding("GET", lambda turn: turn.reply(405))
    async with listening(client) as stream:
        assert stream.acknowledged["params"]["notifications"] == EVERYTHING
        go_on.set()
        assert (await stream.next())["result"]["resultType"] == "complete"
    assert upstream.words.count("initialize") == 1


async def test_a_client_that_leaves_while_the_server_is_away_stops_the_attempts(
    upstream: FakeUpstream, client: Client
) -> None:
    async with listening(client):
        upstream.on("initialize", lambda turn: turn.reply(503))
        upstream.forget()
        upstream.side("s1").put_nowait(None)
        await upstream.saw("initialize", 3)
    # That no attempt and no session is left is seen by the fixture.


async def test_a_flood_costs_one_message_for_each_thing(stand: Stand) -> None:
    async with listening(stand.client()) as stream:
        (session,) = stand.group().sessions
        for number in range(3000):  # all in one go: the client cannot read meanwhile
            for sent in (
                change("tools/list_changed", _meta={"x/n": number}),
                change("resources/updated", uri="file:///a", blob="x" * 20_000),
                change("resources/updated", uri=f"file:///{number}"),
            ):
                session.hear_side(sse.Parser(1 << 20).feed(sent)[0].data)
        session.hear_side(sse.Parser(1 << 20).feed(change("prompts/list_changed"))[0].data)
        one, two, three = [await stream.next() for _ in range(3)]
    assert one["params"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1", "x/n": 2999}
    assert three["method"] == "notifications/prompts/list_changed", "there was no other"
    assert two["params"] == {"uri": "file:///a", "_meta": {mcp.META_SUBSCRIPTION: "c1"}}, "without what is too large"


async def test_a_subscription_is_kept_alive_by_comments(begin: Start) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.02})
    async with stand.client().open(mcp.LISTEN, {"notifications": {}}) as response:
        seen = b""
        while seen.count(b":\n\n") < 2:
            seen += await response.content.readany()
    assert b"acknowledged" in seen


@pytest.mark.parametrize("params", [{}, {"notifications": 5}, {"notifications": {"toolsListChanged": "yes"}}])
async def test_a_bad_filter_opens_no_session(upstream: FakeUpstream, client: Client, params: dict[str, Any]) -> None:
    assert (await client.post(mcp.LISTEN, params)).refusal == (400, -32602)
    too_many = {"notifications": {"resourceSubscriptions": ["x:y"] * 1001}}
    assert (await client.post(mcp.LISTEN, too_many)).refusal == (400, -32602)
    assert upstream.seen == []


async def test_without_a_side_stream_nothing_is_promised(upstream: FakeUpstream, client: Client) -> None:
    upstream.on("GET", lambda turn: turn.reply(405))
    async with listening(client) as stream:
        assert stream.acknowledged["params"]["notifications"] == {}
    assert mcp.SUBSCRIBE not in upstream.words

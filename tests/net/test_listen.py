"""subscriptions/listen: acknowledged, filtered, passed on, ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway.core import mcp, sse
from tests.net.conftest import Start
from tests.net.fake_upstream import FakeUpstream, event
from tests.net.workbench import Client, Stand, eventually
from tests.schema import assert_modern_message

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


class Stream:
    """The messages of one subscription."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
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
async def listening(client: Client, chosen: dict[str, Any]) -> AsyncIterator[Stream]:
    async with client.open(mcp.LISTEN, {"notifications": chosen}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        yield Stream(response)


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
    async with listening(client, EVERYTHING) as stream:
        first = await stream.next()
    assert first["method"] == mcp.ACKNOWLEDGED
    assert first["params"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1"}
    assert first["params"]["notifications"] == {"toolsListChanged": True, "resourceSubscriptions": ["file:///a"]}


async def test_what_was_chosen_is_passed_on_and_nothing_else(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities = OFFERED
    chosen = {"toolsListChanged": True, "resourceSubscriptions": ["file:///a"]}
    async with listening(client, chosen) as stream:
        await stream.next()
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
    upstream.capabilities = OFFERED
    async with listening(client, EVERYTHING) as stream:
        await stream.next()
        for params in ("5", "[]", '{"_meta":5}', '{"uri":7}'):
            upstream.side("s1").put_nowait(
                b'data: {"jsonrpc":"2.0","method":"notifications/resources/updated","params":%b}\n\n' % params.encode()
            )
        upstream.side("s1").put_nowait(change("tools/list_changed"))
        while (await stream.next())["method"] != mcp.TOOLS_CHANGED:
            pass


async def test_closing_the_stream_frees_the_session(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    async with listening(client, {}) as stream:
        await stream.next()
        assert stand.sessions("busy") == 1
    assert (await upstream.saw("DELETE"))[0].session == "s1"
    await eventually(lambda: stand.sessions("busy") == 0)
    assert not stand.gateway.routes.bridges["/mcp"].listeners


async def test_a_drain_ends_subscriptions_gracefully(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    upstream.capabilities = OFFERED
    async with listening(client, EVERYTHING) as stream:
        await stream.next()
        drain = asyncio.get_running_loop().create_task(stand.gateway.drain(delay_seconds=0))
        last = await stream.next()
        upstream.side("s1").put_nowait(change("tools/list_changed"))
        await asyncio.wait_for(drain, 2)
    assert last["id"] == "c1"
    assert last["result"]["resultType"] == "complete"
    assert last["result"]["_meta"] == {mcp.META_SUBSCRIPTION: "c1"}


async def test_a_side_stream_lost_for_good_ends_the_subscription(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities = OFFERED
    async with listening(client, EVERYTHING) as stream:
        await stream.next()

        async def refuse(turn: Any) -> None:
            turn.reply(405)

        upstream.on("GET", refuse)
        upstream.side("s1").put_nowait(None)
        last = await stream.next()
    assert last["result"]["resultType"] == "complete", "rather an end than changes that are missed"


async def test_a_subscription_is_kept_alive_by_comments(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.02})
    async with stand.client().open(mcp.LISTEN, {"notifications": {}}) as response:
        seen = b""
        while seen.count(b":\n\n") < 2:
            seen += await response.content.readany()
    assert b"acknowledged" in seen


@pytest.mark.parametrize("params", [{}, {"notifications": 5}, {"notifications": {"toolsListChanged": "yes"}}])
async def test_a_bad_filter_opens_no_session(upstream: FakeUpstream, client: Client, params: dict[str, Any]) -> None:
    assert (await client.post(mcp.LISTEN, params)).outcome[:2] == (400, -32602)
    too_many = {"notifications": {"resourceSubscriptions": ["x:y"] * 1001}}
    assert (await client.post(mcp.LISTEN, too_many)).outcome[:2] == (400, -32602)
    assert upstream.seen == []


async def test_without_a_side_stream_nothing_is_promised(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities = OFFERED

    async def refuse(turn: Any) -> None:
        turn.reply(405)

    upstream.on("GET", refuse)
    async with listening(client, EVERYTHING) as stream:
        assert (await stream.next())["params"]["notifications"] == {}
    assert mcp.SUBSCRIBE not in upstream.words

"""The standalone streams of mirrored sessions, with their subscriptions."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.config import parse
from gateway.mirror.streamable import session_homes
from gateway.mirror.streamable.session_homes import Home
from gateway.protocol import mcp
from tests.mirror.conftest import Begin, mirror_of
from tests.support.fake_modern import FakeModern, Json
from tests.support.legacy_client import LegacyClient
from tests.support.workbench import Stand, configuration, eventually, later

CHANGED: Json = {"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED, "params": {}}


async def session_of(stand: Stand, caller: str) -> LegacyClient:
    return await LegacyClient(stand, headers={"Authorization": f"Bearer {caller}"}).initialize()


def homes(stand: Stand) -> list[Home]:
    return mirror_of(stand).homes._homes.values()


async def test_a_stream_that_is_opened_anew_survives_the_end_of_the_old_one(begin: Begin, server: FakeModern) -> None:
    stand = await begin()
    client = await LegacyClient(stand).initialize()
    opened = asyncio.Event()

    async def again() -> Json:
        async with client.listen() as stream:
            assert stream.response.status == 200
            opened.set()
            while (message := await stream.message()) != CHANGED:
                pass
            return message

    async with client.listen():
        server.may_listen.clear()
        second = later(again())
        await eventually(lambda: len(server.of(mcp.LISTEN)) == 2)
    await eventually(lambda: stand.metric("mcp_gateway_subscriptions") == 0, "the gateway has noticed")
    server.may_listen.set()
    await eventually(lambda: opened.is_set() or second.done())
    await eventually(lambda: len(server.listeners) == 1 or second.done())
    await server.listeners[0](CHANGED)
    assert await second == CHANGED
    await eventually(lambda: not server.listeners)


async def test_a_stream_that_cannot_be_opened_is_no_stream(begin: Begin, server: FakeModern) -> None:
    """A status of 200 would say that there is one, which says nothing and ends."""
    client = await LegacyClient(await begin()).initialize()
    await server.close()
    async with client.listen() as stream:
        assert stream.response.status == 502
        assert (await stream.message())["error"]["data"]["reason"] == "upstream_unreachable"
    async with client.request("resources/subscribe", {"uri": "a://b"}) as stream:
        assert stream.response.status == 200, "the session goes on"


async def test_a_refused_subscription_leaves_no_stream_at_the_server(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin()).initialize()
    server.silent_about.add("a://b")
    async with client.request("resources/subscribe", {"uri": "a://b"}) as stream:
        assert (await stream.message())["error"]["code"] == mcp.INVALID_PARAMS
        assert stream.response.status == 200, "the session goes on"
    await eventually(lambda: not server.listeners)


async def test_a_stream_whose_credential_the_server_refuses_now_ends_so_that_the_client_signs_in_again(
    begin: Begin, server: FakeModern
) -> None:
    client = await LegacyClient(await begin()).initialize()
    async with client.listen() as stream:
        _ = await stream.event()
        server.credential = "Bearer new"
        await server.listeners[0]({"jsonrpc": "2.0", "id": server.of(mcp.LISTEN)[0]["id"], "result": {}})
        while await stream.event():
            pass
    async with client.listen() as refused:
        assert refused.response.status == 401
        assert refused.response.headers["WWW-Authenticate"] == server.challenge


async def test_a_session_listens_to_the_server_that_a_reload_gave_its_route(begin: Begin, server: FakeModern) -> None:
    stand = await begin()
    client = await LegacyClient(stand).initialize()
    async with client.listen() as stream:
        _ = await stream.event()
    (before,) = homes(stand)
    async with FakeModern() as other:
        stand.gateway.apply(parse(configuration(other.url, route={"era": "mirror"}), "test", {}))
        async with client.listen() as stream:
            _ = await stream.event()
            await eventually(lambda: len(other.listeners) == 1)
        assert before not in homes(stand)
        await eventually(lambda: not (server.listeners or other.listeners))


async def test_subscriptions_share_a_budget_in_which_the_oldest_give_way(begin: Begin, server: FakeModern) -> None:
    stand = await begin(limits={"results_bytes": 1_000})
    first, second = await LegacyClient(stand).initialize(), await LegacyClient(stand).initialize()
    uri = "a://" + "x" * 600
    async with first.listen() as stream:
        assert (await first.ask("resources/subscribe", {"uri": uri}))["result"] == {}
        assert (await second.ask("resources/subscribe", {"uri": uri}))["result"] == {}
        while await stream.event():
            pass
    assert stand.gateway.lot.results.used < 1_000
    assert await second.end() == 200
    assert stand.gateway.lot.results.used == 0
    assert homes(stand) == []


async def test_the_streams_of_one_caller_end_no_stream_of_another(
    begin: Begin, server: FakeModern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_homes, "_MAX_HOMES", 3)
    stand = await begin()
    ann = await session_of(stand, "ann")
    async with ann.listen() as stream, AsyncExitStack() as flood:
        _ = await stream.event()
        eves = [
            await (await flood.enter_async_context((await session_of(stand, "eve")).listen())).event()
            for _ in range(5)
        ]
        assert len(eves) == 5
        assert len(homes(stand)) == 3
        await eventually(lambda: len(server.listeners) == 3, "the oldest streams of the flood are closed")
        await server.listeners[0](CHANGED)
        assert await stream.message() == CHANGED


async def test_the_subscriptions_of_one_caller_end_no_stream_of_another(begin: Begin, server: FakeModern) -> None:
    stand = await begin(limits={"results_bytes": 3_000})
    ann, uri = await session_of(stand, "ann"), "a://" + "x" * 600
    async with ann.listen() as stream:
        _ = await stream.event()
        assert (await ann.ask("resources/subscribe", {"uri": "a://a"}))["result"] == {}
        for _ in range(7):
            assert (await (await session_of(stand, "eve")).ask("resources/subscribe", {"uri": uri}))["result"] == {}
        listening = server.of(mcp.LISTEN)
        assert "a://a" in [
            uri for body in listening for uri in body["params"]["notifications"]["resourceSubscriptions"]
        ]
        await server.listeners[0](CHANGED)
        assert await stream.message() == CHANGED
    assert stand.gateway.lot.results.used <= 3_000


async def test_one_caller_makes_nobody_elses_level_or_end_forgotten(
    begin: Begin, server: FakeModern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_homes, "_MAX_LEVELS", 3)
    monkeypatch.setattr(session_homes, "_MAX_ENDED", 3)
    stand = await begin()
    ann, gone = await session_of(stand, "ann"), await session_of(stand, "ann")
    assert (await ann.ask("logging/setLevel", {"level": "error"}))["result"] == {}
    assert await gone.end() == 200
    for _ in range(5):
        eve = await session_of(stand, "eve")
        assert (await eve.ask("logging/setLevel", {"level": "info"}))["result"] == {}
        assert await (await session_of(stand, "eve")).end() == 200
    server.tools["level"] = lambda call: call.text(call.meta[mcp.META_LOG_LEVEL])
    async with ann.call("level") as stream:
        assert "error" in str(await stream.message())
    async with gone.request("ping") as stream:
        assert stream.response.status == 404

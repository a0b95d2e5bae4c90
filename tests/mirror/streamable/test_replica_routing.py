"""Mirrored sessions over several replicas, each request at another one, and with replicas that die."""

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from msgspec.structs import replace

from gateway.cluster.peer_errors import ReplyBroken
from gateway.mirror.streamable.tokens import EVENT, NESTED
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.mirror.conftest import mirror_of, sealed
from tests.mirror.streamable.test_front import ACCEPT, text
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.legacy_client import DEADLINE, LegacyClient, Stream
from tests.support.logs import Lines
from tests.support.replicas import Cluster
from tests.support.workbench import Stand, eventually, later

MIRROR: dict[str, Any] = {"route": {"era": "mirror"}}
DECLINE: Json = {"action": "decline"}


async def asked(stream: Stream) -> tuple[Json, str]:
    """The next question, with the id of its event."""
    question = await stream.message()
    assert stream.last
    return question, stream.last


async def pair(server: FakeModern, cluster: Cluster, **sections: Any) -> tuple[Stand, Stand, LegacyClient]:
    """Two replicas before a server whose tool asks, and a client of the first one."""
    one, two = await cluster.begin("gw-1", "gw-2", **MIRROR | sections)
    return one, two, await LegacyClient(one).initialize()


async def asked_by_a_replica_that_dies(
    cluster: Cluster, dying: Stand, client: LegacyClient, arguments: Json | None = None
) -> tuple[Json, str]:
    """The question of a call, with the id of its event."""
    async with client.call("ask", arguments) as stream:
        found = await asked(stream)
        await cluster.crash(dying)
    return found


async def answered_at(url: str, client: LegacyClient, question: Json, place: str) -> None:
    """Come back to a replica for a call, and answer its question there."""
    async with client.listen(place, url=url) as stream:
        _ = await stream.place()
        assert await client.answer(question, ACCEPT, url=url) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


def both(call: Call) -> Json:
    return call.text(call.answers) if call.answers else call.ask(a=FORM, b=FORM)


class Gate:
    """A tool that asks, and then waits for the test."""

    def __init__(self, server: FakeModern, name: str = "slow") -> None:
        self.answered, self.go = asyncio.Event(), asyncio.Event()
        server.tools[name] = self.tool

    async def tool(self, call: Call) -> Json:
        if not call.answers:
            return call.ask(name=FORM)
        self.answered.set()
        await self.go.wait()
        return call.text(call.answers)

    async def answered_by(self, client: LegacyClient, stream: Stream) -> None:
        """Answer the question, and wait until the server has the answer."""
        question, _ = await asked(stream)
        assert await client.answer(question, ACCEPT) == 202
        await self.answered.wait()


async def test_what_the_dead_replica_was_answered_is_asked_again(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster)
    server.tools["both"] = both
    async with client.call("both") as stream:
        first, second = await stream.message(), await stream.message()
        before = stream.last
        assert await client.answer(first, DECLINE) == 202
        assert await stream.place() != before
        place = str(stream.last)
        await cluster.crash(one)
    async with client.listen(place, url=two.url) as stream:
        again = await stream.message()
        assert again["id"] != first["id"]
        assert await client.answer(again, ACCEPT, url=two.url) == 202
        assert await client.answer(second, DECLINE, url=two.url) == 202
        assert text(await stream.message()) == {"a": ACCEPT, "b": DECLINE}
    assert len(server.of("tools/call")) == 2


async def test_time_in_which_a_client_thought_of_a_question_counts_if_it_is_asked_again(
    server: FakeModern, cluster: Cluster
) -> None:
    one, two, client = await pair(server, cluster)
    server.tools["both"] = both
    async with client.call("both") as stream:
        first, second = await stream.message(), await stream.message()
        assert await client.answer(first, ACCEPT) == 202
        place = str(await stream.place())
        await cluster.crash(one)
    async with client.listen(place, url=two.url) as stream:
        _ = await stream.message()
        await asyncio.sleep(0.5)
    async with client.listen(place, url=two.url) as stream:
        for question in (await stream.message(), second):
            assert await client.answer(question, ACCEPT, url=two.url) == 202
        assert text(await stream.message()) == {"a": ACCEPT, "b": ACCEPT}
    assert 0 < two.metric("mcp_server_operation_duration_seconds_sum", method="tools/call") < 0.5


async def test_a_call_that_ran_is_lost_with_its_replica(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster)
    gate = Gate(server)
    async with client.call("slow") as stream:
        await gate.answered_by(client, stream)
        place = await stream.place()
        await cluster.crash(one)
    async with client.listen(place, url=two.url) as stream:
        error = (await stream.message())["error"]
    assert (error["code"], error["data"]["reason"]) == (-32603, "owner_lost")
    assert len(server.of("tools/call")) == 2


async def test_an_ephemeral_call_that_ran_is_run_again(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster, route={"era": "mirror", "ephemeral": ["slow"]})
    gate = Gate(server)
    async with client.call("slow", {"n": 1}) as stream:
        await gate.answered_by(client, stream)
        place = await stream.place()
        await cluster.crash(one)
    gate.go.set()
    async with client.listen(place, url=two.url) as stream:
        question, _ = await asked(stream)
        assert await client.answer(question, DECLINE, url=two.url) == 202
        assert text(await stream.message()) == {"name": DECLINE}
    assert [call["params"]["arguments"] for call in server.of("tools/call")] == [{"n": 1}] * 4


async def test_what_no_id_can_carry_is_lost_with_its_replica(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster)
    async with client.call("ask", {"text": "x" * 5_000}) as stream:
        question, place = await asked(stream)
        assert len(question["id"]) < 1_000
        assert await client.answer(question, ACCEPT, url=two.url) == 202, "as long as it lives, it is answered"
        assert text(await stream.message()) == {"name": ACCEPT}
    question, place = await asked_by_a_replica_that_dies(cluster, one, client, {"text": "x" * 5_000})
    assert await client.answer(question, ACCEPT, url=two.url) == 202
    async with client.listen(place, url=two.url) as stream:
        assert (await stream.message())["error"]["data"]["reason"] == "owner_lost"
    assert len(server.of("tools/call")) == 3


async def test_an_older_client_cannot_come_back_so_its_answer_runs_nothing(
    server: FakeModern, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **MIRROR)
    client = await LegacyClient(one, version="2025-06-18").initialize()
    async with client.call("ask") as stream:
        question = await stream.message()
        await cluster.crash(one)
    assert await client.answer(question, ACCEPT, url=two.url) == 202
    assert len(server.of("tools/call")) == 1


async def test_a_cancellation_reaches_the_replica_that_holds_the_call(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster)
    gate = Gate(server)
    async with client.request("tools/call", {"name": "slow", "arguments": {}}, id_="c1") as stream:
        await gate.answered_by(client, stream)
        assert await client.notify(mcp.CANCELLED, {"requestId": "c1"}, url=two.url) == 202
        assert one.metric("mcp_gateway_mirrored_calls") == 0, "before it was accepted"
        await eventually(lambda: server.left == 1)


async def test_a_client_that_comes_back_to_a_call_that_its_owner_does_not_serve_is_logged_with_the_call(
    server: FakeModern, cluster: Cluster, log_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, client = await pair(server, cluster)
    async with client.call("ask") as stream:
        question, place = await asked(stream)
    with monkeypatch.context() as patch:
        patch.setattr(one.gateway.downstream, "handle_hop", AsyncMock(side_effect=ReplyBroken))
        async with client.listen(place, url=two.url) as stream:
            assert stream.response.status == 503
    await answered_at(two.url, client, question, place)
    (finished,) = log_lines("exchange.finished")
    assert {line["exchange_id"] for line in log_lines("peer.failed")} == {finished["exchange_id"]}


async def test_a_call_of_a_dead_replica_does_not_take_the_place_of_one_with_its_id(
    server: FakeModern, cluster: Cluster, log_lines: Lines
) -> None:
    one, two, client = await pair(server, cluster)
    call = {"name": "ask", "arguments": {}}
    async with client.request("tools/call", call, id_="c1") as stream:
        question, place = await asked(stream)
        await cluster.crash(one)
    async with client.request("tools/call", call, id_="c1", url=two.url) as newer:
        _ = await asked(newer)
        async with client.listen(place, url=two.url) as stream:
            _ = await stream.place()
            assert await client.notify(mcp.CANCELLED, {"requestId": "c1"}, url=two.url) == 202
            assert await client.answer(question, ACCEPT, url=two.url) == 202
            assert text(await stream.message()) == {"name": ACCEPT}
    assert [line["outcome"] for line in log_lines("exchange.finished")] == ["cancelled", "complete"]


async def test_all_replicas_know_the_log_level(server: FakeModern, cluster: Cluster) -> None:
    _, two, client = await pair(server, cluster)
    server.tools["level"] = lambda call: call.text(call.meta[mcp.META_LOG_LEVEL])
    async with client.request("logging/setLevel", {"level": "alert"}) as stream:
        assert (await stream.message())["result"] == {}
    found = None
    while found != "alert":
        async with client.call("level", url=two.url) as stream:
            found = text(await stream.message())


@pytest.mark.parametrize("at", [0, 1])
async def test_changes_reach_the_standalone_stream_at_whichever_replica_it_is(
    server: FakeModern, cluster: Cluster, at: int
) -> None:
    stands = await cluster.begin("gw-1", "gw-2", **MIRROR)
    client = await LegacyClient(stands[0]).initialize()
    async with client.listen(url=stands[at].url) as stream:
        assert stream.response.status == 200
        async with client.request("resources/subscribe", {"uri": "a://b"}, stands[1 - at].url) as subscribed:
            assert (await subscribed.message())["result"] == {}
        await eventually(lambda: len(server.listeners) == 1)
        updated = {"jsonrpc": "2.0", "method": mcp.RESOURCE_UPDATED, "params": {"uri": "a://b"}}
        await server.listeners[0](updated)
        assert await stream.message() == updated


def home_of(*stands: Stand) -> Stand:
    """The home of the only session."""
    (home,) = [stand for stand in stands if stand.metric("mcp_gateway_subscriptions")]
    return home


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_the_subscriptions_of_a_session_outlive_its_home(server: FakeModern, cluster: Cluster, at: int) -> None:
    stands = await cluster.begin("gw-1", "gw-2", "gw-3", **MIRROR)
    client = await LegacyClient(stands[at]).initialize()
    async with client.listen() as stream:
        before = await stream.place()
        for method, uri in (("subscribe", "a://b"), ("subscribe", "a://c"), ("unsubscribe", "a://b")):
            async with client.request(f"resources/{method}", {"uri": uri}) as answered:
                assert (await answered.message())["result"] == {}
        place = await stream.place(3)
        assert place != before
        home = home_of(*stands)
        await cluster.crash(home)
        if home is not stands[at]:
            with pytest.raises((EOFError, aiohttp.ClientError)):
                _ = await stream.message()
    left = [stand for stand in stands if stand is not home]
    async with client.listen(place, url=left[0].url) as stream:
        _ = await stream.place()
        told = [(await stream.message())["method"] for _ in range(4)]
        assert {mcp.TOOLS_CHANGED, mcp.RESOURCE_UPDATED} < {*told}, "they may have changed"
        updated = {"jsonrpc": "2.0", "method": mcp.RESOURCE_UPDATED, "params": {"uri": "a://c"}}
        await server.listeners[-1](updated)
        assert await stream.message() == updated
    assert server.of(mcp.LISTEN)[-1]["params"]["notifications"]["resourceSubscriptions"] == ["a://c"]


async def test_an_older_client_gets_no_ids_on_its_standalone_stream(server: FakeModern, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", **MIRROR)
    client = await LegacyClient(one, version="2025-06-18").initialize()
    async with client.listen() as stream:
        async with client.request("resources/subscribe", {"uri": "a://b"}) as answered:
            assert (await answered.message())["result"] == {}
        updated = {"jsonrpc": "2.0", "method": mcp.RESOURCE_UPDATED, "params": {"uri": "a://b"}}
        await eventually(lambda: len(server.listeners) == 1)
        await server.listeners[-1](updated)
        event = await stream.event()
        assert (event.id, json.loads(event.data)) == (None, updated)


async def test_a_stream_by_way_of_another_replica_is_cut_when_its_owner_dies(
    server: FakeModern, cluster: Cluster
) -> None:
    """Its client comes back with the newest event id; the one of its last request would be too old."""
    one, two, client = await pair(server, cluster)
    async with client.call("ask") as stream:
        question, place = await asked(stream)
    async with client.listen(place, url=two.url) as stream:
        place = await stream.place()
        await cluster.crash(one)
        with pytest.raises((EOFError, aiohttp.ClientError)):
            _ = await stream.message()
    await answered_at(two.url, client, question, place)
    assert len(server.of("tools/call")) == 2


async def test_an_old_id_continues_no_call_of_a_dead_replica(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster)
    question, place = await asked_by_a_replica_that_dies(cluster, one, client)
    tokens = sealed()
    known = tokens.sessions.open(client.headers[mcp.SESSION_ID])
    old_question, old_event = [
        tokens.of_place(kind, replace(found, issued=found.issued - 601))
        for kind, token in ((NESTED, question["id"]), (EVENT, place))
        for found in [tokens.place(kind, token, known.key)]
    ]
    question["id"] = old_question
    assert await client.answer(question, ACCEPT, url=two.url) == 202
    async with client.listen(old_event, url=two.url) as stream:
        assert (await stream.message())["error"]["data"]["reason"] == "owner_lost"
    assert len(server.of("tools/call")) == 1


async def test_an_old_id_does_not_run_a_call_again_that_another_replica_has_ended(
    server: FakeModern, cluster: Cluster, log_lines: Lines
) -> None:
    one, two, client = await pair(server, cluster, hold={"linger_seconds": 0})
    question, place = await asked_by_a_replica_that_dies(cluster, one, client)
    client.headers["X-Request-Id"] = "the-answer"
    assert await client.answer(question, ACCEPT, url=two.url) == 202
    (line,) = log_lines("call.taken_over")
    assert (line["request_id"], line["owner"], line["round"]) == ("the-answer", "gw-1", 1)
    await eventually(lambda: len(server.of("tools/call")) == 2)
    assert line["exchange_id"] == log_lines("exchange.finished")[-1]["exchange_id"]
    await eventually(lambda: not list(mirror_of(two).lot), "the response is forgotten")
    assert await client.answer(question, ACCEPT, url=two.url) == 202
    async with client.listen(place, url=two.url) as stream:
        assert (await stream.message())["error"]["data"]["reason"] == "owner_lost"
    assert len(server.of("tools/call")) == 2


async def test_who_comes_back_too_late_is_not_told_that_the_replica_has_died(
    server: FakeModern, cluster: Cluster
) -> None:
    one, two, client = await pair(server, cluster, hold={"ttl_seconds": 0.2})
    async with client.call("ask") as stream:
        _, place = await asked(stream)
    await eventually(lambda: not list(mirror_of(one).lot), "the client was away for hold.ttl_seconds")
    for url in (one.url, two.url):
        async with client.listen(place, url=url) as stream:
            error = (await stream.message())["error"]
        assert error["data"]["reason"] == "call_lost"
        assert error["message"].startswith("The call is over, because its client was away for too long or cancelled")


async def test_a_drain_waits_for_the_answer_to_an_open_question(server: FakeModern, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", **MIRROR)
    client = await LegacyClient(one).initialize()
    async with client.call("ask") as stream:
        question, _ = await asked(stream)
        ending = later(drain(one.gateway, delay_seconds=0))
        await eventually(lambda: one.gateway.draining.has_begun)
        async with client.call("ask") as refused:
            assert refused.response.status == 200, "the session goes on"
            assert (await refused.message())["error"]["data"]["reason"] == "stopping"
        assert not ending.done()
        assert await client.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    async with asyncio.timeout(DEADLINE):
        await ending
    assert len(server.of("tools/call")) == 2


async def test_a_question_outlives_a_drain_that_ends_before_its_answer(server: FakeModern, cluster: Cluster) -> None:
    one, two, client = await pair(server, cluster, hold={"drain_seconds": 0})
    async with client.call("ask") as stream:
        question, place = await asked(stream)
        async with asyncio.timeout(DEADLINE):
            await drain(one.gateway, delay_seconds=0)
            await cluster.crash(one)
        with pytest.raises((EOFError, aiohttp.ClientError)):
            _ = await stream.message()
    async with client.listen(place, url=two.url) as stream:
        _ = await stream.place()
        assert await client.answer(question, ACCEPT, url=two.url) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    assert len(server.of("tools/call")) == 2


async def test_a_standalone_stream_moves_on_in_a_drain_with_its_subscriptions(
    server: FakeModern, cluster: Cluster
) -> None:
    one, two, client = await pair(server, cluster)
    async with client.listen() as stream:
        _ = await stream.place()
        async with client.request("resources/subscribe", {"uri": "a://b"}) as answered:
            assert (await answered.message())["result"] == {}
        place = await stream.place()
        home = home_of(one, two)
        left = two if home is one else one
        async with asyncio.timeout(DEADLINE):
            ending = later(drain(home.gateway, delay_seconds=0))
            with pytest.raises((EOFError, aiohttp.ClientError)):
                _ = await stream.message()
            await ending
    async with client.listen(place, url=left.url) as stream:
        assert stream.response.status == 200
        _ = await stream.place()
        assert mcp.RESOURCE_UPDATED in [(await stream.message())["method"] for _ in range(4)]

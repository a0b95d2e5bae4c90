"""A draining replica sends its new calls to another one, which serves each as its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.support.fake_peer import Asked, FakePeer
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import Cluster, asked_peers, dies_after_the_body, drop, in_time
from tests.support.workbench import Stand, eventually, later


@asynccontextmanager
async def draining(stand: Stand) -> AsyncIterator[None]:
    """Keep a replica in its drain: it holds a call until the end."""
    client = stand.client()
    asked = await client.call("tool")
    ending = later(drain(stand.gateway, delay_seconds=0))
    await eventually(lambda: stand.gateway.draining.has_begun)
    yield
    assert (await client.answer(asked)).text == "tool"
    await in_time(ending)


async def echo(turn: Turn) -> None:
    """The tool `tool` asks a question; each tool returns its name."""
    name = turn.body["params"]["name"]
    if name == "tool":
        await turn.elicit("q")
    await turn.result(text(name))


@pytest.fixture(autouse=True)
def _echo(upstream: FakeUpstream) -> None:
    upstream.tool(echo)


async def test_another_replica_serves_a_new_call_with_all_its_rounds(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    async with draining(one):
        client = one.client()
        assert (await client.call("plain")).text == "plain"
        asked = await client.call("tool")
        assert two.held == 1
        assert (await client.answer(asked)).text == "tool"
        assert one.metric("mcp_gateway_calls_sent_on_total") == 2
        assert asked_peers(one) == {"served": 3}
    assert [turn.body["params"]["name"] for turn in upstream.of("tools/call")].count("plain") == 1


async def test_replicas_take_turns_with_the_new_calls_of_another_one(cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3")
    async with draining(one):
        before = [each.metric("mcp_gateway_sessions_opened_total") for each in (two, three)]
        for _ in range(4):
            assert (await one.client().call("plain")).text == "plain"
        after = [each.metric("mcp_gateway_sessions_opened_total") for each in (two, three)]
    assert before == [0, 0]
    assert after == [1, 1]


async def test_a_new_call_is_refused_when_every_other_replica_is_gone_or_drains(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3")
    await cluster.crash(three)
    async with draining(one), draining(two):
        refused = await one.client().call("plain")
        assert refused.outcome == (503, -32603, "stopping")
        assert asked_peers(one) == {"dead": 1, "gone": 1}
        assert asked_peers(two) == {}, "a forwarded call is never forwarded again"
    assert not [turn for turn in upstream.of("tools/call") if turn.body["params"]["name"] == "plain"]


async def test_a_new_call_goes_past_a_replica_that_does_not_react_or_refuses_it(cluster: Cluster) -> None:
    async def refuses(asked: Asked) -> None:
        await asked.raw(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    old = await cluster.fake(FakePeer(refuses))
    one, _ = await cluster.begin("gw-1", "gw-3", fakes={"gw-2": old.address})
    async with draining(one):
        for _ in range(2):
            assert (await one.client().call("plain")).text == "plain"
        assert asked_peers(one) == {"refused": 1, "served": 2}


async def test_a_new_call_that_was_taken_is_never_sent_again(upstream: FakeUpstream, cluster: Cluster) -> None:
    taken = await cluster.fake(FakePeer(dies_after_the_body))
    one, _ = await cluster.begin("gw-1", "gw-3", fakes={"gw-2": taken.address})
    async with draining(one):
        outcomes = [(await one.client().call("plain")) for _ in range(2)]
        lost = next(reply for reply in outcomes if "error" in reply.final)
        assert lost.outcome == (503, -32603, "call_lost")
        assert "Retry-After" not in lost.headers
        assert "may have had effects" in lost.error["message"]
        assert asked_peers(one) == {"broke": 1, "served": 1}
    assert len([turn for turn in upstream.of("tools/call") if turn.body["params"]["name"] == "plain"]) == 1


@pytest.mark.parametrize("listed", ["prompts", "tools"], ids=["the request itself", "what its tool is"])
async def test_a_list_that_outlasts_the_drain_ends_its_request_with_an_error(
    upstream: FakeUpstream, cluster: Cluster, listed: str
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", hold={"drain_seconds": 0.5})
    await one.client().call("tool")
    go = upstream.holding(f"{listed}/list", lambda turn: turn.result({listed: []}))
    ending = later(drain(one.gateway, delay_seconds=0))
    await eventually(lambda: one.gateway.draining.has_begun)
    ended = await (one.client().call("plain") if listed == "tools" else one.client().post("prompts/list"))
    assert ended.outcome == (503, -32603, "stopping")
    assert ("Retry-After" in ended.headers) == (listed == "tools"), "a call that was not sent can come again"
    go.set()
    await in_time(ending)
    await drop(one)
    assert (await two.client().call("plain")).text == "plain"


async def test_a_draining_replica_answers_what_it_knows_of_the_server_and_sends_on_what_it_would_have_to_ask(
    cluster: Cluster,
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    async with draining(one):
        assert (await one.client().post(mcp.DISCOVER)).status == 200
        assert asked_peers(one) == {}
        other = one.client(authorization="Bearer other")
        assert (await other.post(mcp.DISCOVER)).status == 200
        assert asked_peers(one) == {"served": 1}
        assert two.metric("mcp_gateway_sessions_opened_total") == 1


async def test_a_subscription_is_refused_rather_than_sent_on(cluster: Cluster) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2")
    async with draining(one):
        refused = await one.client().post(mcp.LISTEN, {"notifications": {"toolsListChanged": True}})
        assert refused.outcome == (503, -32603, "stopping")


async def test_connections_end_with_their_next_reply_while_a_replica_drains(cluster: Cluster) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2")
    assert "Connection" not in (await one.client().call("plain")).headers
    async with draining(one):
        assert (await one.client().call("plain")).headers["Connection"] == "close"

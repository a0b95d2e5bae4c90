"""A retry that reaches any replica is served by the one that holds the call.

The replicas are real and in this process; `fake_peer` stands in for a replica that misbehaves.
"""

import asyncio
from contextlib import suppress
from typing import Any

import aiohttp

from gateway.plugins.status_page.snapshot import known_peers
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.support.fake_peer import FakePeer
from tests.support.fake_upstream import FakeUpstream, Turn, asks, text
from tests.support.replicas import Cluster, Gate, asked_peers, in_time, is_never_asked, opened, operations, steps
from tests.support.workbench import ACCEPT, Client, eventually, jwt, later


async def test_a_retry_that_reaches_another_replica_is_served_by_the_owner(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    direct = await one.client().call()
    reply = await two.client().answer(asked)
    assert reply.json == ACCEPT
    same = await one.client().answer(direct)
    assert (reply.status, reply.is_stream) == (same.status, same.is_stream) == (200, False)
    hide = ("Date", "X-Request-Id")
    assert {k: v for k, v in reply.headers.items() if k.title() not in hide} == {
        k: v for k, v in same.headers.items() if k.title() not in hide
    }, "it looks like the owner's own reply"
    assert len(upstream.of("tools/call")) == len(upstream.of("answer")) == 2
    assert (steps(one), steps(two)) == ({"held": 2}, {"forwarded": 1})
    assert (asked_peers(one), asked_peers(two)) == ({}, {"served": 1})
    assert operations(two, "complete") == 1
    assert operations(one, "complete") == 1, "only the replica that the client spoke to counts a request"


async def test_the_status_shows_the_result_of_the_last_contact(cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")

    def told() -> list[tuple[str, str]]:
        return [(peer.id, peer.state) for peer in known_peers(two.gateway.members)]

    assert told() == [("gw-1", "not asked")]
    _ = await two.client().answer(await one.client().call())
    assert told() == [("gw-1", "answered")]
    asked = await one.client().call()
    await cluster.crash(one)
    _ = await two.client().answer(asked)
    assert told() == [("gw-1", "dead")]
    (peer,) = known_peers(two.gateway.members)
    assert peer.last_answer_seconds_ago is not None, "when it last did is still known"


async def test_every_round_may_reach_another_replica(upstream: FakeUpstream, cluster: Cluster) -> None:
    stands = await cluster.begin("gw-1", "gw-2", "gw-3")

    upstream.tool(asks("done", *(f"q{number}" for number in range(6))))
    reply = await stands[0].client().call()
    for number in range(1, 7):
        reply = await stands[number % 3].client().answer(reply)
    assert reply.text == "done"
    assert [steps(each) for each in stands] == [{"held": 6}, {"forwarded": 2}, {"forwarded": 2}]


async def test_a_stopping_owner_reports_that_through_other_replicas(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", hold={"drain_seconds": 0.05})
    gate = Gate(upstream)
    asked = await one.client().call()
    waiting = later(two.client().answer(asked))
    await in_time(gate.answered.wait())
    await drain(one.gateway, delay_seconds=0)
    reply = await waiting
    assert reply.outcome == (503, -32603, "stopping")
    assert "Retry-After" not in reply.headers, "the call was cancelled, and may have had effects"
    await upstream.saw(mcp.CANCELLED)
    gate.go.set()


async def test_a_draining_replica_keeps_the_leg_of_a_call_that_cannot_be_parked(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2", hold={"max_calls": 1})
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        if turn.body["params"]["name"] == "runs":
            await go.wait()
        else:
            await turn.elicit()
        await turn.result(text("done"))

    upstream.tool(tool)
    client = one.client()
    running = later(client.call("runs"))
    await upstream.saw("tools/call")
    asked = await client.call()
    draining = later(drain(one.gateway, delay_seconds=0))
    await eventually(lambda: one.gateway.draining.has_begun)
    assert (await client.answer(asked)).text == "done"
    assert not running.done()
    go.set()
    assert (await running).text == "done"
    await in_time(draining)
    assert mcp.CANCELLED not in upstream.words


async def test_the_owner_learns_that_a_client_of_another_replica_disconnected(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    gate = Gate(upstream)
    asked = await one.client().call()
    waiting = later(two.client().answer(asked))
    await in_time(gate.answered.wait())
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    gate.go.set()
    assert operations(two, "cancelled") == 1


async def test_the_same_retry_through_two_replicas_gets_one_result(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3")
    gate = Gate(upstream)
    asked = await one.client().call()
    replies = [later(stand.client().answer(asked)) for stand in (two, three, one)]
    await eventually(lambda: len(one.gateway.routes.live["/mcp"].deadlines.silence) == 3)
    gate.go.set()
    assert [reply.text for reply in await in_time(asyncio.gather(*replies))] == ["done"] * 3
    late = await two.client().answer(asked)
    assert late.text == "done", "and the result is kept for a reply that got lost"
    assert len(upstream.of("answer")) == len(upstream.of("tools/call")) == 1


async def test_the_owner_trusts_a_proxys_header_by_the_proxys_address(cluster: Cluster) -> None:
    """Clients come from 127.0.0.2, which is trusted; replicas speak to each other from 127.0.0.1, which is not."""
    section = {"source": "header", "header": "x-user", "trusted_proxies": ["127.0.0.2/32"]}
    one, two = await cluster.begin("gw-1", "gw-2", principal=section)
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as proxy:
        ada: dict[str, Any] = {"headers": {"X-User": "ada"}}
        asked = await Client(proxy, one.url).call(**ada)
        eve = await Client(proxy, two.url).answer(asked, headers={"X-User": "eve"})
        assert eve.outcome == (400, -32602, "invalid_request_state")
        stranger = await two.client().answer(asked, headers={"X-User": "ada"})
        assert stranger.outcome == (400, -32602, "invalid_request_state"), (
            "only the trusted proxy may name the principal"
        )
        assert (await Client(proxy, two.url).answer(asked, **ada)).json == ACCEPT
    assert steps(two) == {"forwarded": 1}


async def test_credentials_and_forwarded_headers_are_forwarded_byte_for_byte(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route={"forward_headers": ["X-Tenant", "X-Empty"]})
    claims = {"iss": "https://as", "sub": "ada"}
    tenant = 'Grüße, Ωmega \U0001f600; a="b\\"'
    sent = {"X-Tenant": tenant, "X-Empty": ""}
    asked = await one.client(jwt(**claims, exp=1)).call(headers=sent)
    fresh = jwt(**claims, exp=2)
    assert (await two.client(fresh).answer(asked, headers=sent)).json == ACCEPT
    (answer,) = upstream.of("answer")
    assert answer.headers.getall("Authorization") == [fresh]
    assert answer.headers.getall("X-Tenant") == [tenant]
    assert answer.headers.getall("X-Empty") == [""]
    stranger = await two.client(jwt(iss="https://as", sub="eve")).answer(asked, headers=sent)
    assert stranger.outcome == (400, -32602, "invalid_request_state")


async def test_a_replay_route_needs_no_peers(upstream: FakeUpstream, cluster: Cluster) -> None:
    third = await cluster.fake(FakePeer(is_never_asked))
    sections = {"route": {"continuation": "replay"}}
    stands = await cluster.begin("gw-1", "gw-2", fakes={"gw-3": third.address}, **sections)

    upstream.tool(asks("done", *(f"q{number}" for number in range(4))))
    reply = await stands[0].client().call()
    for number in range(1, 5):
        assert opened(reply.state).owner == ""
        reply = await stands[number % 2].client().answer(reply)
    assert reply.text == "done"
    assert [asked_peers(stand) for stand in stands] == [{}, {}]
    assert third.connections == 0
    assert len(upstream.of("tools/call")) == 5
    assert [stand.held for stand in stands] == [0, 0]

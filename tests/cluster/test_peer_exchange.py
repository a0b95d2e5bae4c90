"""Retries that one client sends over one connection, and that are forwarded to the owner of their call."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.downstream.test_known_heads import reply, request
from tests.parts.launch import free_port
from tests.support.fake_peer import Asked, FakePeer
from tests.support.fake_upstream import FakeUpstream
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.replicas import (
    TWICE,
    Cluster,
    Gate,
    ask,
    asked_peers,
    facing,
    in_time,
    operations,
    orphan,
    retry_params,
    sample,
    steps,
)
from tests.support.workbench import ACCEPT, Stand, eventually

RESULT = b'{"jsonrpc":"2.0","id":"c2","result":{"resultType":"complete","content":[]}}'


class Owner:
    """A FAKE owner that serves the first retries well, and the others as `script` does."""

    def __init__(self) -> None:
        self.script: Callable[[Asked], Any] | None = None

    async def __call__(self, asked: Asked) -> None:
        if self.script is not None:
            await self.script(asked)
            return
        await asked.take()
        await asked.whole(RESULT)

    def waits(self) -> tuple[asyncio.Event, asyncio.Event]:
        """From now on, reply only once the second event is set; the first one tells that a request is here."""
        taken, go = asyncio.Event(), asyncio.Event()

        async def script(asked: Asked) -> None:
            await asked.take()
            taken.set()
            await go.wait()
            await asked.whole(RESULT)

        self.script = script
        return taken, go


@asynccontextmanager
async def forwarding(
    upstream: FakeUpstream, cluster: Cluster
) -> AsyncIterator[tuple[Stand, Owner, FakePeer, RawConnection, bytes]]:
    """A replica that has forwarded three retries, so that it knows the head of the next one."""
    owner = Owner()
    one, peer = await facing(cluster, upstream, owner, **TWICE)
    asked = await orphan(one, "gw-2")
    sent = request(one, body=one.client().build("tools/call", retry_params(asked))[1])
    async with raw_connection(one) as raw:
        for _ in range(3):
            await raw.send(sent)
            assert (await reply(raw))[1] == RESULT
        yield one, owner, peer, raw, sent


async def test_both_replicas_count_a_forwarded_retry_while_it_waits(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    gate = Gate(upstream)
    asked = await one.client().call()
    async with raw_connection(two) as raw:
        await raw.send(request(two, body=two.client().build("tools/call", retry_params(asked))[1]))
        await in_time(gate.answered.wait())
        assert (two.gateway.downstream.in_flight, two.gateway.downstream.legs.running) == (1, {})
        assert (one.gateway.downstream.in_flight, len(one.gateway.downstream.legs.relayed)) == (1, 1)
        gate.go.set()
        assert json.loads((await reply(raw))[1])["result"]["content"][0]["text"] == "done"
    assert (steps(one), steps(two)) == ({"held": 1}, {"forwarded": 1})
    assert asked_peers(two) == {"served": 1}


async def test_a_retry_that_is_sent_ahead_waits_for_the_one_before(upstream: FakeUpstream, cluster: Cluster) -> None:
    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        taken, go = owner.waits()
        await raw.send(sent)
        await in_time(taken.wait())
        await raw.send(sent)
        await eventually(lambda: one.gateway.routes.process.traffic.bodies.budget.used, "the second one is here")
        assert (one.gateway.downstream.in_flight, len(peer.asked)) == (1, 4)
        go.set()
        for _ in range(2):
            assert (await reply(raw))[1] == RESULT
    assert len(peer.asked) == 5, "each request was sent once"
    assert asked_peers(one) == {"served": 5}


async def test_a_reply_with_a_status_of_its_own_keeps_it(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.whole(b'{"error":1}', 429)

    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = script
        await raw.send(sent)
        head, body = await reply(raw)
        assert (head.split(b" ")[1], body) == (b"429", b'{"error":1}')
    assert (len(peer.asked), asked_peers(one)) == (4, {"served": 4})


OTHERS = {"count": 2}
"""Other arguments than those of the call."""


def refused(stand: Stand) -> float:
    """The states that this replica refused because of their arguments."""
    return sample(stand, "mcp_gateway_state_rejected_total", reason="other_arguments")


async def test_the_owner_refuses_other_arguments_than_those_of_the_call(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """The replica that forwards a retry does not compare them: it would do half of the owner's work."""
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    params = retry_params(asked) | {"arguments": OTHERS}
    sent = request(two, body=two.client().build("tools/call", params)[1])
    async with raw_connection(two) as raw:
        for number in (1, 2, 3, 4):
            await raw.send(sent)
            head, body = await reply(raw)
            assert b" 400 " in head
            assert json.loads(body)["error"]["data"]["reason"] == "invalid_request_state"
            assert (refused(one), refused(two)) == (number, 0)
    assert (asked_peers(two), steps(one)) == ({"served": 4}, {})
    assert not upstream.of("answer")
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT


async def test_a_dead_owners_call_is_not_taken_over_with_other_arguments(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}"}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-1")
    calls = len(upstream.of("tools/call"))
    sent = request(one, body=one.client().build("tools/call", retry_params(asked) | {"arguments": OTHERS})[1])
    async with raw_connection(one) as raw:
        for number in (1, 2, 3, 4):
            await raw.send(sent)
            assert b" 400 " in (await reply(raw))[0]
            assert (refused(one), asked_peers(one)) == (number, {"dead": number})
    assert (len(upstream.of("tools/call")), steps(one)) == (calls, {})
    assert (await one.client().answer(asked)).text


BOUND = {"forward_headers": ["x-api-key"], "bind_headers": ["x-api-key"]}


@pytest.mark.parametrize(
    ("route", "first", "second", "reason"),
    [
        ({}, ("Authorization: Bearer a",), ("Authorization: Bearer b",), "other_principal"),
        (BOUND, ("x-api-key: a",), ("x-api-key: b",), "other_headers"),
        (BOUND, ("x-api-key: a",), (), "other_headers"),
    ],
)
async def test_the_retry_of_another_caller_is_not_forwarded(
    upstream: FakeUpstream,
    cluster: Cluster,
    route: dict[str, Any],
    first: tuple[str, ...],
    second: tuple[str, ...],
    reason: str,
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route=route)
    upstream.tool(ask)
    asked = await one.client(headers=dict(line.split(": ") for line in first)).call()
    body = two.client().build("tools/call", retry_params(asked))[1]
    async with raw_connection(two) as raw:
        for number in (1, 2, 3, 4):
            await raw.send(request(two, *second, body=body))
            assert b" 400 " in (await reply(raw))[0]
            assert sample(two, "mcp_gateway_state_rejected_total", reason=reason) == number
        assert asked_peers(two) == {}
        for _ in range(4):
            await raw.send(request(two, *first, body=body))
            assert b" 200 OK" in (await reply(raw))[0]
    assert asked_peers(two) == {"served": 4}
    assert len(upstream.of("answer")) == 1


async def test_a_retry_of_a_dead_owner_is_counted_once(upstream: FakeUpstream, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}"}, **TWICE)
    upstream.tool(ask)
    async with raw_connection(one) as raw:
        for number in (1, 2, 3, 4):
            asked = await orphan(one, "gw-2", "gw-1")
            await raw.send(request(one, body=one.client().build("tools/call", retry_params(asked))[1]))
            assert b" 200 " in (await reply(raw))[0]
            assert operations(one, "complete") == number

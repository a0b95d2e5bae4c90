"""Retries that are forwarded without a task, and what makes them need one."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.cluster.peer_exchange import PeerExchange
from gateway.http_client.errors import NoReply
from gateway.http_client.reply_head import ReplyHead
from gateway.routes import deadlines
from gateway.seal import peer_messages as messages
from gateway.seal.keyring import Keyring
from gateway.seal.peer_messages import Frames, PeerRequest, Whole
from gateway.telemetry import COMPLETE
from tests.cluster.test_reply_relay import BROKEN
from tests.downstream.test_fast_path_request import direct, reply, request
from tests.parts.launch import free_port
from tests.support.fake_peer import KEY, Asked, FakePeer
from tests.support.fake_upstream import FakeUpstream
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.replicas import (
    TWICE,
    Cluster,
    Gate,
    ask,
    asked_peers,
    dies_at_once,
    in_time,
    orphan,
    retry_params,
    sample,
    steps,
)
from tests.support.workbench import ACCEPT, Stand, eventually

RESULT = b'{"jsonrpc":"2.0","id":"c2","result":{"resultType":"complete","content":[]}}'


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task takes over because a reply takes long."""
    monkeypatch.setattr(deadlines, "_HOP_PART", 1000.0)
    monkeypatch.setattr(deadlines, "_HOP_SECONDS", 1000.0)


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


@asynccontextmanager
async def forwarding(
    upstream: FakeUpstream, cluster: Cluster
) -> AsyncIterator[tuple[Stand, Owner, FakePeer, RawConnection, bytes]]:
    """A replica that has forwarded three retries, so that it forwards the next one without a task."""
    owner = Owner()
    peer = await cluster.fake(FakePeer(owner))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2")
    sent = request(one, body=one.client().build("tools/call", retry_params(asked))[1])
    async with raw_connection(one) as raw:
        for _ in range(3):
            await raw.send(sent)
            assert (await reply(raw))[1] == RESULT
        yield one, owner, peer, raw, sent


async def forward(upstream: FakeUpstream, one: Stand, two: Stand, look: Callable[[], bool]) -> int:
    """Have `two` forward retries to `one` until `look` finds a waiting one as it should be; return their number."""
    async with raw_connection(two) as raw:
        for number in itertools.count(1):
            gate = Gate(upstream)
            asked = await one.client().call()
            await raw.send(request(two, body=two.client().build("tools/call", retry_params(asked))[1]))
            await in_time(gate.answered.wait())
            is_found = look()
            gate.go.set()
            assert json.loads((await reply(raw))[1])["result"]["content"][0]["text"] == "done"
            if is_found:  # a head is known once it came twice, and the length in it may differ
                break
            assert number < 20, "each retry takes a task"
    return number


@pytest.mark.usefixtures("_patient")
async def test_a_forwarded_retry_needs_no_task_on_either_side(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")

    def look() -> bool:
        assert (two.gateway.downstream.in_flight, two.gateway.downstream.running) == (1, {})
        return (direct(two), len(one.gateway.downstream._hops)) == (1, 1)

    number = await forward(upstream, one, two, look)
    assert steps(two) == {"forwarded": number}
    assert steps(one) == {"held": number}
    assert asked_peers(two) == {"served": number}


async def test_a_task_waits_for_a_reply_that_takes_long(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await go.wait()
        await asked.whole(RESULT)

    go = asyncio.Event()
    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = script
        await raw.send(sent)
        await eventually(lambda: direct(one) == 1)
        await eventually(lambda: direct(one) == 0, "a task has taken over")
        go.set()
        assert (await reply(raw))[1] == RESULT
    assert len(peer.asked) == 4, "the request was sent once"
    assert asked_peers(one) == {"served": 4}


@pytest.mark.usefixtures("_patient")
async def test_a_task_that_the_next_request_makes_gets_a_reply_that_is_read_whole(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        taken.set()
        await go.wait()
        await asked.whole(RESULT)

    taken, go = asyncio.Event(), asyncio.Event()
    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = script
        await raw.send(sent)
        await in_time(taken.wait())
        assert direct(one) == 1
        await raw.send(sent)
        await eventually(lambda: direct(one) == 0, "a task has taken over")
        go.set()
        for _ in range(2):
            assert (await reply(raw))[1] == RESULT
    assert len(peer.asked) == 5, "each request was sent once"
    assert asked_peers(one) == {"served": 5}


async def test_a_reply_with_a_status_of_its_own_takes_a_task(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.whole(b'{"error":1}', 429)

    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = script
        await raw.send(sent)
        head, body = await reply(raw)
        assert (head.split(b" ")[1], body) == (b"429", b'{"error":1}')
    assert (len(peer.asked), asked_peers(one)) == (4, {"served": 4})


@pytest.mark.parametrize(("size", "is_taken"), [(65_000, True), (66_000, False)])
async def test_a_large_reply_is_left_to_the_task_that_writes_it(size: int, *, is_taken: bool) -> None:
    """A replica of another version may send more in one frame; what was taken would not be there a second time."""
    ring, nonce, body = Keyring((KEY,), "peer"), messages.nonce(), b"x" * size
    peer_request = PeerRequest(kind="owner", to="gw-2", issued=0, nonce=nonce)
    exchange = PeerExchange(Mock(), "gw-2:1", peer_request, lambda: Frames(ring, nonce, 1 << 24), 0)
    sealed = Frames(ring, nonce, 1 << 24).seal(Whole(200, (), body, "complete"))
    exchange.on_head(ReplyHead(200, "1.1", []))
    exchange.on_body(sealed)
    exchange.on_end()
    assert exchange.message() == ((body, COMPLETE) if is_taken else None)
    assert exchange.whole_at_most(1 << 20) == (b"" if is_taken else sealed)


@pytest.mark.parametrize("script", BROKEN)
async def test_a_reply_that_breaks_off_is_asked_for_once_more(
    upstream: FakeUpstream, cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = script
        await raw.send(sent)
        head, body = await reply(raw)
        assert b" 503 " in head
        assert json.loads(body)["error"]["data"]["reason"] == "owner_stalled"
    assert (len(peer.asked), asked_peers(one)) == (5, {"served": 3, "broke": 2})
    assert steps(one) == {"forwarded": 3}


async def test_a_kept_connection_that_has_ended_is_replaced(upstream: FakeUpstream, cluster: Cluster) -> None:
    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = dies_at_once
        await raw.send(sent)
        assert b"limits.connections" in (await reply(raw))[1], "the second connection ended too"
        owner.script = None
        await raw.send(sent)
        assert (await reply(raw))[1] == RESULT
    assert asked_peers(one) == {"served": 4, "stalled": 1}
    assert peer.connections == 3


async def test_an_owner_that_falls_silent_gets_nothing_to_run(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        behind.append(await asked.silence())

    behind: list[int] = []
    async with forwarding(upstream, cluster) as (one, owner, peer, raw, sent):
        owner.script = script
        await raw.send(sent)
        assert json.loads((await reply(raw))[1])["error"]["data"]["reason"] == "owner_stalled"
        await eventually(lambda: behind)
        assert behind == [0], "a process that wakes up later has nothing to run"
    assert asked_peers(one) == {"served": 3, "stalled": 1}
    assert len(peer.kinds) == 3


@pytest.mark.usefixtures("_patient")
async def test_a_client_that_leaves_ends_the_request_to_the_owner(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        taken.set()
        await asked.silence()
        left.set()

    taken, left = asyncio.Event(), asyncio.Event()
    async with forwarding(upstream, cluster) as (one, owner, _, raw, sent):
        owner.script = script
        await raw.send(sent)
        await in_time(taken.wait())
        assert direct(one) == 1
    await in_time(left.wait())
    await eventually(lambda: one.gateway.downstream.in_flight == 0)
    assert asked_peers(one) == {"served": 3, "broke": 1}


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


async def test_a_call_that_was_taken_over_refuses_other_arguments_here(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """Its state names the dead owner, but this replica holds it."""
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}"}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-1")
    taken = await one.client().answer(asked)
    assert taken.text
    sent = request(one, body=one.client().build("tools/call", retry_params(asked) | {"arguments": OTHERS})[1])
    async with raw_connection(one) as raw:
        for _ in range(4):
            await raw.send(sent)
            assert b" 400 " in (await reply(raw))[0]
    assert refused(one) == 4
    assert asked_peers(one) == {"dead": 1}


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_reply_that_was_read_whole_calls_back_at_its_end(*, is_read: bool) -> None:
    """A task waits for the rest of others, so it takes over when their head comes."""
    pending = Mock(is_read=is_read)
    exchange = PeerExchange(Mock(return_value=pending), "gw-2:1", Mock(), Mock(), 0)
    done = Mock()
    exchange.add_done_callback(done)
    exchange.on_head(ReplyHead(200, "1.1", []))
    exchange.on_body(b"x")
    assert done.call_count == (not is_read)
    exchange.on_end()
    exchange.settle()
    done.assert_called_once_with(exchange)


async def test_a_request_that_fails_calls_back() -> None:
    exchange = PeerExchange(Mock(return_value=Mock(is_read=False)), "gw-2:1", Mock(), Mock(), 0)
    done = Mock()
    exchange.add_done_callback(done)
    exchange.on_failed(NoReply(reused=True))
    done.assert_called_once_with(exchange)
    assert exchange.message() is None

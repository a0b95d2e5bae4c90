"""The workers of one host reach each other, and other hosts reach them."""

import asyncio
from pathlib import Path
from typing import Any

from gateway.cluster.worker import Worker
from gateway.seal.peer_messages import End, Gone
from tests.parts.launch import free_port
from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import (
    TWICE,
    Cluster,
    Gate,
    asked_peers,
    exchange_failing_over_to,
    frames_of,
    frames_of_worker,
    in_time,
    order,
    orphan,
    peer_request_for,
    steps,
)
from tests.support.workbench import ACCEPT, Stand, later


async def workers(cluster: Cluster, folder: Path, count: int, **sections: Any) -> list[Stand]:
    """The processes of gw-2, which share its ports, and gw-1 beside them."""
    cluster.peers = {"gw-1": f"127.0.0.1:{free_port()}", "gw-2": f"127.0.0.1:{free_port()}"}
    for number in range(count):
        worker = Worker(number, count, str(folder), bytes(32))
        listen = f"127.0.0.1:{free_port()}"  # its own, so that a test can choose
        await cluster.start("gw-2", cluster.peers["gw-2"], worker, listen=listen, **sections)
    await cluster.start("gw-1", cluster.peers["gw-1"], **sections)
    return list(cluster.stands.values())


async def test_workers_are_reached_by_siblings_and_by_other_hosts(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    *own, other = await workers(cluster, tmp_path, 3)
    for owner in own:
        for asker in (*own, other):
            reply = await asker.client().answer(await owner.client().call())
            assert reply.json == ACCEPT
    for asker in own:
        assert (await asker.client().answer(await other.client().call())).json == ACCEPT
    assert [steps(each) for each in own] == [{"held": 4, "forwarded": 3}] * 3
    assert steps(other) == {"held": 3, "forwarded": 3}
    assert len(upstream.of("tools/call")) == len(upstream.of("answer")) == 15
    assert not any({"gone", "dead", "stalled", "broke"} & asked_peers(each).keys() for each in (*own, other))


async def test_a_worker_forwards_requests_of_other_hosts_but_not_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    *own, other = await workers(cluster, tmp_path, 2)
    asked = await orphan(other, "gw-2#0")
    peer_request = peer_request_for("gw-2#0", "owner", asked, other.client())
    found = await frames_of_worker(tmp_path / "peer-1.sock", peer_request)
    assert found == [Gone("gw-2")]
    assert [asked_peers(each) for each in own] == [{}, {}]


async def test_the_workers_of_a_candidate_host_agree_on_one_worker(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    first, second, other = await workers(cluster, tmp_path, 2, **TWICE)
    exchange = await exchange_failing_over_to(first, "gw-2#1", "gw-2#0", "gw-1")
    assert (await order(other, exchange))[0] == "gw-2"
    asked = await orphan(other, "gw-9", exchange=exchange)
    for _ in range(12):  # each on a connection of its own: the kernel chooses the worker
        found = await frames_of(cluster, "gw-2", peer_request_for("gw-2", "heir", asked, other.client()), close=True)
        assert found[-1] == End("complete")
    assert len(upstream.of("tools/call")) == 2, "the second runs it, and keeps the result for all others"
    assert (steps(first), steps(second).get("replayed")) == ({}, 1)
    assert asked_peers(second) == {}


async def test_the_calls_of_a_worker_that_dies_under_waiting_clients_fail_over(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    """They wait at another host, which reaches it directly or through its sibling: the kernel chooses."""
    first, second, other = await workers(cluster, tmp_path, 2, **TWICE)
    gate = Gate(upstream)
    asked = [await first.client().call() for _ in range(6)]
    waiting = [later(other.client().answer(each)) for each in asked]
    await upstream.saw("answer", 6)
    await cluster.crash(first)
    gate.go.set()
    assert [reply.text for reply in await in_time(asyncio.gather(*waiting))] == ["done"] * 6
    assert len(upstream.of("tools/call")) == 12
    assert steps(second).get("replayed", 0) + steps(other).get("replayed", 0) == 6

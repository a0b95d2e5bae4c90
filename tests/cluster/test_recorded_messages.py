"""A message between replicas that someone on the network has recorded, and sends again."""

from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from gateway.seal.peer_messages import End, Gone, PeerRequest
from tests.cluster.test_worker import workers
from tests.support.fake_upstream import FakeUpstream, ask, text
from tests.support.replicas import Cluster, frames_of, frames_of_worker, peer_request_for, seal
from tests.support.workbench import Stand


@pytest.fixture(autouse=True)
def _plain(upstream: FakeUpstream) -> None:
    upstream.tool(lambda turn: turn.result(text("done")))


def new_call(to: str, stand: Stand) -> PeerRequest:
    """The message with which a replica that drains has another one begin a call."""
    headers, body = stand.client().build("tools/call", {"name": "tool", "arguments": {}})
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    return replace(peer_request_for(to, "new"), headers=raw, body=body)


async def status(cluster: Cluster, name: str, message: PeerRequest) -> int:
    async with cluster.http.post(f"http://{cluster.peers[name]}/peer", data=seal(message)) as response:
        return response.status


async def test_another_replica_does_not_serve_it(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, *_ = await cluster.begin("gw-1", "gw-2", "gw-3")
    message = new_call("gw-2", one)
    assert (await frames_of(cluster, "gw-2", message))[-1] == End("complete")
    assert await status(cluster, "gw-2", message) == 403
    assert await frames_of(cluster, "gw-3", message) == [Gone("gw-3")]
    assert await frames_of(cluster, "gw-1", message) == [Gone("gw-1")]
    assert len(upstream.of("tools/call")) == 1


async def test_one_worker_of_its_host_serves_it(upstream: FakeUpstream, cluster: Cluster, tmp_path: Path) -> None:
    *own, _ = await workers(cluster, tmp_path, 3)
    for number in range(3):
        message = new_call("gw-2", own[number])
        for _ in range(12):  # each on a connection of its own: the kernel chooses the worker
            assert await status_of_any(cluster, message) in (200, 403)
        assert len(upstream.of("tools/call")) == number + 1


async def status_of_any(cluster: Cluster, message: PeerRequest) -> int:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        try:
            async with http.post(f"http://{cluster.peers['gw-2']}/peer", data=seal(message)) as response:
                _ = await response.read()
                return response.status
        except aiohttp.ClientError:
            return 403  # the worker that serves it refused it, and this one breaks its reply off


async def test_a_message_for_one_worker_runs_there_alone(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    first, *_ = await workers(cluster, tmp_path, 2)
    message = new_call("gw-2#1", first)
    for _ in range(8):
        assert await status_of_any(cluster, message) in (200, 403)
    assert len(upstream.of("tools/call")) == 1
    unread = new_call("gw-2#1", first)
    assert await frames_of_worker(tmp_path / "peer-0.sock", unread) == [Gone("gw-2")]
    assert len(upstream.of("tools/call")) == 1


async def test_a_process_that_started_after_it_does_not_serve_it(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    message = new_call("gw-2", one)
    assert (await frames_of(cluster, "gw-2", message))[-1] == End("complete")
    await cluster.crash(two)
    two = await cluster.start("gw-2", cluster.peers["gw-2"])
    for _ in range(2):
        assert await status(cluster, "gw-2", message) == 403
    assert len(upstream.of("tools/call")) == 1
    assert (await frames_of(cluster, "gw-2", new_call("gw-2", two)))[-1] == End("complete")


async def test_a_retry_that_was_meant_for_the_process_before_says_that_this_has_ended(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    upstream.tool(ask)
    one, two = await cluster.begin("gw-1", "gw-2")
    asked = await two.client().call()
    message = peer_request_for("gw-2", "owner", asked, one.client())
    await cluster.crash(two)
    _ = await cluster.start("gw-2", cluster.peers["gw-2"])
    assert await frames_of(cluster, "gw-2", message) == [Gone("gw-2")]

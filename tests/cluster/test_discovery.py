"""Replicas behind one DNS name find each other."""

import json

from gateway.cluster.worker import Address
from tests.parts.launch import free_port
from tests.support.fake_peer import Silent
from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import TWICE, Cluster, ask, drop, resealed
from tests.support.workbench import ACCEPT


async def test_replicas_that_a_name_service_knows_find_one_another(upstream: FakeUpstream, cluster: Cluster) -> None:
    names = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2", "gw-3")}
    dead = f"127.0.0.1:{free_port()}"

    async def resolve(host: str, port: int) -> list[Address]:
        assert (host, port) == ("peers.example", 8081)
        return [dead, *names.values()]

    section = {"peers": {}, "peers_dns": "peers.example:8081"}
    for name, listen in names.items():
        stand = await cluster.start(name, listen, replica=section, timeouts={"peer_accept_seconds": 2}, **TWICE)
        stand.gateway.members._discovery._resolve = resolve
        stand.gateway.members._discovery._born = float("-inf")  # it has been here for long
    one, two, three = cluster.stands.values()
    upstream.tool(ask)
    asked = await one.client().call()
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT
    asked = await one.client().call()
    await cluster.crash(one)
    reply = await three.client().answer(asked)
    assert json.loads(reply.text) == ACCEPT
    assert len(upstream.of("tools/call")) == 3


async def test_a_stopped_process_that_a_name_service_knows_may_be_the_owner(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    silent = await cluster.fake(Silent())

    async def resolve(_: str, __: int) -> list[Address]:
        return [silent.address]

    section = {"peers": {}, "peers_dns": "peers.example:8081"}
    one = await cluster.start("gw-1", f"127.0.0.1:{free_port()}", replica=section, **TWICE)
    one.gateway.members._discovery._resolve = resolve
    upstream.tool(ask)
    asked = await one.client().call()
    state = resealed(asked.state, owner="gw-2", exchange="x", upstream=None)
    await drop(one)
    reply = await one.client().call(state=state, answers=dict.fromkeys(asked.questions, ACCEPT))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert len(upstream.of("tools/call")) == 1
    assert all(bytes(received).endswith(b"\r\n\r\n") for received in silent.received)

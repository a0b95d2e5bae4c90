"""Connections to other replicas are reused, and only a refused one proves a death."""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from yarl import URL

from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.worker import Address
from gateway.config import InForce, Timeouts, split_address
from gateway.protocol.errors import OwnerSilent, OwnerStalled
from gateway.runtime.tasks import Tasks
from gateway.seal import peer_messages as messages
from gateway.seal.keyring import Keys
from gateway.seal.peer_messages import PeerRequest, PeerSealer
from tests.parts.launch import free_port
from tests.support.fake_http import Proxy, fake_wire
from tests.support.fake_peer import Asked
from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import (
    STALLED,
    TWICE,
    Cluster,
    asked_peers,
    dies_at_once,
    facing,
    orphan,
    speaks_no_http,
    steps,
)
from tests.support.workbench import ACCEPT


@pytest.mark.parametrize("script", [dies_at_once, speaks_no_http])
async def test_a_peer_that_closes_and_then_refuses_connections_is_dead(
    cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    one, peer = await facing(cluster, script, mortal=True, **TWICE)
    asked = await orphan(one, "gw-2", "gw-1")
    assert (await one.client().answer(asked)).json == ACCEPT
    assert asked_peers(one) == {"dead": 1}
    assert peer.kinds == []


@pytest.mark.parametrize("script", [dies_at_once, speaks_no_http])
async def test_a_peer_that_accepts_and_closes_connections_is_alive(
    cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    """A replica at its limit of connections does this."""
    one, peer = await facing(cluster, script, **TWICE)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-1"))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert "limits.connections" in reply.error["message"]
    assert (peer.kinds, len(peer.asked)) == ([], 2)


async def test_a_stale_connection_is_replaced_and_the_request_runs_once(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    ports = free_port()
    proxy = await cluster.fake(Proxy(f"127.0.0.1:{ports}"))
    cluster.peers = {"gw-1": f"127.0.0.1:{ports}", "gw-2": f"127.0.0.1:{free_port()}"}
    one = await cluster.start("gw-1", cluster.peers["gw-1"], **TWICE)
    through = {"peers": cluster.peers | {"gw-1": proxy.address}}
    two = await cluster.start("gw-2", cluster.peers["gw-2"], replica=through, **TWICE)
    assert (await two.client().answer(await one.client().call())).json == ACCEPT
    asked = await one.client().call()
    proxy.break_kept()
    assert (await two.client().answer(asked)).json == ACCEPT
    assert (proxy.connections, proxy.broken) == (2, 1)
    assert asked_peers(two) == {"served": 2}
    assert steps(one) == {"held": 2}
    assert len(upstream.of("answer")) == len(upstream.of("tools/call")) == 2


async def test_a_name_whose_addresses_all_refuse_proves_death(cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"localhost:{free_port()}"})
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.outcome == (200, -32603, "owner_lost")
    assert asked_peers(one).keys() == {"dead"}


async def test_a_port_that_resets_a_connection_and_then_refuses_proves_death(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel resets what it has accepted for a process that ends at this moment."""
    port = free_port()
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{port}"})
    asked = await orphan(one, "gw-2")
    loop, resets = asyncio.get_running_loop(), iter([ConnectionResetError(errno.ECONNRESET, "reset")])
    connect = loop.sock_connect

    async def reset_once(sock: socket.socket, address: Any) -> None:
        if address[1] == port and (reset := next(resets, None)) is not None:
            raise reset
        await connect(sock, address)

    monkeypatch.setattr(loop, "sock_connect", reset_once)
    assert (await one.client().answer(asked)).outcome == (200, -32603, "owner_lost")
    assert next(resets, None) is None
    assert asked_peers(one).keys() == {"dead"}


@pytest.mark.parametrize("order", [1, -1])
async def test_a_name_with_an_address_that_does_not_refuse_proves_nothing(
    cluster: Cluster, hole: Address, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """The name service has an old address beside the new one, or both of two networks."""
    dead, silent = f"127.0.0.2:{hole.rpartition(':')[2]}", hole
    asking = socket.getaddrinfo

    def two_addresses(host: Any, *rest: Any, **options: Any) -> Any:
        if host != "gw-2.test":
            return asking(host, *rest, **options)
        places = [split_address(address) for address in (dead, silent)]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places][::order]

    monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
    loop = asyncio.get_running_loop()

    async def looked_up(host: Any, port: Any, **options: Any) -> Any:  # like uvloop's own, which is not patched above
        return two_addresses(host, port, **options)

    monkeypatch.setattr(loop, "getaddrinfo", looked_up)
    port = hole.rpartition(":")[2]
    times = {"peer_connect_seconds": 0.2, "peer_accept_seconds": 5}
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"gw-2.test:{port}"}, timeouts=times)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.outcome == STALLED
    assert asked_peers(one) == {"silent": 1}


@pytest.mark.parametrize("listen", [None, "0.0.0.0:8081", "[::]:8081", "gw-1.test:8081", "127.0.0.1:8081"])
async def test_a_peer_is_reached_from_any_listener_of_its_address_family(listen: Address | None) -> None:
    """Only the address of one interface is the source of requests; that of all interfaces would fix the family."""
    connections = connections_from(listen)
    assert await connections.ask_name(f"127.0.0.1:{free_port()}", "") is None, "refused, and so reached"
    connections.close()


async def test_requests_come_from_the_address_of_the_peer_listener() -> None:
    connections = connections_from("[::1]:8081")
    with pytest.raises(OwnerSilent):
        await connections.ask_name(f"127.0.0.1:{free_port()}", "")
    connections.close()


async def test_an_answer_that_is_too_long_is_not_read_to_its_end() -> None:
    """No seal shows yet that a replica sends it."""
    connections = connections_from(None)
    said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n%b\r\n" % bytes(65_536) * 2
    async with fake_wire(said, stays=True) as url:
        address = str(URL(url).authority)
        question = PeerRequest(kind="who", to=address, issued=0, nonce=messages.nonce())
        with pytest.raises(OwnerStalled, match="with more than 65536 bytes"):
            await connections.question(address, question, 5, fresh=True)
    connections.close()


async def test_a_name_that_does_not_resolve_in_time_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has as long as the peer; the time for a connection begins behind the lookup."""

    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    connections = connections_from(None, Timeouts(peer_connect_seconds=0.001, peer_accept_seconds=0.05))
    question = PeerRequest(kind="who", to="gw-2", issued=0, nonce=messages.nonce())
    with pytest.raises(OwnerSilent, match="did not resolve in time") as silence:
        await connections.question("gw-2.test:80", question, 5)
    assert silence.value.is_local
    connections.close()


async def test_peers_are_reached_without_the_proxy_of_the_environment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    one, two = await cluster.begin("gw-1", "gw-2")
    assert (await two.client().answer(await one.client().call())).json == ACCEPT
    assert steps(two)["forwarded"] == 1


def connections_from(listen: Address | None, timeouts: Timeouts | None = None) -> PeerConnections:
    sealer = PeerSealer(InForce(Keys((bytes(32),))))
    return PeerConnections(InForce(timeouts or Timeouts()), listen, "gw-1", sealer, Tasks(Mock()))

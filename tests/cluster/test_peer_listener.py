"""The peer listener serves sealed requests of replicas, and nothing else."""

import io
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config import InForce
from gateway.seal import peer_messages as messages
from gateway.seal.keyring import Keyring
from gateway.seal.peer_messages import Data, End, Gone, Head, Identity, PeerRequest, PeerSealer
from tests.support.fake_peer import KEY, Asked, FakePeer
from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import Cluster, ask, asked_peers, frames_of, orphan, peer_request_for, retry_params
from tests.support.workbench import Stand


def sealed(ring: Keyring | None = None, **changes: Any) -> bytes:
    peer_request = PeerRequest(
        kind="owner", to="gw-1", issued=time.time(), nonce=messages.nonce(), path="/mcp", body=b"{}"
    )
    return PeerSealer(InForce(ring or Keyring((KEY,), "peer"))).seal(replace(peer_request, **changes))


def refused(stand: Stand) -> dict[str, int]:
    families = stand.gateway.metrics._registry.collect()
    return {
        each.labels["reason"]: int(each.value)
        for family in families
        for each in family.samples
        if each.name == "mcp_gateway_peer_rejected_total" and each.value
    }


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda: b"", "malformed"),
        (lambda: b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}', "malformed"),
        (lambda: b"x" * 1000, "unknown_key"),
        (lambda: sealed()[:-1], "forged"),
        (lambda: (body := sealed())[:-1] + bytes([body[-1] ^ 1]), "forged"),
        (lambda: sealed(issued=time.time() - 61), "expired"),
        (lambda: sealed(issued=time.time() + 70), "future"),
        (lambda: sealed(Keyring((bytes(range(1, 33)),), "peer")), "unknown_key"),
        (lambda: sealed(Keyring((KEY,), "state")), "forged"),
        (lambda: Keyring((KEY,), "peer").seal_bytes(b"\x90", b"request"), "version"),
        (lambda: Keyring((KEY,), "peer").seal_bytes(b"\x90", b"reply"), "forged"),
    ],
)
async def test_a_request_that_no_replica_sealed_is_refused_without_a_reason(
    upstream: FakeUpstream, cluster: Cluster, body: Callable[[], bytes], why: str
) -> None:
    (one,) = await cluster.begin("gw-1")
    url = f"http://{cluster.peers['gw-1']}/peer"
    async with cluster.http.post(url, data=body()) as response:
        assert (response.status, await response.read()) == (403, b"")
        assert set(response.headers) <= {"Content-Length", "Content-Type", "Date", "Server", "Connection"}
    assert refused(one) == {why: 1}
    assert upstream.seen == []


async def test_a_replayed_request_is_refused(upstream: FakeUpstream, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1")
    upstream.tool(ask)
    asked = await one.client().call()
    headers, body = one.client().build("tools/call", retry_params(asked))
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    request = sealed(headers=raw, body=body)
    url = f"http://{cluster.peers['gw-1']}/peer"
    async with cluster.http.post(url, data=request) as response:
        assert response.status == 200
        first = await response.read()
    for _ in range(3):
        async with cluster.http.post(url, data=request) as response:
            assert (response.status, await response.read()) == (403, b"")
    assert refused(one) == {"replayed": 3}
    assert b"Ada" not in first, "an eavesdropper reads nothing"
    assert len(upstream.of("answer")) == 1


async def test_the_peer_port_serves_only_peer_requests(upstream: FakeUpstream, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1")
    base = f"http://{cluster.peers['gw-1']}"
    headers, body = one.client().build("tools/call", {"name": "tool", "arguments": {}})
    paths = ("/", "/mcp", "/peer/", "/peer/x", "/peers", "/metrics", "/healthz", "/readyz", "/status")
    for path in paths:
        async with cluster.http.post(base + path, headers=headers, data=body) as response:
            assert (response.status, await response.read()) == (404, b"")
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        async with cluster.http.request(method, base + "/peer", data=sealed()) as response:
            assert (response.status, await response.read()) == (404, b"")
    async with cluster.http.post(base + "/peer", data=io.BytesIO(bytes(5_000_000))) as response:
        assert (response.status, await response.read()) == (413, b"")
    assert upstream.seen == []
    # The clients' port does not accept peer requests either.
    async with cluster.http.post(one.url.replace("/mcp", "/peer"), data=sealed()) as response:
        assert response.status == 404
    async with cluster.http.post(one.url, data=sealed()) as response:
        assert response.status == 404
    assert upstream.words == ["raw"], "it is no modern request: what it is, is the upstream's to say"


async def test_a_replica_tells_its_id_only_to_replicas(cluster: Cluster) -> None:
    await cluster.begin("gw-1", "gw-2")
    assert await frames_of(cluster, "gw-2", peer_request_for("", "who")) == [Identity("gw-2")]


@pytest.mark.parametrize("kind", ["owner", "heir", "resume"])
async def test_a_request_for_a_third_replica_is_not_forwarded(
    upstream: FakeUpstream, cluster: Cluster, kind: messages.Kind
) -> None:
    """Threat 20: A -> B -> A, or on to a third replica."""

    async def never(asked: Asked) -> None:
        raise AssertionError("it was asked")

    third = await cluster.fake(FakePeer(never))
    one, two = await cluster.begin("gw-1", "gw-2", fakes={"gw-3": third.address})
    upstream.tool(ask)
    asked = await one.client().call()
    client = two.client()
    for to in ("gw-1", "gw-3", "gw-3#1", "gw-9", "", third.address):
        peer_request = peer_request_for(to, kind, asked, client)
        assert await frames_of(cluster, "gw-2", peer_request) == [Gone("gw-2")], to
    assert third.connections == 0
    assert (asked_peers(one), asked_peers(two)) == ({}, {})
    assert "answer" not in upstream.words
    # The owner holds the call, so it serves the request, whatever receiver the request names.
    (head, data, end) = await frames_of(cluster, "gw-1", peer_request_for("gw-1", "owner", asked, client))
    assert isinstance(head, Head)
    assert isinstance(data, Data)
    assert isinstance(end, End)
    assert (head.status, end.outcome) == (200, "complete")


async def test_a_request_for_a_missing_worker_does_not_loop(cluster: Cluster, upstream: FakeUpstream) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await orphan(one, "gw-2#1")
    assert await frames_of(cluster, "gw-2", peer_request_for("gw-2#1", "owner", asked, one.client())) == [Gone("gw-2")]
    assert asked_peers(two) == {"dead": 1}


async def test_a_peer_request_with_a_wrong_path_or_body_gets_the_errors_of_a_client(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    await cluster.begin("gw-1")
    for changes, status, code in (
        ({"path": "/other"}, 404, "-32601"),
        ({"body": b"{"}, 400, "-32700"),
        ({"body": b""}, 400, "-32700"),
    ):
        peer_request = replace(peer_request_for("gw-1"), **changes)
        head, _, end = await frames_of(cluster, "gw-1", peer_request)
        assert isinstance(head, Head)
        assert head.status == status
        assert end == End("rejected", code)
    assert upstream.seen == []

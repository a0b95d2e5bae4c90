"""The peer listener serves sealed requests of replicas, and nothing else."""

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from yarl import URL

from gateway.config import InForce
from gateway.exchange.machine import DETACHED
from gateway.http.outbox import FinalMessage
from gateway.http.server import connection as connections
from gateway.http.server.request import NO_HEADERS, HttpRequest, ReceivedHead, RequestBody
from gateway.seal import peer_messages as messages
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.peer_messages import End, Frame, Frames, Gone, Head, Identity, PeerRequest, PeerSealer, Whole
from gateway.server import peer_listener
from gateway.server.peer_listener import PeerListener, PeerReply
from tests.support.fake_peer import KEY, FakePeer
from tests.support.fake_upstream import FakeUpstream
from tests.support.logs import Lines
from tests.support.noted_connections import NotedConnection
from tests.support.noted_timers import Timers
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.replicas import (
    Cluster,
    Gate,
    asked_peers,
    frames_for,
    frames_of,
    in_time,
    is_never_asked,
    orphan,
    peer_request_for,
    retry_params,
    seal,
    steps,
)
from tests.support.workbench import Reply, Stand, eventually


def sealed(*keys: bytes, **changes: Any) -> bytes:
    peer_request = PeerRequest(
        kind="owner", to="gw-1", issued=time.time(), nonce=messages.nonce(), path="/mcp", body=b"{}"
    )
    return PeerSealer(InForce(Keys(keys or (KEY,)))).seal(replace(peer_request, **changes))


def refused(stand: Stand) -> dict[str, int]:
    families = stand.gateway.metrics.series.registry.collect()
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
        (lambda: sealed(bytes(range(1, 33))), "unknown_key"),
        (lambda: Keyring((KEY,), "state").seal_bytes(b"\x90", b"request"), "forged"),
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


@pytest.mark.parametrize(
    ("ahead", "sender", "fix"),
    [
        (120, "gw-2#1", "gw-2#1's clock is 120 s ahead of this replica's; compare the clocks"),
        (-120, "gw-2", "gw-2's clock is 120 s behind this replica's; compare the clocks"),
        (120, "", "the replica at 127.0.0.1's clock is 120 s ahead of this replica's"),
    ],
)
async def test_the_log_says_whose_clock_is_off_and_by_how_much(
    cluster: Cluster, log_lines: Lines, ahead: int, sender: str, fix: str
) -> None:
    _ = await cluster.begin("gw-1")
    request = sealed(issued=time.time() + ahead, sender=sender)
    async with cluster.http.post(f"http://{cluster.peers['gw-1']}/peer", data=request) as response:
        assert (response.status, await response.read()) == (403, b"")
    (line,) = log_lines("peer.rejected")
    assert line["reason"] == ("future" if ahead > 0 else "expired")
    assert line["fix"].startswith(fix)
    assert ("repeated" in line["fix"]) == (ahead < 0), "its time tells no clock from an old message"


async def test_a_message_in_time_that_was_taken_once_blames_no_clock(cluster: Cluster, log_lines: Lines) -> None:
    _ = await cluster.begin("gw-1")
    request = sealed(kind="who", sender="gw-2")
    url = f"http://{cluster.peers['gw-1']}/peer"
    for status in (200, 403):
        async with cluster.http.post(url, data=request) as response:
            assert response.status == status
    (line,) = log_lines("peer.rejected")
    assert line["fix"].startswith("if it is a replica, give it the same state.keys; else")


async def test_a_replayed_request_is_refused(upstream: FakeUpstream, cluster: Cluster) -> None:
    asked, (one,) = await cluster.asked("gw-1")
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


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("kind", ["owner", "heir", "resume"])
async def test_a_request_for_a_third_replica_is_not_forwarded(
    upstream: FakeUpstream, cluster: Cluster, kind: messages.Kind
) -> None:
    """Threat 20: A -> B -> A, or on to a third replica."""

    third = await cluster.fake(FakePeer(is_never_asked))
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", fakes={"gw-3": third.address})
    client = two.client()
    for to in ("gw-1", "gw-3", "gw-3#1", "gw-9", "", third.address):
        peer_request = peer_request_for(to, kind, asked, client)
        assert await frames_of(cluster, "gw-2", peer_request) == [Gone("gw-2")], to
    assert third.connections == 0
    assert (asked_peers(one), asked_peers(two)) == ({}, {})
    assert "answer" not in upstream.words
    # The owner holds the call, so it serves the request, whatever receiver the request names.
    (reply,) = await frames_of(cluster, "gw-1", peer_request_for("gw-1", "owner", asked, client))
    assert isinstance(reply, Whole)
    assert (reply.status, reply.outcome) == (200, "complete")


async def test_a_request_for_a_missing_worker_does_not_loop(cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    asked = await orphan(one, "gw-2#1")
    assert await frames_of(cluster, "gw-2", peer_request_for("gw-2#1", "owner", asked, one.client())) == [Gone("gw-2")]
    assert asked_peers(two) == {"dead": 1}


@pytest.mark.usefixtures("patient")
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
        (reply,) = await frames_of(cluster, "gw-1", peer_request)
        assert isinstance(reply, Whole)
        assert (reply.status, reply.outcome, reply.error_type) == (status, "rejected", code)
    assert upstream.seen == []


# -- retries whose reply comes at once, or not ------------------------------------------------------------------------

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RING = Keyring((KEY,), "peer")


def head_of(body: bytes, *, expects: bool = True) -> bytes:
    """The head of a request as the replicas of this version send it."""
    expect = "Expect: 100-continue\r\n" if expects else ""
    what = f"POST /peer HTTP/1.1\r\nHost: gw-1:1\r\nContent-Type: application/octet-stream\r\n{expect}"
    return f"{what}Content-Length: {len(body)}\r\n\r\n".encode()


async def ask_to_send(raw: RawConnection, body: bytes) -> None:
    """Send the head of a request, and wait until its body is wanted."""
    await raw.send(head_of(body))
    assert await raw.until(b"\r\n\r\n") == CONTINUE


async def whole(raw: RawConnection, peer_request: PeerRequest) -> list[Frame]:
    """The frames of a reply of known length."""
    head = await raw.until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    return frames_for(peer_request).feed(await raw.exactly(length))


async def streamed(raw: RawConnection, frames: Frames) -> list[Frame]:
    """The frames of the next chunk; none if it is the last one."""
    size = int(await raw.line(), 16)
    return frames.feed((await raw.exactly(size + 2))[:-2])


@pytest.mark.usefixtures("patient")
async def test_a_retry_of_a_held_call_gets_its_whole_reply_at_once(cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1")
    async with raw_connection(one, cluster.peers["gw-1"]) as raw:
        for _ in range(3):
            asked = await one.client().call()
            peer_request = peer_request_for("gw-1", "owner", asked, one.client())
            body = seal(peer_request)
            await ask_to_send(raw, body)
            await raw.send(body)
            (frame,) = await whole(raw, peer_request)
            assert isinstance(frame, Whole)
            assert b"Ada" in frame.data
            assert (frame.status, frame.headers, frame.outcome) == (200, (), "complete")
    assert steps(one) == {"held": 3}
    assert one.gateway.downstream.in_flight == 0


async def test_a_head_is_answered_before_anything_is_known_of_its_body(cluster: Cluster) -> None:
    """The other replica has proof that this one reacts before it sends anything that this one could run."""
    (one,) = await cluster.begin("gw-1")
    async with raw_connection(one, cluster.peers["gw-1"]) as raw:
        await ask_to_send(raw, bytes(1000))
        await raw.send(bytes(1000))
        assert (await raw.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 403 ")
    assert refused(one) == {"unknown_key": 1}


async def hop(stand: Stand, raw: RawConnection, asked: Reply | None = None) -> PeerRequest:
    """Begin a retry of a held call, which the tool lets wait."""
    asked = asked or await stand.client().call()
    peer_request = peer_request_for("gw-1", "owner", asked, stand.client())
    body = seal(peer_request)
    await ask_to_send(raw, body)
    await raw.send(body)
    return peer_request


@pytest.mark.usefixtures("patient")
async def test_a_replica_that_leaves_as_its_retry_is_accepted_late_is_missed(
    upstream: FakeUpstream, cluster: Cluster, accepted: list[NotedConnection], timers: Timers
) -> None:
    """It is accepted when nothing can be written any more, and a moment before the connection counts as lost."""
    (one,) = await cluster.begin("gw-1", hold={"grace_seconds": 60})
    gate = Gate(upstream)
    async with raw_connection(one, cluster.peers["gw-1"]) as raw:
        asked = await one.client().call()
        await hop(one, raw, asked)
        await in_time(gate.answered.wait())
        (driver,) = one.gateway.downstream.legs.relayed
        accepted[0].wire.end()
        timers.ring(1000.0)
        await eventually(lambda: one.gateway.downstream.in_flight == 0)
        assert driver.glance(0.0).state == DETACHED, "the leg has ended"
    gate.go.set()
    assert (await one.client().answer(asked)).text == "done"


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_reply_keeps_the_keys_of_its_request(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    monkeypatch.setattr(peer_listener, "_ACCEPT_SECONDS", 0.01 if is_late else 1000.0)
    monkeypatch.setattr(peer_listener, "_ACCEPT_PART", 1000.0)
    (one,) = await cluster.begin("gw-1")
    gate = Gate(upstream)
    async with raw_connection(one, cluster.peers["gw-1"]) as raw:
        peer_request = await hop(one, raw)
        await in_time(gate.answered.wait())
        if is_late:
            assert b"chunked" in await raw.until(b"\r\n\r\n")
        config, state = one.gateway.config, one.gateway.config.state
        one.gateway.apply(replace(config, state=replace(state, keys=("ab" * 32, *state.keys))))
        gate.go.set()
        if is_late:
            assert (await streamed(raw, frames_for(peer_request)))[-1] == End("complete")
        else:
            assert len(await whole(raw, peer_request)) == 1


@pytest.mark.parametrize("times", [{}, {"peer_accept_seconds": 3600}], ids=["usual", "a patient owner"])
async def test_a_retry_whose_reply_takes_long_is_accepted_first(
    upstream: FakeUpstream, cluster: Cluster, times: dict[str, int]
) -> None:
    """The other replica tells by this that the request was taken, and waits for the rest as long as it must."""
    (one,) = await cluster.begin("gw-1", timeouts=times)
    gate = Gate(upstream)
    async with raw_connection(one, cluster.peers["gw-1"]) as raw:
        peer_request = await hop(one, raw)
        assert b"chunked" in await raw.until(b"\r\n\r\n")
        assert len(one.gateway.downstream.legs.relayed) == 1
        gate.go.set()
        frames = frames_for(peer_request)
        head, _, end = await streamed(raw, frames)
        assert (head, end) == (Head(200, (), streamed=False), End("complete"))
    assert steps(one) == {"held": 1}


@pytest.mark.usefixtures("patient")
async def test_a_replica_that_leaves_takes_its_retry_with_it(upstream: FakeUpstream, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", hold={"grace_seconds": 60})
    gate = Gate(upstream)
    async with raw_connection(one, cluster.peers["gw-1"]) as raw:
        asked = await one.client().call()
        await hop(one, raw, asked)
        await in_time(gate.answered.wait())
    await eventually(lambda: one.gateway.downstream.in_flight == 0)
    assert not one.gateway.downstream.legs.relayed
    (driver,) = one.gateway.lot
    assert driver.glance(0.0).state == DETACHED
    gate.go.set()
    assert (await one.client().answer(asked)).text == "done", "the client may come back"


async def test_a_sender_that_does_not_read_that_its_body_is_wanted_has_a_deadline(cluster: Cluster) -> None:
    """The task of the request would wait for it for ever."""

    (one,) = await cluster.begin("gw-1", timeouts={"send_seconds": 0.01})
    process = one.gateway.routes.process
    sealer = PeerSealer(InForce(Keys((KEY,))))
    listener = PeerListener(InForce(one.gateway.config), sealer, Mock(), process.witness, Mock(), process.traffic)
    connection = connections.Connection(connections.Service(listener.handle, process.traffic))
    known = {"is_closing.return_value": False, "get_write_buffer_size.return_value": 1}
    out = Mock(write=lambda _: connection.pause_writing(), **known)
    connection.connection_made(out)
    connection.data_received(head_of(b"x" * 100))
    await eventually(lambda: out.abort.called)
    connection.connection_lost(None)


async def test_a_whole_reply_is_not_accepted_once_more() -> None:
    """The time to accept its request may end before the reply is written."""
    wire = Mock()
    http = HttpRequest(ReceivedHead("POST", "/peer", NO_HEADERS, URL("/peer")), RequestBody(), wire)
    reply = PeerReply(http, Frames(RING, messages.nonce()), accept_seconds=1e-9)
    whole_reply = await reply.only(FinalMessage(b"{}"))
    for _ in range(3):
        await asyncio.sleep(0)  # the time ends
    reply.stop_timer()
    assert await reply.close() is whole_reply
    wire.write.assert_not_called()


async def test_a_message_larger_than_a_frame_may_be_is_written_in_several() -> None:
    http = HttpRequest(ReceivedHead("POST", "/peer", NO_HEADERS, URL("/peer")), RequestBody(), Mock())
    reply = PeerReply(http, Frames(RING, messages.nonce()), accept_seconds=60)
    frames: list[messages.Frame] = []

    async def note(*each: messages.Frame) -> None:
        frames.extend(each)

    reply.frame = note  # type: ignore[method-assign]
    data = b"0123456789" * 2_000_000
    await reply.write(data)
    reply.stop_timer()
    pieces = [frame.data for frame in frames if isinstance(frame, messages.Data)]
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) < messages.FRAME_BYTES

"""Requests to other replicas arrive unchanged and at most once, also if the peer or the connection fails."""

import asyncio
import io
import time
from email.utils import formatdate

import pytest
from msgspec.structs import replace

from gateway import world
from gateway.cluster.peer_errors import NoReplica, PeerRefused
from gateway.seal.peer_messages import Whole
from tests.support.fake_peer import Asked, FakePeer, Silent
from tests.support.fake_upstream import DEADLINE, FakeUpstream
from tests.support.logs import Lines
from tests.support.replicas import (
    TWICE,
    Cluster,
    asked_peers,
    facing,
    frames_of,
    in_time,
    is_never_asked,
    orphan,
    peer_request_for,
    retry_params,
    steps,
)
from tests.support.workbench import ACCEPT, Reply

_BOTH = "refuses requests from gw-1 (HTTP 403): compare the clocks and state.keys of both"
_PROGRAM = "answers HTTP 404 (is its address in replica.peers that of another program?)"


async def test_the_client_gets_the_owners_refusal_unchanged(upstream: FakeUpstream, cluster: Cluster) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    challenge = 'Bearer resource_metadata="https://as.example/é"'

    upstream.once("answer", lambda turn: turn.reply(401, {"error": "expired"}, {"WWW-Authenticate": challenge}))
    refused = await two.client().answer(asked)
    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"] == challenge
    assert refused.error["data"]["reason"] == "upstream_refused"
    wrong = await two.client().answer(asked, {"action": "shrug"})
    assert (wrong.status, wrong.error["code"]) == (400, -32602)
    assert one.held == 1, "the call is unharmed"
    assert (await two.client().answer(asked)).json == ACCEPT
    assert len(upstream.of("tools/call")) == 1


@pytest.mark.usefixtures("patient")
async def test_the_owner_looks_for_itself_whether_a_credential_came_once(cluster: Cluster) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2", route={"forward_headers": ["x-api-key"]})
    client = one.client(headers={"X-Api-Key": "mine"})
    asked = await client.call()
    request = peer_request_for("gw-1", "owner", asked, client)
    twice = replace(request, headers=(*request.headers, (b"x-api-key", b"another")))
    (reply,) = await frames_of(cluster, "gw-1", twice)
    assert isinstance(reply, Whole)
    assert (reply.status, reply.outcome, reply.error_type) == (400, "rejected", "-32600")
    assert (await client.answer(asked)).text


async def test_headers_and_the_clients_address_reach_the_other_replica_unchanged(cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.reply(b"{}")

    one, peer = await facing(cluster, script)
    asked = await orphan(one, "gw-2")
    headers, body = one.client().build("tools/call", retry_params(asked))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    odd = [(b"X-Odd", b"\xff\xfe\xc3\xa9"), (b"x-twice", b"1"), (b"X-Twice", b"2"), (b"X-Empty", b"")]
    raw += [(b"Host", one.gateway.listen.encode()), (b"Content-Length", b"%d" % len(body)), *odd]
    host, _, port = one.gateway.listen.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /mcp HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % each for each in raw) + b"\r\n" + body)
    assert (await in_time(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 200 ")
    writer.close()
    await writer.wait_closed()
    peer_request = peer.asked[0].peer_request
    assert list(peer_request.headers) == raw
    assert (peer_request.remote, peer_request.body) == ("127.0.0.1", body)
    assert b"odd" not in peer.asked[0].head.lower(), "nothing of it can be read on the way"


@pytest.mark.parametrize("limit", [100_000, 4_194_304])
async def test_a_body_up_to_the_limit_is_forwarded_and_a_larger_one_is_refused(cluster: Cluster, limit: int) -> None:
    asked, (_, two) = await cluster.asked("gw-1", "gw-2", limits={"body_bytes": limit})
    client = two.client()
    pad = {f"X-Pad-{number}": "p" * 8000 for number in range(3)}
    headers, body = client.build("tools/call", retry_params(asked), headers=pad)
    async with client.http.post(client.url, headers=headers, data=io.BytesIO(body.ljust(limit + 1))) as response:
        assert response.status == 413
    assert asked_peers(two) == {}
    async with asyncio.timeout(DEADLINE):
        async with client.http.post(client.url, headers=headers, data=io.BytesIO(body.ljust(limit))) as response:
            reply = Reply(response, await response.read(), "tools/call")
    assert reply.json == ACCEPT
    assert asked_peers(two) == {"served": 1}


async def test_an_address_never_comes_from_a_state(cluster: Cluster) -> None:
    """Threat 17: an owner that is not a member is not asked, whatever its id looks like; it may be a newer member."""

    canary = await cluster.fake(FakePeer(is_never_asked))
    (one,) = await cluster.begin("gw-1")
    for owner in (canary.address, f"{canary.address}#0", f"http://{canary.address}", "unix:/tmp/x", "gw-9"):
        reply = await one.client().answer(await orphan(one, owner))
        assert reply.outcome == (503, -32603, "owner_stalled"), owner
    assert steps(one) == {}
    reply = await one.client().answer(await orphan(one, "gw-1#0"))
    assert reply.outcome == (200, -32603, "owner_lost"), "this process has the name of its host: there is no worker"
    assert canary.connections == 0
    assert steps(one) == {"lost": 1}


async def test_a_silent_owner_receives_nothing_and_keeps_its_calls(upstream: FakeUpstream, cluster: Cluster) -> None:
    silent = await cluster.fake(Silent())
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": silent.address}, **TWICE)
    asked = await orphan(one, "gw-2")
    for count in (1, 2):
        reply = await one.client().answer(asked)
        assert reply.outcome == (503, -32603, "owner_stalled")
        assert reply.headers["Retry-After"] == "1"
        assert silent.connections == count
    for received in silent.received:
        head, end, body = bytes(received).partition(b"\r\n\r\n")
        assert end
        assert body == b"", "a process that wakes up later has nothing to run"
        assert b"100-continue" in head.lower()
    assert len(upstream.of("tools/call")) == 1, "and it is run nowhere else"
    assert asked_peers(one) == {"stalled": 2}
    assert len(one.gateway.lot) == 0


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [
        (403, b"", "refused"),
        (403, b"Forbidden", "stalled"),  # not by a replica, which gives no reason
        *((status, b"", "stalled") for status in (404, 413, 500, 503)),
    ],
)
async def test_an_owner_that_refuses_the_request_counts_as_alive(
    upstream: FakeUpstream, cluster: Cluster, status: int, body: bytes, state: str
) -> None:
    """If clocks or keys differ, its calls are not taken over, and the error says why."""

    async def script(asked: Asked) -> None:
        await asked.refuse(status, body=body)
        await asked.silence()

    one, _ = await facing(cluster, script, **TWICE)
    asked = await orphan(one, "gw-2")
    for _ in range(2):
        reply = await one.client().answer(asked)
        assert reply.outcome == (503, -32603, "owner_stalled")
        assert f"HTTP {status}" in reply.error["message"]
    assert asked_peers(one) == {state: 2}
    assert one.gateway.members.seen["gw-2"].state == state
    assert len(upstream.of("tools/call")) == 1


@pytest.mark.parametrize(
    ("status", "date", "cause", "says"),
    [
        (
            403,
            120,
            "refuses requests from gw-1 (HTTP 403): its clock is 120 s ahead of that of gw-1",
            "gw-2's clock is 120 s ahead of this replica's",
        ),
        (
            403,
            -120,
            "refuses requests from gw-1 (HTTP 403): its clock is 120 s behind that of gw-1",
            "gw-2's clock is 120 s behind this replica's",
        ),
        (403, 30, "(HTTP 403): compare state.keys of both, whose clocks agree", PeerRefused.fix),
        (404, 120, _PROGRAM, NoReplica.fix),
        (403, "yesterday", _BOTH, PeerRefused.fix),
        (403, "", _BOTH, PeerRefused.fix),
    ],
)
async def test_the_cause_and_the_fix_name_a_clock_that_is_off(
    cluster: Cluster,
    log_lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    date: int | str,
    cause: str,
    says: str,
) -> None:
    now = float(int(time.time()))
    monkeypatch.setattr(world, "wall", lambda: now)
    date = date if isinstance(date, str) else formatdate(now + date, usegmt=True)
    one, _ = await facing(cluster, lambda asked: asked.refuse(status, date), **TWICE)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.outcome == (503, -32603, "owner_stalled")
    (line,) = log_lines("peer.failed")
    assert line["fix"].startswith(says)
    assert line["exchange_id"] == "orphan of gw-2"
    for text in (line["cause"], reply.error["message"]):
        assert f"{cause}; the call may still wait" in text
    (error,) = one.gateway.recent_errors.told()
    assert error.fix.lower().startswith(says.lower())

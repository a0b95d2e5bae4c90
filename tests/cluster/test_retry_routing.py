"""Several replicas over one old server: whoever gets a retry, the one that holds the call serves it, or its heir.

The replicas are real and in this process; `fake_peer` stands where a replica misbehaves as no real one does.
"""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.admin.snapshot import known_peers
from gateway.cluster.membership import Address, Worker
from gateway.exchange.events import Expired
from gateway.exchange.machine import Exchange, State
from gateway.http.reply import Incoming, ReplyWriter
from gateway.protocol import mcp
from gateway.seal import peer_messages as hops
from gateway.seal.cipher import Keyring
from gateway.seal.peer_messages import Data, End, Frames, Gone, Head, Hop, Me, PeerSealer
from gateway.seal.request_state import Envelope
from tests.parts.launch import free_port
from tests.support import workbench
from tests.support.black_hole import black_hole
from tests.support.fake_peer import KEY, Asked, FakePeer, Proxy, Server, Silent
from tests.support.fake_upstream import DEADLINE, FORM, FakeUpstream, Turn, event, text
from tests.support.stand import _at_rest
from tests.support.workbench import ACCEPT, Client, Reply, Stand, eventually, jwt

SECONDS = {"peer_connect_seconds": 1, "peer_accept_seconds": 0.2, "cancel_seconds": 1}
TWICE: dict[str, Any] = {"route": {"ephemeral": ["*"]}}
"""Every tool may run twice."""
TOKEN = {mcp.META_PROGRESS_TOKEN: "t"}
RETRY = "mcp_gateway_continuations_total"


async def ask(turn: Turn) -> None:
    answer = await turn.elicit("q")
    await turn.result(text(json.dumps(answer)))


class Gate:
    """A tool that asks, then waits for the test before it gives its result."""

    def __init__(self, upstream: FakeUpstream) -> None:
        self.answered = asyncio.Event()
        self.go = asyncio.Event()
        upstream.tool(self.tool)

    async def tool(self, turn: Turn) -> None:
        await turn.elicit("q")
        self.answered.set()
        await self.go.wait()
        await turn.result(text("done"))


def later(work: Any) -> "asyncio.Task[Reply]":
    task: asyncio.Task[Reply] = asyncio.get_running_loop().create_task(work)
    return task


async def in_time(work: Any) -> Any:
    async with asyncio.timeout(DEADLINE):
        return await work


def opened(state: str) -> Envelope:
    return msgspec.msgpack.Decoder(Envelope).decode(Keyring((KEY,), "state").open(state))


def resealed(state: str, **changes: Any) -> str:
    """A state as any replica could have sealed it, but for these."""
    envelope = replace(opened(state), **changes)
    return Keyring((KEY,), "state").seal(msgspec.msgpack.encode(envelope))


def sample(stand: Stand, name: str, **labels: str) -> float:
    return stand.gateway.metrics._registry.get_sample_value(name, labels) or 0.0


def asked_peers(stand: Stand) -> dict[str, int]:
    """What became of the requests to others."""
    outcomes = ("served", "gone", "dead", "silent", "stalled", "broke")
    found = {each: int(sample(stand, "mcp_gateway_peer_requests_total", outcome=each)) for each in outcomes}
    return {outcome: count for outcome, count in found.items() if count}


def steps(stand: Stand) -> dict[str, int]:
    names = ("held", "forwarded", "resumed", "replayed", "lost")
    found = {each: int(stand.metric(RETRY, step=each)) for each in names}
    return {step: count for step, count in found.items() if count}


def operations(stand: Stand, outcome: str) -> int:
    """Requests that this replica counted as its clients'."""
    families = stand.gateway.metrics._registry.collect()
    return int(
        sum(
            each.value
            for family in families
            for each in family.samples
            if each.name == "mcp_server_operation_duration_seconds_count" and each.labels["outcome"] == outcome
        )
    )


async def crash(stand: Stand) -> None:
    """End a process without a word to anybody: its connections break, its tasks are gone, nothing of it is tidied."""
    gateway = stand.gateway

    def never(work: Any, _: str) -> Any:
        work.close()
        over = asyncio.get_running_loop().create_future()
        over.set_result(None)
        return over

    gateway.tasks.start = never  # type: ignore[method-assign,assignment]
    for task in gateway.tasks._running:
        task.cancel()
    for listener in gateway._listeners:
        server = listener._runner.server
        assert server is not None
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
    for listener in gateway._listeners:
        await listener.close()
    await gateway.tasks.close()
    await gateway._client.close()
    await gateway._peers.close()


class Cluster:
    """Replicas of one service, gw-1 and so on."""

    def __init__(self, upstream: FakeUpstream, http: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self.http = http
        self.peers: dict[str, Address] = {}
        self.stands: dict[str, Stand] = {}
        self.crashed: list[Stand] = []
        self.servers: list[Server] = []

    async def begin(self, *names: str, fakes: dict[str, Address] | None = None, **sections: Any) -> list[Stand]:
        """Start these replicas; `fakes` are the addresses of others, or other ways to these."""
        ports = {name: f"127.0.0.1:{free_port()}" for name in names}
        self.peers = {**ports, **(fakes or {})}
        return [await self.start(name, ports[name], **sections) for name in names]

    async def start(self, name: str, door: Address, worker: Worker | None = None, **sections: Any) -> Stand:
        replica = {"id": name, "listen": door, "peers": self.peers, **sections.pop("replica", {})}
        sections = {**sections, "timeouts": {**SECONDS, **sections.get("timeouts", {})}, "replica": replica}
        stand = await workbench.start(self._upstream.url, self.http, worker=worker, **sections)
        self.stands[name if worker is None else f"{name}#{worker.number}"] = stand
        return stand

    async def crash(self, stand: Stand) -> None:
        self.stands = {name: each for name, each in self.stands.items() if each is not stand}
        self.crashed.append(stand)
        await crash(stand)

    async def fake(self, server: Server, port: int = 0) -> Any:
        await server.start(port)
        self.servers.append(server)
        return server


@pytest.fixture
async def cluster(upstream: FakeUpstream) -> AsyncIterator[Cluster]:
    """Starts replicas; afterwards those that live must come to rest and leave nothing behind."""
    before = asyncio.all_tasks()
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    found = Cluster(upstream, http)
    yield found
    try:
        for stand in found.stands.values():
            await _at_rest(stand)
    finally:
        for server in found.servers:
            await server.close()
        for stand in found.stands.values():
            await stand.gateway.close()
        await http.close()
        await upstream.close()
    known = {*before, asyncio.current_task()}
    await eventually(lambda: not asyncio.all_tasks() - known, "no task is left")


async def drop(stand: Stand) -> None:
    """Give up what nobody will answer."""
    for driver in list(stand.gateway.lot):
        driver._feed(Expired())


async def order(stand: Stand, exchange: str) -> list[str]:
    return await stand.gateway.members.heirs(exchange)


async def exchange_inherited_by(stand: Stand, *first: str) -> str:
    """An exchange id whose heirs begin with these."""
    for number in range(10_000):
        if (await order(stand, f"x{number}"))[: len(first)] == list(first):
            return f"x{number}"
    raise AssertionError("no such order")


async def orphan(stand: Stand, owner: str, *heirs: str, **changes: Any) -> Reply:
    """A call whose state says that another replica holds it, which knows nothing of it; the real one is given up."""
    asked = await stand.client().call()
    exchange = await exchange_inherited_by(stand, *heirs) if heirs else f"orphan of {owner}"
    state = resealed(asked.state, owner=owner, **{"upstream": None, "exchange": exchange, **changes})
    await drop(stand)
    asked.messages[-1]["result"]["requestState"] = state
    return asked


# -- the owner is asked ----------------------------------------------------------------------------------------------


async def test_a_retry_that_reaches_another_replica_is_served_by_the_owner(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    direct = await one.client().call()
    reply = await two.client().answer(asked)
    assert json.loads(reply.text) == ACCEPT
    same = await one.client().answer(direct)
    assert (reply.status, reply.is_stream) == (same.status, same.is_stream) == (200, False)
    hide = ("Date", "X-Request-Id")
    assert {k: v for k, v in reply.headers.items() if k.title() not in hide} == {
        k: v for k, v in same.headers.items() if k.title() not in hide
    }, "nobody can tell it from a reply of the owner's own"
    assert len(upstream.of("tools/call")) == len(upstream.of("answer")) == 2
    assert (steps(one), steps(two)) == ({"held": 2}, {"forwarded": 1})
    assert (asked_peers(one), asked_peers(two)) == ({}, {"served": 1})
    assert operations(two, "complete") == 1
    assert operations(one, "complete") == 1, "only the replica that the client spoke to counts a request"


async def test_what_came_of_it_is_told_to_who_looks(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)

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

    async def tool(turn: Turn) -> None:
        answers = [await turn.elicit(f"q{number}") for number in range(6)]
        await turn.result(text(json.dumps(len(answers))))

    upstream.tool(tool)
    reply = await stands[0].client().call()
    for number in range(1, 7):
        reply = await stands[number % 3].client().answer(reply)
    assert reply.text == "6"
    assert [steps(each) for each in stands] == [{"held": 6}, {"forwarded": 2}, {"forwarded": 2}]


async def test_a_stream_goes_over_while_it_runs(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        token = turn.body["params"]["_meta"]["progressToken"]
        await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 1})
        await go.wait()
        await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 2})
        await turn.result(text("done"))

    upstream.tool(tool)
    asked = await one.client().call(meta=TOKEN)
    params = {
        "name": "tool",
        "arguments": {},
        "requestState": asked.state,
        "inputResponses": dict.fromkeys(asked.questions, ACCEPT),
    }
    async with asyncio.timeout(DEADLINE), two.client().open("tools/call", params, meta=TOKEN) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        first = await response.content.readuntil(b"\n\n")
        assert b'"progress":1' in first.replace(b" ", b"")
        assert not go.is_set(), "it came before the tool went on"
        go.set()
        rest = await response.read()
    reply = Reply(response, first + rest, "tools/call")
    assert [each["params"]["progress"] for each in reply.notifications] == [1, 2]
    assert reply.text == "done"
    assert (await asyncio.wait_for(upstream.saw("tools/call"), DEADLINE))[0].cut.is_set() is False


async def test_keep_alives_of_a_silent_call_come_through(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", timeouts={"keepalive_seconds": 0.05})
    gate = Gate(upstream)
    asked = await one.client().call()
    params = {
        "name": "tool",
        "arguments": {},
        "requestState": asked.state,
        "inputResponses": dict.fromkeys(asked.questions, ACCEPT),
    }
    async with asyncio.timeout(DEADLINE), two.client().open("tools/call", params) as response:
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b":\n\n"
        gate.go.set()
        assert b"done" in await response.read()


async def test_the_owners_refusal_comes_back_as_it_is(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    challenge = 'Bearer resource_metadata="https://as.example/é"'

    async def refuse(turn: Turn) -> None:
        turn.reply(401, {"error": "expired"}, {"WWW-Authenticate": challenge})

    upstream.once("answer", refuse)
    refused = await two.client().answer(asked)
    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"] == challenge
    assert refused.error["data"]["reason"] == "upstream_refused"
    wrong = await two.client().answer(asked, {"action": "shrug"})
    assert (wrong.status, wrong.error["code"]) == (400, -32602)
    assert one.held == 1, "the call is unharmed"
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT
    assert len(upstream.of("tools/call")) == 1


async def test_an_owner_that_ends_says_so_through_others(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", hold={"drain_seconds": 0.05})
    gate = Gate(upstream)
    asked = await one.client().call()
    waiting = later(two.client().answer(asked))
    await in_time(gate.answered.wait())
    await one.gateway.drain(delay_seconds=0)
    reply = await waiting
    assert reply.outcome == (503, -32603, "stopping")
    assert reply.headers["Retry-After"] == "1"
    await upstream.saw(mcp.CANCELLED)
    gate.go.set()


async def test_a_draining_replica_leaves_a_call_that_finds_no_place_its_leg(
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
    draining = asyncio.get_running_loop().create_task(one.gateway.drain(delay_seconds=0))
    await eventually(lambda: one.gateway.downstream.stopping)
    assert (await client.answer(asked)).text == "done"
    assert not running.done()
    go.set()
    assert (await running).text == "done"
    await in_time(draining)
    assert mcp.CANCELLED not in upstream.words


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {"Retry-After": "7"}), (401, {"WWW-Authenticate": "X"}), (200, {})]
)
async def test_whatever_a_replica_answers_is_passed_on(
    upstream: FakeUpstream, cluster: Cluster, status: int, headers: dict[str, str]
) -> None:
    result = {"resultType": "complete", **text("é")}
    body = json.dumps({"jsonrpc": "2.0", "id": "c2", "result": result}, ensure_ascii=False).encode()

    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.reply(body, status, headers)

    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address})
    upstream.tool(ask)
    asked = await orphan(one, "gw-2")
    client = one.client()
    sent, retry = client.build("tools/call", retry_params(asked))
    async with asyncio.timeout(DEADLINE), client.http.post(client.url, headers=sent, data=retry) as response:
        assert (response.status, await response.read()) == (status, body)
        for name, value in headers.items():
            assert response.headers.getall(name) == [value]
    (taken,) = peer.asked
    assert (taken.hop.kind, taken.hop.to, taken.hop.path, taken.hop.body) == ("owner", "gw-2", "/mcp", retry)


def retry_params(asked: Reply, answer: Any = None) -> dict[str, Any]:
    answers = dict.fromkeys(asked.questions, ACCEPT if answer is None else answer)
    return {"name": "tool", "arguments": {}, "requestState": asked.state, "inputResponses": answers}


# -- clients that leave, come again, come twice ----------------------------------------------------------------------


async def test_the_owner_hears_of_a_client_that_leaves_another_replica(
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


async def test_a_client_that_comes_back_within_the_grace_finds_its_call(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", hold={"grace_seconds": 60})
    gate = Gate(upstream)
    asked = await one.client().call()
    (driver,) = one.gateway.lot
    waiting = later(two.client().answer(asked))
    await in_time(gate.answered.wait())
    waiting.cancel()
    await eventually(lambda: driver._exchange.state is State.DETACHED)
    again = later(three.client().answer(asked))
    await eventually(lambda: driver._exchange.state is State.RUNNING)
    gate.go.set()
    assert (await again).text == "done"
    assert len(upstream.of("answer")) == len(upstream.of("tools/call")) == 1
    assert mcp.CANCELLED not in upstream.words


async def test_the_same_retry_through_two_replicas_gets_one_result(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3")
    gate = Gate(upstream)
    asked = await one.client().call()
    (driver,) = one.gateway.lot
    replies = [later(stand.client().answer(asked)) for stand in (two, three, one)]
    await eventually(lambda: len(driver._exchange.legs) == 3)
    gate.go.set()
    assert [reply.text for reply in await in_time(asyncio.gather(*replies))] == ["done"] * 3
    late = await two.client().answer(asked)
    assert late.text == "done", "and the result is kept for a reply that got lost"
    assert len(upstream.of("answer")) == len(upstream.of("tools/call")) == 1


async def test_other_answers_are_refused_through_another_replica_too(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT
    other = await two.client().answer(asked, {"action": "decline"})
    assert other.outcome == (400, -32602, "invalid_request_state")
    assert len(upstream.of("answer")) == 1
    assert (sample(one, "mcp_gateway_state_rejected_total", reason="answered"), two.held) == (1, 0)


# -- who is calling --------------------------------------------------------------------------------------------------


async def test_the_owner_believes_a_proxys_header_for_the_proxys_address(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """Clients come from 127.0.0.2, which is trusted; replicas speak to each other from 127.0.0.1, which is not."""
    section = {"source": "header", "header": "x-user", "trusted_proxies": ["127.0.0.2/32"]}
    one, two = await cluster.begin("gw-1", "gw-2", principal=section)
    upstream.tool(ask)
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as proxy:
        ada: dict[str, Any] = {"headers": {"X-User": "ada"}}
        asked = await Client(proxy, one.url).call(**ada)
        eve = await Client(proxy, two.url).answer(asked, headers={"X-User": "eve"})
        assert eve.outcome == (400, -32602, "invalid_request_state")
        stranger = await two.client().answer(asked, headers={"X-User": "ada"})
        assert stranger.outcome == (400, -32602, "invalid_request_state"), "said by nobody who may say it"
        assert json.loads((await Client(proxy, two.url).answer(asked, **ada)).text) == ACCEPT
    assert steps(two) == {"forwarded": 1}


async def test_a_retry_through_another_replica_is_judged_by_its_credentials_all_the_same(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    upstream.tool(ask)
    one, other = await cluster.begin("gw-1", "gw-2", route={"forward_headers": ["x-api-key"]})
    asked = await one.client(headers={"X-Api-Key": "mine"}).call()
    for headers in ({}, {"X-Api-Key": "another"}):
        assert (await other.client(headers=headers).answer(asked)).outcome == (400, -32602, "invalid_request_state")
    sent, body = other.client().build("tools/call", retry_params(asked))
    twice = CIMultiDict(sent)
    twice.extend([("X-Api-Key", "another"), ("x-api-key", "mine")])
    incoming = Incoming("/mcp", CIMultiDictProxy(twice), "127.0.0.1", body, request_id="r")
    asked_of = one.gateway.members.own
    wire = Recorder()
    _ = await other.gateway._peers.forward("owner", asked_of, incoming, wire)
    assert (wire.status, json.loads(wire.body)["error"]["code"]) == (400, -32600), "the owner looks for itself"
    assert (await other.client(headers={"X-Api-Key": "mine"}).answer(asked)).text


class Recorder(ReplyWriter):
    """Keeps a whole reply."""

    async def only(self, body: bytes, status: int, headers: Any, ending: Any) -> web.StreamResponse:
        self.body, self.status = body, status
        return web.Response()

    async def start(self) -> None:
        raise AssertionError

    async def write(self, data: bytes) -> None:
        raise AssertionError

    async def end(self, ending: Any) -> web.StreamResponse:
        raise AssertionError


async def test_a_call_that_is_taken_over_stays_bound_to_its_credentials(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def twice(turn: Turn) -> None:
        _ = await turn.elicit("q")
        await turn.result(text(json.dumps(await turn.elicit("r"))))

    upstream.tool(twice)
    one, other = await cluster.begin("gw-1", "gw-2", route={"forward_headers": ["x-api-key"], "ephemeral": ["*"]})
    asked = await one.client(headers={"X-Api-Key": "mine"}).call()
    await cluster.crash(one)
    refused = (400, -32602, "invalid_request_state")
    assert (await other.client(headers={"X-Api-Key": "another"}).answer(asked)).outcome == refused
    again = await other.client(headers={"X-Api-Key": "mine"}).answer(asked)
    assert (await other.client().answer(again)).outcome == refused
    assert (await other.client(headers={"X-Api-Key": "mine"}).answer(again)).text


async def test_credentials_and_forwarded_headers_go_through_byte_for_byte(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route={"forward_headers": ["X-Tenant", "X-Empty"]})
    upstream.tool(ask)
    claims = {"iss": "https://as", "sub": "ada"}
    tenant = 'Grüße, Ωmega \U0001f600; a="b\\"'
    sent = {"X-Tenant": tenant, "X-Empty": ""}
    asked = await one.client(jwt(**claims, exp=1)).call(headers=sent)
    fresh = jwt(**claims, exp=2)
    assert json.loads((await two.client(fresh).answer(asked, headers=sent)).text) == ACCEPT
    (answer,) = upstream.of("answer")
    assert answer.headers.getall("Authorization") == [fresh]
    assert answer.headers.getall("X-Tenant") == [tenant]
    assert answer.headers.getall("X-Empty") == [""]
    stranger = await two.client(jwt(iss="https://as", sub="eve")).answer(asked, headers=sent)
    assert stranger.outcome == (400, -32602, "invalid_request_state")


async def test_every_header_and_the_clients_address_reach_the_other_replica_as_they_came(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.reply(b"{}")

    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address})
    upstream.tool(ask)
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
    hop = peer.asked[0].hop
    assert list(hop.headers) == raw
    assert (hop.remote, hop.body) == ("127.0.0.1", body)
    assert b"odd" not in peer.asked[0].head.lower(), "nothing of it can be read on the way"


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100_000, 4_194_304])
async def test_a_body_up_to_the_limit_goes_over_and_no_larger_one(
    upstream: FakeUpstream, cluster: Cluster, limit: int
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", limits={"body_bytes": limit})
    upstream.tool(ask)
    asked = await one.client().call()
    client = two.client()
    pad = {f"X-Pad-{number}": "p" * 8000 for number in range(3)}
    headers, body = client.build("tools/call", retry_params(asked), headers=pad)
    async with client.http.post(client.url, headers=headers, data=io.BytesIO(body.ljust(limit + 1))) as response:
        assert response.status == 413
    assert asked_peers(two) == {}
    async with asyncio.timeout(DEADLINE):
        async with client.http.post(client.url, headers=headers, data=io.BytesIO(body.ljust(limit))) as response:
            reply = Reply(response, await response.read(), "tools/call")
    assert json.loads(reply.text) == ACCEPT
    assert asked_peers(two) == {"served": 1}


async def test_a_large_result_comes_over_whole(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    large = "x" * 3_000_000 + "é"

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        token = turn.body["params"].get("_meta", {}).get("progressToken")
        if token is not None:
            await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 1})
        await turn.result(text(large))

    upstream.tool(tool)
    for meta in ({}, TOKEN):
        asked = await one.client().call(meta=meta)
        reply = await two.client().answer(asked, meta=meta)
        assert reply.text == large
        assert reply.is_stream == bool(meta)


# -- the peer port ---------------------------------------------------------------------------------------------------


def sealed(ring: Keyring | None = None, **changes: Any) -> bytes:
    hop = Hop(kind="owner", to="gw-1", issued=time.time(), nonce=hops.nonce(), path="/mcp", body=b"{}")
    return PeerSealer(ring or Keyring((KEY,), "peer")).seal(replace(hop, **changes))


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
async def test_what_no_replica_sealed_is_refused_without_a_word(
    upstream: FakeUpstream, cluster: Cluster, body: Callable[[], bytes], why: str
) -> None:
    (one,) = await cluster.begin("gw-1")
    url = f"http://{cluster.peers['gw-1']}/peer"
    async with cluster.http.post(url, data=body()) as response:
        assert (response.status, await response.read()) == (403, b"")
        assert set(response.headers) <= {"Content-Length", "Content-Type", "Date", "Server", "Connection"}
    assert refused(one) == {why: 1}
    assert upstream.seen == []


async def test_a_request_that_comes_again_is_refused(upstream: FakeUpstream, cluster: Cluster) -> None:
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
    assert b"Ada" not in first, "who only listens has heard nothing"
    assert len(upstream.of("answer")) == 1


async def test_the_peer_port_serves_nothing_else(upstream: FakeUpstream, cluster: Cluster) -> None:
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
    # Nor does the clients' port let a replica in.
    async with cluster.http.post(one.url.replace("/mcp", "/peer"), data=sealed()) as response:
        assert response.status == 404
    async with cluster.http.post(one.url, data=sealed()) as response:
        assert response.status == 404
    assert upstream.words == ["raw"], "it is no modern request: what it is, is the upstream's to say"


async def frames_of(cluster: Cluster, name: str, hop: Hop, *, close: bool = False) -> list[hops.Frame]:
    """What a replica answers another one."""
    ring = Keyring((KEY,), "peer")
    url = f"http://{cluster.peers[name]}/peer"
    headers = {"Connection": "close"} if close else {}
    sealed_hop = PeerSealer(ring).seal(hop)
    async with asyncio.timeout(DEADLINE), cluster.http.post(url, data=sealed_hop, headers=headers) as response:
        assert response.status == 200
        return Frames(ring, hop.nonce, 1 << 24).feed(await response.read())


def hop_for(to: str, kind: hops.Kind = "owner", asked: Reply | None = None, client: Client | None = None) -> Hop:
    headers, body = client.build("tools/call", retry_params(asked)) if client and asked else ({}, b"")
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    return Hop(
        kind=kind, to=to, issued=time.time(), nonce=hops.nonce(), path="/mcp", headers=raw, remote="::1", body=body
    )


async def test_a_replica_says_who_it_is_to_replicas_only(cluster: Cluster) -> None:
    await cluster.begin("gw-1", "gw-2")
    assert await frames_of(cluster, "gw-2", hop_for("", "who")) == [Me("gw-2")]


@pytest.mark.parametrize("kind", ["owner", "heir", "resume"])
async def test_a_request_for_a_third_replica_goes_no_further(
    upstream: FakeUpstream, cluster: Cluster, kind: hops.Kind
) -> None:
    """Threat 20: A -> B -> A, or on to anybody else."""

    async def never(asked: Asked) -> None:
        raise AssertionError("it was asked")

    third = await cluster.fake(FakePeer(never))
    one, two = await cluster.begin("gw-1", "gw-2", fakes={"gw-3": third.address})
    upstream.tool(ask)
    asked = await one.client().call()
    client = two.client()
    for to in ("gw-1", "gw-3", "gw-3#1", "gw-9", "", third.address):
        hop = hop_for(to, kind, asked, client)
        assert await frames_of(cluster, "gw-2", hop) == [Gone("gw-2")], to
    assert third.connections == 0
    assert (asked_peers(one), asked_peers(two)) == ({}, {})
    assert "answer" not in upstream.words
    # The owner itself serves it, whatever the request says of its receiver: the call is here.
    (head, data, end) = await frames_of(cluster, "gw-1", hop_for("gw-1", "owner", asked, client))
    assert isinstance(head, Head)
    assert isinstance(data, Data)
    assert isinstance(end, End)
    assert (head.status, end.outcome) == (200, "complete")


async def test_a_request_for_a_worker_that_is_not_there_is_no_loop(cluster: Cluster, upstream: FakeUpstream) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await orphan(one, "gw-2#1")
    assert await frames_of(cluster, "gw-2", hop_for("gw-2#1", "owner", asked, one.client())) == [Gone("gw-2")]
    assert asked_peers(two) == {"dead": 1}


async def test_a_hop_with_a_foreign_path_or_a_bad_body_is_answered_as_a_client_would_be(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    await cluster.begin("gw-1")
    for changes, status, code in (
        ({"path": "/other"}, 404, "-32601"),
        ({"body": b"{"}, 400, "-32700"),
        ({"body": b""}, 400, "-32700"),
    ):
        hop = replace(hop_for("gw-1"), **changes)
        head, _, end = await frames_of(cluster, "gw-1", hop)
        assert isinstance(head, Head)
        assert head.status == status
        assert end == End("rejected", code)
    assert upstream.seen == []


# -- addresses -------------------------------------------------------------------------------------------------------


async def test_no_address_ever_comes_out_of_a_state(upstream: FakeUpstream, cluster: Cluster) -> None:
    """Threat 17: an owner that is not a member is not asked, whatever its id looks like; it may be a newer member."""

    async def never(asked: Asked) -> None:
        raise AssertionError("it was asked")

    canary = await cluster.fake(FakePeer(never))
    (one,) = await cluster.begin("gw-1")
    upstream.tool(ask)
    for owner in (canary.address, f"{canary.address}#0", f"http://{canary.address}", "unix:/tmp/x", "gw-9"):
        reply = await one.client().answer(await orphan(one, owner))
        assert reply.outcome == (503, -32603, "owner_stalled"), owner
    assert steps(one) == {}
    reply = await one.client().answer(await orphan(one, "gw-1#0"))
    assert reply.outcome == (200, -32603, "owner_lost"), "this process has the name of its host: there is no worker"
    assert canary.connections == 0
    assert steps(one) == {"lost": 1}


# -- owners that are there and do not serve --------------------------------------------------------------------------


async def test_a_silent_owner_is_given_nothing_and_nobody_takes_its_calls(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    silent = await cluster.fake(Silent())
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": silent.address}, **TWICE)
    upstream.tool(ask)
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


async def test_an_owner_that_stops_after_it_took_the_request_is_stalled_too(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.silence()

    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert peer.kinds == ["owner"], "sent once"


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_owner_that_stops_in_its_reply_is_stalled_and_the_stream_ends_well(
    upstream: FakeUpstream, cluster: Cluster, *, streamed: bool
) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=streamed))
        if streamed:
            await asked.say(Data(event(progress(1))))
        await asked.silence()

    peer = await cluster.fake(FakePeer(script))
    times = {"keepalive_seconds": 0.1}
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, timeouts=times, **TWICE)
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.status == (200 if streamed else 503)
    assert reply.is_stream is streamed
    assert reply.error["data"]["reason"] == "owner_stalled"
    assert len(reply.notifications) == streamed
    assert peer.kinds == ["owner"]


def progress(number: int) -> dict[str, Any]:
    params = {"progressToken": "t", "progress": number}
    return {"jsonrpc": "2.0", "method": mcp.PROGRESS, "params": params}


@pytest.mark.parametrize("status", [403, 404, 413, 500, 503])
async def test_an_owner_that_refuses_the_request_lives(upstream: FakeUpstream, cluster: Cluster, status: int) -> None:
    """Clocks or keys that disagree: its calls are not taken over, and the operator reads why."""

    async def script(asked: Asked) -> None:
        await asked.refuse(status)
        await asked.silence()

    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2")
    for _ in range(2):
        reply = await one.client().answer(asked)
        assert reply.outcome == (503, -32603, "owner_stalled")
        assert f"HTTP {status}" in reply.error["message"]
    assert asked_peers(one) == {"stalled": 2}
    assert len(upstream.of("tools/call")) == 1


# -- owners that die -------------------------------------------------------------------------------------------------


async def test_a_dead_owners_call_is_lost_where_it_may_not_run_twice(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    reply = await two.client().answer(asked)
    assert reply.outcome == (200, -32603, "owner_lost")
    assert "gw-1" in reply.error["message"]
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert len(upstream.of("tools/call")) == 1
    assert "answer" not in upstream.words
    assert steps(two) == {"lost": 1}
    again = await two.client().answer(asked)
    assert again.outcome == reply.outcome, "and so it stays"
    assert len(upstream.of("tools/call")) == 1


async def test_a_dead_owners_call_runs_again_where_it_may(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **TWICE)
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT
    assert len(upstream.of("tools/call")) == 2
    assert steps(two) == {"replayed": 1}


@pytest.mark.parametrize("slower", ["stream", "answer"])
async def test_a_call_taken_over_runs_again_once_though_its_stream_and_its_answer_both_find_it_lost(
    upstream: FakeUpstream, cluster: Cluster, slower: str
) -> None:
    """Both then look up whether the tool may run twice. The slower of them must not send the call once more."""
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tools = [{"name": "tool", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]

    async def asks(turn: Turn) -> None:
        params = {**FORM, "requestedSchema": {**FORM["requestedSchema"], "title": "q"}}
        await turn.say({"id": "q", "method": mcp.ELICIT, "params": params}, "e1")
        await turn.for_ever()

    async def gone(turn: Turn) -> None:
        turn.reply(404, {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "Session not found"}})

    async def slow(turn: Turn) -> None:
        await upstream.saw("tools/call", 2)
        await turn.result({"tools": upstream.tools})

    async def until_answered(turn: Turn) -> None:
        await turn.raw(b":\n\n")
        await upstream.saw("answer")

    async def after_the_stream(turn: Turn) -> None:
        await upstream.saw("tools/list", 2)
        await gone(turn)

    upstream.tool(asks)
    asked = await one.client().call()
    await cluster.crash(one)
    gate = Gate(upstream)
    upstream.on("resume", gone)
    upstream.once("resume", until_answered)
    upstream.once("answer", after_the_stream if slower == "stream" else gone)
    upstream.once("tools/list", slow)
    reply = later(two.client().answer(asked))
    await eventually(gate.answered.is_set)
    await eventually(lambda: len(calls_of(two)) == 1, "who followed the lost call has come to an end")
    gate.go.set()
    assert (await in_time(reply)).text == "done"
    assert len(upstream.of("tools/call")) == 2
    assert steps(two) == {"resumed": 1, "replayed": 1}


def calls_of(stand: Stand) -> list[str]:
    return [task.get_name() for task in stand.gateway.tasks._running if task.get_name() == "call"]


async def test_retries_at_two_replicas_at_once_meet_at_one_heir(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", **TWICE)
    gate = Gate(upstream)
    asked = await one.client().call()
    (driver,) = one.gateway.lot
    heirs = [name for name in await order(two, driver.id) if name != "gw-1"]
    assert heirs == [name for name in await order(three, driver.id) if name != "gw-1"]
    await cluster.crash(one)
    upstream.tool(gate.tool)
    replies = [later(stand.client().answer(asked)) for stand in (two, three, two, three)]
    heir = cluster.stands[heirs[0]]
    await eventually(lambda: [len(each._exchange.legs) for each in heir.gateway.lot] == [4], "all wait at the heir")
    await eventually(gate.answered.is_set)
    gate.go.set()
    assert [reply.text for reply in await in_time(asyncio.gather(*replies))] == ["done"] * 4
    assert len(upstream.of("tools/call")) == 2, "once by the dead one, once by its heir"
    assert steps(heir).get("replayed") == 1


async def test_the_heirs_own_next_round_is_reached_through_others(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", **TWICE)

    async def tool(turn: Turn) -> None:
        first = await turn.elicit("first")
        second = await turn.elicit("second")
        await turn.result(text(json.dumps([first, second])))

    upstream.tool(tool)
    asked = await one.client().call()
    await cluster.crash(one)
    asked = await two.client().answer(asked)
    assert list(asked.questions) == ["second"]
    heir = opened(asked.state).owner
    assert heir in ("gw-2", "gw-3")
    reply = await (three if heir == "gw-2" else two).client().answer(asked, {"action": "decline"})
    assert json.loads(reply.text) == [ACCEPT, {"action": "decline"}]
    assert len(upstream.of("tools/call")) == 2


async def test_an_owner_that_comes_back_as_another_process_is_gone(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **TWICE)
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    again = await cluster.start("gw-1", cluster.peers["gw-1"], **TWICE)
    reply = await two.client().answer(asked)
    assert json.loads(reply.text) == ACCEPT
    found = asked_peers(two)
    assert found.pop("gone") == 1
    assert found in ({}, {"served": 1}), "then whoever inherits it runs it again"
    assert len(upstream.of("tools/call")) == 2
    assert steps(again).get("replayed", 0) + steps(two).get("replayed", 0) == 1


async def test_a_restarted_owner_that_is_asked_itself_runs_it_again_too(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    (one,) = await cluster.begin("gw-1", **TWICE)
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    again = await cluster.start("gw-1", cluster.peers["gw-1"], **TWICE)
    assert json.loads((await again.client().answer(asked)).text) == ACCEPT
    assert asked_peers(again) == {}


async def dies_at_once(asked: Asked) -> None:
    asked.die()


async def dies_after_continue(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
    asked.die()


async def dies_after_the_body(asked: Asked) -> None:
    await asked.take()
    asked.die()


async def dies_after_the_head(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    asked.die()


async def dies_within_a_frame(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.send(asked.frames.seal(Head(200, (), streamed=False))[:-1])
    asked.die()


async def ends_too_early(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.say(Head(200, (), streamed=False), Data(b"{}"))
    await asked.end()


async def says_garbage(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.send(b"\0\0\0\x50" + b"garbage " * 10)
    await asked.silence()


async def says_too_much(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.send(b"\xff" * 100)
    await asked.silence()


async def says_it_in_the_clear(asked: Asked) -> None:
    await asked.take()
    await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    await asked.silence()


async def repeats_a_frame(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    head = asked.frames.seal(Head(200, (), streamed=False))
    await asked.send(head + head)
    await asked.silence()


async def answers_another_request(asked: Asked) -> None:
    await asked.take()
    asked.frames = Frames(Keyring((KEY,), "peer"), bytes(16), 1 << 20)
    await asked.reply(b"{}")
    await asked.silence()


async def answers_who_it_is(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.say(Me("gw-2"))
    await asked.silence()


async def ends_without_a_head(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.say(Data(b"{}"), End("complete"))
    await asked.silence()


async def speaks_no_http(asked: Asked) -> None:
    await asked.raw(b"SSH-2.0-x\r\n\r\n")
    await asked.silence()


BROKEN = [
    dies_after_continue,
    dies_after_the_body,
    dies_after_the_head,
    dies_within_a_frame,
    ends_too_early,
    says_garbage,
    says_too_much,
    says_it_in_the_clear,
    repeats_a_frame,
    answers_another_request,
    answers_who_it_is,
    ends_without_a_head,
]


@pytest.mark.parametrize("script", BROKEN)
async def test_an_owner_that_breaks_off_has_an_heir(
    upstream: FakeUpstream, cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    peer = await cluster.fake(FakePeer(script, mortal=True))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-1")
    reply = await one.client().answer(asked)
    assert json.loads(reply.text) == ACCEPT
    assert (reply.status, reply.is_stream) == (200, False)
    assert asked_peers(one) == {"broke": 1, "dead": 1}
    assert steps(one) == {"replayed": 1}
    assert len(peer.asked) == 1, "it was sent once"


@pytest.mark.parametrize("script", BROKEN)
async def test_an_owner_that_breaks_off_and_lives_keeps_its_call(
    upstream: FakeUpstream, cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    """It is asked once more, in case only the connection died; then the client is told to come again."""
    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-1"))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert steps(one) == {}
    assert len(peer.asked) == 2


async def test_a_reply_that_ends_in_another_versions_word_is_whole(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        body = b'{"jsonrpc":"2.0","id":"c2","error":{"code":-32603,"message":"no"}}'
        await asked.say(Head(503, (), streamed=False), Data(body[:20]), Data(body[20:]), End("splendid"))
        await asked.end()

    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address})
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert (reply.status, reply.error["message"]) == (503, "no")
    assert operations(one, "error") == 1


@pytest.mark.parametrize("script", [dies_at_once, speaks_no_http])
async def test_one_that_never_takes_a_request_is_dead(
    upstream: FakeUpstream, cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    peer = await cluster.fake(FakePeer(script, mortal=True))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-1")
    assert json.loads((await one.client().answer(asked)).text) == ACCEPT
    assert asked_peers(one) == {"dead": 1}
    assert peer.kinds == []


@pytest.mark.parametrize("script", [dies_at_once, speaks_no_http])
async def test_one_that_accepts_and_closes_lives(
    upstream: FakeUpstream, cluster: Cluster, script: Callable[[Asked], Any]
) -> None:
    """As a replica does that has all the connections it may have."""
    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **TWICE)
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-1"))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert "limits.connections" in reply.error["message"]
    assert (peer.kinds, len(peer.asked)) == ([], 2)


@pytest.mark.parametrize("twice", [True, False])
async def test_a_stream_whose_owner_dies_ends_with_one_final_message(
    upstream: FakeUpstream, cluster: Cluster, *, twice: bool
) -> None:
    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=True), Data(event(progress(1))), Data(b":\n\n"))
        asked.die()

    peer = await cluster.fake(FakePeer(script, mortal=True))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **(TWICE if twice else {}))

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        token = turn.body["params"]["_meta"]["progressToken"]
        await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 2})
        await turn.result(text("done"))

    upstream.tool(tool)
    asked = await one.client().call(meta=TOKEN)
    exchange = await exchange_inherited_by(one, "gw-1")
    state = resealed(asked.state, owner="gw-2", exchange=exchange, upstream=None)
    await drop(one)
    reply = await one.client().call(state=state, answers=dict.fromkeys(asked.questions, ACCEPT), meta=TOKEN)
    assert reply.is_stream
    numbers = [each["params"]["progress"] for each in reply.notifications]
    if twice:
        assert reply.text == "done"
        assert numbers == [1, 2]
    else:
        assert reply.error["data"]["reason"] == "owner_lost"
        assert numbers == [1]
    assert reply.data.count(b"text/event-stream") == 0


async def test_a_stream_that_began_here_goes_on_with_the_heirs_whole_reply(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """The owner streamed, its heir has one body: the client reads it as the last event."""

    async def owner(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=True), Data(event(progress(1))))
        asked.die()

    body = json.dumps({"jsonrpc": "2.0", "id": "c2", "result": {**text("whole"), "resultType": "complete"}}).encode()

    async def heir(asked: Asked) -> None:
        await asked.take()
        await asked.reply(body)

    first, second = await cluster.fake(FakePeer(owner, mortal=True)), await cluster.fake(FakePeer(heir))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": first.address, "gw-3": second.address})
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-3"))
    assert reply.is_stream
    assert len(reply.notifications) == 1
    assert reply.text == "whole"
    assert (first.kinds, second.kinds) == (["owner"], ["heir"])
    assert second.asked[0].hop.to == "gw-3"


async def test_a_stream_that_began_here_goes_on_with_the_heirs_stream(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def owner(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=True), Data(event(progress(1))))
        asked.die()

    final = {"jsonrpc": "2.0", "id": "c2", "result": {**text("heir"), "resultType": "complete"}}

    async def heir(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=True), Data(event(progress(2))), Data(event(final)), End("complete"))
        await asked.end()

    first, second = await cluster.fake(FakePeer(owner, mortal=True)), await cluster.fake(FakePeer(heir))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": first.address, "gw-3": second.address})
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-3"))
    assert [each["params"]["progress"] for each in reply.notifications] == [1, 2]
    assert reply.text == "heir"
    assert b"HTTP/1.1" not in reply.data, "one head, whoever writes the stream"


async def test_an_owner_that_is_gone_is_not_asked_to_inherit_first(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        hop = await asked.take()
        if hop.kind == "owner":
            await asked.begin()
            await asked.say(Gone())
            await asked.end()
        else:
            await asked.reply(b'{"jsonrpc":"2.0","id":"c2","error":{"code":-32603,"message":"heir"}}')

    peer = await cluster.fake(FakePeer(script, mortal=True))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address})
    upstream.tool(ask)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-2"))
    assert reply.error["message"] == "heir"
    assert peer.kinds == ["owner", "heir"], "the process that has its name now is first in the order"
    assert peer.connections == 1, "one connection serves both"


# -- heirs that cannot -----------------------------------------------------------------------------------------------


async def served_as_heir(asked: Asked) -> None:
    hop = await asked.take()
    await asked.reply(b'{"jsonrpc":"2.0","id":"c2","error":{"code":-32603,"message":"heir"}}')
    assert hop.kind == "heir"


async def test_a_dead_heir_is_passed_over_and_asked_again_at_once(upstream: FakeUpstream, cluster: Cluster) -> None:
    """It may be back, and have taken the call from another replica."""
    port = free_port()
    (one,) = await cluster.begin(
        "gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}", "gw-3": f"127.0.0.1:{port}"}, **TWICE
    )
    upstream.tool(ask)
    first = await orphan(one, "gw-2", "gw-3", "gw-2", "gw-1")
    second = await orphan(one, "gw-2", "gw-3", "gw-1")
    assert json.loads((await one.client().answer(first)).text) == ACCEPT
    assert asked_peers(one) == {"dead": 3}
    await cluster.fake(FakePeer(served_as_heir), port)
    assert (await one.client().answer(second)).error["message"] == "heir"


async def test_a_silent_heir_is_passed_over_and_not_asked_again_at_once(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """Else every retry would wait for it."""
    port = free_port()
    (one,) = await cluster.begin(
        "gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}", "gw-3": f"127.0.0.1:{port}"}, **TWICE
    )
    upstream.tool(ask)
    first = await orphan(one, "gw-2", "gw-3", "gw-1")
    second = await orphan(one, "gw-2", "gw-3", "gw-2", "gw-1")
    with black_hole(f"127.0.0.1:{port}"):
        assert json.loads((await one.client().answer(first)).text) == ACCEPT
    peer = await cluster.fake(FakePeer(served_as_heir), port)
    assert json.loads((await one.client().answer(second)).text) == ACCEPT
    assert not peer.asked
    assert asked_peers(one) == {"dead": 3, "silent": 2}


async def test_a_stalled_heir_is_passed_over(upstream: FakeUpstream, cluster: Cluster) -> None:
    silent = await cluster.fake(Silent())
    nobody = f"127.0.0.1:{free_port()}"
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": nobody, "gw-3": silent.address}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-3", "gw-1")
    assert json.loads((await one.client().answer(asked)).text) == ACCEPT
    assert asked_peers(one) == {"dead": 1, "stalled": 1}
    assert bytes(silent.received[0]).endswith(b"\r\n\r\n"), "it was given nothing"


async def test_an_heir_that_took_it_and_fell_silent_is_waited_for(upstream: FakeUpstream, cluster: Cluster) -> None:
    """It may be at work on it: nobody else may be."""

    async def script(asked: Asked) -> None:
        await asked.take()
        if times.pop():
            await asked.begin()
            await asked.say(Head(200, (), streamed=False))
        await asked.silence()

    times = [False, True]
    peer = await cluster.fake(FakePeer(script))
    fakes = {"gw-2": f"127.0.0.1:{free_port()}", "gw-3": peer.address}
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts={"keepalive_seconds": 0.1}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-3", "gw-1")
    while times:
        assert (await one.client().answer(asked)).outcome == (503, -32603, "owner_stalled")
    assert peer.kinds == ["heir", "heir"]
    assert len(upstream.of("tools/call")) == 1


async def test_an_heir_that_dies_of_it_has_an_heir_too(upstream: FakeUpstream, cluster: Cluster) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    peer = await cluster.fake(FakePeer(dies_after_the_body, mortal=True))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": nobody, "gw-3": peer.address}, **TWICE)
    upstream.tool(ask)
    asked = await orphan(one, "gw-2", "gw-3", "gw-1")
    assert json.loads((await one.client().answer(asked)).text) == ACCEPT
    assert asked_peers(one) == {"dead": 2, "broke": 1}


# -- connections -----------------------------------------------------------------------------------------------------


async def test_a_kept_connection_is_used_again(upstream: FakeUpstream, cluster: Cluster) -> None:
    ports = free_port()
    proxy = await cluster.fake(Proxy(f"127.0.0.1:{ports}"))
    cluster.peers = {"gw-1": f"127.0.0.1:{ports}", "gw-2": f"127.0.0.1:{free_port()}"}
    one = await cluster.start("gw-1", cluster.peers["gw-1"])
    two = await cluster.start(
        "gw-2", cluster.peers["gw-2"], replica={"peers": cluster.peers | {"gw-1": proxy.address}}
    )
    upstream.tool(ask)
    for _ in range(4):
        assert json.loads((await two.client().answer(await one.client().call())).text) == ACCEPT
    assert proxy.connections == 1


async def test_a_kept_connection_that_is_stale_costs_one_more_and_the_request_runs_once(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    ports = free_port()
    proxy = await cluster.fake(Proxy(f"127.0.0.1:{ports}"))
    cluster.peers = {"gw-1": f"127.0.0.1:{ports}", "gw-2": f"127.0.0.1:{free_port()}"}
    one = await cluster.start("gw-1", cluster.peers["gw-1"], **TWICE)
    through = {"peers": cluster.peers | {"gw-1": proxy.address}}
    two = await cluster.start("gw-2", cluster.peers["gw-2"], replica=through, **TWICE)
    upstream.tool(ask)
    assert json.loads((await two.client().answer(await one.client().call())).text) == ACCEPT
    asked = await one.client().call()
    proxy.break_kept()
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT
    assert (proxy.connections, proxy.broken) == (2, 1)
    assert asked_peers(two) == {"served": 2}
    assert steps(one) == {"held": 2}
    assert len(upstream.of("answer")) == len(upstream.of("tools/call")) == 2


async def test_a_client_that_leaves_closes_the_way_to_the_owner_and_the_next_takes_a_new_one(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def script(asked: Asked) -> None:
        hop = await asked.take()
        if b"last" in hop.body:
            await asked.reply(b'{"jsonrpc":"2.0","id":"c3","result":{"resultType":"complete","content":[]}}')
        else:
            await asked.begin()
            await asked.silence()
            left.set()

    left = asyncio.Event()
    peer = await cluster.fake(FakePeer(script))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address})
    upstream.tool(ask)
    asked = await orphan(one, "gw-2")
    waiting = later(one.client().answer(asked))
    await eventually(lambda: peer.kinds)
    waiting.cancel()
    await in_time(left.wait())
    params = {**retry_params(asked), "inputResponses": {"q": {"action": "accept", "content": {"name": "last"}}}}
    assert (await one.client().post("tools/call", params)).status == 200
    assert peer.connections == 2


# -- routes that hold nothing ----------------------------------------------------------------------------------------


async def test_a_route_that_holds_nothing_needs_no_peers(upstream: FakeUpstream, cluster: Cluster) -> None:
    async def never(asked: Asked) -> None:
        raise AssertionError("it was asked")

    third = await cluster.fake(FakePeer(never))
    sections = {"route": {"continuation": "replay"}}
    stands = await cluster.begin("gw-1", "gw-2", fakes={"gw-3": third.address}, **sections)

    async def tool(turn: Turn) -> None:
        answers = [await turn.elicit(f"q{number}") for number in range(4)]
        await turn.result(text(json.dumps(len(answers))))

    upstream.tool(tool)
    reply = await stands[0].client().call()
    for number in range(1, 5):
        assert opened(reply.state).owner == ""
        reply = await stands[number % 2].client().answer(reply)
    assert reply.text == "4"
    assert [asked_peers(stand) for stand in stands] == [{}, {}]
    assert third.connections == 0
    assert len(upstream.of("tools/call")) == 5
    assert [stand.held for stand in stands] == [0, 0]


# -- takeovers for nothing -------------------------------------------------------------------------------------------


async def test_a_takeover_with_wrong_answers_leaves_nothing_behind(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **TWICE)
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    before = len(upstream.seen)
    for wrong in ({"action": "shrug"}, "text", None):
        reply = await two.client().call(state=asked.state, answers={"q": wrong})
        assert (reply.status, reply.error["code"]) == (400, -32602)
        assert len(two.gateway.lot) == two.held == 0
        assert not list(two.gateway.lot)
    assert len(upstream.seen) == before, "nothing went upstream"
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT


async def test_a_takeover_that_asks_again_holds_the_call_until_it_is_answered(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **TWICE)
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    again = await two.client().call(state=asked.state, answers={})
    assert again.questions == asked.questions
    assert two.held == len(two.gateway.lot) == 1
    wrong = await two.client().answer(again, {"action": "shrug"})
    assert (wrong.status, wrong.error["code"]) == (400, -32602)
    assert two.held == len(two.gateway.lot) == 1, "a wrong answer harms no call that waits"
    assert json.loads((await two.client().answer(again)).text) == ACCEPT


async def test_a_full_replica_takes_nothing_over(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", hold={"max_calls": 1}, **TWICE)
    upstream.tool(ask)
    asked = await one.client().call()
    await cluster.crash(one)
    own = await two.client().call()
    full = await two.client().answer(asked)
    assert full.status == 503
    assert full.headers["Retry-After"]
    assert json.loads((await two.client().answer(own)).text) == ACCEPT
    assert json.loads((await two.client().answer(asked)).text) == ACCEPT


async def test_a_stranger_cannot_take_a_call_over(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **TWICE)
    upstream.tool(ask)
    asked = await one.client(jwt(iss="i", sub="ada")).call()
    await cluster.crash(one)
    reply = await two.client(jwt(iss="i", sub="eve")).answer(asked)
    assert reply.outcome == (400, -32602, "invalid_request_state")
    assert asked_peers(two) == {}, "nobody is asked for a state that does not open"


# -- states that do not fit ------------------------------------------------------------------------------------------


async def asked_much(upstream: FakeUpstream, stand: Stand, count: int, size: int) -> Reply:
    """A round with many long questions."""

    async def tool(turn: Turn) -> None:
        await turn.raw(b"")
        waits = [
            turn.ask(
                mcp.ELICIT,
                {
                    "message": Random(number).randbytes(size // 2).hex(),
                    "requestedSchema": {"type": "object", "title": f"q{number}", "properties": {}},
                },
            )
            for number in range(count)
        ]
        answers = await asyncio.gather(*waits)
        await turn.result(text(str(len(answers))))

    upstream.tool(tool)
    asked = await stand.client().call()
    assert len(asked.questions) == count
    return asked


@pytest.mark.parametrize(
    ("count", "size", "gives_way"),
    [(2, 100, "nothing"), (5, 1000, "words"), (60, 100, "all")],
)
async def test_what_only_others_need_gives_way_in_a_state_that_is_too_large(
    upstream: FakeUpstream, cluster: Cluster, count: int, size: int, gives_way: str
) -> None:
    limit = 4096
    one, two = await cluster.begin("gw-1", "gw-2", limits={"state_bytes": limit}, **TWICE)
    asked = await asked_much(upstream, one, count, size)
    assert len(asked.state) <= limit
    envelope = opened(asked.state)
    if gives_way == "all":
        assert (envelope.open, envelope.upstream, envelope.record) == ((), None, None)
    else:
        assert len(envelope.open) == count
        assert envelope.upstream is not None
        assert envelope.record == b""
        assert all((each.params is None) == (gives_way == "words") for each in envelope.open)
    reply = await two.client().answer(asked)
    assert reply.text == str(count), "the owner never needs it"


async def test_without_its_words_a_round_is_taken_over_with_all_its_answers_only(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", limits={"state_bytes": 4096}, **TWICE)
    asked = await asked_much(upstream, one, 5, 1000)
    await cluster.crash(one)
    some = dict.fromkeys(list(asked.questions)[:-1], ACCEPT)
    reply = await two.client().call(state=asked.state, answers=some)
    assert (reply.status, reply.error["code"]) == (400, -32602)
    assert list(asked.questions)[-1] in reply.error["message"]
    assert len(two.gateway.lot) == two.held == 0


async def test_without_its_record_a_call_is_lost_with_its_owner(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", limits={"state_bytes": 4096}, **TWICE)
    asked = await asked_much(upstream, one, 60, 100)
    await cluster.crash(one)
    reply = await two.client().answer(asked)
    assert reply.error["data"]["reason"] in ("owner_lost", "call_lost"), "and says so"
    assert len(upstream.of("tools/call")) == 1
    assert len(two.gateway.lot) == two.held == 0


async def test_a_record_that_does_not_fit_gives_way_to_the_cursor(upstream: FakeUpstream, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", limits={"state_bytes": 4096}, **TWICE)

    async def tool(turn: Turn) -> None:
        answers = [await turn.elicit(f"q{number}") for number in range(2)]
        await turn.result(text(str(len(answers))))

    upstream.tool(tool)
    asked = await one.client().call()
    long = {"action": "accept", "content": {"name": Random(0).randbytes(4000).hex()}}
    asked = await one.client().answer(asked, long)
    envelope = opened(asked.state)
    assert envelope.record is None
    assert len(envelope.open) == 1
    assert envelope.upstream is not None
    assert (await one.client().answer(asked)).text == "2"


async def test_a_route_that_holds_nothing_says_when_the_answers_do_not_fit(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    (one,) = await cluster.begin("gw-1", limits={"state_bytes": 4096}, route={"continuation": "replay"})

    async def tool(turn: Turn) -> None:
        answers = [await turn.elicit(f"q{number}") for number in range(2)]
        await turn.result(text(str(len(answers))))

    upstream.tool(tool)
    asked = await one.client().call()
    long = {"action": "accept", "content": {"name": Random(0).randbytes(4000).hex()}}
    reply = await one.client().answer(asked, long)
    assert "limits.state_bytes" in reply.error["message"]


@pytest.mark.parametrize("number", ["1e400", "1" * 5000], ids=["float", "integer"])
@pytest.mark.parametrize("key", ["q", "unknown"])
async def test_an_answer_that_cannot_be_read_takes_no_place_where_nothing_is_held(
    upstream: FakeUpstream, cluster: Cluster, key: str, number: str
) -> None:
    hold = {"max_calls": 1, "max_calls_per_principal": 1}
    (one,) = await cluster.begin("gw-1", route={"continuation": "replay"}, hold=hold)
    upstream.tool(ask)
    client = one.client()
    asked = await client.call()
    params = {"name": "tool", "arguments": {}, "requestState": asked.state}
    for _ in range(3):
        headers, body = client.build("tools/call", {**params, "inputResponses": {key: {"x": 0}}})
        body = body.replace(b'"x": 0', f'"x": {number}'.encode())
        async with client.http.post(client.url, headers=headers, data=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, -32602)
        assert (len(one.gateway.lot), one.held) == (0, 0)
    assert (await client.answer(asked)).result["resultType"] == "complete"


async def test_whatever_fails_while_a_call_is_restored_its_place_is_free_again(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = await cluster.begin("gw-1", route={"continuation": "replay"})
    upstream.tool(ask)
    asked = await one.client().call()
    for broken in ("handle", "restore"):
        with monkeypatch.context() as patched:
            # No request is known to get here any more; the next bug must not cost a place for ever either.
            patched.setattr(Exchange, broken, Mock(side_effect=RuntimeError("a planted bug")))
            reply = await one.client().answer(asked)
        one.planted_bugs += 1
        assert reply.error["code"] == -32603
        assert (len(one.gateway.lot), one.held) == (0, 0)
    assert (await one.client().answer(asked)).result["resultType"] == "complete"


async def test_half_an_emoji_goes_from_replica_to_replica_and_from_run_to_run(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    half = "cut \ud83d"

    async def tool(turn: Turn) -> None:
        answers = [await turn.elicit(title) for title in (half, "second")]
        await turn.result({"content": [{"type": "text", "text": half}], "structuredContent": {half: answers}})

    one, two = await cluster.begin("gw-1", "gw-2", **TWICE)
    upstream.tool(tool)
    arguments, accepted = {half: half}, {"action": "accept", "content": {"name": half}}
    first = await one.client().call(arguments=arguments)
    second = await two.client().answer(first, accepted, arguments=arguments)
    assert list(second.questions) == ["second"]
    await cluster.crash(one)
    done = await two.client().answer(second, accepted, arguments=arguments)
    assert done.text == half
    assert done.result["structuredContent"] == {half: [accepted, accepted]}
    assert len(upstream.of("tools/call")) == 2


# -- workers ---------------------------------------------------------------------------------------------------------


async def workers(cluster: Cluster, folder: Path, count: int, **sections: Any) -> list[Stand]:
    """The processes of gw-2, which share its ports, and gw-1 beside them."""
    cluster.peers = {"gw-1": f"127.0.0.1:{free_port()}", "gw-2": f"127.0.0.1:{free_port()}"}
    for number in range(count):
        worker = Worker(number, count, str(folder), bytes(32))
        listen = f"127.0.0.1:{free_port()}"  # its own, so that a test can choose
        await cluster.start("gw-2", cluster.peers["gw-2"], worker, listen=listen, **sections)
    await cluster.start("gw-1", cluster.peers["gw-1"], **sections)
    return list(cluster.stands.values())


async def test_workers_reach_one_another_and_others_reach_them(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    *own, other = await workers(cluster, tmp_path, 3)
    upstream.tool(ask)
    for owner in own:
        for asker in (*own, other):
            reply = await asker.client().answer(await owner.client().call())
            assert json.loads(reply.text) == ACCEPT
    for asker in own:
        assert json.loads((await asker.client().answer(await other.client().call())).text) == ACCEPT
    assert [steps(each) for each in own] == [{"held": 4, "forwarded": 3}] * 3
    assert steps(other) == {"held": 3, "forwarded": 3}
    assert len(upstream.of("tools/call")) == len(upstream.of("answer")) == 15
    assert not any({"gone", "dead", "stalled", "broke"} & asked_peers(each).keys() for each in (*own, other))


async def test_a_worker_passes_on_what_came_from_another_host_but_not_from_its_own(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    *own, other = await workers(cluster, tmp_path, 2)
    upstream.tool(ask)
    asked = await orphan(other, "gw-2#0")
    hop = hop_for("gw-2#0", "owner", asked, other.client())
    connector = aiohttp.UnixConnector(str(tmp_path / "peer-1.sock"))
    async with aiohttp.ClientSession(connector=connector) as http:
        ring = Keyring((KEY,), "peer")
        async with (
            asyncio.timeout(DEADLINE),
            http.post("http://peer/peer", data=PeerSealer(ring).seal(hop)) as response,
        ):
            found = Frames(ring, hop.nonce, 1 << 20).feed(await response.read())
    assert found == [Gone("gw-2")]
    assert [asked_peers(each) for each in own] == [{}, {}]


async def test_the_workers_of_an_heir_agree_who_of_them_it_is(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    first, second, other = await workers(cluster, tmp_path, 2, **TWICE)
    upstream.tool(ask)
    exchange = await exchange_inherited_by(first, "gw-2#1", "gw-2#0", "gw-1")
    assert (await order(other, exchange))[0] == "gw-2"
    asked = await orphan(other, "gw-9", exchange=exchange)
    for _ in range(12):  # each on a connection of its own: the kernel chooses the worker
        found = await frames_of(cluster, "gw-2", hop_for("gw-2", "heir", asked, other.client()), close=True)
        assert found[-1] == End("complete")
    assert len(upstream.of("tools/call")) == 2, "the second runs it, and keeps the result for all others"
    assert (steps(first), steps(second).get("replayed")) == ({}, 1)
    assert asked_peers(second) == {}


async def test_a_worker_that_dies_under_waiting_clients_has_heirs(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    """They wait at another host, which reaches it straight or through its sibling: the kernel chooses."""
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


async def test_a_dead_workers_call_goes_to_a_sibling_or_another_host(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    first, second, other = await workers(cluster, tmp_path, 2, **TWICE)
    upstream.tool(ask)
    askeds = [await first.client().call() for _ in range(6)]
    await cluster.crash(first)
    for number, asked in enumerate(askeds):
        assert json.loads((await (second, other)[number % 2].client().answer(asked)).text) == ACCEPT
    assert len(upstream.of("tools/call")) == 12, "each once more, and no more"


# -- found by name ---------------------------------------------------------------------------------------------------


async def test_replicas_that_a_name_service_knows_find_one_another(upstream: FakeUpstream, cluster: Cluster) -> None:
    names = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2", "gw-3")}
    dead = f"127.0.0.1:{free_port()}"

    async def resolve(host: str, port: int) -> list[Address]:
        assert (host, port) == ("peers.example", 8081)
        return [dead, *names.values()]

    section = {"peers": {}, "peers_dns": "peers.example:8081"}
    for name, listen in names.items():
        stand = await cluster.start(name, listen, replica=section, timeouts={"peer_accept_seconds": 2}, **TWICE)
        stand.gateway.members._resolve = resolve
        stand.gateway.members._born = float("-inf")  # it has been here for long
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
    one.gateway.members._resolve = resolve
    upstream.tool(ask)
    asked = await one.client().call()
    state = resealed(asked.state, owner="gw-2", exchange="x", upstream=None)
    await drop(one)
    reply = await one.client().call(state=state, answers=dict.fromkeys(asked.questions, ACCEPT))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert len(upstream.of("tools/call")) == 1
    assert all(bytes(received).endswith(b"\r\n\r\n") for received in silent.received)

"""Starts several replicas over one fake legacy server in this process, and inspects them."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec.structs import replace

from gateway.cluster.worker import Address, Worker
from gateway.config import InForce
from gateway.exchange.commands import TTL
from gateway.protocol import mcp
from gateway.protocol.errors import ShuttingDown
from gateway.seal import peer_messages as messages
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.peer_messages import Frames, PeerRequest, PeerSealer
from gateway.seal.request_state import Envelope
from tests.parts.launch import free_port
from tests.support import workbench
from tests.support.fake_http import FakeHttp
from tests.support.fake_peer import KEY, Asked, FakePeer
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, text
from tests.support.workbench import ACCEPT, Client, Reply, Stand

SECONDS = {"peer_connect_seconds": 1, "peer_accept_seconds": 0.2, "cancel_seconds": 1}
STALLED = (503, -32603, "owner_stalled")
TWICE: dict[str, Any] = {"route": {"ephemeral": ["*"]}}
"""Every tool may run twice."""
TOKEN = {mcp.META_PROGRESS_TOKEN: "t"}
RETRY = "mcp_gateway_continuations_total"


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


async def in_time(work: Any) -> Any:
    async with asyncio.timeout(DEADLINE):
        return await work


def opened(state: str) -> Envelope:
    return msgspec.msgpack.Decoder(Envelope).decode(Keyring((KEY,), "state").open(state))


def resealed(state: str, **changes: Any) -> str:
    """A state as any replica could have sealed it, with these changes."""
    envelope = replace(opened(state), **changes)
    return Keyring((KEY,), "state").seal(msgspec.msgpack.encode(envelope))


def reseal(asked: Reply, **changes: Any) -> None:
    """Have the state of a round be one with these changes."""
    asked.messages[-1]["result"]["requestState"] = resealed(asked.state, **changes)


def seal(peer_request: PeerRequest) -> bytes:
    """A message as any replica seals it."""
    return PeerSealer(InForce(Keys((KEY,)))).seal(peer_request)


def frames_for(peer_request: PeerRequest) -> Frames:
    """Opens the frames of the reply to a message."""
    return Frames(Keyring((KEY,), "peer"), peer_request.nonce)


def asked_peers(stand: Stand) -> dict[str, int]:
    """The outcomes of requests to other replicas."""
    outcomes = ("served", "gone", "dead", "silent", "refused", "stalled", "broke")
    found = {each: int(stand.metric("mcp_gateway_peer_requests_total", outcome=each)) for each in outcomes}
    return {outcome: count for outcome, count in found.items() if count}


def steps(stand: Stand) -> dict[str, int]:
    names = ("held", "forwarded", "resumed", "replayed", "lost")
    found = {each: int(stand.metric(RETRY, step=each)) for each in names}
    return {step: count for step, count in found.items() if count}


def operations(stand: Stand, outcome: str) -> int:
    """The requests that this replica counted for its own clients."""
    return int(stand.metric("mcp_server_operation_duration_seconds_count", outcome=outcome))


async def crash(stand: Stand) -> None:
    """Kill a replica: its connections break, its tasks are gone, and it cleans up nothing."""
    gateway = stand.gateway

    def never(work: Any, _: str) -> Any:
        work.close()
        over = asyncio.get_running_loop().create_future()
        over.set_result(None)
        return over

    gateway.tasks.start = never  # type: ignore[method-assign,assignment]
    closing = [asyncio.ensure_future(listener.close()) for listener in gateway.listeners]
    for listener in gateway.listeners:
        for connection in list(listener.connections):
            connection.wire.abort()
    await gateway.tasks.close()
    await asyncio.gather(*closing)
    for live in gateway.routes.live.values():
        live.upstream.client.close()


class Cluster:
    """The replicas of one service: gw-1, gw-2, ..."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        """`url` is the upstream's."""
        self.url = url
        self.http = http
        self.peers: dict[str, Address] = {}
        self.stands: dict[str, Stand] = {}
        self.crashed: list[Stand] = []
        self.servers: list[FakeHttp] = []

    async def begin(self, *names: str, fakes: dict[str, Address] | None = None, **sections: Any) -> list[Stand]:
        """Start these replicas; `fakes` are addresses of further replicas, or other addresses for these."""
        ports = {name: f"127.0.0.1:{free_port()}" for name in names}
        self.peers = {**ports, **(fakes or {})}
        return [await self.start(name, ports[name], **sections) for name in names]

    async def asked(self, *names: str, **options: Any) -> tuple[Reply, list[Stand]]:
        """Start replicas; a call of the first one waits for its client."""
        stands = await self.begin(*names, **options)
        return await stands[0].client().call(), stands

    async def start(self, name: str, door: Address, worker: Worker | None = None, **sections: Any) -> Stand:
        replica = {"id": name, "listen": door, "peers": self.peers, **sections.pop("replica", {})}
        sections = {**sections, "timeouts": {**SECONDS, **sections.get("timeouts", {})}, "replica": replica}
        stand = await workbench.start(self.url, self.http, worker=worker, **sections)
        self.stands[name if worker is None else f"{name}#{worker.number}"] = stand
        return stand

    async def crash(self, stand: Stand) -> None:
        self.stands = {name: each for name, each in self.stands.items() if each is not stand}
        self.crashed.append(stand)
        await crash(stand)

    async def fake(self, server: FakeHttp, port: int = 0) -> Any:
        await server.start(port)
        self.servers.append(server)
        return server


async def drop(stand: Stand) -> None:
    """Give up every parked call."""
    for driver in list(stand.gateway.lot):
        driver.stop(ShuttingDown("the test drops it"))
        driver.fire(TTL)


async def order(stand: Stand, exchange: str) -> list[str]:
    return await stand.gateway.members.candidates(exchange)


async def exchange_failing_over_to(stand: Stand, *first: str) -> str:
    """Find an exchange id whose failover candidates begin with these."""
    for number in range(10_000):
        if (await order(stand, f"x{number}"))[: len(first)] == list(first):
            return f"x{number}"
    raise AssertionError("no such order")


async def orphan(stand: Stand, owner: str, *candidates: str, **changes: Any) -> Reply:
    """A call whose state names another replica as its owner, which does not know it; the real call is dropped."""
    asked = await stand.client().call()
    exchange = await exchange_failing_over_to(stand, *candidates) if candidates else f"orphan of {owner}"
    state = resealed(asked.state, owner=owner, **{"upstream": None, "exchange": exchange, **changes})
    await drop(stand)
    asked.messages[-1]["result"]["requestState"] = state
    return asked


async def facing(
    cluster: "Cluster", script: Callable[[Asked], Any], *, mortal: bool = False, **sections: Any
) -> tuple[Stand, FakePeer]:
    """A replica whose only peer is a FAKE one that serves requests as `script` does."""
    peer = await cluster.fake(FakePeer(script, mortal=mortal))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address}, **sections)
    return one, peer


def retry_params(asked: Reply, answer: Any = None) -> dict[str, Any]:
    answers = dict.fromkeys(asked.questions, ACCEPT if answer is None else answer)
    return {"name": "tool", "arguments": {}, "requestState": asked.state, "inputResponses": answers}


async def frames_of(
    cluster: Cluster, name: str, peer_request: PeerRequest, *, close: bool = False
) -> list[messages.Frame]:
    """The frames with which a replica answers another one."""
    url = f"http://{cluster.peers[name]}/peer"
    headers = {"Connection": "close"} if close else {}
    async with asyncio.timeout(DEADLINE), cluster.http.post(url, data=seal(peer_request), headers=headers) as response:
        assert response.status == 200
        return frames_for(peer_request).feed(await response.read())


async def frames_of_worker(socket: Path, peer_request: PeerRequest) -> list[messages.Frame]:
    """The frames with which the worker at a socket answers another one of its host."""
    connector = aiohttp.UnixConnector(str(socket))
    async with (
        asyncio.timeout(DEADLINE),
        aiohttp.ClientSession(connector=connector) as http,
        http.post("http://peer/peer", data=seal(peer_request)) as response,
    ):
        return frames_for(peer_request).feed(await response.read())


def peer_request_for(
    to: str, kind: messages.Kind = "owner", asked: Reply | None = None, client: Client | None = None
) -> PeerRequest:
    headers, body = client.build("tools/call", retry_params(asked)) if client and asked else ({}, b"")
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    return PeerRequest(
        kind=kind, to=to, issued=time.time(), nonce=messages.nonce(), path="/mcp", headers=raw, remote="::1", body=body
    )


def progress(number: int) -> dict[str, Any]:
    params = {"progressToken": "t", "progress": number}
    return {"jsonrpc": "2.0", "method": mcp.PROGRESS, "params": params}


async def is_never_asked(_: Asked) -> None:
    raise AssertionError("it was asked")


async def dies_at_once(asked: Asked) -> None:
    asked.die()


async def dies_after_the_body(asked: Asked) -> None:
    await asked.take()
    asked.die()


async def speaks_no_http(asked: Asked) -> None:
    await asked.raw(b"SSH-2.0-x\r\n\r\n")
    await asked.silence()

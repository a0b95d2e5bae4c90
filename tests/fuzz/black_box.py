"""Throws mutated bytes at a real gateway process, from the side of clients, replicas, operators or upstreams.

    python -m tests.fuzz.black_box client|passthrough|peer|admin|upstream SECONDS FOLDER [SEED]

Every reply must come in time, in one piece, with one final message if the request was sent in whole. The gateway must
not answer 5xx but its documented 502, 503 and 504, must not write a traceback or an error, and must hold no more
memory, descriptors and calls afterwards than before. Another caller works beside; what is its own must stay so.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.protocol import mcp
from gateway.seal.keyring import Keyring
from gateway.seal.peer_messages import PeerRequest
from tests.fuzz import wire
from tests.fuzz.fake_hostile_upstream import ASK, ECHO, FakeHostileUpstream
from tests.fuzz.mutator import Mutator
from tests.fuzz.targets import TARGETS, Findings
from tests.parts.launch import free_port
from tests.support.gateway_process import STATE_KEY, Gateway, gateway
from tests.support.workbench import ALL

REPLY_SECONDS: Final = 20.0
"""The gateway's own time limits below add up to less."""
SILENCE_SECONDS: Final = 0.1
"""How long a reply to bytes that may be half a request is waited for."""
LANES: Final = 4
SECRET: Final = "fuzz-secret-7c1d"
"""Part of the credential of every mutated request; no log line may contain it."""
MEMORY_KIB: Final = 65_536
DESCRIPTORS: Final = 32
REST_SECONDS: Final = 40.0
LIMITS: Final[dict[str, Any]] = {
    "timeouts": {
        "connect_seconds": 1,
        "handshake_seconds": 1,
        "answer_seconds": 1,
        "idle_seconds": 1.5,
        "session_wait_seconds": 1,
        "keepalive_seconds": 0.5,
        "cancel_seconds": 0.5,
        "send_seconds": 2,
    },
    "limits": {"receive_seconds": 1},
    "hold": {"ttl_seconds": 3, "linger_seconds": 1, "drain_delay_seconds": 0, "drain_seconds": 0.2},
    "legs": {"limit_seconds": 2, "rounds": 1},
    "sessions": {"idle_seconds": 1, "quarantine_seconds": 1, "max_per_principal": 200},
}
EXPECTED_ERRORS: Final = frozenset({"traces.failed"})


class Campaign:
    """What was sent to one gateway, and what was found."""

    def __init__(self, gw: Gateway, name: str, folder: Path) -> None:
        self._gw = gw
        self._read = 0
        self.executions = 0
        self.findings = Findings(name, folder)
        self.report = self.findings.report

    def read_log(self, data: bytes) -> None:
        """Look at the new lines of the log; the cause is likely, but not surely, what was sent last."""
        with (self._gw.directory / "stderr").open("rb") as file:
            _ = file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._judge(line, data)

    def _judge(self, line: bytes, data: bytes) -> None:
        if wire.CANARY in line or SECRET.encode() in line:
            self.report("a credential is in the log", data, line[:2000].decode(errors="replace"))
        try:
            said = json.loads(line)
        except ValueError:
            return self.report("the log has a line that is not JSON", data, line[:2000].decode(errors="replace"))
        trace = str(said.get("exception") or said.get("traceback") or "")
        if trace or "Traceback" in line.decode(errors="replace"):
            last = trace.strip().splitlines()[-1:] or [""]
            self.report(
                f"a traceback in the log: {said.get('event')}: {last[0].partition(':')[0]}", data, trace[-2000:]
            )
        elif said.get("level") in {"error", "critical"} and said.get("event") not in EXPECTED_ERRORS:
            self.report(f"an error in the log: {said.get('event')}", data, line[:2000].decode(errors="replace"))
        return None


async def exchange(address: str, data: bytes, seconds: float) -> tuple[bytes, bool]:
    """Send bytes over a new connection; what came back, and whether it ended in time."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    came = bytearray()
    try:
        async with asyncio.timeout(seconds):
            writer.write(data)
            while piece := await reader.read(65_536):
                came += piece
    except TimeoutError:
        return bytes(came), False
    except ConnectionError:
        pass  # what came before counts
    finally:
        writer.close()
    return bytes(came), True


def framed(line: str, headers: list[bytes], body: bytes) -> bytes:
    """A request that is whole: its length is right, and the connection ends after it."""
    head = [line.encode("latin-1"), b"Connection: close", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", b""]) + body


def modern(method: str, params: dict[str, Any], target: str = "", token: str = SECRET) -> tuple[list[bytes], bytes]:
    """Headers and body of a modern request that is right in every way."""
    meta = {mcp.META_VERSION: mcp.MODERN, mcp.META_CAPABILITIES: ALL}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    headers = [
        b"Host: 127.0.0.1",
        b"Content-Type: application/json",
        b"Accept: application/json, text/event-stream",
        b"Authorization: Bearer %b" % token.encode(),
        b"MCP-Protocol-Version: %b" % mcp.MODERN.encode(),
        b"Mcp-Method: %b" % method.encode(),
        *([b"Mcp-Name: %b" % target.encode()] if target else []),
    ]
    return headers, json.dumps(body).encode()


CALLS: Final = (
    ("tools/call", {"name": ECHO, "arguments": {"a": 1}}, ECHO),
    ("tools/call", {"name": ASK, "arguments": {}}, ASK),
    ("tools/list", {}, ""),
    ("resources/read", {"uri": "file:///a"}, "file:///a"),
    ("prompts/get", {"name": "p"}, "p"),
    ("server/discover", {}, ""),
)


class Attack:
    """Sends one hostile thing at a time, or has the upstream say it, and judges what comes back."""

    def __init__(
        self,
        campaign: Campaign,
        mutator: Mutator,
        address: str,
        path: str = "/mcp",
        upstream: FakeHostileUpstream | None = None,
    ) -> None:
        self.campaign = campaign
        self.mutator = mutator
        self.random = mutator.random
        self.address = address
        self.path = path
        self._upstream = upstream

    async def send(self, data: bytes, *, is_whole: bool, explains: bool, is_modern: bool = False) -> None:
        """Send a request, and report what must not be."""
        came, ended = await exchange(self.address, data, REPLY_SECONDS if is_whole else SILENCE_SECONDS)
        with self._judging(data, came):
            self._judge(data, came, ended=ended, is_whole=is_whole, explains=explains, is_modern=is_modern)

    @contextmanager
    def _judging(self, cause: bytes, came: bytes, where: str = "") -> Iterator[None]:
        """Count one execution; report what is wrong with what came, and with the log."""
        self.campaign.executions += 1
        try:
            yield
        except wire.Broken as broken:
            self.campaign.report(f"{where}{broken}", cause, came[:1000].decode(errors="replace"))
        self.campaign.read_log(cause)

    def _judge(
        self, data: bytes, came: bytes, *, ended: bool, is_whole: bool, explains: bool, is_modern: bool
    ) -> None:
        if not is_whole:
            if came.startswith(b"HTTP/") and b"\r\n\r\n" in came and not data.startswith(b"HEAD"):
                for reply in wire.replies(came)[:1]:
                    wire.check(reply, explains=explains and reply.is_whole)
            return
        reply = wire.only(wire.replies(came, ended=ended, to_head=data.startswith(b"HEAD")))
        wire.check(reply, explains=explains)
        if is_modern and reply.status == 200:
            _ = wire.final(reply)

    async def throw(self, line: str, headers: list[bytes], body: bytes, *, explains: bool = True) -> None:
        """Send a mutant of a request: of its body, of a header, or of all its bytes."""
        what = self.random.random()
        if what < 0.3:
            await self.send(self.mutator.mutate(framed(line, headers, body)), is_whole=False, explains=explains)
            return
        if what < 0.6 and body:
            body = self.mutator.mutate_json(body)
        elif what < 0.75:
            body = self.mutator.mutate(body)
        elif what < 0.95:
            at = self.random.randrange(len(headers))
            name, _, value = headers[at].partition(b": ")
            odd = self.mutator.mutate(value).translate(None, b"\r\n\0")
            headers = [*headers[:at], b"%b: %b" % (name, odd), *headers[at + 1 :]]
        await self.send(framed(line, headers, body), is_whole=True, explains=explains)

    async def as_client(self) -> None:
        """A modern request, mutated."""
        method, params, target = self.random.choice(CALLS)
        headers, body = modern(method, dict(params), target)
        if self.random.random() < 0.2:
            _, _, body = self.random.choice(TARGETS["request"].seeds()).partition(b"\n\n")
        await self.throw(f"POST {self.path} HTTP/1.1", headers, body)

    async def as_legacy_client(self) -> None:
        """A request that passes through, mutated."""
        message = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": self.random.choice(("initialize", "tools/list", "ping")),
            "params": {},
        }
        line, body = self.random.choice(
            (
                (f"POST {self.path} HTTP/1.1", json.dumps(message).encode()),
                (f"GET {self.path} HTTP/1.1", b""),
                (f"DELETE {self.path} HTTP/1.1", b""),
                (f"GET {self.path}?mrtr-endpoint=mrtr1.a.b HTTP/1.1", b""),
                (f"GET /.well-known/oauth-protected-resource{self.path} HTTP/1.1", b""),
                (f"GET /.well-known/oauth-authorization-server{self.path} HTTP/1.1", b""),
                (f"POST /token{self.path} HTTP/1.1", b"grant_type=authorization_code&resource=http%3A%2F%2Fx"),
            )
        )
        headers = [
            b"Host: 127.0.0.1",
            b"Content-Type: application/json",
            b"Accept: application/json, text/event-stream",
            b"Authorization: Bearer " + SECRET.encode(),
            b"Mcp-Session-Id: s1",
            b"Origin: http://localhost",
            b"Last-Event-ID: e1",
        ]
        await self.throw(line, headers, body)

    async def as_operator(self) -> None:
        """A request to the admin listener, mutated."""
        line = f"GET {self.random.choice(('/healthz', '/readyz', '/metrics', '/status'))} HTTP/1.1"
        headers = [b"Host: 127.0.0.1", b"Accept: text/html", b"Authorization: Bearer " + SECRET.encode()]
        await self.throw(line, headers, b"", explains=False)

    async def as_replica(self) -> None:
        """A sealed request with mutated content, or mutated bytes."""
        kind = self.random.choice(("owner", "heir", "resume", "who", "reach", "holds"))
        headers, body = modern(*CALLS[self.random.randrange(len(CALLS))])
        pairs = tuple((name, value) for name, _, value in (header.partition(b": ") for header in headers))
        request_ = PeerRequest(
            kind="who", to="gw-1", issued=time.time(), nonce=self.random.randbytes(16), path=self.path, body=body
        )
        plain = msgspec.msgpack.encode(replace(request_, kind=kind, headers=pairs))
        if self.random.random() < 0.7:
            plain = self.mutator.mutate(plain)
        sealed = Keyring([bytes.fromhex(STATE_KEY)], "peer").seal_bytes(plain, b"request")
        head = [b"Host: 127.0.0.1", b"Content-Type: application/octet-stream"]
        if self.random.random() < 0.5:
            await self.send(framed("POST /peer HTTP/1.1", head, sealed), is_whole=True, explains=False)
        else:
            await self.throw("POST /peer HTTP/1.1", head, sealed, explains=False)

    async def as_plain_client(self) -> None:
        """Requests that are right, because it is the upstream that is hostile; its questions are answered."""
        method, params, target = self.random.choice(CALLS)
        if self.random.random() < 0.15:
            legacy = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            headers = [b"Host: 127.0.0.1", b"Content-Type: application/json"]
            data = framed(f"POST {self.path} HTTP/1.1", headers, json.dumps(legacy).encode())
            came, _ = await exchange(self.address, data, REPLY_SECONDS)
            self._passed_through(came)
            return
        given: dict[str, Any] = {}
        for _ in range(4):
            headers, body = modern(method, {**params, **given}, target)
            result = await self._one_round(framed(f"POST {self.path} HTTP/1.1", headers, body))
            if result.get("resultType") != "input_required":
                return
            answer = {"action": "accept", "content": {"name": "x"}}
            given = {"inputResponses": dict.fromkeys(result.get("inputRequests", {}), answer)}
            given |= {"requestState": result["requestState"]} if "requestState" in result else {}

    def _upstream_said(self) -> bytes:
        return self._upstream.last if self._upstream is not None else b""

    def _passed_through(self, came: bytes) -> None:
        """What an upstream says passes through, whatever its status is, but not a switch of protocols."""
        said = self._upstream_said()
        with self._judging(said, came, "passed through: "):
            for reply in wire.replies(came)[:1]:
                if reply.status < 500 or (reply.status == 500 and b" 500 " not in said[:16]):
                    wire.check(reply, explains=False)

    async def _one_round(self, data: bytes) -> dict[str, Any]:
        came, ended = await exchange(self.address, data, REPLY_SECONDS)
        message: dict[str, Any] = {}
        with self._judging(self._upstream_said(), came):
            reply = wire.only(wire.replies(came, ended=ended))
            wire.check(reply, explains=True)
            message = wire.final(reply)
        result = message.get("result")
        return result if isinstance(result, dict) else {}


async def canary(campaign: Campaign, address: str, until: float) -> None:
    """Call as somebody else until then; its calls must succeed, and give it what is its own."""
    number = 0
    while time.monotonic() < until:
        number += 1
        own = f"{wire.CANARY.decode()}-{number}"
        headers, body = modern("tools/call", {"name": ECHO, "arguments": {"own": own}}, ECHO, token=own)
        came, _ = await exchange(address, framed("POST /calm HTTP/1.1", headers, body), REPLY_SECONDS)
        if own.encode() not in came or b'"complete"' not in came:
            campaign.report("another caller got no good reply", came)
        await asyncio.sleep(0.2)


async def lane(throw: Callable[[], Awaitable[None]], until: float) -> None:
    """Throw one thing after the other."""
    while time.monotonic() < until:
        await throw()


def resources(gw: Gateway) -> tuple[int, int]:
    """Resident memory in KiB, and open descriptors, of the gateway's process."""
    assert gw.process is not None
    status = Path(f"/proc/{gw.process.pid}/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return memory, len(list(Path(f"/proc/{gw.process.pid}/fd").iterdir()))


async def comes_to_rest(gw: Gateway, campaign: Campaign, before: tuple[int, int]) -> None:
    """Report what does not return."""
    deadline = time.monotonic() + REST_SECONDS
    memory, descriptors = resources(gw)
    while descriptors > before[1] + DESCRIPTORS and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        memory, descriptors = resources(gw)
    try:
        await gw.settled(REST_SECONDS)
    except AssertionError as exc:
        campaign.report("a call is held, or a session busy, for ever", str(exc).encode())
    if descriptors > before[1] + DESCRIPTORS:
        campaign.report("descriptors do not return", f"{before[1]} before, {descriptors} after".encode())
    if memory > before[0] + MEMORY_KIB:
        campaign.report("memory does not return", f"{before[0]} KiB before, {memory} KiB after".encode())
    failures = await gw.metric("mcp_gateway_task_failures_total")
    if failures:
        campaign.report("a task failed", f"mcp_gateway_task_failures_total is {failures}".encode())
    print(f"memory {before[0] >> 10} -> {memory >> 10} MiB, descriptors {before[1]} -> {descriptors}", flush=True)


async def run(kind: str, seconds: float, folder: Path, seed: int) -> int:
    """Attack a gateway of its own for so long; the number of findings."""
    random = Random(seed)
    hostility = 0.6 if kind == "upstream" else 0.0
    calm = FakeHostileUpstream(Mutator(0), 0)
    hostile = [FakeHostileUpstream(Mutator(random.getrandbits(32)), hostility) for _ in range(LANES)]
    peers = f"127.0.0.1:{free_port()}"
    replica = {"id": "gw-1", "listen": peers, "peers": {"gw-1": peers}}
    async with AsyncExitStack() as stack:
        for each in (calm, *hostile):
            await stack.enter_async_context(each)
        routes = [{"path": "/calm", "upstream": {"url": calm.url, "transport": "streamable-http"}}]
        routes += [{"path": f"/mcp{at}", "upstream": {"url": each.url}} for at, each in enumerate(hostile)]
        started = gateway("unused", check=False, **LIMITS, routes=routes, replica=replica)
        gw = await stack.enter_async_context(started)
        campaign = Campaign(gw, kind, folder)
        listen, admin = str(gw.config["listen"]), str(gw.config["admin"])
        attacks = []
        for at, upstream in enumerate(hostile):
            mutator = Mutator(random.getrandbits(32), TARGETS["request"].seeds())
            address = {"peer": peers, "admin": admin}.get(kind, listen)
            attack = Attack(campaign, mutator, address, f"/mcp{at}", upstream)
            attacks.append(
                {
                    "client": attack.as_client,
                    "passthrough": attack.as_legacy_client,
                    "peer": attack.as_replica,
                    "admin": attack.as_operator,
                    "upstream": attack.as_plain_client,
                }[kind]
            )
        await canary(campaign, listen, time.monotonic() + 1)
        before = resources(gw)
        until = time.monotonic() + seconds
        await asyncio.gather(canary(campaign, listen, until), *(lane(attack, until) for attack in attacks))
        await comes_to_rest(gw, campaign, before)
        campaign.read_log(b"")
        print(f"{campaign.executions} executions, {len(campaign.findings)} findings (seed {seed})", flush=True)
        return len(campaign.findings)


def main() -> int:
    """Attack as the command line says."""
    kind, seconds, place, *seed = sys.argv[1:]
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    return 1 if asyncio.run(run(kind, float(seconds), folder, int(*seed or [SystemRandom().randrange(2**32)]))) else 0


if __name__ == "__main__":
    sys.exit(main())

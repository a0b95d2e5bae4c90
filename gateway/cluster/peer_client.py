"""One replica speaks to another: the request goes over once, its reply comes back as it is written.

The request's body goes out only after the other side has said `100 Continue`: a process that accepts connections but
does nothing (stopped, or stuck) has then been given nothing that it could still run when it wakes up.

Only these prove that a process is dead: its address refuses a connection, its unix socket does not exist or refuses
one, another process answers in its name. Every other failure to connect is silence, and many have their cause here.
"""

import asyncio
import errno
import ipaddress
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.membership import Address, Membership, State
from gateway.config import Config, split_address
from gateway.http.reply import Incoming, ReplyWriter, leave_open, read_body, send
from gateway.protocol.errors import GatewayError, InvalidState, OwnerSilent, OwnerStalled
from gateway.seal import peer_messages as hops
from gateway.seal.peer_messages import Frames, Hop, PeerSealer
from gateway.telemetry import Ending, Event, Metrics, Outcome, PeerOutcome, get_logger

log = get_logger()

PATH: Final = "/peer"
_CONTENT: Final = "application/octet-stream"
_OVERHEAD_BYTES: Final = 262_144
"""What a request's headers and its seal may add to its body."""
_FRAME_BYTES: Final = 16_777_216
_PIECE_BYTES: Final = 65_536
_UNIX: Final = "unix:"
_NAME_SECONDS: Final = 2
"""How long the address of a peer that is configured by name is remembered."""
_LOG_SECONDS: Final = 1.0
"""Refusals on the peer port are logged no more often than this; the metrics count each."""
_REJECTED_FIX: Final = (
    "if it is a replica, give it the same state.keys and compare the clocks; else let only replicas reach "
    "replica.listen"
)
_FOREIGN: Final = (aiohttp.ClientError, ConnectionError, TimeoutError)
_TRIES: Final = 3
"""How often a member that refuses connections is looked up anew and asked again."""
_NO_SOCKET: Final = (errno.ECONNREFUSED, errno.ENOENT)
"""How the kernel says that nobody listens on a unix socket."""
_FAR: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ECONNRESET, errno.ECONNABORTED)
"""Failures to connect whose cause need not be on this host."""

_SEEN: Final[dict[PeerOutcome, State]] = {
    PeerOutcome.SERVED: "answered",
    PeerOutcome.GONE: "answered",
    PeerOutcome.DEAD: "dead",
    PeerOutcome.SILENT: "silent",
    PeerOutcome.STALLED: "stalled",
    PeerOutcome.BROKE: "stalled",
}

Replied = tuple[web.StreamResponse, Ending]
Serve = Callable[[Incoming, ReplyWriter], Awaitable[object]]
"""Serves a request that came from another replica; raises PeerFailed."""
Tell = Callable[[Hop, bool], Awaitable[str]]
"""Answers a question of another replica; whether that one is a process of this host."""


class PeerFailed(Exception):
    """Another replica did not serve a request; the reply may have begun."""


class Dead(PeerFailed):
    """Its address refuses connections, or there is no such process: nothing was sent."""


class Gone(PeerFailed):
    """Another process answers in its name, so the one that held the call is dead: nothing was run."""


class _Stale(PeerFailed):
    """The connection broke before anything was sent on it."""


class Broke(PeerFailed):
    """It took the request, and broke off before its reply was complete."""


class Stuck(OwnerStalled):
    """It took the request and fell silent: unlike others that are stalled, it may be at work on it."""


class PeerClient:
    """The way to the other replicas."""

    def __init__(self, config: Config, members: Membership, hops: PeerSealer, metrics: Metrics) -> None:
        self.timeouts = config.timeouts
        """They may change; what goes over after that has the new ones."""
        self._members = members
        self._hops = hops
        self._metrics = metrics
        self._clients: dict[tuple[Address, bool], aiohttp.ClientSession] = {}
        listen = config.replica.listen
        host = split_address(listen)[0] if listen is not None else ""
        self._source = (host, 0) if _is_one(host) else None
        """Others find this process where its requests come from."""
        members.ask_name = self._ask_name
        members.greet = self._greet

    async def forward(self, kind: hops.Kind, member: str, incoming: Incoming, wire: ReplyWriter) -> Replied:
        """Have `member` serve the request, and write its reply to `wire`.

        Raises Dead and Gone, OwnerSilent when it was given nothing and may live, and OwnerStalled when it lives and
        does not serve it.
        """
        try:
            return await self._forward(kind, member, incoming, wire)
        except Broke:
            # It died, or only the connection did. A living one joins both: it claims a round's answers once.
            try:
                return await self._forward(kind, member, incoming, wire, fresh=True)
            except Broke as exc:
                raise Stuck(member, "breaks off its replies") from exc

    async def _forward(
        self, kind: hops.Kind, member: str, incoming: Incoming, wire: ReplyWriter, *, fresh: bool = False
    ) -> Replied:
        for _ in range(_TRIES):
            address = await self._address(kind, member)
            try:
                return await self._counted(address, _hop(kind, member, incoming), wire, fresh=fresh)
            except Dead:
                self._members.forget_address(member)
                if not await self._members.is_back(member):
                    raise
                fresh = True
        raise self._slow(member)

    async def _address(self, kind: hops.Kind, member: str) -> Address:
        """Where to send a request; raises Dead and OwnerSilent, and counts them."""
        try:
            address = await self._members.address(member)
        except OwnerSilent:
            self._metrics.peer_asked(PeerOutcome.SILENT)
            raise
        if address is None:
            self._metrics.peer_asked(PeerOutcome.DEAD)
            raise Dead(member)
        # An owner that was silent a moment ago may be back: only heirs are passed over for it.
        if kind != "owner" and self._members.was_silent(member):
            self._metrics.peer_asked(PeerOutcome.SILENT)
            raise OwnerSilent(member, "did not accept a connection a moment ago")
        return address

    async def _counted(self, address: Address, hop: Hop, wire: ReplyWriter, *, fresh: bool) -> Replied:
        """Send a request, and note what came of it."""
        outcome = PeerOutcome.BROKE
        try:
            replied = await self._exchange(address, hop, wire, fresh=fresh)
            outcome = PeerOutcome.SERVED
        except Dead:
            outcome = PeerOutcome.DEAD
            raise
        except Gone:
            outcome = PeerOutcome.GONE
            raise
        except OwnerSilent as exc:
            outcome = PeerOutcome.STALLED if exc.is_connected else PeerOutcome.SILENT
            if exc.is_local:
                self._members.forget_address(hop.to)
            elif not exc.is_connected:
                self._members.note_silent(hop.to)
            raise
        except OwnerStalled:
            outcome = PeerOutcome.STALLED
            raise
        finally:
            self._metrics.peer_asked(outcome)
            self._members.note(hop.to, _SEEN[outcome])
        return replied

    async def _exchange(self, address: Address, hop: Hop, wire: ReplyWriter, *, fresh: bool) -> Replied:
        async with await self._open(address, hop, fresh=fresh) as response:
            if response.status != 200:
                # It lives, so nobody may take its calls over.
                raise OwnerStalled(
                    hop.to, f"refuses this one (HTTP {response.status}; do clocks and state.keys of both agree?)"
                )
            return await self._relay(hop, response, wire)

    async def _open(self, address: Address, hop: Hop, *, fresh: bool = False) -> aiohttp.ClientResponse:
        try:
            return await self._post(address, hop, fresh=fresh)
        except _Stale:
            # A connection kept from before died with the process it led to, or by its age: nothing was sent on it.
            try:
                return await self._post(address, hop, fresh=True)
            except _Stale as exc:
                # Somebody accepts connections, so somebody lives.
                raise OwnerStalled(hop.to, "closes its connections (is it at limits.connections?)") from exc

    async def _post(self, address: Address, hop: Hop, *, fresh: bool) -> aiohttp.ClientResponse:
        client, url = self._client(address, fresh=fresh)
        sealed = self._hops.seal(hop)
        sent = False
        connected = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            nonlocal sent
            sent = True
            yield sealed

        headers = {"Content-Type": _CONTENT}
        timeouts = self.timeouts
        wait = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.peer_connect_seconds, sock_read=None)
        try:
            async with asyncio.timeout(timeouts.peer_connect_seconds + timeouts.peer_accept_seconds):
                return await client.post(
                    url,
                    data=body(),
                    headers=headers,
                    expect100=True,
                    allow_redirects=False,
                    timeout=wait,
                    trace_request_ctx=connected,
                )
        except aiohttp.ConnectionTimeoutError as exc:
            raise self._slow(hop.to) from exc
        except aiohttp.ClientConnectorDNSError as exc:
            why = f"cannot be reached from {self._members.own} (its name in replica.peers does not resolve)"
            raise OwnerSilent(hop.to, why, is_local=True) from exc
        except aiohttp.ClientConnectorError as exc:
            raise await self._unconnected(address, hop.to, exc.os_error) from exc
        except TimeoutError as exc:
            if sent:
                raise Stuck(hop.to) from exc
            if connected.is_set():
                raise OwnerSilent(hop.to, "does not react", is_connected=True) from exc
            why = f"cannot be reached from {self._members.own} (its name in replica.peers did not resolve in time)"
            raise OwnerSilent(hop.to, why, is_local=True) from exc
        except _FOREIGN as exc:
            raise (Broke if sent else _Stale)(f"{hop.to}: {type(exc).__name__}") from exc

    def _slow(self, member: str) -> OwnerSilent:
        where = f"a connection from {self._members.own} within timeouts.peer_connect_seconds"
        return OwnerSilent(member, f"does not accept {where}")

    async def _unconnected(self, address: Address, member: str, failure: OSError) -> PeerFailed | OwnerSilent:
        """What a connection that did not come about says of the process at an address."""
        number = failure.errno
        if address.startswith(_UNIX):
            is_proof = number in _NO_SOCKET
        elif _is_literal(split_address(address)[0]):
            is_proof = number == errno.ECONNREFUSED
        else:
            is_proof = await self._all_refuse(address)
        if is_proof:
            return Dead(member)
        cause = os.strerror(number) if number is not None and number > 0 else failure.strerror or str(failure)
        why = f"cannot be reached from {self._members.own} ({cause})"
        return OwnerSilent(member, why, is_local=number not in _FAR)

    async def _all_refuse(self, address: Address) -> bool:
        """Whether each address of a name, looked up anew, refuses connections: the one that did may be an old one."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeouts.peer_connect_seconds):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return all([await _refuses(family, where) for family, _, _, _, where in found])
        except (OSError, TimeoutError):
            return False

    async def _relay(self, hop: Hop, response: aiohttp.ClientResponse, wire: ReplyWriter) -> Replied:
        """Write the frames of a reply to `wire`, each as it comes."""
        frames = Frames(self._hops.keyring, hop.nonce, _FRAME_BYTES)
        reply = _Reply(wire, hop.to)
        try:
            while True:
                chunk = await self._next(response, hop.to)
                for frame in frames.feed(chunk):
                    replied = await reply.take(frame)
                    if replied is not None:
                        return replied
        except InvalidState as exc:
            raise Broke(f"{hop.to}: {exc.reason}") from exc

    async def _next(self, response: aiohttp.ClientResponse, member: str) -> bytes:
        # It is never silent for longer than this: it sends the keep-alives of the client's stream.
        limit = 2 * self.timeouts.keepalive_seconds + self.timeouts.peer_accept_seconds
        try:
            async with asyncio.timeout(limit):
                chunk = await response.content.readany()
        except TimeoutError as exc:
            raise Stuck(member) from exc
        except (aiohttp.ClientError, ConnectionError) as exc:
            raise Broke(f"{member}: {type(exc).__name__}") from exc
        if not chunk:
            raise Broke(f"{member} ended its reply half-way")
        return chunk

    async def _greet(self, address: Address) -> str | None:
        """As `_ask_name`, and says who asks: the other one may not have found this one's name yet."""
        return await self._ask_name(address, self._members.host)

    async def _ask_name(self, address: Address, own: str = "") -> str | None:
        """Who is at an address; None when nobody is, TimeoutError when that cannot be told."""
        hop = Hop(kind="who", to=address, issued=time.time(), nonce=hops.nonce(), path=own)
        try:
            async with asyncio.timeout(self.timeouts.peer_accept_seconds):
                answers = await self._question(address, hop, fresh=False)
        except Dead:
            return None
        except (*_FOREIGN, PeerFailed, OwnerStalled, InvalidState) as exc:
            raise TimeoutError from exc
        found = [frame for frame in answers if isinstance(frame, hops.Me)]
        if not found:
            raise TimeoutError
        return found[0].id

    async def _question(self, address: Address, hop: Hop, *, fresh: bool) -> list[hops.Frame]:
        """The frames that answer a question; raises what `_open` and reading raise."""
        async with await self._open(address, hop, fresh=fresh) as response:
            if response.status != 200:
                raise OwnerStalled(hop.to, f"refuses a question (HTTP {response.status})")
            return Frames(self._hops.keyring, hop.nonce, _FRAME_BYTES).feed(await response.read())

    async def ask(self, kind: hops.Kind, member: str, about: str, detail: bytes = b"") -> str:
        """The word with which another replica answers a question; raises PeerFailed and OwnerStalled.

        It may have to try a connection of its own first, so it has as long as that may take.
        """
        address = await self._members.address(member)
        if address is None:
            raise Dead(member)
        hop = Hop(kind=kind, to=member, issued=time.time(), nonce=hops.nonce(), path=about, body=detail)
        timeouts = self.timeouts
        wait = 2 * (timeouts.peer_connect_seconds + timeouts.peer_accept_seconds) + timeouts.peer_accept_seconds
        try:
            async with asyncio.timeout(wait):
                answers = await self._question(address, hop, fresh=False)
        except (*_FOREIGN, InvalidState) as exc:
            raise OwnerStalled(member) from exc
        words = [frame.word for frame in answers if isinstance(frame, hops.Told)]
        return words[0] if words else "unknown"

    async def reach(self, member: str) -> str:
        """What this replica can testify of another one by an attempt of its own: reached, silent or unknown."""
        host = member.partition("#")[0]
        try:
            address = await self._members.address(host)
        except OwnerSilent:
            address = None
        if address is None:
            return "unknown"
        try:
            hop = Hop(kind="who", to=address, issued=time.time(), nonce=hops.nonce())
            timeouts = self.timeouts
            # Longer than `_post` waits, whose word for silence is the more exact one.
            async with asyncio.timeout(timeouts.peer_connect_seconds + 2 * timeouts.peer_accept_seconds):
                answers = await self._question(address, hop, fresh=True)
        except (*_FOREIGN, PeerFailed, InvalidState, OwnerStalled) as exc:
            return _testimony(exc)
        return "reached" if hops.Me(host) in answers else "unknown"

    def _client(self, address: Address, *, fresh: bool) -> tuple[aiohttp.ClientSession, str]:
        """The connections of an address: those to all TCP peers, or to one socket; `fresh` ones are not kept."""
        is_unix = address.startswith(_UNIX)
        name = (address if is_unix else "", fresh)
        client = self._clients.get(name)
        if client is None:
            connector: aiohttp.BaseConnector
            if is_unix:
                connector = aiohttp.UnixConnector(address.removeprefix(_UNIX), limit=0, force_close=fresh)
            else:
                # Who moved is looked for at the new address soon.
                connector = aiohttp.TCPConnector(
                    limit=0, force_close=fresh, ttl_dns_cache=_NAME_SECONDS, local_addr=self._source
                )
            client = self._clients[name] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                trace_configs=[_notes_connections()],
            )
        return client, f"http://{'peer' if is_unix else address}{PATH}"

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()


def _testimony(failure: Exception) -> str:
    """What a failed attempt to ask a replica for its name shows."""
    match failure:
        case Dead() | OwnerSilent(is_local=False):
            return "silent"
        case OwnerStalled() if not isinstance(failure, OwnerSilent):
            return "reached"  # it refuses, so it lives
        case _:
            return "unknown"


def _hop(kind: hops.Kind, member: str, incoming: Incoming) -> Hop:
    """A client's request for another replica."""
    return Hop(
        kind=kind,
        to=member,
        issued=time.time(),
        nonce=hops.nonce(),
        path=incoming.path,
        headers=tuple((_bytes(name), _bytes(value)) for name, value in incoming.headers.items()),
        remote=incoming.remote,
        body=incoming.body,
        request_id=incoming.request_id,
        trace=incoming.span.token if incoming.span is not None else b"",
    )


def _notes_connections() -> aiohttp.TraceConfig:
    """Sets the event that a request has as its context when the request has a connection."""

    async def note(_: object, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.set()

    config = aiohttp.TraceConfig()
    config.on_connection_create_end.append(note)
    config.on_connection_reuseconn.append(note)
    return config


async def _refuses(family: int, address: tuple[object, ...]) -> bool:
    """Whether an address refuses a connection; raises OSError where that cannot be told."""
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(attempt, address)
        except ConnectionRefusedError:
            return True
    return False


def _is_literal(host: str) -> bool:
    try:
        _ = ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_one(host: str) -> bool:
    """Whether it is an address of one interface, and neither a name nor all of them."""
    return _is_literal(host) and not ipaddress.ip_address(host).is_unspecified


def _bytes(text: str) -> bytes:
    """Header text as it was on the wire: what is no UTF-8 came in as surrogates."""
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _ending(frame: hops.End) -> Ending:
    """Labels for the metrics; a replica of another version may have one more, and its reply is whole all the same."""
    outcome = next((outcome for outcome in Outcome if outcome == frame.outcome), Outcome.ERROR)
    return Ending(outcome, frame.error_type)


class _Reply:
    """One reply as its frames come in."""

    def __init__(self, wire: ReplyWriter, member: str) -> None:
        self._wire = wire
        self._member = member
        self._head: hops.Head | None = None
        self._whole = bytearray()

    async def take(self, frame: hops.Frame) -> Replied | None:
        """Pass one frame on; the reply when it was the last."""
        wire, head = self._wire, self._head
        match frame:
            case hops.Gone(id=id_):
                if id_ and id_ != self._member.partition("#")[0]:
                    why = f"cannot be reached (the replica {id_} answers at its address; correct replica.peers)"
                    raise OwnerSilent(self._member, why, is_local=True)
                raise Gone(self._member)
            case hops.Head():
                self._head = frame
                if frame.streamed and not wire.started:
                    await wire.start()
            case hops.Data(data=data) if head is not None and head.streamed:
                await wire.write(data)
            case hops.Data(data=data):
                self._whole += data
            case hops.End() if head is not None:
                ending = _ending(frame)
                if head.streamed:
                    return await wire.end(ending), ending
                return await wire.whole(bytes(self._whole), head.status, dict(head.headers), ending), ending
            case _:
                raise Broke(f"{self._member} answered something else")
        return None


class PeerListener:
    """The peer listener: opens what other replicas send, and lets it be served."""

    def __init__(  # noqa: PLR0913  (what a listener needs)
        self, config: Config, members: Membership, hops: PeerSealer, serve: Serve, tell: Tell, metrics: Metrics
    ) -> None:
        self.config = config
        self._members = members
        self._hops = hops
        self._serve = serve
        self._tell = tell
        self._metrics = metrics
        self._logged = float("-inf")

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """One request from the network."""
        return await self._handle(http, is_local=False)

    async def handle_local(self, http: web.BaseRequest) -> web.StreamResponse:
        """One request from another process of this host."""
        return await self._handle(http, is_local=True)

    async def _handle(self, http: web.BaseRequest, *, is_local: bool) -> web.StreamResponse:
        """Who cannot seal gets a refusal that says nothing."""
        if http.method != "POST" or http.path != PATH:
            return web.Response(status=404)
        limits = self.config.limits
        try:
            sealed = await read_body(http, limits.body_bytes + _OVERHEAD_BYTES, limits.receive_seconds)
            hop = self._hops.open(sealed, time.time())
        except InvalidState as exc:
            self._metrics.peer_rejected(exc.reason)
            if time.monotonic() - self._logged > _LOG_SECONDS:
                self._logged = time.monotonic()
                log.warning(Event.PEER_REJECTED, reason=exc.reason, remote=http.remote, fix=_REJECTED_FIX)
            return web.Response(status=403)
        except GatewayError as exc:
            return web.Response(status=exc.status)
        wire = PeerReply(http, Frames(self._hops.keyring, hop.nonce, _FRAME_BYTES), self.config.timeouts.send_seconds)
        await wire.open()
        if hop.kind in ("who", "reach", "holds"):
            await wire.frame(await self._answer(hop, http.remote, is_local=is_local))
        else:
            await self._pass(hop, wire, http, is_local=is_local)
        return await wire.close()

    async def _answer(self, hop: Hop, remote: str | None, *, is_local: bool) -> hops.Frame:
        if hop.kind != "who":
            return hops.Told(await self._tell(hop, is_local))
        if hop.path:
            self._members.greeted(hop.path, remote)
        return hops.Me(self._members.host)

    async def _pass(self, hop: Hop, wire: "PeerReply", http: web.BaseRequest, *, is_local: bool) -> None:
        """Have a client's request served."""
        headers = CIMultiDictProxy(CIMultiDict((_text(name), _text(value)) for name, value in hop.headers))
        incoming = Incoming(hop.path, headers, hop.remote, hop.body, hop, is_local, hop.request_id)
        try:
            _ = await self._serve(incoming, wire)
        except Gone:
            await wire.frame(hops.Gone(self._members.host))
        except PeerFailed as exc:
            log.warning(Event.PEER_FAILED, cause=str(exc), request_id=hop.request_id)
            if http.transport is not None:
                http.transport.abort()  # the other side must see that the reply is incomplete


class PeerReply(ReplyWriter):
    """Back to the replica that the client spoke to, sealed."""

    def __init__(self, http: web.BaseRequest, frames: Frames, send_seconds: float) -> None:
        self._http = http
        self._frames = frames
        self._send_seconds = send_seconds
        self._stream = web.StreamResponse(headers={"Content-Type": _CONTENT})

    async def open(self) -> None:
        """Tell the other side that its request was taken."""
        leave_open(self._http, self._stream)
        await self._stream.prepare(self._http)

    async def frame(self, *frames: hops.Frame) -> None:
        """Send frames together."""
        data = b"".join([self._frames.seal(frame) for frame in frames])
        await send(self._http, self._stream, data, self._send_seconds)

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        """Send a whole reply."""
        pieces = [hops.Data(body[start : start + _PIECE_BYTES]) for start in range(0, len(body), _PIECE_BYTES)]
        await self.frame(hops.Head(status, tuple(headers.items()), streamed=False), *pieces, hops.End(*ending))
        return self._stream

    async def start(self) -> None:
        """Send the head of a stream."""
        await self.frame(hops.Head(200, (), streamed=True))
        self.started = True

    async def write(self, data: bytes) -> None:
        """Send a part of a stream."""
        await self.frame(hops.Data(data))

    async def end(self, ending: Ending) -> web.StreamResponse:
        """Send the end of a stream."""
        await self.frame(hops.End(*ending))
        return self._stream

    async def close(self) -> web.StreamResponse:
        """The connection may be used again."""
        await self._stream.write_eof()
        return self._stream

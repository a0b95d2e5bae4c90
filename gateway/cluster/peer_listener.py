"""Serves the requests of other replicas."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.cluster.peer_connections import CONTENT_TYPE, FRAME_BYTES, PATH
from gateway.cluster.peer_errors import PeerFailed, PeerReplaced
from gateway.cluster.witness import Witness
from gateway.config import Config, InForce
from gateway.http.incoming import Incoming
from gateway.http.reply import ReplyWriter, leave_open, send, share_unread
from gateway.http.traffic import Traffic
from gateway.protocol.errors import GatewayError, InvalidState
from gateway.runtime.budget import Share
from gateway.seal import peer_messages as messages
from gateway.seal.peer_messages import Frames, PeerRequest, PeerSealer
from gateway.telemetry import Ending, Event, get_logger

log = get_logger()

_OVERHEAD_BYTES: Final = 262_144
"""The most that a request's headers and its seal may add to its body."""
_PIECE_BYTES: Final = 65_536
_LOG_SECONDS: Final = 1.0
"""The shortest time between two log lines about rejected requests; the metrics count each."""
_REJECTED_FIX: Final = (
    "if it is a replica, give it the same state.keys and compare the clocks; else let only replicas reach "
    "replica.listen"
)

Serve = Callable[[Incoming, ReplyWriter], Awaitable[object]]
"""Serves a client's request that came from another replica; raises PeerFailed."""
TellStatus = Callable[[bool], Awaitable[str]]
"""Returns the status of this host, or of this process alone if the argument is true."""


class PeerListener:
    """Opens the requests of other replicas, and hands them to `serve` and `witness`."""

    def __init__(  # noqa: PLR0913  (everything that another replica may ask for)
        self,
        in_force: InForce[Config],
        sealer: PeerSealer,
        serve: Serve,
        witness: Witness,
        tell_status: TellStatus,
        traffic: Traffic,
    ) -> None:
        self._in_force = in_force
        self._membership = witness.membership
        self._sealer = sealer
        self._serve = serve
        self._bodies = traffic.bodies
        self._witness = witness
        self._tell_status = tell_status
        self._metrics = traffic.metrics
        self._logged = float("-inf")

    async def handle(self, http: web.BaseRequest, *, is_local: bool = False) -> web.StreamResponse:
        """Serve one request from the network, or from another process of this host.

        A request that is not sealed with a state key gets a refusal without a reason.
        """
        if http.method != "POST" or http.path != PATH:
            return web.Response(status=404)
        config = self._in_force.value
        try:
            limits = config.limits
            sealed = await self._bodies.read(http, limits.body_bytes + _OVERHEAD_BYTES, limits.receive_seconds)
            peer_request = self._sealer.open(sealed, time.time())
        except InvalidState as exc:
            self._reject(exc.reason, http.remote)
            return web.Response(status=403)
        except GatewayError as exc:
            return web.Response(status=exc.status)
        frames = Frames(self._sealer.keyring, peer_request.nonce, FRAME_BYTES)
        reply = PeerReply(http, frames, config.timeouts.send_seconds)
        await reply.open()
        if peer_request.kind in ("who", "reach", "holds", "status"):
            await reply.frame(await self._answer(peer_request, http.remote, is_local=is_local))
        else:
            await self._serve_request(peer_request, reply, http, is_local=is_local)
        return await reply.close()

    def _reject(self, reason: str, remote: str | None) -> None:
        self._metrics.peer_rejected(reason)
        if time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            log.warning(Event.PEER_REJECTED, reason=reason, remote=remote, fix=_REJECTED_FIX)

    async def _answer(self, peer_request: PeerRequest, remote: str | None, *, is_local: bool) -> messages.Frame:
        """The answer to a question."""
        if peer_request.kind == "status":
            return messages.Answer(await self._tell_status(is_local))
        if peer_request.kind != "who":
            return messages.Answer(await self._witness.tell(peer_request, is_local=is_local))
        if peer_request.path:
            self._membership.discovery.greeted(peer_request.path, remote)
        return messages.Identity(self._membership.host)

    async def _serve_request(
        self, peer_request: PeerRequest, reply: "PeerReply", http: web.BaseRequest, *, is_local: bool
    ) -> None:
        """Have a client's request served."""
        headers = CIMultiDictProxy(CIMultiDict((_text(name), _text(value)) for name, value in peer_request.headers))
        incoming = Incoming(
            peer_request.path,
            headers,
            peer_request.remote,
            peer_request.body,
            peer_request,
            is_local,
            peer_request.request_id,
            peer_request.method,
        )
        try:
            _ = await self._serve(incoming, reply)
        except PeerReplaced:
            await reply.frame(messages.Gone(self._membership.host))
        except PeerFailed as exc:
            log.warning(Event.PEER_FAILED, cause=str(exc), request_id=peer_request.request_id)
            if http.transport is not None:
                http.transport.abort()  # the other replica must see that the reply is incomplete


class PeerReply(ReplyWriter):
    """Sends a sealed reply to the replica that forwarded the request."""

    def __init__(self, http: web.BaseRequest, frames: Frames, send_seconds: float) -> None:
        self._http = http
        self._frames = frames
        self._send_seconds = send_seconds
        self._stream = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})

    async def open(self) -> None:
        """Tell the other replica that its request was accepted."""
        leave_open(self._http, self._stream)
        await self._stream.prepare(self._http)

    def share_unread(self) -> Share:
        """See `ReplyWriter`."""
        return share_unread(self._http)

    async def frame(self, *frames: messages.Frame) -> None:
        """Send frames together."""
        data = b"".join([self._frames.seal(frame) for frame in frames])
        await send(self._http, self._stream, data, self._send_seconds)

    async def only(self, body: bytes, status: int, headers: Mapping[str, str], ending: Ending) -> web.StreamResponse:
        """Send a whole reply."""
        pieces = [messages.Data(body[start : start + _PIECE_BYTES]) for start in range(0, len(body), _PIECE_BYTES)]
        head = messages.Head(status, tuple(headers.items()), streamed=False)
        await self.frame(head, *pieces, messages.End(*ending))
        return self._stream

    async def start(self) -> None:
        """Send the head of a stream."""
        await self.frame(messages.Head(200, (), streamed=True))
        self.started = True

    async def write(self, data: bytes) -> None:
        """Send a part of a stream."""
        await self.frame(messages.Data(data))

    async def end(self, ending: Ending) -> web.StreamResponse:
        """Send the end of a stream."""
        await self.frame(messages.End(*ending))
        return self._stream

    async def close(self) -> web.StreamResponse:
        """End the HTTP body, so that the connection can be reused."""
        await self._stream.write_eof()
        return self._stream


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")

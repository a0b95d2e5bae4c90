"""Messages between replicas: a sealed request that gets sealed frames in reply.

Both directions use AES-256-GCM under subkeys of the state keys for the purpose "peer", so only a process with the
state keys can send a replica requests, or read or change the messages. A request is valid for one process, once, for
a short time; a frame is valid at one place in the reply to one request. Threats 17, 19 and 20.

Rule: a process that passes a request on to another one of its host keeps its time and, as `first`, its nonce. So a
recorded request is refused whichever process it is sent to.
"""

import math
from collections import OrderedDict
from typing import Final, Literal

import msgspec

from gateway import world
from gateway.config import InForce
from gateway.protocol.errors import InvalidState, OutOfTime
from gateway.seal.claims import SKEW_SECONDS
from gateway.seal.keyring import Keyring, Keys, decode_content, ring

PURPOSE: Final = "peer"
_NONCE_BYTES: Final = 16
FRAME_BYTES: Final = 16_777_216
"""The longest frame, sealed."""
_MAX_REMEMBERED: Final = 200_000
_LENGTH_BYTES: Final = 4

Kind = Literal["owner", "heir", "resume", "session", "new", "who", "reach", "holds", "status"]
"""`owner`: the receiver holds this call. `heir`: the call's owner is dead, and the receiver is to take it over.
`resume`: as `heir`, but the owner is silent and may be alive, so the receiver must not disturb the call. `session`:
the receiver has the legacy client's session that the request names. `new`: a new call that a draining replica does not
begin itself; a receiver that drains too answers `Gone`. `who`: asks for the receiver's id (the sender is `path`, if
given). `reach`: asks whether the receiver reaches the replica `path`. `holds`: asks whether the receiver took over the
exchange `path` after the round in `body`, or follows the task `path`. `status`: asks for the receiver's part of the
status page. A replica refuses a kind that it does not know with HTTP 403."""


class PeerRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One client request, or a question of a replica, on its way to another replica.

    `to` is a member (`gw-1`, `gw-2#0`) or the host of several (`gw-2`); `remote` is the client's address as the first
    replica saw it. `headers` are unchanged bytes. `request_id` identifies the request in the logs of both replicas.
    `trace` is the token of its span, if it is traced. `leg_seconds` is set by a replica that will end: until then the
    receiver must have replied, at least with a state-only round. `first` is the nonce of the request that a process
    passes on to another one of its host. `sender` is the member that sealed it, for the log; older ones do not tell.
    `exchange_id` is for the log too, as far as the first replica knows it.
    """

    kind: Kind
    to: str
    issued: float
    nonce: bytes
    method: str = "POST"
    path: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    remote: str | None = None
    body: bytes = b""
    request_id: str = ""
    trace: bytes = b""
    leg_seconds: float | None = None
    first: bytes = b""
    sender: str = ""
    exchange_id: str = ""

    @property
    def once(self) -> bytes:
        """What identifies the request at every process that it comes to."""
        return self.first or self.nonce


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """The reply's status and headers; `streamed` if the body is an SSE stream."""

    status: int
    headers: tuple[tuple[str, str], ...]
    streamed: bool


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """A piece of the reply's body."""

    data: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The end of a reply, with its outcome; a reply without this frame was cut off."""

    outcome: str
    error_type: str = ""


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """A whole reply that is no stream, and fits into one frame."""

    status: int
    headers: tuple[tuple[str, str], ...]
    data: bytes
    outcome: str
    error_type: str = ""


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The process that held the call has ended: a new process of replica `id` answers at its address.

    A process that has parted says the same of itself: it let its calls go, and ends within a moment. If `id` is not
    the owner's, only the address was wrong.
    """

    id: str


class Identity(msgspec.Struct, frozen=True, array_like=True, tag="me"):
    """The answer to `who`: the id of this replica."""

    id: str


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The answer to `reach` (`reached`, `silent`, `unknown`), `holds` (`yes`, `no`, `unknown`) or `status` (JSON)."""

    word: str


Frame = Head | Data | End | Whole | Gone | Identity | Told

_encode = msgspec.msgpack.Encoder().encode
_request_decoder = msgspec.msgpack.Decoder(PeerRequest)
_frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class PeerSealer:
    """Seals and opens requests between replicas, each of which is accepted once."""

    def __init__(self, keys: InForce[Keys]) -> None:
        self._keyring = ring(keys, PURPOSE)
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        """The nonces of accepted requests, with the time from which each is remembered."""
        self._newest_expired = -math.inf
        """When the newest request was issued that came too late: a clock that is set back makes none valid again."""

    def frames(self, request: PeerRequest) -> "Frames":
        """What seals or opens the reply to a request; a reload does not change the keys in the middle of it."""
        return Frames(self._keyring.value, request.nonce)

    def seal(self, request: PeerRequest) -> bytes:
        """A request, sealed."""
        return self._keyring.value.seal_bytes(_encode(request), b"request")

    def open(self, sealed: bytes, now: float) -> PeerRequest:
        """The request, if it is authentic, in time and new; raises InvalidState.

        One from the future is new only once too: its sender has done the work elsewhere when its time has come. So one
        that seemed to have expired, because the clock was ahead, stays so.
        """
        request = decode_content(_request_decoder, self._keyring.value.open_bytes(sealed, b"request"))
        if request.issued < now - SKEW_SECONDS:
            self._newest_expired = max(self._newest_expired, request.issued)
        if request.issued <= self._newest_expired:
            raise OutOfTime("expired", request.sender, request.issued - now)
        if request.once in self._seen:
            raise InvalidState("replayed")
        # Those whose requests are too old to be accepted are forgotten, twice the tolerance after they came.
        while self._seen and (
            next(iter(self._seen.values())) < now - 2 * SKEW_SECONDS or len(self._seen) >= _MAX_REMEMBERED
        ):
            _ = self._seen.popitem(last=False)
        self._seen[request.once] = max(now, request.issued)  # one from the future would be good for longer
        if request.issued > now + SKEW_SECONDS:
            raise OutOfTime("future", request.sender, request.issued - now)
        return request


class Frames:
    """Seals the frames of one reply in order, or opens them; both ends use it."""

    def __init__(self, keyring: Keyring, nonce: bytes) -> None:
        self._keyring = keyring
        self._nonce = nonce
        self._number = 0
        self._received = bytearray()

    def seal(self, frame: Frame) -> bytes:
        """The next frame, prefixed with its length."""
        sealed = self._keyring.seal_bytes(_encode(frame), self._place())
        return len(sealed).to_bytes(_LENGTH_BYTES) + sealed

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes; raises InvalidState for one that is not the next of this reply."""
        self._received += data
        frames: list[Frame] = []
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES])
            if length > FRAME_BYTES:
                raise InvalidState("too_large")
            if len(self._received) < _LENGTH_BYTES + length:
                break
            sealed = bytes(self._received[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del self._received[: _LENGTH_BYTES + length]
            frames.append(decode_content(_frame_decoder, self._keyring.open_bytes(sealed, self._place())))
        return frames

    def _place(self) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"reply" + self._nonce + number.to_bytes(8)


def nonce() -> bytes:
    """A new request's nonce."""
    return world.random_bytes(_NONCE_BYTES)


def question(sender: str, kind: Kind, to: str, about: str, detail: bytes = b"") -> PeerRequest:
    """A new question of this replica."""
    return PeerRequest(kind=kind, to=to, issued=world.wall(), nonce=nonce(), path=about, body=detail, sender=sender)

"""What one replica sends another: a sealed request, and sealed frames back.

Both directions are AES-256-GCM under subkeys of the state keys for the purpose "peer", so whoever cannot read a state
can neither ask a replica for anything nor read or change what two of them say. A request is good for one receiver,
once, for a short time; a frame is good for one place in the reply to one request. Threats 17, 19 and 20.
"""

import secrets
from collections import OrderedDict
from typing import Final, Literal

import msgspec

from gateway.protocol.errors import InvalidState
from gateway.seal.cipher import Keyring

SKEW_SECONDS: Final = 60.0
"""How far the clocks of two replicas may differ; a request is remembered for twice this time."""
_NONCE_BYTES: Final = 16
_MAX_REMEMBERED: Final = 200_000
_LENGTH_BYTES: Final = 4

Kind = Literal["owner", "heir", "resume", "who", "reach", "holds"]
"""`owner`: you hold this call. `heir`: its owner is dead, and you are the one to take it over. `resume`: as `heir`,
but its owner is silent and may live: go on with the call without harm to it, or not at all. `who`: who are you? (I am
`path`, where there is one.) `reach`: do you reach the replica `path`? `holds`: have you taken over the exchange `path`
after the round that `body` names? A replica that does not know a kind refuses it with HTTP 403."""


class Hop(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One client request on its way to another replica.

    `to` is a member (`gw-1`, `gw-2#0`) or the host of several (`gw-2`); `remote` is the client's address as the first
    replica saw it. Headers are the bytes that came, and `request_id` names the request in the logs of
    both; `trace` is the token of its span, where it is traced.
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


class Head(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """The reply's status and headers; `streamed` tells an SSE stream from one whole body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    streamed: bool


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """A piece of the reply's body."""

    data: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The reply is complete, and how it ended; one that stops before this was cut off."""

    outcome: str
    error_type: str = ""


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The process that held the call is no more: the process of replica `id` answers at its address.

    An older version leaves `id` empty. Another id than the owner's proves only that the address was a wrong one.
    """

    id: str = ""


class Me(msgspec.Struct, frozen=True, array_like=True, tag="me"):
    """The answer to `who`."""

    id: str


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The answer to `reach` (`reached`, `silent`, `unknown`) and to `holds` (`yes`, `no`, `unknown`)."""

    word: str


Frame = Head | Data | End | Gone | Me | Told

_encode = msgspec.msgpack.Encoder().encode
_decode_hop = msgspec.msgpack.Decoder(Hop).decode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode


class PeerSealer:
    """Seals and opens what goes between replicas."""

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def seal(self, hop: Hop) -> bytes:
        """A request, sealed."""
        return self.keyring.seal_bytes(_encode(hop), b"request")

    def open(self, sealed: bytes, now: float) -> Hop:
        """A request that is ours, in time and new; raises InvalidState."""
        try:
            hop = _decode_hop(self.keyring.open_bytes(sealed, b"request"))
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise InvalidState("version") from exc
        if hop.issued > now + SKEW_SECONDS:
            raise InvalidState("future")
        if hop.issued < now - SKEW_SECONDS:
            raise InvalidState("expired")
        self._remember(hop.nonce, now)
        return hop

    def _remember(self, nonce: bytes, now: float) -> None:
        """Let a nonce pass once; one that would be too old by now needs no memory."""
        if nonce in self._seen:
            raise InvalidState("replayed")
        while self._seen and (
            next(iter(self._seen.values())) < now - 2 * SKEW_SECONDS or len(self._seen) >= _MAX_REMEMBERED
        ):
            _ = self._seen.popitem(last=False)
        self._seen[nonce] = now


class Frames:
    """The frames of one reply, in their order; the same class at both ends."""

    def __init__(self, keyring: Keyring, nonce: bytes, max_bytes: int) -> None:
        self._keyring = keyring
        self._nonce = nonce
        self._max = max_bytes
        self._number = 0
        self._received = bytearray()

    def seal(self, frame: Frame) -> bytes:
        """The next frame with its length in front."""
        sealed = self._keyring.seal_bytes(_encode(frame), self._place())
        return len(sealed).to_bytes(_LENGTH_BYTES) + sealed

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now; raises InvalidState where one is not the next of this reply."""
        self._received += data
        frames: list[Frame] = []
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES])
            if length > self._max:
                raise InvalidState("too_large")
            if len(self._received) < _LENGTH_BYTES + length:
                break
            sealed = bytes(self._received[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del self._received[: _LENGTH_BYTES + length]
            try:
                frames.append(_decode_frame(self._keyring.open_bytes(sealed, self._place())))
            except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
                raise InvalidState("version") from exc
        return frames

    def _place(self) -> bytes:
        number, self._number = self._number, self._number + 1
        return b"reply" + self._nonce + number.to_bytes(8)


def nonce() -> bytes:
    """A new request's nonce."""
    return secrets.token_bytes(_NONCE_BYTES)

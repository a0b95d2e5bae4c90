"""What `requestState` carries, and what it is bound to.

The envelope is bound to the route, the method, its target, a digest of its arguments, the principal, and the headers
that are credentials; it is good for one round of one exchange until it expires. Sources: specification 2026-07-28
basic/patterns/mrtr (Server Requirements 4 and 5), SEP-1685.
"""

import hashlib
import hmac
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from gateway.exchange.replay import Recorded
from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidParams, InvalidState
from gateway.protocol.request import Request
from gateway.seal.cipher import Keyring

VERSION: Final = 2
SKEW_SECONDS: Final = 60.0
"""How far the clocks of two replicas may differ."""


class Binding(msgspec.Struct, frozen=True, array_like=True):
    """What a request must repeat for its state to be accepted; digests, so that nothing of it can be read."""

    route: str
    method: str
    target: bytes
    arguments: bytes
    principal: bytes
    names: tuple[str, ...] | None = None
    """Of the headers that are credentials, by the configuration under which the state was sealed, so that a reload
    loses no call. None: sealed by a version that bound none, or of a path whose configuration is not known."""
    headers: bytes = b""
    """Their digest; empty where there are no names."""


_REPEATED: Final = ("route", "method", "target", "arguments", "principal")
Digest = Callable[[Sequence[str]], bytes]
"""Of the headers of these names, as a request has them (`principal.of_headers`)."""


def _no_headers(names: Sequence[str]) -> bytes:
    """Stand for a request without any: nothing that was sealed with names opens with it."""
    _ = names
    return b""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """One question that is with the client; `params` give way where the state would be too large."""

    key: str
    method: str
    upstream_id: bytes | None
    digest: bytes
    params: bytes | None = None


class Upstream(msgspec.Struct, frozen=True, array_like=True):
    """What another replica needs to pick the call up: the upstream's session, the call's id, the last event id.

    `call` and `server_info` are JSON, `version` is the negotiated one.
    """

    session: str
    version: str
    call: bytes
    server_info: bytes
    cursor: str | None


class Envelope(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The content of one `requestState`; times are seconds since the epoch.

    `owner` is the replica that holds the call ("" where nobody does) and `epoch` names its process, so that a
    restarted one is recognised. `state` is that of the exchange. `record` is what `pack_record` made of the answers
    so far; None when they did not fit, and then the call can never be run again.
    `trace` is the token of the span of the round that asked, where rounds are traced.
    """

    version: int = VERSION
    issued: float
    expires: float
    binding: Binding
    exchange: str
    round: int
    owner: str
    epoch: str
    state: str
    sheds: int = 0
    open: tuple[Open, ...] = ()
    upstream: Upstream | None = None
    record: bytes | None = None
    trace: bytes | None = None


_RECORD: Final = msgspec.msgpack.Decoder(tuple[Recorded, ...])
_MAX_RECORD_BYTES: Final = 4_194_304


def pack_record(record: Sequence[Recorded]) -> bytes:
    """Answers in small: compressed apart from everything else, so that the length of a state tells only of them."""
    return zlib.compress(msgspec.msgpack.encode(record), 9) if record else b""


def unpack_record(packed: bytes) -> tuple[Recorded, ...]:
    """The answers of `pack_record`; raises InvalidState when it is none."""
    if not packed:
        return ()
    inflater = zlib.decompressobj()
    try:
        return _RECORD.decode(inflater.decompress(packed, _MAX_RECORD_BYTES))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidState("version") from exc


def bind(
    route: str,
    request: Request,
    principal: bytes,
    names: tuple[str, ...] | None = (),
    digest: Digest = _no_headers,
) -> Binding:
    """The binding of a request; equal JSON values bind equally, however they are spelled. Raises InvalidParams.

    1 and 1.0 are two values here: a client that repeats its own arguments never mixes them.
    """
    try:
        named = jsonrpc.canonical({key: jsonrpc.value(value) for key, value in request.params.items()})
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params" cannot be bound to a requestState: {exc}') from exc
    return Binding(
        route,
        request.method,
        hashlib.sha256(request.target.encode("utf-8", "surrogatepass")).digest(),
        hashlib.sha256(named).digest(),
        principal,
        names,
        digest(names) if names else b"",
    )


def digest_answers(answers: dict[str, msgspec.Raw]) -> bytes:
    """Names a set of answers: a repeated retry has the same digest, other answers do not. Raises InvalidParams."""
    try:
        named = jsonrpc.canonical({key: jsonrpc.value(value) for key, value in answers.items()})
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params.inputResponses" cannot be read: {exc}; the call still waits') from exc
    return hashlib.sha256(named).digest()


class Sealer:
    """Envelopes to `requestState` and back."""

    def __init__(self, keyring: Keyring, max_bytes: int) -> None:
        self.keyring = keyring
        self._max = self._most = max_bytes
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Envelope).decode

    def change(self, keyring: Keyring, max_bytes: int) -> None:
        """Seal with other keys and another size from now on; a state that went out before is not too large to open."""
        self.keyring = keyring
        self._max = max_bytes
        self._most = max(self._most, max_bytes)

    def seal(self, envelope: Envelope) -> str:
        """The state; raises ValueError when it would pass `limits.state_bytes`."""
        state = self.keyring.seal(self._encode(envelope))
        if len(state) > self._max:
            raise ValueError(f"the state has {len(state)} bytes, more than limits.state_bytes ({self._max})")
        return state

    def open(self, state: str, binding: Binding, now: float, digest: Digest = _no_headers) -> Envelope:
        """The envelope of `state`, if it is ours, in time and of this very request; raises InvalidState.

        `digest` is that of the request's headers, by the names that the envelope has.
        """
        if len(state) > self._most:
            raise InvalidState("too_large")
        try:
            envelope = self._decode(self.keyring.open(state))
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise InvalidState("version") from exc
        if envelope.version != VERSION:
            raise InvalidState("version")
        if envelope.issued > now + SKEW_SECONDS:
            raise InvalidState("future")
        if envelope.expires < now:
            raise InvalidState("expired")
        for name in _REPEATED:
            if not _equal(getattr(envelope.binding, name), getattr(binding, name)):
                raise InvalidState(f"other_{name}")
        if not _has_its_headers(envelope.binding, binding, digest):
            raise InvalidState("other_headers")
        return envelope


def _has_its_headers(sealed: Binding, given: Binding, digest: Digest) -> bool:
    if sealed.names is None:
        return given.names == ()  # it was not bound, and may only open where nothing is
    return hmac.compare_digest(sealed.headers, digest(sealed.names) if sealed.names else b"")


def _equal(sealed: str | bytes, given: str | bytes) -> bool:
    return hmac.compare_digest(*(v.encode() if isinstance(v, str) else v for v in (sealed, given)))

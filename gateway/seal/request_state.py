"""The sealed content of a `requestState`, bound to the request that got it.

The envelope is bound to the route, the method, its target, a digest of its arguments, the principal, and the headers
that are credentials; it is valid for one round of one exchange until it expires. Sources: specification 2026-07-28
basic/patterns/mrtr (Server Requirements 4 and 5), SEP-1685.
"""

import hashlib
import hmac
import zlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.config import InForce
from gateway.exchange.input_requests import Question
from gateway.exchange.replay_ledger import Recorded
from gateway.protocol import jsonrpc
from gateway.protocol.canonical_json import canonical_members
from gateway.protocol.errors import InvalidParams, InvalidState, StateFromFuture
from gateway.protocol.request import Request
from gateway.seal.claims import SKEW_SECONDS, Bearer, Claims
from gateway.seal.keyring import Keys

PURPOSE: Final = "state"
MOST: Final = 65_536
"""The largest `limits.state_bytes`: a state that was issued under a larger limit than the present one still opens."""


class Binding(msgspec.Struct, frozen=True, array_like=True):
    """What a request must repeat for its state to be accepted; mostly digests, so that it reveals nothing."""

    route: str
    method: str
    target: bytes
    arguments: bytes
    principal: bytes
    names: tuple[str, ...]
    """Names of the headers that are credentials under the configuration that sealed the state, so that a reload loses
    no call."""
    headers: bytes
    """Digest of those headers; empty if there are no names."""


_REPEATED: Final = ("route", "method", "target", "arguments", "principal")


class Whereabouts(msgspec.Struct, frozen=True, array_like=True):
    """What another replica needs to resume the call: the upstream's session, the call's id, the last event id.

    `call` and `server_info` are JSON, `version` is the negotiated one. `task` is the upstream's id of the task that
    the call has become, empty as long as the upstream has not told it, None if the call is no task. `may_have_others`:
    other calls may run in the session, whose questions on the side stream nothing tells from those of this one.
    """

    session: str
    version: str
    call: bytes
    server_info: bytes
    cursor: str | None
    task: str | None = None
    may_have_others: bool = False

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could go on with the call: it can read its stream from here on, or it is a task."""
        return self.cursor is not None or bool(self.task)


class Envelope(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The content of one `requestState`; times are seconds since the epoch.

    `owner` is the replica that holds the call ("" if none does), and `epoch` identifies its process, so that a
    restart is detected. `state` is that of the exchange. `record` holds the answers so far, packed by `pack_record`;
    None if they did not fit, and then the call cannot be run again. `trace` is the token of the span of the round that
    asked, if rounds are traced.
    """

    version: Literal[2] = 2
    issued: float
    expires: float
    binding: Binding
    exchange: str
    round: int
    owner: str
    epoch: str
    state: str
    sheds: int = 0
    open: tuple[Question, ...] = ()
    upstream: Whereabouts | None = None
    record: bytes | None = None
    trace: bytes | None = None
    repeatable: bool = False
    """Whether the server's own list of tools said that the tool may run twice."""

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could go on with the call."""
        return self.upstream is not None and self.upstream.is_resumable

    def is_of_call_at(self, upstream: Whereabouts | None) -> bool:
        """Whether the replica that sealed this state may have gone on with the very call that is there.

        Each round of a call that no replica holds is a run of its own. A state that leads nowhere was sealed for the
        same session: after visits to URLs the call goes there again.
        """
        theirs = self.upstream
        return bool(self.owner) and (upstream is None or theirs is None or upstream.session == theirs.session)


_RECORD: Final = msgspec.msgpack.Decoder(tuple[Recorded, ...])
# Against bombs (threat 13). What a ledger records is far below: 64 KiB of answers, and their keys.
_MAX_RECORD_BYTES: Final = 4_194_304


def pack_record(record: Sequence[Recorded]) -> bytes:
    """Compress answers separately from everything else, so that a state's length reveals nothing about the rest."""
    return zlib.compress(msgspec.msgpack.encode(record), 9) if record else b""


def unpack_record(packed: bytes) -> tuple[Recorded, ...]:
    """The answers packed by `pack_record`; raises InvalidState if they are malformed."""
    if not packed:
        return ()
    inflater = zlib.decompressobj()
    try:
        return _RECORD.decode(inflater.decompress(packed, _MAX_RECORD_BYTES))  # what is cut off there does not decode
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise InvalidState("version") from exc


def bind(bearer: Bearer, request: Request, names: tuple[str, ...] = (), arguments: bytes | None = None) -> Binding:
    """The binding of a request; equal JSON values bind equally, in any spelling. Raises InvalidParams.

    1 and 1.0 count as different values: a client that repeats its own arguments does not mix them. `names` are those
    of the headers that are credentials. `arguments` is the digest of them, if another process is to compute it.
    """
    try:
        # They may be a text, which each of its methods opens anew.
        arguments = arguments or _digest(dict(request.params.items()))
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params" cannot be bound to a requestState: {exc}') from exc
    return Binding(
        bearer.route,
        request.method,
        hashlib.sha256(request.target.encode("utf-8", "surrogatepass")).digest(),
        arguments,
        bearer.principal,
        names,
        bearer.digest(names) if names else b"",  # there are none on most routes
    )


def _digest(members: jsonrpc.Fields) -> bytes:
    return hashlib.sha256(canonical_members(members)).digest()


def digest_answers(answers: jsonrpc.Fields) -> bytes:
    """A digest of answers: a repeated retry has the same digest, other answers do not. Raises InvalidParams."""
    try:
        return _digest(answers)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f'"params.inputResponses" cannot be read: {exc}; the call still waits') from exc


def states(keys: InForce[Keys], max_bytes: InForce[int]) -> Claims[Envelope]:
    """Seals envelopes as `requestState`, and opens them; what opens is still to `check`."""
    return Claims(keys, PURPOSE, Envelope, MOST, max_bytes)


def check(envelope: Envelope, bearer: Bearer, request: Request, arguments: bytes | None = None) -> None:
    """Check that an envelope is in time and belongs to this request; `arguments` is as in `bind`.

    Raises InvalidParams or InvalidState; StateFromFuture only for the request that the state belongs to, so that
    nothing is revealed to others.
    """
    sealed = envelope.binding
    binding = bind(bearer, request, sealed.names, arguments)
    if envelope.expires < bearer.now:
        raise InvalidState("expired")
    if not hmac.compare_digest(_repeated(sealed), _repeated(binding)):
        differing = next(name for name in _REPEATED if getattr(sealed, name) != getattr(binding, name))
        raise InvalidState(f"other_{differing}")
    if not hmac.compare_digest(sealed.headers, binding.headers):
        raise InvalidState("other_headers")
    if envelope.issued > bearer.now + SKEW_SECONDS:
        raise StateFromFuture(envelope.owner)


def _repeated(binding: Binding) -> bytes:
    """All that a request must repeat but for its headers; only the principal has no fixed length, and comes last."""
    where = f"{binding.route}\0{binding.method}\0".encode("utf-8", "surrogatepass")
    return b"%b%b%b%b" % (where, binding.target, binding.arguments, binding.principal)

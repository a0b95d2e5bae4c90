"""What the mirror seals: session ids, ids of nested requests, their states, ids of events.

Rule 1: no token grants anything. The caller of each request is told by its own credentials, and a token of another
principal, route or session counts for nothing. Rule 2: a nested id or an event id can continue a call whose replica
has died, if what that takes fits; otherwise it only names the replica and the call.

Clients echo nested ids of 3,000 characters exactly, and event ids and session ids travel in headers, for which servers
and proxies allow 8 KB.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

import msgspec

from gateway import world
from gateway.config import InForce
from gateway.mirror.call_rounds import Progress, Question, Request
from gateway.mirror.client_profile import Profile
from gateway.protocol.errors import DownstreamError, InvalidState
from gateway.seal import token_check
from gateway.seal.keyring import Keyring

SESSION: Final = "mirror session"
NESTED: Final = "mirror nested"
EVENT: Final = "mirror event"
STATE: Final = "mirror state"

_MAX_NESTED: Final = 3_000
_MAX_EVENT: Final = 4_000
_MAX_TOKEN: Final = 8_190
_MAX_URIS_BYTES: Final = 2_800
_URI_BYTES: Final = 3
"""What a URI takes besides its characters."""


class MirrorRings(NamedTuple):
    """The keyrings of the four kinds of tokens."""

    sessions: Keyring
    nested: Keyring
    events: Keyring
    states: Keyring


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The content of an `Mcp-Session-Id`; `key` is random and names the session."""

    key: str
    route: str
    principal: bytes
    issued: float
    profile: Profile


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a call is: its session's key, its own id, and the process that holds it."""

    session: str
    exchange: str
    owner: str
    epoch: str
    issued: float

    @property
    def is_resumable(self) -> bool:
        """No other replica goes on with a call before its client comes back (`router.Held`)."""
        return False


class Nested(msgspec.Struct, frozen=True, array_like=True):
    """The content of a nested request's id, and of its state.

    `request` and `progress` continue the call, and `keys` are all questions of the round; None or empty if they did
    not fit. `has_state` says whether the client must echo a state.
    """

    place: Place
    round: int
    key: str
    request: Request | None = None
    progress: Progress = Progress()
    keys: tuple[str, ...] = ()
    has_state: bool = False

    @property
    def brief(self) -> "Nested":
        """The same question without what continues the call."""
        return Nested(self.place, self.round, self.key, has_state=self.has_state)


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The content of an event's id: a place in the stream of a call.

    `rpc_id` is the client's request. `asking` holds the round's questions if nothing has been sent upstream since they
    were asked, and `answered` the keys of those that the client has answered. `request` is None if it did not fit. The
    last event of a call `is_final`.
    """

    place: Place
    number: int
    rpc_id: bytes
    is_final: bool = False
    request: Request | None = None
    progress: Progress = Progress()
    asking: tuple[Question, ...] = ()
    answered: tuple[str, ...] = ()

    @property
    def brief(self) -> "Mark":
        """The same place without what continues the call."""
        return Mark(self.place, self.number, self.rpc_id, self.is_final)


Content = TypeVar("Content", Nested, Mark)


class Subscribed(msgspec.Struct, frozen=True, array_like=True):
    """The content of an id on the standalone stream of a session: the resources to which it is subscribed."""

    session: str
    uris: tuple[bytes, ...]


class NoSession(DownstreamError):
    """The session id does not open, or belongs to another caller: the client must begin a new session."""

    rejection = "no_session"
    status = 404

    def __init__(self, reason: str) -> None:
        super().__init__(
            "This session does not exist or has expired; send initialize to begin a new one",
            data={"reason": "no_session"},
        )
        self.reason = reason


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_session: Final = msgspec.msgpack.Decoder(Session).decode
_decode_nested: Final = msgspec.msgpack.Decoder(Nested).decode
_decode_mark: Final = msgspec.msgpack.Decoder(Mark).decode
_decode_subscribed: Final = msgspec.msgpack.Decoder(Subscribed).decode


class Tokens:
    """Seals the tokens of a process, and opens those of all replicas."""

    def __init__(self, rings: InForce[MirrorRings]) -> None:
        self._rings = rings

    # -- sessions -----------------------------------------------------------------------------------------------

    def new_session(self, route: str, principal: bytes, profile: Profile, now: float) -> str:
        """The id of a new session."""
        session = Session(world.token_urlsafe(12), route, principal, now, profile)
        return self._rings.value.sessions.seal(_encode(session))

    def is_session(self, token: str | None) -> bool:
        """Whether a session id is one of the mirror's, whosever it is."""
        with suppress(InvalidState):
            _ = self._session(token or "")
            return True
        return False

    def session(self, token: str, route: str, principal: bytes, now: float, ttl_seconds: float) -> Session:
        """The session of a request; raises NoSession."""
        try:
            session = self._session(token)
            token_check.check(session, route, principal, now, session.issued + ttl_seconds)
        except InvalidState as exc:
            raise NoSession(exc.reason) from exc
        return session

    def _session(self, token: str) -> Session:
        return self._rings.value.sessions.open_as(token, _decode_session, _MAX_TOKEN)

    def standalone_id(self, session: Session, uris: Iterable[str]) -> str:
        """The id of an event on the standalone stream; it is valid for as long as the session's own."""
        kept, room = [], _MAX_URIS_BYTES
        for uri in uris:
            written = uri.encode("utf-8", "surrogatepass")
            if len(written) + _URI_BYTES <= room:
                kept.append(written)
                room -= len(written) + _URI_BYTES
        return self._rings.value.sessions.seal(_encode(Subscribed(session.key, tuple(kept))))

    def subscribed(self, token: str, session: Session) -> tuple[str, ...] | None:
        """The resources that an id of the session's standalone stream names; None if it is not such an id."""
        try:
            found = self._rings.value.sessions.open_as(token, _decode_subscribed, _MAX_TOKEN)
        except InvalidState:
            return None
        if found.session != session.key:
            return None
        return tuple(uri.decode("utf-8", "surrogatepass") for uri in found.uris)

    # -- nested requests ----------------------------------------------------------------------------------------

    def nested_id(self, nested: Nested) -> bytes:
        """The id of a nested request, as JSON."""
        return b'"%b"' % _sealed(self._rings.value.nested, nested, _MAX_NESTED).encode()

    def nested(self, token: str, session: Session) -> Nested:
        """The nested request that a client answers; raises InvalidState."""
        return _of_session(self._nested(token), session)

    def is_nested(self, token: str | None) -> bool:
        """Whether a response's id is that of a nested request, of whichever session."""
        with suppress(InvalidState):
            _ = self._nested(token or "")
            return True
        return False

    def _nested(self, token: str) -> Nested:
        return self._rings.value.nested.open_as(token, _decode_nested, _MAX_TOKEN)

    def state(self, nested: Nested) -> str:
        """The state of a nested request (SEP-1685)."""
        return _sealed(self._rings.value.states, nested, _MAX_TOKEN)

    def echoed(self, state: str, nested: Nested) -> Nested:
        """What the state of a nested request says, which `nested` names; raises InvalidState."""
        found = self._rings.value.states.open_as(state, _decode_nested, _MAX_TOKEN)
        if found.brief != nested.brief:
            raise InvalidState("other_target")
        return found

    # -- events -------------------------------------------------------------------------------------------------

    def event_id(self, mark: Mark) -> str:
        """The id of an event."""
        return _sealed(self._rings.value.events, mark, _MAX_EVENT)

    def mark(self, token: str, session: Session) -> Mark:
        """The place in a stream from which a client goes on; raises InvalidState."""
        return _of_session(self._rings.value.events.open_as(token, _decode_mark, _MAX_TOKEN), session)


def _sealed(ring: Keyring, content: Nested | Mark, most: int) -> str:
    """The token for a content, or for its brief form if the token would be longer than `most` characters."""
    if _bulk(content) < most:  # what does not fit may be megabytes, and is not even encoded
        sealed = ring.seal(_encode(content))
        if len(sealed) <= most:
            return sealed
    return ring.seal(_encode(content.brief))


def _bulk(content: Nested | Mark) -> int:
    """The size of the parts of a content that its peers choose."""
    request = content.request
    size = (len(request.params) if request is not None else 0) + len(content.progress.state or b"")
    if isinstance(content, Nested):
        return size + sum(map(len, content.keys))
    return size + sum(len(question.params) for question in content.asking)


def _of_session(found: Content, session: Session) -> Content:
    """What a token of this session says; raises InvalidState."""
    if found.place.session != session.key:
        raise InvalidState("other_principal")
    return found

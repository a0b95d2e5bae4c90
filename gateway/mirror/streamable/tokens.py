"""What the mirror seals: session ids, ids of nested requests, their states, ids of events.

Rule 1: no token grants anything. The caller of each request is told by its own credentials, and a token of another
principal, route or session counts for nothing. Rule 2: a nested id or an event id can continue a call whose replica
has died, if what that takes fits; otherwise it only names the replica and the call.

Clients echo nested ids of 3,000 characters exactly, and event ids and session ids travel in headers, for which servers
and proxies allow 8 KB.
"""

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from gateway import world
from gateway.config import InForce
from gateway.exchange.input_requests import Question
from gateway.mirror.call_rounds import Progress
from gateway.mirror.client_requests import Profile, Request
from gateway.protocol.errors import DownstreamError, InvalidState
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import Keys

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


class Session(msgspec.Struct, frozen=True, array_like=True):
    """The content of an `Mcp-Session-Id`; `key` is random and names the session."""

    key: str
    route: str
    principal: bytes
    issued: float
    profile: Profile


class CallPlace(msgspec.Struct, frozen=True, array_like=True):
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


class SealedQuestion(msgspec.Struct, frozen=True, array_like=True):
    """One question of a round; `params` is JSON."""

    key: str
    method: str
    params: bytes

    @classmethod
    def of(cls, question: Question) -> "SealedQuestion":
        """The sealed form of a question."""
        return cls(question.key, question.method, question.params or b"")

    @property
    def opened(self) -> Question:
        """The question as the exchange knows it."""
        return Question(self.key, self.method, None, params=self.params)


class NestedId(msgspec.Struct, frozen=True, array_like=True):
    """The content of a nested request's id, and of its state.

    `request` and `progress` continue the call, and `keys` are all questions of the round; None or empty if they did
    not fit. `has_state` says whether the client must echo a state.
    """

    place: CallPlace
    round: int
    key: str
    request: Request | None = None
    progress: Progress = Progress()
    keys: tuple[str, ...] = ()
    has_state: bool = False

    @property
    def asking(self) -> tuple[SealedQuestion, ...]:
        """The questions of the round, of which only the keys are known."""
        return tuple([SealedQuestion(key, "", b"{}") for key in self.keys])

    @property
    def brief(self) -> "NestedId":
        """The same question without what continues the call."""
        return NestedId(self.place, self.round, self.key, has_state=self.has_state)


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The content of an event's id: a place in the stream of a call.

    `rpc_id` is the client's request. `asking` holds the round's questions if nothing has been sent upstream since they
    were asked, and `answered` the keys of those that the client has answered. `request` is None if it did not fit. The
    last event of a call `is_final`.
    """

    place: CallPlace
    number: int
    rpc_id: bytes
    is_final: bool = False
    request: Request | None = None
    progress: Progress = Progress()
    asking: tuple[SealedQuestion, ...] = ()
    answered: tuple[str, ...] = ()

    @property
    def brief(self) -> "Mark":
        """The same place without what continues the call."""
        return Mark(self.place, self.number, self.rpc_id, self.is_final)


Content = TypeVar("Content", NestedId, Mark)


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


class Tokens:
    """Seals the tokens of a process, and opens those of all replicas."""

    def __init__(self, keys: InForce[Keys], of: str = "") -> None:
        """`of` names a dialect that has tokens of its own."""
        self.sessions = Claims(keys, of + SESSION, Session, _MAX_TOKEN, opens_former=True)
        self._standalone = Claims(keys, of + SESSION, Subscribed, _MAX_TOKEN, opens_former=True)
        self.nested = Claims(keys, of + NESTED, NestedId, _MAX_TOKEN, InForce(_MAX_NESTED))
        self._states = Claims(keys, of + STATE, NestedId, _MAX_TOKEN)
        self._events = Claims(keys, of + EVENT, Mark, _MAX_TOKEN, InForce(_MAX_EVENT))

    # -- sessions -----------------------------------------------------------------------------------------------

    def new_session(self, bearer: Bearer, profile: Profile) -> str:
        """The id of a new session."""
        key = world.token_urlsafe(12)
        return self.sessions.seal(Session(key, bearer.route, bearer.principal, bearer.now, profile))

    def session(self, token: str, bearer: Bearer, ttl_seconds: float) -> Session:
        """The session of a request; raises NoSession."""
        try:
            session = self.sessions.open(token)
            expires = session.issued + ttl_seconds
            bearer.check(session.route, session.principal, issued=session.issued, expires=expires)
        except InvalidState as exc:
            raise NoSession(exc.reason) from exc
        return session

    def standalone_id(self, session: Session, uris: Iterable[str]) -> str:
        """The id of an event on the standalone stream; it is valid for as long as the session's own."""
        kept, room = [], _MAX_URIS_BYTES
        for uri in uris:
            written = uri.encode("utf-8", "surrogatepass")
            if len(written) + _URI_BYTES <= room:
                kept.append(written)
                room -= len(written) + _URI_BYTES
        return self._standalone.seal(Subscribed(session.key, tuple(kept)))

    def subscribed(self, token: str, session: Session) -> tuple[str, ...] | None:
        """The resources that an id of the session's standalone stream names; None if it is not such an id."""
        try:
            found = self._standalone.open(token)
        except InvalidState:
            return None
        if found.session != session.key:
            return None
        return tuple(uri.decode("utf-8", "surrogatepass") for uri in found.uris)

    # -- nested requests ----------------------------------------------------------------------------------------

    def nested_id(self, nested: NestedId) -> bytes:
        """The id of a nested request, as JSON."""
        return b'"%b"' % self.nested.seal(*_forms(nested, _MAX_NESTED)).encode()

    def asked(self, token: str, session: Session) -> NestedId:
        """The nested request that a client answers; raises InvalidState."""
        return _of_session(self.nested.open(token), session)

    def state(self, nested: NestedId) -> str:
        """The state of a nested request (SEP-1685)."""
        return self._states.seal(*_forms(nested, _MAX_TOKEN))

    def echoed(self, state: str, nested: NestedId) -> NestedId:
        """What the state of a nested request says, which `nested` names; raises InvalidState."""
        found = self._states.open(state)
        if found.brief != nested.brief:
            raise InvalidState("other_target")
        return found

    # -- events -------------------------------------------------------------------------------------------------

    def event_id(self, mark: Mark) -> str:
        """The id of an event."""
        return self._events.seal(*_forms(mark, _MAX_EVENT))

    def mark(self, token: str, session: Session) -> Mark:
        """The place in a stream from which a client goes on; raises InvalidState."""
        return _of_session(self._events.open(token), session)


def _forms(content: Content, most: int) -> tuple[Content, ...]:
    """A content, then its brief form; only that if what the peers chose, which may be megabytes, cannot fit."""
    bulk = len(content.progress.state or b"")
    if content.request is not None:
        bulk += len(content.request.params)
    if isinstance(content, NestedId):
        bulk += sum(map(len, content.keys))
    else:
        bulk += sum(len(question.params) for question in content.asking)
    return (content, content.brief) if bulk < most else (content.brief,)


def _of_session(found: Content, session: Session) -> Content:
    """What a token of this session says; raises InvalidState."""
    if found.place.session != session.key:
        raise InvalidState("other_principal")
    return found

"""What the mirror seals: session ids, ids of nested requests, their states, ids of events.

Rule 1: no token grants anything. The caller of each request is told by its own credentials, and a token of another
principal, route or session counts for nothing. Rule 2: a nested id or an event id can continue a call whose replica
has died, if what that takes fits; otherwise it only names the replica and the call.

Clients echo nested ids of 3,000 characters exactly, and event ids and session ids travel in headers, for which servers
and proxies allow 8 KB.
"""

from collections.abc import Iterable
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from gateway import world
from gateway.config import InForce
from gateway.exchange.input_requests import Question
from gateway.mirror.call_rounds import Progress
from gateway.mirror.client_requests import LegacyRequest, Profile
from gateway.protocol.errors import DownstreamError, InvalidState
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import Keys

SESSION: Final = "mirror session"
NESTED: Final = "mirror nested"
EVENT: Final = "mirror event"
STATE: Final = "mirror state"
Kind = Literal["mirror nested", "mirror event", "mirror state"]
"""What a token of a place is: the id of a nested request, the id of an event, or a state (SEP-1685)."""

_MAX_NESTED: Final = 3_000
_MAX_EVENT: Final = 4_000
_MAX_TOKEN: Final = 8_190  # aiohttp, for one, refuses a longer header value
_MAX_URIS_BYTES: Final = 2_800  # sealed and in base64, within `_MAX_EVENT`
_URI_BYTES: Final = 3
"""What a URI takes besides its characters."""


class MirroredSession(msgspec.Struct, frozen=True, array_like=True):
    """The content of an `Mcp-Session-Id`; `key` is random and names the session."""

    key: str
    route: str
    principal: bytes
    issued: float
    profile: Profile


class CallPlace(msgspec.Struct, frozen=True, array_like=True):
    """A place in a call: the content of an event's id, of a nested request's id, and of its state.

    The process that holds the call is its `owner` with this `epoch`. `number` counts the events of its stream, of
    which the last one `is_final`; `rpc_id` is the client's request, in an event's id. `key` names the question of a
    nested request, and `has_state` says whether the client must echo a state.

    `request` continues the call at another replica, and is None if it did not fit. `asking` holds the questions of the
    round if nothing has been sent upstream since they were asked, and `answered` the keys of those that the client has
    answered. In the id of a nested request they have no params.
    """

    session: str
    exchange: str
    owner: str
    epoch: str
    issued: float
    number: int = 0
    rpc_id: bytes = b""
    is_final: bool = False
    key: str = ""
    has_state: bool = False
    request: LegacyRequest | None = None
    progress: Progress = Progress()
    asking: tuple[Question, ...] = ()
    answered: tuple[str, ...] = ()

    @property
    def brief(self) -> "CallPlace":
        """The same place without what continues the call."""
        return replace(self, request=None, progress=Progress(self.progress.round), asking=(), answered=())


class Subscribed(msgspec.Struct, frozen=True, array_like=True):
    """The content of an id on the standalone stream of a session: the resources to which it is subscribed."""

    session: str
    uris: tuple[bytes, ...]


class NoSession(DownstreamError):
    """The session id does not open, or belongs to another caller: the client must begin a new session."""

    rejection = reason = "no_session"
    status = 404

    def __init__(self) -> None:
        super().__init__("This session does not exist or has expired; send initialize to begin a new one")


class Tokens:
    """Seals the tokens of a process, and opens those of all replicas."""

    def __init__(self, keys: InForce[Keys], of: str = "") -> None:
        """`of` names a dialect that has tokens of its own."""
        # Former keys open these two: no measured SDK initializes again after 404, so a rotation must end no session.
        self.sessions = Claims(keys, of + SESSION, MirroredSession, _MAX_TOKEN, opens_former=True)
        self._standalone = Claims(keys, of + SESSION, Subscribed, _MAX_TOKEN, opens_former=True)
        self._places = {
            NESTED: Claims(keys, of + NESTED, CallPlace, _MAX_TOKEN, InForce(_MAX_NESTED)),
            STATE: Claims(keys, of + STATE, CallPlace, _MAX_TOKEN),
            EVENT: Claims(keys, of + EVENT, CallPlace, _MAX_TOKEN, InForce(_MAX_EVENT)),
        }

    # -- sessions -----------------------------------------------------------------------------------------------

    def new_session(self, bearer: Bearer, profile: Profile) -> str:
        """The id of a new session."""
        key = world.token_urlsafe(12)
        return self.sessions.seal(MirroredSession(key, bearer.route, bearer.principal, bearer.now, profile))

    def session(self, token: str, bearer: Bearer, ttl_seconds: float) -> MirroredSession:
        """The session of a request; raises NoSession."""
        try:
            session = self.sessions.open(token)
            expires = session.issued + ttl_seconds
            bearer.check(session.route, session.principal, issued=session.issued, expires=expires)
        except InvalidState as exc:
            raise NoSession from exc
        return session

    def standalone_id(self, session: MirroredSession, uris: Iterable[str]) -> str:
        """The id of an event on the standalone stream; it is valid for as long as the session's own."""
        kept, room = [], _MAX_URIS_BYTES
        for uri in uris:
            written = uri.encode("utf-8", "surrogatepass")  # JSON can escape half of a surrogate pair
            if len(written) + _URI_BYTES <= room:
                kept.append(written)
                room -= len(written) + _URI_BYTES
        return self._standalone.seal(Subscribed(session.key, tuple(kept)))

    def subscribed(self, token: str, session: MirroredSession) -> tuple[str, ...] | None:
        """The resources that an id of the session's standalone stream names; None if it is not such an id."""
        try:
            found = self._standalone.open(token)
        except InvalidState:
            return None
        if found.session != session.key:
            return None
        return tuple(uri.decode("utf-8", "surrogatepass") for uri in found.uris)

    # -- places in calls ----------------------------------------------------------------------------------------

    def of_place(self, kind: Kind, place: CallPlace) -> str:
        """The token of a place; without what continues the call, if that does not fit."""
        claims, bulk = self._places[kind], len(place.progress.state or b"")
        if place.request is not None:
            bulk += len(place.request.params)
        bulk += sum([len(each.key) + len(each.params or b"") for each in place.asking])
        if bulk >= _MAX_TOKEN:  # client and server may have chosen megabytes, which are not even encoded
            return claims.seal(place.brief)
        return claims.seal(place, place.brief)

    def place(self, kind: Kind, token: str, session: str) -> CallPlace:
        """The place that a token of the session with this key names; raises InvalidState."""
        found = self._places[kind].open(token)
        if found.session != session:
            raise InvalidState("other_principal")
        return found

    def is_question(self, token: str | None) -> bool:
        """Whether this is the id of a nested request, whosever it is."""
        return self._places[NESTED].opens(token)

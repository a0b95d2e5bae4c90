"""The sealed ids of client sessions that end at the gateway.

An id names the replica that has the session, and is bound to the route and to the caller. It grants nothing: each
request is authenticated on its own, and must come from the same caller.
"""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gateway.config import InForce
from gateway.http.incoming import Incoming
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import PREFIX, Keys

PURPOSE: Final = "session"
QUERY: Final = "mrtr-session"
"""The query parameter in which a client of HTTP+SSE brings the id of its session."""
_MAX_CHARACTERS: Final = 2048

Front = Literal["http", "sse"]
"""How the client speaks: streamable HTTP or HTTP+SSE."""


class SessionId(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a session id says."""

    version: Literal[1] = 1
    front: Front
    route: str
    owner: str
    epoch: str
    """The process that has the session: a new process of the same replica does not know it."""
    names: tuple[str, ...]
    """The headers that are credentials, as the configuration had them when the session began."""
    caller: bytes
    """A digest of the principal and those headers."""

    def check(self, bearer: Bearer) -> None:
        """Check that the id belongs to this route and caller; raises InvalidState."""
        if self.route != bearer.route:
            raise InvalidState("other_route")
        if not hmac.compare_digest(self.caller, digest(bearer, self.names)):
            raise InvalidState("other_principal")


def given_id(incoming: Incoming) -> str | None:
    """Return the session id of a request if it may be one of a gateway."""
    given = incoming.headers.get(mcp.SESSION_ID) or incoming.url.query.get(QUERY)
    # To open one of an upstream's would cost an exception for each of its requests.
    return given if given is not None and given.startswith(f"{PREFIX}.") else None


def digest(bearer: Bearer, names: Sequence[str]) -> bytes:
    """Return the digest of everything that identifies the caller of a request."""
    return hashlib.sha256(bearer.principal + bearer.digest(names)).digest()


def session_ids(keys: InForce[Keys]) -> Claims[SessionId]:
    """Seals and opens the ids; what opens is still to `check`."""
    return Claims(keys, PURPOSE, SessionId, _MAX_CHARACTERS, opens_former=True)

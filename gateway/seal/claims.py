"""One claim: what a client keeps for the gateway, sealed, until a request brings it back.

Rule: a claim grants nothing. The caller of each request is told by its own credentials, and a claim that was given to
another one, on another route, or for a time that is over, counts for nothing. Each kind is sealed for a purpose of its
own, so none opens as another.
"""

import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal.keyring import Keys, decode_content, ring, room

T = TypeVar("T")
SKEW_SECONDS: Final = 60.0
"""How far the clocks of two replicas may differ."""
Digest = Callable[[Sequence[str]], bytes]
"""Returns the digest of a request's headers of these names, empty for no names (`principal.of_headers`)."""
_encode = msgspec.msgpack.Encoder().encode


class Bearer(msgspec.Struct, frozen=True):
    """The request that brings a claim, or gets one."""

    route: str
    principal: bytes
    now: float
    """In seconds since the epoch."""
    digest: Digest

    def check(self, route: str, principal: bytes, *, issued: float, expires: float) -> None:
        """Check that a claim was given to this caller on this route, and its time is not over; raises InvalidState."""
        if route != self.route:
            raise InvalidState("other_route")
        if not hmac.compare_digest(principal, self.principal):
            raise InvalidState("other_principal")
        if issued > self.now + SKEW_SECONDS:
            raise InvalidState("future")
        if expires < self.now:
            raise InvalidState("expired")


class Claims(Generic[T]):
    """Seals contents of one type, and opens them."""

    def __init__(  # noqa: PLR0913  (what tells one kind of claim from another)
        self,
        keys: InForce[Keys],
        purpose: str,
        content: type[T],
        most: int,
        fits: InForce[int] | None = None,
        *,
        opens_former: bool = False,
    ) -> None:
        """One with more than `most` characters is not opened; `fits` is the most that one is to have.

        `opens_former`: a former key opens it, too.
        """
        self._ring = ring(keys, purpose, opens_former=opens_former)
        self._most, self._fits = most, fits or InForce(most)
        self._decoder = msgspec.msgpack.Decoder(content)

    def fitting(self, content: T) -> str | None:
        """The claim; None if it does not fit."""
        encoded = _encode(content)
        return self._ring.value.seal(encoded) if len(encoded) <= room(self._fits.value) else None

    def seal(self, content: T, *smaller: T) -> str:
        """The claim; one that does not fit is the first of the smaller ones that does, or the last one."""
        for each in smaller:
            if (sealed := self.fitting(content)) is not None:
                return sealed
            content = each
        return self._ring.value.seal(_encode(content))

    def open(self, sealed: str) -> T:
        """The content of a claim, whosever it is; raises InvalidState, whose reason is for metrics and logs only."""
        if len(sealed) > self._most:  # before it costs its decoding (threat 13)
            raise InvalidState("too_large")
        return decode_content(self._decoder, self._ring.value.open(sealed))

    def opens(self, sealed: str | None) -> bool:
        """Whether this is such a claim, whosever it is."""
        with suppress(InvalidState):
            _ = self.open(sealed or "")
            return True
        return False

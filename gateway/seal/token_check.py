"""Checks what a token of a client is bound to: its route, its caller, its time."""

import hmac
from typing import Protocol

from gateway.protocol.errors import InvalidState
from gateway.seal.request_state import SKEW_SECONDS


class Bound(Protocol):
    """The content of such a token."""

    @property
    def route(self) -> str:
        """The route on which it was given."""

    @property
    def principal(self) -> bytes:
        """The caller that got it."""

    @property
    def issued(self) -> float:
        """When it was sealed, in seconds since the epoch."""


def check(bound: Bound, route: str, principal: bytes, now: float, expires: float) -> None:
    """Check that this caller got a token on this route, and that its time is not over; raises InvalidState."""
    if bound.route != route:
        raise InvalidState("other_route")
    if not hmac.compare_digest(bound.principal, principal):
        raise InvalidState("other_principal")
    if bound.issued > now + SKEW_SECONDS:
        raise InvalidState("future")
    if expires < now:
        raise InvalidState("expired")

"""Limits how often the sessions of one route are opened.

Each costs the upstream several requests, or a process. A request that continues a call takes its token too, but is
never refused: its client would not come again, and the answers of a person would be lost.
"""

import math
from collections.abc import Hashable
from typing import Final

from gateway.config import InForce, RouteSettings
from gateway.protocol.errors import Busy
from gateway.runtime.rate_limit import Rate, RateLimit
from gateway.sessions import pool_errors
from gateway.sessions.assignment import Opener

_ROUTE: Final[Hashable] = None
"""The only key of the bucket that all principals share."""


class OpeningRate:
    """The token buckets of one route: one for each principal, another one for all."""

    def __init__(self, settings: InForce[RouteSettings]) -> None:
        self._settings = settings
        self._of_principal = RateLimit(settings.part(_of_principal))
        self._of_route = RateLimit(settings.part(_of_route))

    def take(self, principal: bytes, opener: Opener) -> Busy | None:
        """Take the tokens for a new session; return the error instead if there are none."""
        if not opener.is_exempt:
            route = self._settings.value.route
            if (seconds := self._of_principal.wait_seconds(principal)) > 0:
                return pool_errors.too_many_of_principal(route, seconds)
            if (seconds := self._of_route.wait_seconds(_ROUTE)) > 0:
                return pool_errors.too_many_of_route(route, seconds)
        self._of_principal.take(principal)
        self._of_route.take(_ROUTE)
        return None


def _of_principal(settings: RouteSettings) -> Rate:
    sessions = settings.config.sessions
    return _rate(sessions.new_per_second_per_principal, sessions.max_per_principal)


def _of_route(settings: RouteSettings) -> Rate:
    sessions, upstream = settings.config.sessions, settings.route.upstream
    if upstream.command is not None:
        return _rate(upstream.new_children_per_second, upstream.max_children)
    return _rate(sessions.new_per_second, sessions.max)


def _rate(per_second: float, most: int) -> Rate:
    """A bucket that lets all permitted sessions be opened at once, and never less than those of a second."""
    return Rate(per_second, max(most, math.ceil(per_second)))

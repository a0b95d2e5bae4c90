"""Judges the health of an upstream by the traffic of its route."""

import time
from typing import Final

from gateway.protocol.errors import GatewayError, Unreachable
from gateway.telemetry.process_status import Failure
from gateway.telemetry.recent_errors import RecentErrors, fix_for, presentable, sentence

_FAILURES: Final = frozenset({"upstream_unreachable", "session_lost", "call_lost"})
"""After these an upstream counts as failing; an upstream that refuses a caller is available."""

_COMMAND_FIX: Final = (
    "run the command by hand, as the gateway's user and in its folder; the gateway's log has its stderr "
    "(`child.ended`)"
)
_CHILD_FIX: Final = "look in the gateway's log for the last lines of its stderr (`child.ended`)"


class UpstreamHealth:
    """The health of one route's upstream."""

    def __init__(self, route: str, errors: RecentErrors, *, is_command: bool) -> None:
        self.answered = float("-inf")
        """Monotonic time of the last answer outside a session: to a probe, or to a request that was passed through."""
        self.speaks_sse = False
        self._route = route
        self._is_command = is_command
        self._errors = errors
        self._failed = float("-inf")
        self._kind = self._cause = self._fix = ""

    def ok(self) -> None:
        """The upstream has answered."""
        self.answered = time.monotonic()

    def note(self, error: GatewayError) -> None:
        """Record an error of a request of this route; the same error may be given several times."""
        fix = _COMMAND_FIX if isinstance(error, Unreachable) and self._is_command else ""
        kind = self._errors.note(error, self._route, fix=fix)
        if kind in _FAILURES:
            self._failed, self._kind, self._cause = time.monotonic(), kind, presentable(error.message)
            self._fix = sentence(fix or fix_for(kind, error))

    def child_ended(self, how: str) -> None:
        """Record that a child ended unexpectedly."""
        self._errors.say("child_ended", f"A child of route {self._route} {how}", _CHILD_FIX, self._route)

    @property
    def failure(self) -> Failure | None:
        """The last failure, however long ago."""
        if not self._kind:
            return None
        ago = time.monotonic() - self._failed
        return Failure(kind=self._kind, cause=self._cause, fix=self._fix, seconds_ago=ago)

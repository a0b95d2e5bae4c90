"""What the traffic of one route shows of its upstream."""

import time
from typing import Final

from gateway.protocol.errors import GatewayError, Unreachable
from gateway.telemetry.recent_errors import RecentErrors, fix_for, presentable, sentence
from gateway.telemetry.status import Failure

_FAILURES: Final = frozenset({"upstream_unreachable", "session_lost", "call_lost"})
"""After these an upstream counts as failing; an upstream that refuses a caller is available."""

_COMMAND_FIX: Final = (
    "run the command by hand, as the gateway's user and in its folder; the gateway's log has its stderr "
    "(`child.ended`)"
)
_CHILD_FIX: Final = "look in the gateway's log for the last lines of its stderr (`child.ended`)"


class UpstreamHealth:
    """What the traffic of one route shows of its upstream."""

    def __init__(self, route: str, errors: RecentErrors, *, is_command: bool) -> None:
        self.answered = float("-inf")
        """When the upstream last answered what did not go through a session: a probe, or what is passed through."""
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
        """Take in an error of a request of this route, whosoever it is; the same one may come several times."""
        fix = _COMMAND_FIX if isinstance(error, Unreachable) and self._is_command else ""
        kind = self._errors.note(error, self._route, fix=fix)
        if kind in _FAILURES:
            self._failed, self._kind, self._cause = time.monotonic(), kind, presentable(error.message)
            self._fix = sentence(fix or fix_for(kind, error))

    def child_ended(self, how: str) -> None:
        """A child ended that nobody asked to."""
        self._errors.say("child_ended", f"A child of route {self._route} {how}", _CHILD_FIX, self._route)

    @property
    def failure(self) -> Failure | None:
        """The last one, however long ago."""
        if not self._kind:
            return None
        ago = time.monotonic() - self._failed
        return Failure(kind=self._kind, cause=self._cause, fix=self._fix, seconds_ago=ago)

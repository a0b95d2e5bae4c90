"""Keeps the recent errors for the status page: each kind once, with its count, with its fix.

Rule: an error has the same text as in the log, masked, without what an upstream said about a call. Errors count as the
same kind if their texts differ only in numbers, other than those of names (gw-1): a thousand ports make one line.
"""

import re
from collections import OrderedDict
from typing import Final, NamedTuple
from weakref import WeakSet

from gateway import world
from gateway.protocol.errors import Busy, GatewayError, InvalidState, NoKeys, OwnerStalled, UpstreamError, clean
from gateway.telemetry.process_status import MOST_ERRORS, ErrorStatus
from gateway.telemetry.redaction import mask

_TEXT_CHARACTERS: Final = 400
_SAME_CHARACTERS: Final = 15
"""Two pieces of advice that begin with as many equal characters say the same."""
_NUMBERS: Final = re.compile(r"(?<![\w#-])\d+")
_QUOTES: Final = (
    re.compile(r"(?<=refused a message): .*", re.DOTALL),
    re.compile(r"(answered HTTP \d+) \(.*\)", re.DOTALL),
    re.compile(r"(?<=The task has no result): .*", re.DOTALL),
    re.compile(r"(Invalid enum value) '.*'", re.DOTALL),
)
"""A server's refusal may repeat the contents of the call or answer, as may that of an answer which is not valid."""
_NOT_BY_CLIENTS: Final = frozenset({"unknown_key"})
"""Reasons of rejected states that point to the deployment; the other reasons are the client's problem."""
_FIXES: Final = {
    "unknown_key": "give all replicas the same state.keys; remove an old key only when State keys of the status page "
    "says so. This is expected right after a start without state.keys",
    "internal": "this is a bug in the gateway: please report it with the traceback in the log (`task.failed`)",
}
"""By kind, for errors whose own `fix` is missing or too general."""


class RecentError(NamedTuple):
    """One line of the list; `first` and `last` are monotonic."""

    kind: str
    text: str
    fix: str
    times: int
    first: float
    last: float


class RecentErrors:
    """The errors of one process."""

    def __init__(self, config_file: str = "") -> None:
        """`config_file` is for the commands of fixes, quoted; empty if the process has none."""
        self.config_file = config_file
        self._known: OrderedDict[tuple[str, str, str], RecentError] = OrderedDict()
        """The most recent one is last; the number is bounded by what the page shows."""
        self._noted: WeakSet[GatewayError] = WeakSet()

    def note(self, error: GatewayError, route: str = "") -> RecentError | None:
        """Record an error and return its entry; None if it concerns only its client, or was recorded before."""
        match error:
            case UpstreamError() | Busy() | NoKeys() | OwnerStalled():
                kind = error.reason
            case InvalidState(reason=reason) if reason in _NOT_BY_CLIENTS:
                kind = reason
            case _ if type(error) is GatewayError:
                kind = "internal"  # every foreseen condition has a class of its own
            case _:
                return None
        if error in self._noted:
            return None
        self._noted.add(error)
        fix = _FIXES.get(kind, error.fix)
        # Clients see the message without the fix, so it may end with the same advice.
        said, _, advice = error.message.rpartition("; ")
        is_same = bool(said) and advice[:_SAME_CHARACTERS] == fix[:_SAME_CHARACTERS]
        return self.say(kind, said if is_same else error.message, fix, route)

    def say(self, kind: str, text: str, fix: str, route: str = "") -> RecentError:
        """Record a problem that is not an exception."""
        text = presentable(text)
        now = world.monotonic()
        key = kind, route, _NUMBERS.sub("0", text)
        known = self._known.pop(key, None)
        times, first = (known.times, known.first) if known is not None else (0, now)
        self._known[key] = error = RecentError(kind, text, fix[:1].upper() + fix[1:], times + 1, first, now)
        if len(self._known) > MOST_ERRORS:
            _ = self._known.popitem(last=False)
        return error

    def told(self) -> tuple[ErrorStatus, ...]:
        """Return the errors, newest first."""
        now = world.monotonic()
        return tuple(
            ErrorStatus(
                kind=kind,
                route=route,
                text=known.text,
                fix=known.fix,
                count=known.times,
                first_seconds_ago=now - known.first,
                last_seconds_ago=now - known.last,
            )
            for (kind, route, _), known in reversed(self._known.items())
        )


def presentable(text: str) -> str:
    """Return one line of what may be shown: without secrets, control characters, or what a server said of a call."""
    for quote in _QUOTES:
        text = quote.sub(lambda found: found[1] if found.re.groups else "", text)
    return clean(mask(text), _TEXT_CHARACTERS)

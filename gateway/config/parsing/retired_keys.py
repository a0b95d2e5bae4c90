"""Keys that earlier releases read, each with what to do without it."""

import re
from typing import Final

_ADDRESS = (
    "an office behind one address reached such a cap before an attacker with many did; limit requests in the proxy in "
    "front, and set principal.source to jwt so that nobody can invent callers"
)
_SESSIONS = "sessions.max_per_principal and sessions.new_per_second do it"

RETIRED: Final = {
    "hold.max_calls_per_address": _ADDRESS,
    "hold.max_cold_calls": "limits.cold_bytes bounds what cold calls take, about 0.5 KiB each",
    "limits.behind_bytes": "it is always 1 MiB; limits.sending_bytes bounds what all clients together have not read",
    "limits.json_depth": "it is always 64: no known message needs 20, and some servers cannot read more than 100",
    "limits.receiving_bytes_per_address": _ADDRESS,
    "principal.jwks_stale_seconds": "it is always a day: an issuer that fails for longer needs an operator anyway",
    "sessions.max_per_address": _SESSIONS,
    "sessions.max_newcomers": _SESSIONS,
    "sessions.new_per_second_per_principal": "sessions.new_per_second does it",
}
"""By path; a route's own section has no other keys than the shared one."""

_ROUTE: Final = re.compile(r"routes\[\d+\]\.")


def retired(path: str) -> str | None:
    """Return what replaces a key of an earlier release, and why; None for a key that never was."""
    return RETIRED.get(_ROUTE.sub("", path, count=1))

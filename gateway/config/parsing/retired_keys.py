"""Keys that earlier releases read, each with what to do without it."""

import re
from typing import Final

_ADDRESS = (
    "an office behind one address reached such a cap before an attacker with many did; limit requests in the proxy in "
    "front, and set principal.source to jwt so that nobody can invent callers"
)
_SESSIONS = "sessions.max_per_principal and sessions.new_per_second do it"
_OF_ROUTES: Final = (
    *("hold.quiet_seconds", "hold.grace_seconds", "hold.linger_seconds", "hold.cold_seconds", "limits"),
    *("timeouts.connect_seconds", "timeouts.answer_seconds", "timeouts.session_wait_seconds"),
    *("timeouts.keepalive_seconds", "timeouts.cancel_seconds", "timeouts.send_seconds"),
    *("sessions.new_per_second", "sessions.quarantine_seconds", "sessions.client_idle_seconds"),
    *("legs", "tasks.ttl_seconds"),
)

RETIRED: Final = {
    "hold.max_calls_per_address": _ADDRESS,
    "hold.max_cold_calls": "what all cold calls take is bounded by 1 GiB, about 0.5 KiB each",
    "limits.arriving_bytes": "it is always 32 MiB; past it the unfinished messages of an upstream take turns",
    "limits.behind_bytes": "it is always 1 MiB; limits.sending_bytes bounds what all clients together have not read",
    "limits.cold_bytes": "it is always 1 GiB, for two million calls; hold.max_calls_per_principal is reached first",
    "limits.json_depth": "it is always 64: no known message needs 20, and some servers cannot read more than 100",
    "limits.receiving_bytes_per_address": _ADDRESS,
    "limits.replay_bytes": "it is always 32 MiB, or limits.event_bytes; only the caller that has the most notices it",
    "principal.algorithms": "a key of the issuer says what it signs with; no algorithm with a shared secret is taken",
    "principal.jwks_stale_seconds": "it is always a day: an issuer that fails for longer needs an operator anyway",
    "sessions.max_per_address": _SESSIONS,
    "sessions.max_newcomers": _SESSIONS,
    "sessions.new_per_second_per_principal": "sessions.new_per_second does it",
    "routes[].cache.methods": "cache.ttl_ms and cache.scope hold for lists, and resources are always stale at once",
    "routes[].cache.lists_seconds": "set cache.ttl_ms: the client keeps its lists itself. A copy of the gateway could "
    "only be given to the client that had just read the list",
    "tasks.max": "hold.max_calls bounds tasks, too",
    "tasks.max_per_principal": "hold.max_calls_per_principal bounds tasks, too",
    **{f"routes[].{key}": f"set {key}, which holds for all routes; no server needs its own" for key in _OF_ROUTES},
}
"""By path. A key that is named without a route is gone from the section of a route, too."""

_NUMBER: Final = re.compile(r"\[\d+\]")


def retired(path: str) -> str | None:
    """Return what replaces a key of an earlier release, and why; None for a key that never was."""
    name = _NUMBER.sub("[]", path, count=1)
    return RETIRED.get(name) or RETIRED.get(name.removeprefix("routes[]."))

"""What one replica tells another of its status; pure.

The status of another replica is foreign input: it is bounded in bytes, it may only speak of that replica, and it is
checked before anything of it is shown.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.admin.merge_statuses import Heard, cut, of_cluster
from gateway.telemetry.process_status import Status

STATUS_BYTES: Final = 262_144
"""The longest status that one replica takes from another, sealed."""
_TOLD_BYTES: Final = STATUS_BYTES - 4096
"""The longest one that it tells."""
_HALVINGS: Final = 9
"""After so many, every list is empty."""
_MOST: Final = 2**53
"""The largest plausible number: up to it, floating-point numbers represent every integer."""


def told(status: Status) -> str:
    """Encode a status for another replica, with shorter lists if it would be too long."""
    status = replace(status, peers=(), peers_total=0)
    text = msgspec.json.encode(status)
    for _ in range(_HALVINGS):
        if len(text) <= _TOLD_BYTES:
            break
        lists = ("held", "errors", "notices", "routes")
        status = replace(status, **{each: (rows := getattr(status, each))[: len(rows) // 2] for each in lists})
        text = msgspec.json.encode(status)
    return text.decode()


def read(text: str, member: str) -> Status | None:
    """Return the status that a replica or worker reported of itself; None if it is not one."""
    try:
        raw = msgspec.json.decode(text)
        status = msgspec.convert(raw, Status)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    host = member.partition("#")[0]
    is_own = status.replica == member and all(each.id.partition("#")[0] == host for each in status.processes)
    return cut(replace(status, covers="replica")) if is_own and _is_plausible(raw) else None


def _is_plausible(value: object) -> bool:
    match value:
        case dict():
            return all(map(_is_plausible, value.values()))
        case list():
            return all(map(_is_plausible, value))
        case int() | float():
            return abs(value) <= _MOST
        case _:
            return True


def chosen(own: Status, heard: Mapping[str, Heard], replica: str | None) -> Status:
    """Return the status of one replica, if it is known; else that of the whole cluster."""
    if not heard:
        return own
    found = heard.get(replica or "")
    return found.status if found is not None and found.status is not None else of_cluster(own, heard)

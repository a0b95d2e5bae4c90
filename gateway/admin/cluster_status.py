"""The status of a cluster: what one replica tells another, the merging of all into one page; pure.

The status of another replica is foreign input: it is bounded in bytes, it may only speak of that replica, and it is
checked before anything of it is shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.admin.merge_statuses import cut, merged
from gateway.telemetry.process_status import Notice, PeerState, PeerStatus, ProcessStatus, Status

STATUS_BYTES: Final = 262_144
"""The longest status that one replica takes from another, sealed."""
_TOLD_BYTES: Final = STATUS_BYTES - 4096
"""The longest one that it tells."""
_HALVINGS: Final = 9
"""After so many, every list is empty."""
_MOST: Final = 2**53
"""The largest plausible number: up to it, floating-point numbers represent every integer."""
_NAMED: Final = 10


class Heard(Struct, frozen=True, kw_only=True):
    """What came of asking one other replica."""

    state: PeerState
    why: str = ""
    """Why there is no status."""
    status: Status | None = None


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
    return found.status if found is not None and found.status is not None else _whole(own, heard)


def _whole(own: Status, heard: Mapping[str, Heard]) -> Status:
    others = {host: each.status for host, each in heard.items() if each.status is not None}
    missing = tuple(ProcessStatus(id=host, state="silent") for host in heard if host not in others)
    status = merged(replace(own, processes=missing), (own, *others.values()))
    return cut(
        replace(
            status,
            covers="cluster",
            notices=(*_missing(heard), *_differences(own, others), *own.notices, *_of_others(own, others)),
            peers=tuple(_asked(peer, heard) for peer in own.peers),
        )
    )


def _asked(peer: PeerStatus, heard: Mapping[str, Heard]) -> PeerStatus:
    found = heard.get(peer.id)
    if found is None:
        return peer
    ago = 0.0 if found.state == "answered" else peer.last_answer_seconds_ago
    return replace(peer, state=found.state, last_answer_seconds_ago=ago)


def _missing(heard: Mapping[str, Heard]) -> Iterator[Notice]:
    for host, each in heard.items():
        if each.status is None:
            yield Notice(
                f"No status from {host}: the calls that it holds are not counted here",
                "Check whether it runs, and read its log",
                each.why,
            )


def _differences(own: Status, others: Mapping[str, Status]) -> Iterator[Notice]:
    """Report what differs between the replicas, as some things do during an update."""
    replicas = {own.replica: own, **others}
    for what, values in (
        ("versions", {host: each.version for host, each in replicas.items()}),
        ("configurations", {host: each.configuration for host, each in replicas.items()}),
        ("sealing keys", {host: each.keys[0].id if each.keys else "" for host, each in replicas.items()}),
    ):
        groups: dict[str, list[str]] = {}
        for host, value in values.items():
            groups.setdefault(value, []).append(host)
        if len(groups) > 1:
            shown = "; ".join(f"{value} ({_names(hosts)})" for value, hosts in groups.items())
            yield Notice(f"The replicas have different {what}: {shown}", "Expected during an update", is_bad=False)


def _names(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else ""
    return ", ".join(hosts[:_NAMED]) + more


def _of_others(own: Status, others: Mapping[str, Status]) -> Iterator[Notice]:
    """Yield what the other replicas report, with their names, unless this one reports the same."""
    for host, status in others.items():
        for notice in status.notices:
            if notice not in own.notices:
                yield replace(notice, text=f"{host}: {notice.text}")

"""Judges what listeners heard: every change that was promised to them, or an end that they saw; and no other's."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from gateway.protocol import mcp
from tests.simulation.causes import CUTS, DEATHS, SILENCES, begins, met
from tests.simulation.history import Outcome
from tests.simulation.listening import Change
from tests.simulation.subscriber import SESSION_LOST, Heard, Listened, Stream
from tests.simulation.world import START

_SOON_SECONDS: Final = 2.0
_LATE_SECONDS: Final = 90.0
"""How long a change may take to be heard if something went wrong: attempts at a new session pause for up to 45 s."""
_SKIPPED_SECONDS: Final = 2.0
"""How long a replica asks another one no more that it has found silent."""
_ENDS: Final = DEATHS | CUTS | SILENCES | {"server", "dns"}
"""What can end a stream, or delay what it says."""


def complaints(outcome: Outcome) -> Iterator[str]:
    """Everything that is wrong with what the listeners of a history heard."""
    for listened in outcome.listened:
        for complaint in _of_listener(outcome, listened):
            yield f"{listened.listener.tag}: {complaint}"


def _of_listener(outcome: Outcome, listened: Listened) -> Iterator[str]:
    yield from listened.strange
    for heard in listened.heard:
        yield from _of_heard(outcome, listened, heard)
    for stream in listened.streams:
        yield from _of_stream(outcome, listened, stream)
    if listened.listener.is_legacy:
        yield from _of_mirrored(outcome, listened)


def _of_heard(outcome: Outcome, listened: Listened, heard: Heard) -> Iterator[str]:
    topic, listener = (heard.method, heard.uri), listened.listener
    if topic not in _wanted(listened):
        yield f"heard of {topic}, which it did not ask for"
    if heard.number is None:
        used = _anywhere(outcome) if listener.is_legacy else listened.used
        if not met(outcome, replace(listened, used=used), _ENDS, until=heard.at):
            yield f"heard at {heard.at - START:.2f} that {topic} may have changed, though it had missed nothing"
        return
    change = outcome.plan.changes[heard.number - 1]
    if (change.topic, change.caller, change.path) != (topic, listener.caller, listener.path):
        yield f"heard of change {heard.number}, which is not its own: {change}"


def _wanted(listened: Listened) -> set[tuple[str, str]]:
    """What a listener asked for; a mirrored one hears of all lists."""
    listener = listened.listener
    wanted = {(mcp.RESOURCE_UPDATED, uri) for uri in listener.uris}
    return wanted | ({(mcp.TOOLS_CHANGED, "")} if listener.wants_lists or listener.is_legacy else set())


def _of_stream(outcome: Outcome, listened: Listened, stream: Stream) -> Iterator[str]:
    # A mirrored stream is written by the home of its session, which may be any replica.
    used = _anywhere(outcome) if listened.listener.is_legacy else stream.used
    has_cause = bool(met(outcome, replace(stream, used=used), _ENDS))
    if stream.how.startswith(SESSION_LOST):
        has_cause = _may_have_lost_session(outcome, stream)
    if stream.how != "left" and not has_cause:
        yield f"its stream from {stream.began - START:.2f} ended without a cause: {stream.how}"
    if listened.listener.is_legacy or stream.promised is None:
        return
    if stream.offered != _wanted(listened):
        yield f"was offered {sorted(stream.offered)} at {stream.promised - START:.2f}, and wanted more"
    within, end = _LATE_SECONDS if has_cause else _SOON_SECONDS, stream.ended or 0.0
    for number, at, change in _changes(outcome, listened):
        if change.topic in stream.offered and stream.promised <= at and at + within <= end:
            heard = [each for each in listened.heard if stream.promised <= each.at <= at + within]
            if not _is_covered(heard, change, number, at):
                yield f"did not hear of change {number} at {at - START:.2f} within {within} s: {change.topic}"


def _of_mirrored(outcome: Outcome, listened: Listened) -> Iterator[str]:
    """What a session hears, over all its streams: a new one tells of what was missed."""
    session = replace(listened, used=_anywhere(outcome))
    within = _LATE_SECONDS if met(outcome, session, _ENDS) else _SOON_SECONDS
    for number, at, change in _changes(outcome, listened):
        since = listened.promised.get(change.topic)
        if since is None or at < since or at + within > (listened.ended or 0.0):
            continue
        if change.uri and _may_have_moved(outcome, listened):
            continue
        heard = [each for each in listened.heard if each.at <= at + within]
        if not _is_covered(heard, change, number, at):
            yield f"did not hear of change {number} at {at - START:.2f} within {within} s: {change.topic}"


def _changes(outcome: Outcome, listened: Listened) -> Iterator[tuple[int, float, Change]]:
    """The changes at the server of a listener, for its caller."""
    listener = listened.listener
    for number, (at, change) in enumerate(zip(outcome.changed, outcome.plan.changes, strict=False), 1):
        if (change.caller, change.path) == (listener.caller, listener.path):
            yield number, at, change


def _is_covered(heard: list[Heard], change: Change, number: int, at: float) -> bool:
    """Whether a client that heard this knows of a change: a newer one tells as much, or that there may be any."""
    of_topic = [each for each in heard if (each.method, each.uri) == change.topic]
    return any(each.at >= at if each.number is None else each.number >= number for each in of_topic)


def _may_have_moved(outcome: Outcome, listened: Listened) -> bool:
    """Whether a session may have had another home when it subscribed than when it opened its stream.

    Such a session hears of its resources only after it has opened its stream again. A replica may have found the home
    silent just before the session began.
    """
    if listened.sure is None:
        return True
    session = Stream(listened.began - _SKIPPED_SECONDS, _anywhere(outcome))
    return bool(met(outcome, session, DEATHS | SILENCES, until=listened.sure))


def _may_have_lost_session(outcome: Outcome, stream: Stream) -> bool:
    """Whether the id of a session opens no more: its key has ended with a replica, or it is from the future."""
    if "state" in outcome.plan.config and any(when <= stream.began for when, _ in outcome.deaths):
        return True
    return any(fault.kind == "jump" and begins(fault) <= stream.began for fault in outcome.faults)


def _anywhere(outcome: Outcome) -> set[int]:
    return set(range(1, outcome.plan.replicas + 1))

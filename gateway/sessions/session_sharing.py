"""One upstream session for all calls of a principal: who may speak in it beside whom; pure.

Rule 1: a question belongs to the call on whose stream it came. One on the side stream names no call: it has an owner
only while one call is in flight. Rule 2: so a call waits for the one before it, until that one has ended, or waits for
its user, in a session whose questions named their calls so far. Rule 3: whoever joins a session (a *guest*) has a
channel of its own, opens no side stream, and never ends the session; its *host* has the side stream.
"""

from gateway.sessions.session import Session


def names_calls(host: Session) -> bool:
    """Whether the server is known to ask on the streams of its calls, and not known to ask elsewhere."""
    speakers = (host, *host.guests)
    return any(each.asked_in_call for each in speakers) and not any(each.asked_aside for each in speakers)


def may_begin(host: Session) -> bool:
    """Whether a call may begin in a session that has no call of its own now: its guests wait for their users."""
    if not host.guests:
        return True
    return all(guest.resting for guest in host.guests) and names_calls(host)


def has_room(host: Session) -> bool:
    """Whether a call may begin beside that of the host: one that waits for its user, and is named or has ended."""
    return host.resting and (names_calls(host) or not host.pending) and may_begin(host) and can_join(host)


def can_join(host: Session) -> bool:
    """Whether the session can be spoken in at all; one that is being opened, or has no id, cannot."""
    return not host.lost and host.opened and host.channel.session_id is not None


def join(host: Session, guest: Session) -> None:
    """Make a session object that was never opened speak in another one's session."""
    session_id = host.channel.session_id
    assert session_id is not None, "can_join() said so"
    guest.channel.adopt(session_id, host.shaken.version)
    guest.shaken = host.shaken
    guest.host = host
    guest.opened = True


def part(guest: Session) -> None:
    """Take what a guest learnt over to its host."""
    host = guest.host
    assert host is not None, "it joined"
    host.guests.discard(guest)
    host.asked_in_call |= guest.asked_in_call
    host.asked_aside |= guest.asked_aside
    host.lost |= guest.lost

"""Asks the upstream whether it accepts a credential, with a ping in an open session."""

from gateway.protocol.errors import Refused, SessionLost
from gateway.sessions.group import Group
from gateway.sessions.session import Session
from gateway.upstream.channel import Channel, Headers


async def is_served(
    group: Group[Session], headers: Headers, own: Session | None, elsewhere: Channel | None, where: str
) -> bool:
    """Have the credential checked in an open session; returns False if none is left.

    `own` is the session of the call, `elsewhere` a channel of the session that another process opened for it. `where`
    names the upstream in errors. Raises what a ping raises, except SessionLost.
    """
    if elsewhere is not None and await _is_served_elsewhere(elsewhere, headers):
        group.accept(headers)
        return True
    mine = own.shared.owner if own is not None else None  # a joiner speaks in the session of its owner
    for session in (mine, *group.sessions) if mine is not None else tuple(group.sessions):
        if session.lost or session.state is None or not (session.opened or session.adopted):
            continue  # it is in its handshake, or has ended
        try:
            await session.ping(headers)
        except SessionLost as exc:
            if await session.is_alive() and session is mine:
                raise Refused(f"{where} does not accept the credential in the call's session", status=403) from exc
            continue
        group.accept(headers)
        return True
    return False


async def _is_served_elsewhere(channel: Channel, headers: Headers) -> bool:
    try:
        await channel.ping(headers)
    except SessionLost:
        return False
    finally:
        await channel.close(end_session=False)
    return True

"""Has the upstream check a credential before the gateway answers from memory.

A principal may come from a token whose signature the gateway does not check. Nothing that the gateway answers from
memory (a handshake, a kept result, a change on another session) may go out on a forged one. Where the upstream sees no
credential of the client's, no claim of an unverified token makes a principal (`auth.authenticator`).
"""

from gateway.http.upstream_headers import credentials_in
from gateway.protocol.errors import CallLost, Refused, SessionLost, Unheeded, Unreachable, hung
from gateway.seal.request_state import Whereabouts
from gateway.sessions.call import PoolKey
from gateway.sessions.pool.pool import Pool
from gateway.sessions.session import Session
from gateway.upstream.channel import Headers


def has_authorised(pool: Pool, key: PoolKey, headers: Headers) -> bool:
    """Whether the upstream need not see this credential now, as `authorise` has it."""
    if pool.route.upstream.command is not None or not credentials_in(pool.route, headers):
        return True
    return pool.group(key).credentials.include(headers)


async def authorise(  # noqa: PLR0913  (what is known of a call)
    pool: Pool,
    key: PoolKey,
    headers: Headers,
    own: Session | None = None,
    elsewhere: Whereabouts | None = None,
    *,
    is_exempt: bool = True,
) -> None:
    """Have the upstream see this credential, unless it just has; raises Refused, and what a ping raises.

    The ping goes out in the call's `own` session, or in the one that another process opened for the call `elsewhere`;
    if that is gone, or there is none, in any session of the key. No session is occupied for it: a ping goes beside a
    call.
    """
    if has_authorised(pool, key, headers):
        return
    group = pool.group(key)
    try:
        if not await _is_served(pool, key, headers, own, elsewhere):
            # No session is left: opening one shows the credential, too.
            obtain = pool.open if group.sessions else pool.acquire  # `acquire` may lend one in which the ping failed
            session = await obtain(key, headers, is_exempt=is_exempt)
            try:
                if not group.credentials.include(headers):
                    await session.ping(headers)
            finally:
                pool.release(session, clean=True)
    except CallLost as exc:
        raise Unreachable(
            f"{exc.message.partition(';')[0]}, so it is not known whether it accepts this credential; call again",
            fix=hung("timeouts.answer_seconds") if isinstance(exc, Unheeded) else "",
        ) from exc
    group.credentials.note(headers)


async def _is_served(
    pool: Pool, key: PoolKey, headers: Headers, own: Session | None, elsewhere: Whereabouts | None
) -> bool:
    """Have the credential checked in an open session; returns False if none is left.

    Raises what a ping raises, except SessionLost.
    """
    if elsewhere is not None:
        channel = pool.adopted_channel(elsewhere)
        try:
            await channel.ping(headers)
            return True  # noqa: TRY300
        except SessionLost:
            pass
        finally:
            await channel.close(end_session=False)
    mine = own.shared.owner if own is not None else None  # a joiner speaks in the session of its owner
    for session in filter(None, (mine, *pool.group(key).sessions)):
        if session.lost or session not in session.group.sessions or not (session.opened or session.adopted):
            continue  # it is in its handshake, or has ended
        try:
            await session.ping(headers)
            return True  # noqa: TRY300
        except SessionLost as exc:
            # The Python SDK 1.30 answers 404 to any credential but the one that opened the session.
            if await session.is_alive() and session is mine:
                where = pool.route.where
                raise Refused(f"{where} does not accept the credential in the call's session", status=403) from exc
    return False

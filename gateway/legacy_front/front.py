"""Serves legacy clients whose sessions end at the gateway, over streamable HTTP or HTTP+SSE.

Source: specification 2025-11-25 basic/transports (Streamable HTTP), 2024-11-05 basic/transports (HTTP with SSE). A
session lives in one process, which its sealed id names. Every other replica forwards the session's requests there.
"""

import asyncio
from typing import Final

from gateway.http.incoming import Incoming
from gateway.http.server.response import Response
from gateway.legacy_front.arrival import Arrival
from gateway.legacy_front.backend import Connect
from gateway.legacy_front.replica_forwarding import forward
from gateway.legacy_front.session import FrontSession, session_gone
from gateway.legacy_front.session_ids import QUERY, Front, SessionId, digest, given_id
from gateway.legacy_front.session_table import SessionTable
from gateway.legacy_front.stream import ENDED
from gateway.protocol import mcp
from gateway.protocol.errors import GatewayError, InvalidRequest, InvalidState, NotAllowed
from gateway.protocol.reply_messages import EVENT_STREAM

_METHODS: Final = "GET, POST, DELETE"


def beginning(incoming: Incoming) -> Front | None:
    """Over which transport a request begins a session; None if it does not begin one."""
    headers = incoming.headers
    if mcp.SESSION_ID in headers:
        return None
    if incoming.method == "POST":
        if b"initialize" not in incoming.body and b"\\" not in incoming.body:
            return None  # without an escape, the method can only be written as it is
        try:
            return "http" if incoming.parsed().method == mcp.INITIALIZE else None
        except GatewayError:
            return None
    is_sse = incoming.method == "GET" and EVENT_STREAM in headers.get("Accept", "")
    # Clients of streamable HTTP open a stream only once they have a version or a session.
    return "sse" if is_sse and not {mcp.PROTOCOL_VERSION, mcp.LAST_EVENT_ID} & {*headers} else None


async def begin(sessions: SessionTable, front: Front, at: Arrival, connect: Connect) -> Response:
    """Serve a request that begins a session."""
    names, process = at.live.route.bound_headers, at.live.process
    process.draining.check("initialize again", is_stream=True)
    caller = digest(at.bearer, names)
    id_ = SessionId(
        front=front, route=at.incoming.path, owner=process.owner, epoch=process.epoch, names=names, caller=caller
    )
    session = sessions.open(at.live, front, sessions.ids.seal(id_), at.caller, connect)
    goes_on = False
    try:
        with session.serving():
            if front == "sse":  # the stream is the session
                reply = at.http_reply()
                await reply.start()
                address = f"{at.incoming.url.raw_path}?{QUERY}={session.id}"
                # Not shown with the bodies: it is secret.
                await reply.stream.write(f"event: endpoint\ndata: {address}\n\n".encode())
                return await session.standalone.write(reply, 0)
            response = await _post(session, at)
            goes_on = session.is_initialized
            return response
    finally:
        if not goes_on:  # over HTTP+SSE its stream has ended; else the client got no id with which to go on
            session.end(InvalidRequest("The client has ended the session by closing its stream"))


async def continued(sessions: SessionTable, at: Arrival) -> Response | None:
    """Serve a request of a session; None if it names no session of a gateway's. Raises GatewayError."""
    given = given_id(at.incoming)
    if given is None:
        return None
    try:
        found = sessions.ids.open(given)
        found.check(at.bearer)
    except InvalidState as exc:
        # The request passes on all the same: a gateway behind this one may have sealed the id.
        at.live.process.metrics.state_rejections[exc.reason,].inc()
        return None
    if found.front == "http":
        at.incoming.found_session()
    if not at.live.process.is_own(found.owner, found.epoch):
        with at.live.process.draining.leaving_out(at.incoming.method == "GET"):
            return await forward(at, found.owner, given)
    session = sessions.find(given)
    if session is None:
        raise session_gone()
    with session.serving():
        match at.incoming.method:
            case "POST":
                return await _post(session, at)
            case "GET" if session.front == "http":
                return await _get(session, at)
            case "DELETE" if session.front == "http":
                session.end(InvalidRequest("The client has ended the session"))
                return await at.reply.only(ENDED)
        allowed = _METHODS if session.front == "http" else "POST"
        raise NotAllowed(f"HTTP {at.incoming.method[:20]} is not served in a session", allowed=allowed)


async def _post(session: FrontSession, at: Arrival) -> Response:
    if session.is_initialized:
        at.incoming.found_session()  # over HTTP+SSE, it exists before
    message = at.message()
    try:
        stream = session.take(message)
    except GatewayError as exc:
        if session.tells_refused(message, exc):
            return await at.accept()
        raise
    is_greeting = stream is not None and message.opened.method == mcp.INITIALIZE
    at.incoming.drop_body(message.request_id)  # the session has the message
    del message
    if stream is not None and session.front == "http":
        try:
            return await stream.reply(at.reply)
        finally:
            session.left(stream)
    if is_greeting:
        refusal = await asyncio.shield(session.greeting)  # of the credential, which only a status can tell
        if refusal is not None:
            raise refusal
    return await at.accept()


async def _get(session: FrontSession, at: Arrival) -> Response:
    """Serve a stream from a place that the client names, or the standalone one from where the last one ended."""
    stream, position = session.standalone, session.standalone.delivered
    place = at.incoming.headers.get(mcp.LAST_EVENT_ID)
    if place is not None:
        name, _, number = place.partition("-")
        is_place = len(place) <= 40 and name.isdecimal() and number.isdecimal()  # `int` raises beyond 4,300 digits
        found = session.streams.get(int(name)) if is_place else None
        if found is None or not (found.is_resumable and found.can_resume(int(number))):
            raise NotAllowed(  # what clients take for `no stream here`, without giving up their session
                "Last-Event-ID names no event that is kept here: its stream is complete, or its events were "
                "forgotten because those of all clients took more than limits.replay_bytes",
                allowed="POST, DELETE",
            )
        stream, position = found, int(number)
    try:
        return await stream.write(at.reply, position)
    finally:
        if stream is not session.standalone:
            session.left(stream)

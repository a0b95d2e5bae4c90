"""Examines a session on the wire: the form of a reply, event ids, replay, DELETE.

The probe sends requests of its own here, because the gateway's channel hides the differences that it copes with.
"""

from typing import Final

from gateway.protocol import jsonrpc, mcp, reply_messages
from gateway.tools.probe.steps.context import ProbeContext
from gateway.tools.probe.steps.requests import NO_REPLY, ask
from gateway.upstream.channel import Headers

_NO_TOOL: Final = "mrtr-gateway-probe-no-such-tool"
_REPLAY_SECONDS: Final = 2.0
_REPLAY_TRIES: Final = 2
"""server-everything replays only to the second GET."""
_REQUEST_ID: Final = b'"mrtr-gateway-probe-form"'


async def look_at_reply(exam: ProbeContext, headers: Headers, *, has_tools: bool) -> None:
    """Send a call that runs nothing, and examine the form of its reply."""
    method, params = mcp.PING, {}
    if has_tools:
        method, params = mcp.TOOLS_CALL, {"name": _NO_TOOL, "arguments": {}}
    own = {**headers, "Accept": f"application/json, {reply_messages.EVENT_STREAM}", "Content-Type": "application/json"}
    seconds = exam.timeouts.handshake_seconds
    message = jsonrpc.request(_REQUEST_ID, method, params)
    try:
        reply = await ask(exam.client, "POST", exam.endpoint.url, own, message, seconds=seconds, asked=_REQUEST_ID)
    except NO_REPLY as exc:
        exam.notes.warn(
            "replies",
            f"the server did not answer a call of a nonexistent tool ({type(exc).__name__})",
            "It is not known how the server answers calls, and whether they can be resumed.",
            "Look in the server's log.",
        )
        return
    is_json = reply.content_type != reply_messages.EVENT_STREAM
    ids = [] if is_json else [event.id for event in reply_messages.events(reply.body) if event.id]
    exam.learn(json_replies=is_json, event_store=bool(ids))
    if is_json:
        exam.notes.warn("replies", "JSON bodies")
        return
    exam.notes.ok("replies", "event streams")
    # Only behind an earlier event is there an answer to replay, and a header takes no control characters.
    if len(ids) > 1 and ids[0] != ids[-1] and ids[0].isprintable():
        exam.learn(replays=await _replays(exam, headers, ids[0]))
    server = exam.server
    if not server.sessions:
        return
    if server.replays is False:
        exam.notes.warn("event ids", "present, but the server does not replay")
    elif server.event_store:
        how = "the server replays after them" if server.replays else "replay was not tried"
        exam.notes.ok("event ids", f"present, {how}")
    else:
        exam.notes.ok("event ids", "none: no event store")


async def _replays(exam: ProbeContext, headers: Headers, cursor: str) -> bool:
    """Return whether the server replays the answer after the first event id."""
    own = {**headers, "Accept": reply_messages.EVENT_STREAM, mcp.LAST_EVENT_ID: cursor}
    for _ in range(_REPLAY_TRIES):
        try:
            # Up to the answer, because some servers leave the stream open after it.
            reply = await ask(exam.client, "GET", exam.endpoint.url, own, seconds=_REPLAY_SECONDS, asked=_REQUEST_ID)
        except NO_REPLY:
            continue
        if reply.status == 200 and reply.is_answered(_REQUEST_ID):
            return True
    return False


async def end(exam: ProbeContext, headers: Headers) -> None:
    """Try to end the session with DELETE."""
    try:
        seconds = exam.timeouts.cancel_seconds
        status = (await ask(exam.client, "DELETE", exam.endpoint.url, headers, seconds=seconds)).status
    except NO_REPLY:
        exam.notes.ok("DELETE", "does not end a session")
        return
    exam.learn(ends_sessions=status < 300)
    exam.notes.ok("DELETE", "ends a session" if status < 300 else "does not end a session")

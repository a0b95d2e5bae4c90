"""What a session is like on the wire: the form of a reply, event ids and where they lead, the idle stream, DELETE.

Asked for with requests of the probe's own, beside the channel that the gateway would use: that one does not show what
it copes with.
"""

import asyncio
import time
from typing import Final

import aiohttp

from gateway.core import jsonrpc, mcp
from gateway.core.negotiate import Handshake
from gateway.net.client import FOREIGN
from gateway.net.upstream import Channel, Headers
from gateway.probe.examination import Examination
from gateway.probe.requests import EVENTS, Reply, ask, is_answered, messages

_NO_TOOL: Final = "mrtr-gateway-probe-no-such-tool"
_REPLAY_SECONDS: Final = 2.0
_REPLAY_TRIES: Final = 2
"""server-everything repeats only to the second GET."""
_REQUEST_ID: Final = b'"mrtr-gateway-probe-form"'
_SHOWN_BYTES: Final = 65_536


def own_headers(exam: Examination, channel: Channel, shaken: Handshake) -> dict[str, str]:
    """Those of a request in this session."""
    own = {**exam.subject.headers, mcp.PROTOCOL_VERSION: shaken.version}
    if channel.session_id is not None:
        own[mcp.SESSION_ID] = channel.session_id
    return own


async def look_at_reply(exam: Examination, headers: Headers, *, has_tools: bool) -> None:
    """Send a call that runs nothing, and look at the form of its reply."""
    method, params = mcp.PING, {}
    if has_tools:
        method, params = mcp.TOOLS_CALL, {"name": _NO_TOOL, "arguments": {}}
    own = {**headers, "Accept": f"application/json, {EVENTS}", "Content-Type": "application/json"}
    server, seconds = exam.server, exam.timeouts.handshake_seconds
    message = jsonrpc.request(_REQUEST_ID, method, params)
    try:
        reply = await ask(exam.client, "POST", exam.endpoint.url, own, message, seconds, is_answered)
    except FOREIGN as exc:
        exam.warn(
            "replies",
            f"a call of a tool that does not exist was not answered ({type(exc).__name__})",
            "How the server answers calls, and whether they can be resumed, is not known.",
            "Look at the server's own log.",
        )
        return
    server.json_replies = reply.content_type != EVENTS
    ids = messages(reply)[1]
    server.event_store = bool(ids)
    if server.json_replies:
        exam.warn(
            "replies",
            "JSON bodies",
            "A question on a call's own reply is swallowed by the server, and progress with it: the call ends with "
            "an error after timeouts.idle_seconds.",
            "Have the server answer with event streams: no json_response (Python), no enableJsonResponse "
            "(TypeScript).",
        )
    else:
        exam.ok("replies", "event streams")
    if len(ids) > 1 and ids[0] != ids[-1] and ids[0].isprintable():
        server.replays = await _replays(exam, headers, ids[0])
    if server.sessions and not server.json_replies:
        _tell_store(exam)


async def _replays(exam: Examination, headers: Headers, cursor: str) -> bool:
    """Whether the answer comes again behind the first event id."""
    own = {**headers, "Accept": EVENTS, mcp.LAST_EVENT_ID: cursor}
    for _ in range(_REPLAY_TRIES):
        try:
            reply = await ask(exam.client, "GET", exam.endpoint.url, own, None, _REPLAY_SECONDS, is_answered)
        except FOREIGN:
            continue
        if reply.status == 200 and _is_ours(reply):
            return True
    return False


def _is_ours(reply: Reply) -> bool:
    return any(bytes(each.id) == _REQUEST_ID for each in messages(reply)[0] if jsonrpc.is_id(each.id))  # type: ignore[arg-type]


def _tell_store(exam: Examination) -> None:
    server = exam.server
    if not server.event_store:
        exam.ok(
            "event ids",
            "none: no event store",
            "A call whose replica dies cannot be resumed; nine of ten public servers are so.",
        )
    elif server.replays is False:
        exam.warn(
            "event ids",
            "given, but asked for what came behind one, the server sent nothing",
            "A call whose replica dies may be lost, although the server seems to store its events.",
            "Check the server's event store: it must replay by Last-Event-ID.",
        )
    else:
        how = "and what came behind one was sent again" if server.replays else "whether they lead back was not tried"
        exam.ok("event ids", f"given, {how}")


async def end(exam: Examination, headers: Headers) -> bool:
    """End the session with DELETE; whether the server took that."""
    try:
        reply = await ask(exam.client, "DELETE", exam.endpoint.url, headers, None, exam.timeouts.cancel_seconds)
    except FOREIGN:
        return False
    exam.server.ends_sessions = reply.status < 300
    return exam.server.ends_sessions


async def wait_idle(exam: Examination, headers: Headers, ready: asyncio.Event) -> None:
    """Listen to the idle side stream; `ready` is set when it is open, or will not be."""
    began = time.monotonic()
    heard: list[tuple[float, bytes]] = []
    how = "stayed open"
    own = {**headers, "Accept": EVENTS}
    try:
        async with asyncio.timeout(exam.subject.wait_seconds):
            response = await exam.client.open("GET", exam.endpoint.url, own, None)
            try:
                ready.set()
                if response.status != 200:
                    return
                how = await _hear(response, began, heard)
            finally:
                response.close()
    except TimeoutError:
        pass
    except FOREIGN as exc:
        how = f"broke ({type(exc).__name__})"
    finally:
        ready.set()
    after = time.monotonic() - began
    signs = [seconds for seconds, data in heard if data.startswith((b":", b"event: ping")) or b'"ping"' in data]
    if signs:
        exam.server.keep_alive_seconds = round(signs[0], 1)
    _tell_idle(exam, after, how, signs)


async def _hear(response: aiohttp.ClientResponse, began: float, heard: list[tuple[float, bytes]]) -> str:
    size = 0
    async for chunk in response.content.iter_any():
        heard.append((time.monotonic() - began, chunk.lstrip()[:200]))
        size += len(chunk)
        if size > _SHOWN_BYTES:
            return "said more than was listened to"
    return "ended"


def _tell_idle(exam: Examination, after: float, how: str, signs: list[float]) -> None:
    if signs:
        exam.ok("keep-alive", f"a sign of life after {signs[0]:.0f} s; the stream {how} for {after:.0f} s")
    elif how == "stayed open":
        exam.ok(
            "keep-alive",
            f"nothing was heard for {after:.0f} s, and the stream {how}",
            "What stands between may close connections that are silent; "
            + (
                "a call ends with this one."
                if exam.server.transport == "sse"
                else "the gateway then opens the stream anew."
            ),
        )
    else:
        exam.warn(
            "keep-alive",
            f"the idle stream {how} after {after:.0f} s",
            "What the server says outside of calls is lost until the stream is open again.",
            "Look for a time-out of the server, or of a proxy before it, and raise it.",
        )

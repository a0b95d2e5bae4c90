"""How a message of the upstream is about the call in flight: pure."""

from typing import Final

import msgspec
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange import results
from gateway.protocol import jsonrpc, mcp
from gateway.sessions.call import Call

CHANGES: Final = frozenset({mcp.TOOLS_CHANGED, mcp.PROMPTS_CHANGED, mcp.RESOURCES_CHANGED, mcp.RESOURCE_UPDATED})
"""Notifications that something at the upstream changed, whatever runs."""

Answer = on.Resulted | on.Failed
"""The response to the call in flight."""


def answers(message: jsonrpc.Message, call: Call | None) -> bool:
    """Whether a message carries the id of the call in flight as a response."""
    # The gateway's own ids have no character that a JSON writer would escape.
    return call is not None and message.method is None and message.id == Raw(call.id)


def answer(message: jsonrpc.Message, call: Call | None) -> Answer | None:
    """The response to the call in flight, if the message is one."""
    if answers(message, call):
        if isinstance(message.result, Raw):
            return on.Resulted(message.result)
        if (error := message.failure) is not None:
            return on.Failed(error)
    return None


def plain_answer(data: bytes, call: Call | None) -> Answer | None:
    """The response to the call in flight if it has the usual form, and a result of a tool that is plain.

    Such a result is read once, and not copied. For all other messages, None says nothing. Raises UnicodeDecodeError.
    """
    if call is not None and (result := jsonrpc.unchecked_result(data, call.id)) is not None:
        is_tool_error = results.plain(result)
        if is_tool_error is not None:
            if not data.isascii():
                _ = data.decode()  # the result goes to the client unread, so it must be UTF-8
            return on.Resulted(result, is_tool_error=is_tool_error)
    return None


def told(
    method: str, params: Raw | msgspec.UnsetType, call: Call | None
) -> on.Progressed | on.Logged | on.Withdrawn | None:
    """What a notification says about the call in flight, if anything."""
    if call is None:
        return None
    try:
        opened = jsonrpc.fields(params) if isinstance(params, Raw) else {}
    except ValueError:
        return None
    if method == mcp.PROGRESS:
        token = opened.get("progressToken")
        is_ours = token is not None and bytes(token) == call.progress_token
        return on.Progressed(opened) if is_ours else None
    if method == mcp.LOG and isinstance(params, Raw):
        return on.Logged(jsonrpc.text(opened.get("level")) or "", params)
    if method == mcp.CANCELLED and "requestId" in opened:  # the TypeScript SDK withdraws a question after 60 s
        return on.Withdrawn(opened["requestId"])
    return None

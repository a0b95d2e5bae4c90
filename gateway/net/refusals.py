"""What an upstream's refusal means to the caller: of an HTTP request, or of `initialize`."""

import re
from typing import Final

import aiohttp
import msgspec
from msgspec import Raw

from gateway.core import jsonrpc
from gateway.errors import CallLost, NoHandshake, Refused, SessionLost
from gateway.net.client import Endpoint, read_at_most

_SESSION_WORDING: Final = re.compile(rb"session", re.IGNORECASE)
_ERROR_BODY_BYTES: Final = 65_536


class NotSpoken(NoHandshake):
    """The upstream does not speak the transport that was tried; it may speak another."""


async def read_body(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """The whole body, of `limit` bytes at most; raises CallLost, and one of FOREIGN."""
    body = await read_at_most(response, limit)
    if body is None:
        raise CallLost(f"{where} sent a body larger than limits.event_bytes; the call may have had effects")
    return body


async def refusal(response: aiohttp.ClientResponse, endpoint: Endpoint) -> jsonrpc.Error | None:
    """The JSON-RPC error of an HTTP refusal; raises what any other refusal means."""
    status, where = response.status, endpoint.where
    body = await read_body(response, _ERROR_BODY_BYTES, where)
    if status in (401, 403):
        whose = "the credentials" if endpoint.as_client else "what routes[].credentials has it sent"
        raise Refused(
            f"{where} refused {whose} (HTTP {status})",
            status=status,
            challenge=response.headers.get("WWW-Authenticate"),
            is_clients=endpoint.as_client,
        )
    if status == 404 or (status == 400 and _SESSION_WORDING.search(body)):
        raise SessionLost(f"{where} does not know its session any more (HTTP {status})")
    error = _json_error(body)
    if error is not None and status < 500:
        return error
    said = error.message[:200] if error is not None else "no JSON-RPC error"
    raise CallLost(f"{where} answered HTTP {status} ({said}); the call may have had effects")


def _json_error(body: bytes) -> jsonrpc.Error | None:
    try:
        opened = jsonrpc.message(body)
    except (ValueError, msgspec.MsgspecError):
        return None
    return jsonrpc.error(opened.error) if isinstance(opened.error, Raw) else None


def initialized(data: bytes, where: str) -> Raw | None:
    """The result of `initialize`, None for what else is said meanwhile; raises NoHandshake or ValueError."""
    opened = jsonrpc.message(data)
    if isinstance(opened.error, Raw):
        raise NoHandshake(f"{where} refused `initialize`: {jsonrpc.error(opened.error).message[:200]}")
    return opened.result if isinstance(opened.result, Raw) else None

"""What an upstream's refusal means to the caller: of an HTTP request, or of `initialize`."""

import re
from typing import Final

import aiohttp
import msgspec
from msgspec import Raw

from gateway.core import jsonrpc
from gateway.errors import CallLost, NoHandshake, Refused, SessionLost
from gateway.net.client import Endpoint, read_at_most
from gateway.net.headers import joined

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
            challenge=joined(response.headers, "WWW-Authenticate"),
            is_clients=endpoint.as_client,
        )
    if status == 404 or (status == 400 and _SESSION_WORDING.search(body)):
        raise SessionLost(f"{where} does not know its session any more (HTTP {status})")
    error = _json_error(body)
    if error is not None and status < 500:
        return error
    said = endpoint.quoted(error.message) if error is not None else "no JSON-RPC error"
    raise CallLost(f"{where} answered HTTP {status} ({said}); the call may have had effects")


def _json_error(body: bytes) -> jsonrpc.Error | None:
    try:
        opened = jsonrpc.message(body)
    except (ValueError, msgspec.MsgspecError):
        return None
    return jsonrpc.error(opened.error) if isinstance(opened.error, Raw) else None


class Greeting:
    """Hears the answer to `initialize`, whichever stream or body it comes in."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._results: list[Raw] = []

    def receive(self, data: bytes) -> bool:
        """Take a message; whether it was the answer. Raises NoHandshake or ValueError."""
        opened = jsonrpc.message(data)
        if isinstance(opened.error, Raw):
            raise self._refused(jsonrpc.error(opened.error))
        if isinstance(opened.result, Raw):
            self._results.append(opened.result)
        return bool(self._results)

    def result(self, refusal: jsonrpc.Error | None) -> Raw:
        """The answer, when its reply was read; raises NoHandshake for one that was a `refusal`."""
        if refusal is not None:
            raise self._refused(refusal)
        return self._results[0]

    def _refused(self, error: jsonrpc.Error) -> NoHandshake:
        return NoHandshake(f"{self._endpoint.where} refused `initialize`: {self._endpoint.quoted(error.message)}")

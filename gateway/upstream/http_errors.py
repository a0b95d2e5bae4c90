"""What an upstream's refusal means to the caller: of an HTTP request, or of `initialize`.

Rule: what carries the id of the request that was sent is the answer to it (`protocol.lost_session`). Rule: a session
counts as lost only when a `ping` in it is refused too: a call that is sent again may otherwise run twice.
"""

import re
import secrets
from collections.abc import Awaitable
from typing import Final

import aiohttp
from msgspec import Raw

from gateway.http.client import read_at_most
from gateway.http.endpoint import Endpoint
from gateway.http.forwarded_headers import joined
from gateway.protocol import jsonrpc, lost_session, mcp
from gateway.protocol.errors import CallLost, GatewayError, NoHandshake, Refused, SessionLost

_SESSION_WORDING: Final = re.compile(rb"session", re.IGNORECASE)
_ERROR_BODY_BYTES: Final = 65_536
PING_PREFIX: Final = b"gw-ping-"
"""What the ids of the gateway's own pings begin with."""


class NotSpoken(NoHandshake):
    """The upstream does not speak the transport that was tried; it may speak another."""


class Doubted(SessionLost):
    """A refusal that reads like that of a session which is gone."""

    def __init__(self, where: str, status: int, error: jsonrpc.Error | None, *, is_answer: bool) -> None:
        """`is_answer`: the error has the request's own id, and words that no known server uses for such a session."""
        super().__init__(f"{where} does not know its session any more (HTTP {status})")
        self.where = where
        self.status_code = status
        self.error = error
        self.is_answer = is_answer

    async def is_proven(self, pinging: Awaitable[None], *, of_get: bool = False) -> bool:
        """Whether the session is gone: a ping in it was refused in the same way.

        `of_get`: it was a GET that was refused. Servers have other words for that, and nothing is sent again.
        """
        try:
            await pinging
        except Doubted as again:
            return of_get or self._is_like(again)
        except GatewayError:
            pass  # that proves nothing
        return False

    def _is_like(self, other: "Doubted") -> bool:
        if self.status_code != other.status_code or self.is_answer != other.is_answer:
            return False
        mine, others = self.error, other.error
        if mine is None or others is None:
            return mine is None  # a page of HTML may differ each time
        return (mine.code, mine.message) == (others.code, others.message)

    def verdict(self, *, is_gone: bool) -> jsonrpc.Error:
        """The error that was the answer; raises SessionLost where the message was not taken, and else CallLost."""
        if is_gone and not self.is_answer:
            raise SessionLost(self.message) from self
        if self.error is not None:
            return self.error
        raise CallLost(
            f"{self.where} answered HTTP {self.status_code} without a JSON-RPC error, and a ping did not prove "
            "that the session is gone; the call may have had effects"
        ) from self


async def read_response(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """The whole body, of `limit` bytes at most; raises CallLost, and one of FOREIGN."""
    body = await read_at_most(response, limit)
    if body is None:
        raise CallLost(f"{where} sent a body larger than limits.event_bytes; the call may have had effects")
    return body


async def refusal(
    response: aiohttp.ClientResponse, endpoint: Endpoint, sent: bytes | None = None
) -> jsonrpc.Error | Raw:
    """What an HTTP refusal says in JSON-RPC: an error, or even a result; raises what any other refusal means.

    `sent` is the message that it refuses, where that is a request. Raises Doubted when the session may be gone.
    """
    status, where = response.status, endpoint.where
    body = await read_response(response, _ERROR_BODY_BYTES, where)
    if status in (401, 403):
        whose = "the credentials" if endpoint.as_client else "what routes[].credentials has it sent"
        raise Refused(
            f"{where} refused {whose} (HTTP {status})",
            status=status,
            challenge=joined(response.headers, "WWW-Authenticate"),
            is_clients=endpoint.as_client,
        )
    opened = lost_session.opened(body)
    is_own = lost_session.is_own(opened, sent)
    if is_own and isinstance(opened.result, Raw):
        return opened.result
    error = jsonrpc.error(opened.error) if isinstance(opened.error, Raw) else None
    if status == 404 or (status == 400 and _SESSION_WORDING.search(body)):
        is_answer = is_own and error is not None and not lost_session.is_template(error)
        raise Doubted(where, status, error, is_answer=is_answer)
    if error is not None and (is_own or status < 500):
        return error
    said = endpoint.quoted(error.message) if error is not None else "no JSON-RPC error"
    raise CallLost(f"{where} answered HTTP {status} ({said}); the call may have had effects")


def ping_id() -> bytes:
    """The id of a ping: some servers key streams by it across sessions, so none is used twice."""
    return b'"%b%b"' % (PING_PREFIX, secrets.token_hex(8).encode())


def check_pong(said: jsonrpc.Error | Raw, where: str) -> None:
    """Let pass what a server says that has no `ping`: it took the message. Raises CallLost for anything else."""
    if isinstance(said, jsonrpc.Error) and said.code != mcp.METHOD_NOT_FOUND:
        raise CallLost(f"{where} refused a ping: {said.message[:200]}")


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

    def result(self, refusal: jsonrpc.Error | Raw | None) -> Raw:
        """The answer, when its reply was read; raises NoHandshake for one that was a `refusal`."""
        if isinstance(refusal, jsonrpc.Error):
            raise self._refused(refusal)
        return refusal if refusal is not None else self._results[0]

    def _refused(self, error: jsonrpc.Error) -> NoHandshake:
        return NoHandshake(f"{self._endpoint.where} refused `initialize`: {self._endpoint.quoted(error.message)}")

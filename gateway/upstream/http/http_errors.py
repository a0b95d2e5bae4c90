"""Translates the HTTP errors of legacy servers.

Rule 1: a message with the id of the request is the answer to it (`protocol.reply_messages`). Rule 2: a session counts
as lost only if a `ping` in it is refused too. Otherwise a call that is sent again might run twice.
"""

import errno
import re
from collections.abc import Awaitable
from typing import Final

from msgspec import Raw

from gateway import world
from gateway.http.upstream_headers import joined, passed_back
from gateway.http.upstream_url import Endpoint
from gateway.http_client.errors import NotConnected, RequestFailed
from gateway.protocol import jsonrpc, mcp, reply_messages, sse
from gateway.protocol.errors import CallLost, GatewayError, NoHandshake, Refused, SessionLost, UpstreamError
from gateway.upstream.http.reply_reader import ReplyReader

_SESSION_WORDING: Final = re.compile(rb"session", re.IGNORECASE)
_CHALLENGE_CHARACTERS: Final = 8190
"""Most HTTP parsers refuse a longer header."""
_LOCAL_CAUSES: Final = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    *(errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH),
)
"""Failures to connect that have their cause on this host."""


class WrongTransport(NoHandshake):
    """The upstream does not speak the transport that was tried; it may speak another."""


class SuspectedSessionLoss(SessionLost):
    """An HTTP error that reads as if the server had forgotten the session; a ping confirms it or not."""

    def __init__(self, endpoint: Endpoint, status: int, error: jsonrpc.Error | None, *, is_own: bool) -> None:
        """`is_own`: the error has the id of the request."""
        super().__init__(f"{endpoint.where} does not know its session any more (HTTP {status})")
        self.endpoint = endpoint
        self.status_code = status
        self.error = error
        self.is_own = is_own
        self.is_answer = is_own and error is not None and not reply_messages.is_of_lost_session(error)
        """Whether it is the answer in any case: no known server words a lost session like this."""

    async def is_confirmed(self, ping: Awaitable[None], *, of_get: bool = False) -> bool:
        """Send a ping; return whether the server refuses it in the same way, so that the session is gone.

        `of_get`: the server refused a GET. Servers word that differently, and a GET is not sent again.
        """
        try:
            await ping
        except SuspectedSessionLoss as again:
            mine, others = self.error, again.error
            if of_get or (self.status_code, self.is_answer) != (again.status_code, again.is_answer):
                return of_get
            if mine is None or others is None:
                return mine is None  # an HTML page may differ each time
            return (mine.code, mine.message) == (others.code, others.message)
        except GatewayError:
            return False  # this proves nothing
        return False

    def conclude(self, *, is_gone: bool) -> jsonrpc.Error:
        """Return the error as the answer if it has the id of the request.

        Raises SessionLost if the message was not accepted, or CallLost if nothing is certain.
        """
        if is_gone and not self.is_answer:
            raise SessionLost(self.message) from self
        if self.error is not None and self.is_own:
            return self.error
        answered = f"answered HTTP {self.status_code} ({_said(self.error, self.endpoint)})"
        raise CallLost.by(
            self.endpoint.where, f"{answered}, and a ping did not prove that the session is gone"
        ) from self


def mapped(exc: Exception, where: str) -> UpstreamError:
    """Translate why there is no complete reply into an UpstreamError; raises any other exception."""
    if not isinstance(exc, RequestFailed):
        raise exc
    return exc.mapped(where)


def is_local(exc: BaseException) -> bool:
    """Whether there is no connection for a reason on this host: names, file descriptors, memory, routes."""
    cause = exc.__cause__ if isinstance(exc, NotConnected) else None
    return isinstance(cause, world.LookupFailed) or (isinstance(cause, OSError) and cause.errno in _LOCAL_CAUSES)


def stream_cut(reply: ReplyReader, where: str) -> CallLost:
    """Return why a stream broke; raises what cannot be resumed."""
    cause = reply.failure
    if cause is None:
        return CallLost.by(where, "ended the call's stream without a result")
    if isinstance(cause, sse.EventTooLarge):
        raise CallLost.by(where, "sent an event larger than limits.event_bytes")
    return CallLost(mapped(cause, where).message)


def read_refusal(reply: ReplyReader, endpoint: Endpoint, sent: bytes | None = None) -> jsonrpc.Error | Raw:
    """Return the JSON-RPC error, or even the result, in a reply that is over and was not the answer.

    `sent` is the refused message, if it is a request. Raises SuspectedSessionLoss if the session may be gone, Refused
    if the credentials are not accepted, and CallLost for a stream or any other body.
    """
    status, where, body = reply.status, endpoint.where, reply.body
    if reply.is_stream:
        raise stream_cut(reply, where)
    if isinstance(reply.failure, sse.EventTooLarge):
        raise CallLost.by(where, "sent a body larger than limits.event_bytes")
    if reply.failure is not None:
        raise mapped(reply.failure, where) from reply.failure
    if status < 300:
        raise CallLost.by(where, f"answered HTTP {status} without a result")
    if status in (401, 403):
        raise refused(reply, endpoint)
    opened, asked = reply_messages.opened(body), reply_messages.asked(sent)
    is_own = reply_messages.is_own(opened, asked)
    if is_own and isinstance(opened.result, Raw):
        return opened.result
    if reply_messages.is_foreign(opened, asked):
        reply.pending.distrust()  # on this connection, the next request may get the response to this one
        opened = jsonrpc.Message()
    error = opened.failure
    # The Python SDK up to 1.23 and server-everything say it with 400 and a sentence.
    if status == 404 or (status == 400 and _SESSION_WORDING.search(body)):
        raise SuspectedSessionLoss(endpoint, status, error, is_own=is_own)
    if error is not None and (is_own or status < 500):
        return error
    raise CallLost.by(where, f"answered HTTP {status} ({_said(error, endpoint)})")


def _said(error: jsonrpc.Error | None, endpoint: Endpoint) -> str:
    return "no JSON-RPC error" if error is None else endpoint.quoted(error.message)


def refused(reply: ReplyReader, endpoint: Endpoint) -> Refused:
    """The error for credentials that are not accepted, without what the client could not receive of its headers."""
    assert reply.head is not None, "it has a status"
    whose = "the credentials" if endpoint.as_client else "the credentials of routes[].credentials"
    headers = passed_back(reply.head)
    # Each challenge may have a header of its own (RFC 9110, 11.6.1).
    said = joined(headers, "WWW-Authenticate"), joined(headers, "DPoP-Nonce")
    challenge, nonce = (value if value and len(value) <= _CHALLENGE_CHARACTERS else None for value in said)
    words = f"{endpoint.where} refused {whose} (HTTP {reply.status})"
    return Refused(words, status=reply.status, challenge=challenge, nonce=nonce, is_clients=endpoint.as_client)


def check_ping_answer(said: jsonrpc.Error | Raw, endpoint: Endpoint) -> None:
    """Accept "method not found": the server read the ping in its session. Raises CallLost for any other error."""
    if isinstance(said, jsonrpc.Error) and said.code != mcp.METHOD_NOT_FOUND:
        raise CallLost(f"{endpoint.where} refused a ping: {endpoint.quoted(said.message)}")


def initialize_result(found: jsonrpc.Error | Raw | None, endpoint: Endpoint) -> Raw:
    """The answer to `initialize` if it is a result. Raises NoHandshake."""
    if isinstance(found, Raw):
        return found
    assert found is not None, "it was answered"
    raise NoHandshake(f"{endpoint.where} refused `initialize`: {endpoint.quoted(found.message)}")

"""Reads the replies of a gateway from bytes, and judges them."""

import json
from typing import Any, Final, NamedTuple

from gateway.protocol import sse

CANARY: Final = b"canary-5f0c"
"""Part of all that another caller sends and gets; no reply to a hostile client or log line may contain it."""
OWN_FAILURES: Final = frozenset({502, 503, 504})
_NO_BODY: Final = frozenset({204, 304})


class Broken(AssertionError):
    """A reply breaks a promise; the text is the same for all replies that break it in the same way."""


class Reply(NamedTuple):
    """One HTTP reply; `is_whole` if its body came to the end that its framing announced."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool


def replies(data: bytes, *, ended: bool = True, to_head: bool = False) -> list[Reply]:
    """The replies on a connection, without interim ones; `ended`: in time; `to_head`: they have no bodies."""
    if not ended:
        raise Broken("the reply did not end in time")
    found: list[Reply] = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            raise Broken("the head of a reply is incomplete")
        status, headers = _head(head)
        if status == 101:
            raise Broken("the reply switches protocols")
        if status < 200:
            data = rest
            continue
        body, is_whole, data = (b"", True, rest) if to_head or status in _NO_BODY else _body(headers, rest)
        found.append(Reply(status, headers, body, is_whole))
    return found


def _head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/") or not rest[:3].isdigit():
        raise Broken("the reply has no status line")
    pairs = [line.partition(":") for line in lines]
    if any(
        not name or not colon or any(ord(char) < 32 and char != "\t" for char in value) for name, colon, value in pairs
    ):
        raise Broken("a header of the reply is malformed")
    return int(rest[:3]), {name.lower(): value.strip() for name, _, value in pairs}


def _body(headers: dict[str, str], rest: bytes) -> tuple[bytes, bool, bytes]:
    """Body, whether it is whole, and the bytes after it."""
    if "chunked" in headers.get("transfer-encoding", ""):
        return _chunks(rest)
    if "content-length" not in headers:
        return rest, True, b""
    length = int(headers["content-length"])
    return rest[:length], len(rest) >= length, rest[length:]


def _chunks(rest: bytes) -> tuple[bytes, bool, bytes]:
    body = b""
    while True:
        size, separator, rest = rest.partition(b"\r\n")
        if not separator:
            return body, False, b""
        length = int(size, 16)
        if length == 0:
            return body, rest.startswith(b"\r\n"), rest[2:]
        body += rest[:length]
        rest = rest[length + 2 :]


def only(found: list[Reply]) -> Reply:
    """The one reply to a request that was sent in whole."""
    if len(found) != 1:
        raise Broken(f"{len(found)} replies to one request")
    if not found[0].is_whole:
        raise Broken("the reply was cut off")
    return found[0]


def check(reply: Reply, *, explains: bool) -> None:
    """Raise Broken if no reply may be like this one; `explains`: errors of this listener are JSON-RPC errors."""
    if CANARY in reply.body or CANARY.decode() in str(reply.headers):
        raise Broken("the reply contains something of another caller")
    if reply.status < 500:
        return
    if reply.status not in OWN_FAILURES:
        raise Broken(f"the status is {reply.status}")
    if explains and not isinstance(_error(reply.body).get("message"), str):
        raise Broken(f"the status is {reply.status}, without an error that explains it")


def _error(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else {}


def final(reply: Reply) -> dict[str, Any]:
    """The one final message of the reply to a modern request."""
    if not reply.is_whole:
        raise Broken("the reply was cut off")
    if not reply.headers.get("content-type", "").startswith("text/event-stream"):
        events = [reply.body]
    else:
        events = [event.data for event in sse.Parser(1 << 26).feed(reply.body) if event.data]
    try:
        messages = [json.loads(event) for event in events]
    except ValueError as exc:
        raise Broken("a message of the reply is not JSON") from exc
    finals = [message for message in messages if isinstance(message, dict) and "method" not in message]
    if len(finals) != 1 or messages[-1] is not finals[0] or ("result" in finals[0]) is ("error" in finals[0]):
        raise Broken(f"the reply has {len(finals)} final messages")
    return dict(finals[0])

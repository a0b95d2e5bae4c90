"""The HTTP client towards upstreams: one for each route, with the route's limits.

All clients of a process share its connections, which are separated by TLS context.
"""

import ssl
from collections.abc import Coroutine, Mapping
from functools import lru_cache
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
from yarl import URL

from gateway.config import InForce, Limits, Timeouts
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.client import HttpClient
from gateway.http_client.connection import PendingRequest, Sending
from gateway.http_client.origin import Origin
from gateway.http_client.reply_listener import ReplyListener
from gateway.http_client.request_head import HeaderLines, RequestHead
from gateway.runtime.arrivals import Arrivals
from gateway.runtime.coarse_timer import CoarseTimer

_ONE_BYTE: Final = b"Content-Length: 1\r\n\r\n"
REDIRECTS: Final = (301, 302, 303, 307, 308)
"""Statuses whose Location header names another address of the same resource."""
_ADDRESSES: Final = 256
"""Addresses whose origin and request line are kept for the next request; and heads that sessions share."""
ARRIVING_BYTES: Final = 33_554_432
"""What the unfinished messages of one upstream may hold, those below 64 KiB aside. Past it they only take turns, so no
server needs another value."""


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of a client's requests."""

    limits: Limits
    timeouts: Timeouts
    tls: ssl.SSLContext | None = None
    """If None, the authorities of the system are trusted."""
    server_name: str | None = None
    """The name that the certificate must have, if it is not that of the URL."""


class Prepared(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """The head of many requests, formatted once for all sessions of a client, and gone with the last of them."""

    made_of: tuple[object, ...]
    """Two heads that are made of equal things are equal."""
    origin: Origin
    head: bytes
    """All but the headers of a single request, such as the length of its body."""


_prepared: Final[WeakValueDictionary[object, Prepared]] = WeakValueDictionary()
"""Shared, because each of thousands of held calls would keep a head of its own. Weak, because it has credentials."""


class Client:
    """An HTTP client towards upstreams, with the limits and timeouts of its requests."""

    def __init__(self, bounds: InForce[Bounds], calls: HttpClient) -> None:
        """Use the connections of `calls`."""
        self._bounds = bounds
        self._calls = calls
        self._take_over(bounds.value)
        bounds.after_replace(self._take_over)
        self.arriving = Arrivals(ARRIVING_BYTES)
        """Limits the unfinished messages of the upstream."""

    def sibling(self, bounds: InForce[Bounds]) -> "Client":
        """Make a client of other bounds that shares the connections of this one."""
        return Client(bounds, self._calls)

    def _take_over(self, bounds: Bounds) -> None:
        self.limits: Limits = bounds.limits
        """The limits of new requests."""
        self.timeouts: Timeouts = bounds.timeouts
        """The timeouts of new requests."""
        self.answering = CoarseTimer(bounds.timeouts.answer_seconds, self._calls.tasks, "answer")
        """The deadline of messages that need no reply but that the server has accepted them."""

    def send(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str] | HeaderLines,
        body: bytes,
        *,
        sending: Sending = "usual",
    ) -> Coroutine[Any, Any, AwaitedReply]:
        """Send one request; return its reply, awaited, as soon as its head is here. The caller closes it.

        The headers of the reply may have control characters in their values. Raises RequestFailed.
        """
        reply = AwaitedReply()
        pending = self.begin(method, url, headers, body, reply, is_lenient=True, sending=sending)
        return reply.begun(pending)

    def begin(  # noqa: PLR0913  (what one request consists of)
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str] | HeaderLines,
        body: bytes,
        listener: ReplyListener,
        *,
        is_lenient: bool = False,
        sending: Sending = "usual",
    ) -> PendingRequest:
        """Send one request, whose reply goes to `listener`. Raises ValueError for headers that cannot be sent."""
        bounds = self._bounds.value
        origin, head = _address(method, url, bounds.tls, bounds.server_name)
        pending = PendingRequest(
            origin,
            listener,
            head.encoded(headers, len(body)),
            body,
            bounds.timeouts.connect_seconds,
            method=method,
            is_lenient=is_lenient,
            sending=sending,
        )
        self._calls.begin(pending)
        return pending

    def prepared(
        self, url: URL, headers: Mapping[str, str], fixed: Mapping[str, str], before: "Prepared | None"
    ) -> "Prepared":
        """Return the head of POST requests with a client's headers, and those that are fixed for a session.

        `before`, if it is still right. Raises ValueError.
        """
        bounds = self._bounds.value
        made_of = url, headers, fixed, bounds.tls, bounds.server_name  # without the bounds, which a reload replaces
        if before is not None and before.made_of == made_of:
            return before
        shared = url, tuple(headers.items()), tuple(fixed.items()), bounds.tls, bounds.server_name
        found = _prepared.get(shared)
        if found is None:
            origin, head = _address("POST", url, bounds.tls, bounds.server_name)
            encoded = head.encoded({**headers, **fixed}, 1).removesuffix(_ONE_BYTE)
            found = Prepared(made_of, origin, encoded)
            if len(_prepared) < _ADDRESSES:
                _prepared[shared] = found
        return found

    def begin_prepared(
        self,
        prepared: "Prepared",
        line: bytes,
        body: bytes,
        listener: ReplyListener,
        *,
        sending: Sending = "usual",
    ) -> PendingRequest:
        """As `begin`, with a body; `line` is one more header of this request, or empty."""
        head = b"%b%bContent-Length: %d\r\n\r\n" % (prepared.head, line, len(body))
        seconds = self.timeouts.connect_seconds
        pending = PendingRequest(prepared.origin, listener, head, body, seconds, sending=sending)
        self._calls.begin(pending)
        return pending

    def close(self) -> None:
        """Close all connections, those of siblings too."""
        self._calls.close()


@lru_cache(maxsize=_ADDRESSES)
def _address(method: str, url: URL, tls: ssl.SSLContext | None, server_name: str | None) -> tuple[Origin, RequestHead]:
    return Origin.of(url, tls, server_name), RequestHead(method, url)

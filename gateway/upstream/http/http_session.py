"""One session over streamable HTTP as its messages know it: where they go, and what their heads say."""

from functools import lru_cache

from gateway.http.upstream_client import Prepared  # noqa: TC001  (one import style; it costs nothing here)
from gateway.http_client.connection import PendingRequest, Sending
from gateway.http_client.reply_listener import ReplyListener
from gateway.http_client.request_head import HeaderLines
from gateway.protocol import mcp
from gateway.upstream.channel import NO_HEADERS, Headers
from gateway.upstream.http.http_upstream import HttpUpstream


@lru_cache(maxsize=16)
def fixed_headers(version: str) -> Headers:
    """The headers of all messages of a version; "" before it is negotiated."""
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    return {**headers, mcp.PROTOCOL_VERSION: version} if version else headers


class HttpSession:
    """Shared by the requests and the streams of one session."""

    __slots__ = ("_fixed", "_id_line", "_prepared", "is_forgotten", "newest", "upstream")

    def __init__(self, upstream: HttpUpstream) -> None:
        self.upstream = upstream
        self.newest = NO_HEADERS
        """The headers of the last message that the server accepted: GET and DELETE need a credential too."""
        self.is_forgotten = False
        self._fixed = fixed_headers("")
        """The headers of all messages but the session id, shared by the sessions of a version."""
        self._id_line = b""
        """The header with the session id, as it is sent; empty without one."""
        self._prepared: Prepared | None = None

    def accepted(self, headers: Headers) -> None:
        """The server has accepted a message with these headers."""
        self.newest = headers

    def forgotten(self) -> None:
        """The server was proved to have forgotten the session."""
        self.is_forgotten = True

    def identify(self, session_id: str | None) -> None:
        """Send this id with all messages from now on. Raises ValueError for one that cannot be sent."""
        self._id_line = HeaderLines.of([(mcp.SESSION_ID, session_id)]).text if session_id else b""

    def negotiate(self, version: str) -> None:
        """Send this version with all messages from now on."""
        self._fixed = fixed_headers(version)

    @property
    def id(self) -> str | None:
        """The id that the server gave the session."""
        return self._id_line[len(mcp.SESSION_ID) + 2 : -2].decode() or None

    def headers(self, given: Headers) -> dict[str, str]:
        """All headers of one message."""
        whole = {**given, **self._fixed}  # the session's own win over what the route forwards
        if (session_id := self.id) is not None:
            whole[mcp.SESSION_ID] = session_id
        return whole

    def get(self, headers: Headers, listener: ReplyListener, *, last_event_id: str = "") -> PendingRequest:
        """GET a stream, with the newest accepted credential: that of the call may have expired."""
        whole = self.headers(self.newest or headers) | {"Accept": "text/event-stream"}
        del whole["Content-Type"]
        if last_event_id:
            whole[mcp.LAST_EVENT_ID] = last_event_id
        return self.upstream.client.begin("GET", self.upstream.endpoint.url, whole, b"", listener)

    def post(
        self, message: bytes, headers: Headers, listener: ReplyListener, *, is_repeatable: bool = False
    ) -> PendingRequest:
        """POST a message whose reply goes to `listener`. The messages of a session often have the same head."""
        client = self.upstream.client
        prepared = self._prepared = client.prepared(self.upstream.endpoint.url, headers, self._fixed, self._prepared)
        sending: Sending = "repeatable" if is_repeatable else "usual"
        return client.begin_prepared(prepared, self._id_line, message, listener, sending=sending)

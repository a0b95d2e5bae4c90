"""Every exception of the gateway.

GatewayError                  what a client can be told: JSON-RPC `code`, HTTP `status`, `message`, `data`
├── DownstreamError           the client's doing; never our log's business
│   ├── ParseError            -32700  400  not JSON
│   ├── InvalidRequest        -32600  400  not a JSON-RPC request
│   ├── InvalidParams         -32602  400  parameters or `_meta` are wrong
│   ├── InvalidState          -32602  400  requestState does not open; says the same for every cause
│   ├── HeaderMismatch        -32020  400  a header differs from the body
│   ├── MissingCapability     -32021  400  the call needs what the client did not declare
│   ├── UnsupportedVersion    -32022  400
│   ├── MethodNotFound        -32601  404
│   ├── Unauthorized          -32600  401  no token, or one that is not accepted; carries WWW-Authenticate
│   ├── Forbidden             -32600  403  Host or Origin
│   ├── TooLarge              -32600  413
│   └── Busy                  -32603  429/503  a cap; carries Retry-After
├── UpstreamError             the upstream's doing; a JSON-RPC error in HTTP 200
│   ├── Unreachable           no connection, or no handshake
│   │   └── NoHandshake       it answers, but refuses `initialize`
│   ├── SessionLost           the upstream forgot its session (before it took the call)
│   ├── CallLost              the call was sent, its result will not come
│   │   └── CallGone          its session is gone, and the call with it
│   ├── CannotAsk             the upstream's mode cannot carry its own question
│   └── Refused               an HTTP status of the upstream that the client must see (401, 403)
├── NoKeys                    -32603  503  the issuer's keys cannot be had, so that no token can be verified
├── OwnerStalled              -32603  503  the replica that holds the call does not react; try again
│   └── OwnerSilent           this replica could not give it the request; that proves nothing about it
└── Stopping                  -32603  503  this replica is going away
LocalProtocolError            our own bug: an event that the exchange's table forbids
"""

from collections.abc import Mapping
from typing import Any

from gateway.protocol import mcp


class GatewayError(Exception):
    """Something that ends a request; only `downstream.rejections` turns it into a response."""

    code = mcp.INTERNAL_ERROR
    status = 200
    fix = "look for this requestId in the gateway's log"
    """The operator's next step, for the log: the message tells the client."""

    def __init__(self, message: str, *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.data = data
        self.headers: dict[str, str] = {}
        self.request_id: bytes | None = None
        """JSON of the id to answer with, where it is known only to the raiser."""


class DownstreamError(GatewayError):
    """The client's request cannot be served as it is."""

    code = mcp.INVALID_REQUEST
    status = 400
    rejection = "invalid_request"
    """Its name in the metrics."""


class ParseError(DownstreamError):
    """The body is not JSON (or not within its bounds)."""

    rejection = "parse_error"
    code = mcp.PARSE_ERROR


class InvalidRequest(DownstreamError):
    """The body is JSON, but no JSON-RPC request."""


class InvalidParams(DownstreamError):
    """`params` or its `_meta` lacks something or has the wrong shape."""

    rejection = "invalid_params"
    code = mcp.INVALID_PARAMS


class InvalidState(DownstreamError):
    """The one answer to every requestState that is not accepted; `reason` is for metrics and logs only."""

    code = mcp.INVALID_PARAMS

    def __init__(self, reason: str) -> None:
        super().__init__("Invalid or expired requestState", data={"reason": "invalid_request_state"})
        self.reason = reason


class HeaderMismatch(DownstreamError):
    """A mirrored header is missing, repeated, malformed or differs from the body."""

    rejection = "header_mismatch"
    code = mcp.HEADER_MISMATCH


class MissingCapability(DownstreamError):
    """The server asked for something that this client did not declare (basic/index, `_meta`)."""

    rejection = "missing_capability"
    code = mcp.MISSING_CAPABILITY

    def __init__(self, required: Mapping[str, Any], asked: str) -> None:
        names = ", ".join(sorted(required))
        super().__init__(
            f"The server sent {asked}, which needs the client capability {names}; declare it and call again. "
            "The call was ended and may have had effects",
            data={"requiredCapabilities": dict(required)},
        )


class UnsupportedVersion(DownstreamError):
    """The request names a protocol version that is not spoken here."""

    rejection = "unsupported_version"
    code = mcp.UNSUPPORTED_VERSION

    def __init__(self, requested: str) -> None:
        supported = list(mcp.SUPPORTED_VERSIONS)
        super().__init__(
            f"Unsupported protocol version {requested[:40]!r}; supported: {', '.join(supported)}",
            data={"supported": supported, "requested": requested},
        )


class MethodNotFound(DownstreamError):
    """The method does not exist in 2026-07-28."""

    rejection = "method_not_found"
    code = mcp.METHOD_NOT_FOUND
    status = 404


class Unauthorized(DownstreamError):
    """The caller is not known: `why` is one sentence without quotes, nothing of the token is in it (RFC 6750)."""

    rejection = "unauthorized"
    status = 401

    def __init__(self, why: str, *, has_token: bool) -> None:
        super().__init__(why, data={"reason": "unauthorized"})
        error = f' error="invalid_token", error_description="{why}"' if has_token else ""
        self.headers["WWW-Authenticate"] = f"Bearer{error}"


class Forbidden(DownstreamError):
    """Host or Origin is not one that this listener serves (DNS rebinding)."""

    rejection = "forbidden"
    status = 403


class TooLarge(DownstreamError):
    """The body is larger than `limits.body_bytes`."""

    rejection = "too_large"
    status = 413


class Busy(DownstreamError):
    """A cap is reached; others are not affected."""

    rejection = "busy"
    fix = "raise the limit that the message names, or add a replica"
    code = mcp.INTERNAL_ERROR

    def __init__(self, message: str, *, status: int, retry_after_seconds: int = 1) -> None:
        super().__init__(message, data={"reason": "busy"})
        self.status = status
        self.headers["Retry-After"] = str(retry_after_seconds)


class UpstreamError(GatewayError):
    """The upstream failed; the message names route, cause and what to check."""

    reason = "upstream_error"
    fix = "look into the upstream's own log at this time"
    is_counted = False
    """Whether the metrics have this one; who met it first counts it."""

    def __init__(self, message: str, *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, data={"reason": self.reason, **(data or {})})


class Unreachable(UpstreamError):
    """No connection to the upstream, or it did not finish its handshake in time; nothing was run."""

    reason = "upstream_unreachable"
    fix = "check that the server runs and that routes[].upstream is right; `mrtr-gateway probe URL` tells more"


class NoHandshake(Unreachable):
    """The upstream refuses `initialize`: it is no server of the handshake era, or it is none any more."""

    fix = "check the path of upstream.url; `mrtr-gateway probe URL` tells what the server speaks"


class SessionLost(UpstreamError):
    """The upstream refused the session id before it took the call; nothing was run."""

    reason = "session_lost"
    fix = (
        "nothing, if the server was restarted: the next call opens a session. If it is several instances without "
        "sticky sessions, give the route one instance's url"
    )


class CallLost(UpstreamError):
    """The call was sent and its result will not come; it may have had effects."""

    reason = "call_lost"
    fix = (
        "look into the upstream's own log for why it did not answer; for a server that is slow, not stuck, raise "
        "timeouts.idle_seconds. Check the call's effects before it is repeated"
    )


class CallGone(CallLost):
    """The upstream forgot the session under a call that it had taken; unlike SessionLost, it may have had effects."""

    reason = "session_lost"
    fix = "find out why the upstream restarted or dropped its sessions; check the call's effects before it is repeated"


class CannotAsk(UpstreamError):
    """The upstream asked in a mode in which an answer can never reach it."""

    reason = "upstream_cannot_ask"
    fix = "run the server with sessions (no stateless mode)"


class Refused(UpstreamError):
    """The upstream refused this request's credentials.

    Its status and challenge go to the client, unless the credentials are not the client's: then there is nothing that
    it could do about them.
    """

    reason = "upstream_refused"
    fix = (
        "check the credential: with credentials.mode `forward` it is the caller's own; with `replace` renew "
        "credentials.token or token_file, and send SIGHUP"
    )

    def __init__(self, message: str, *, status: int, challenge: str | None = None, is_clients: bool = True) -> None:
        super().__init__(message, data={"status": status})
        if not is_clients:
            return
        self.status = status
        if challenge is not None:
            self.headers["WWW-Authenticate"] = challenge


class NoKeys(GatewayError):
    """The keys that tokens are verified with cannot be had: nobody's token is good or bad until they can."""

    fix = "check principal.jwks_url, and that the issuer can be reached from here"

    status = 503

    def __init__(self, message: str) -> None:
        super().__init__(message, data={"reason": "no_keys"})
        self.headers["Retry-After"] = "10"


class OwnerStalled(GatewayError):
    """The replica that holds the call is there but does not serve it; the call may go on as soon as it does."""

    fix = (
        "look at that replica: is it out of CPU or connections, do its clock and its state.keys agree with this one's?"
    )

    status = 503

    def __init__(self, member: str, why: str = "does not react") -> None:
        super().__init__(
            f"The replica {member} that holds this call {why}; the call may still wait there, call again with the "
            "same requestState and inputResponses",
            data={"reason": "owner_stalled"},
        )
        self.headers["Retry-After"] = "1"


class OwnerSilent(OwnerStalled):
    """This replica could not give the owner the request, and nothing proves that the owner is dead.

    `is_local`: the cause is here (descriptors, name resolution, local address), so it says nothing about the owner.
    `is_connected`: the owner's kernel accepted a connection, and its process did not react.
    """

    def __init__(self, member: str, why: str, *, is_local: bool = False, is_connected: bool = False) -> None:
        super().__init__(member, why)
        self.is_local = is_local
        self.is_connected = is_connected
        if is_local:
            self.fix = (
                "look at this replica, not at the owner: its open files (ulimit -n), its name service, the names in "
                "replica.peers, and the address in replica.listen, which its connections come from"
            )


class Stopping(GatewayError):
    """This replica shuts down and can neither finish nor hand over the call."""

    fix = "raise hold.drain_seconds if calls should have longer to end, or add a replica that takes them over"

    status = 503

    def __init__(self, message: str) -> None:
        super().__init__(message, data={"reason": "stopping"})
        self.headers["Retry-After"] = "1"


class LocalProtocolError(Exception):
    """An event that the exchange's table forbids in its state: a bug of ours, loud on purpose."""

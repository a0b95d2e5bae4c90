"""Every exception of the gateway.

A `DownstreamError` is caused by the client, and is not logged as an error. An `UpstreamError` is caused by the
upstream, and is a JSON-RPC error in HTTP 200. Any other `GatewayError` is a condition of the gateway itself.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

from gateway.protocol import mcp

MESSAGE_CHARACTERS: Final = 1000
"""The longest message of an error; most quotations in it are cut shorter."""
_OF_SESSIONS: Final = frozenset({401, 403, 404, 405})
"""The statuses that tell a legacy client more than that one request is refused: sign in, begin a new session."""

COUNTED_BY_CALLER: Final = (
    *("hold.max_calls", "sessions.max", "upstream.max_children"),
    "limits.calls_bytes_per_principal",
)
"""How the keys of limits begin that one caller may fill: Callers, on the status page, tells what each has."""


def clean(text: str, limit: int = MESSAGE_CHARACTERS) -> str:
    """Return the text as one printable line of at most `limit` characters.

    Messages quote clients, upstreams, peers and libraries, and end in replies, logs and terminals.
    """
    if len(text) <= limit and text.isprintable():
        return text
    shown = "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text[:limit])
    return shown + ("…" if len(text) > limit else "")


def hung(key: str) -> str:
    """Return the next step after an upstream was silent for longer than this key of the configuration allows."""
    return (
        "look into the upstream's own log and at its load, and restart it if it hangs; if it is only slow, raise "
        f"{key}; `mrtr-gateway probe URL` shows what it answers now"
    )


class GatewayError(Exception):
    """An error that ends a request; only `downstream.rejections` turns it into a response.

    Its message is cleaned here, whatever it quotes. A class whose messages may tell of the inside, such as an address,
    a name of a replica, or a limit, has a `brief` sentence.
    """

    code = mcp.INTERNAL_ERROR
    status = 200
    reason = ""
    """`data.reason` for the client, if the error has one."""
    rejection = ""
    """The metric label of an error that the client has caused."""
    retry_after_seconds = 0
    """When the client may try again; 0 if it is not told."""
    fix = "look for this requestId in the gateway's log"
    """The operator's next step; it goes to the log. The message goes to the client."""
    brief = "The gateway could not serve this request"
    """What clients are told with `errors: brief`; empty if they are told the message."""

    def __init__(
        self,
        message: str,
        *,
        data: Mapping[str, Any] | None = None,
        fix: str = "",
        status: int | None = None,
        brief: str = "",
    ) -> None:
        """`fix`, `status` and `brief` replace those of the class, where more is known."""
        self.fix = fix or self.fix
        self.brief = brief or self.brief
        self.status = self.status if status is None else status
        self.message = clean(message)
        super().__init__(self.message)
        self.data = {"reason": self.reason, **(data or {})} if self.reason else data
        seconds = self.retry_after_seconds
        self.headers = {"Retry-After": str(seconds)} if seconds else {}
        self.request_id: bytes | None = None
        """The request's id as JSON, if only the code that raised the error knows it."""

    def advise(self, fix: str) -> None:
        """Give the operator's next step as far as it is known by now."""
        self.fix = fix

    @property
    def label(self) -> str | None:
        """The reason in the line of the request in the log."""
        return self.reason or self.rejection or None

    @property
    def status_in_session(self) -> int:
        """The HTTP status if this refuses one message in a valid session of a legacy client over streamable HTTP.

        The Python SDK (1.10 and 1.30) ends its session, with every call that runs, on any status but 2xx and 404.
        """
        return self.status if self.status in _OF_SESSIONS else 200


class DownstreamError(GatewayError):
    """The client must change its request, or try again later."""

    code = mcp.INVALID_REQUEST
    status = 400
    brief = ""  # the message is about the request
    rejection = "invalid_request"


class ParseError(DownstreamError):
    """The body is not JSON, or exceeds the bounds for JSON."""

    rejection = "parse_error"
    code = mcp.PARSE_ERROR


class InvalidRequest(DownstreamError):
    """The body is JSON, but not a JSON-RPC request."""


class Notification(DownstreamError):
    """The body is a notification, which gets no response; 2026-07-28 defines none over HTTP."""


class IdInUse(InvalidRequest):
    """A request of the session that is not answered yet has this id: no answer could tell the two apart."""

    def __init__(self) -> None:
        super().__init__(
            "A request with this id is still open in the session; every request needs its own id", status=200
        )


class NotAllowed(InvalidRequest):
    """The HTTP method is not served here, or not for this client."""

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message, status=405)
        self.headers["Allow"] = allowed


def not_served(method: str, allowed: str) -> NotAllowed:
    """The error for an HTTP method that the endpoint of a route does not serve."""
    return NotAllowed(f"HTTP {method[:20]} is not served here: a modern endpoint takes POST only", allowed=allowed)


class InvalidParams(DownstreamError):
    """`params` or `_meta` lacks a field, or a field has the wrong type or value."""

    rejection = "invalid_params"
    code = mcp.INVALID_PARAMS


class InvalidState(DownstreamError):
    """The answer to every requestState that is not accepted; only metrics and logs see the `reason`."""

    code = mcp.INVALID_PARAMS

    def __init__(self, reason: str) -> None:
        super().__init__("Invalid or expired requestState", data={"reason": "invalid_request_state"})
        self.reason = reason

    @property
    def is_foreign(self) -> bool:
        """Whether it does not even look sealed with a key of this gateway."""
        return self.reason in ("malformed", "too_large", "unknown_key")


class OutOfTime(InvalidState):
    """A message of another replica is authentic, and sealed too long ago or in the future, by this replica's clock."""

    def __init__(self, reason: str, sender: str, ahead_seconds: float) -> None:
        super().__init__(reason)
        self.sender = sender
        self.ahead_seconds = ahead_seconds


class HeaderMismatch(DownstreamError):
    """A mirrored header is missing, repeated, malformed or differs from the body."""

    rejection = "header_mismatch"
    code = mcp.HEADER_MISMATCH


class MissingCapability(DownstreamError):
    """The server asked for a capability that this client did not declare (basic/index, `_meta`)."""

    rejection = "missing_capability"
    code = mcp.MISSING_CAPABILITY

    def __init__(self, required: Mapping[str, Any], asked: str) -> None:
        names = ", ".join(sorted(required))
        super().__init__(
            f"The server sent {asked}, which needs the client capability {names}. The gateway ended the call, which "
            "may have had effects; declare the capability and call again",
            data={"requiredCapabilities": dict(required)},
        )


class TasksUndeclared(DownstreamError):
    """The request needs the tasks extension, which it did not declare."""

    rejection = "missing_capability"
    code = mcp.MISSING_CAPABILITY

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs the extension {mcp.TASKS}; declare it in the clientCapabilities of this request",
            data={"requiredCapabilities": {"extensions": {mcp.TASKS: {}}}},
        )


class UnknownTask(InvalidParams):
    """The answer to every taskId that is not accepted, whatever the reason: it must not tell which tasks exist."""

    def __init__(self) -> None:
        super().__init__("Unknown or expired taskId")


class UnsupportedVersion(DownstreamError):
    """The request names a protocol version that the gateway does not support."""

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
    status = 404  # required (basic/transports/streamable-http, Protocol Version Header)

    @property
    def status_in_session(self) -> int:
        """See `GatewayError`; to a legacy client, 404 would mean that the session does not exist."""
        return 200


class Unauthorized(DownstreamError):
    """The caller is not authenticated; `why` is one sentence without quotes or any part of the token (RFC 6750)."""

    rejection = reason = "unauthorized"
    status = 401

    def __init__(self, why: str, *, has_token: bool) -> None:
        super().__init__(why)
        # RFC 6750, 3.1: a request without a token is told no error code.
        error = f' error="invalid_token", error_description="{why}"' if has_token else ""
        self.headers["WWW-Authenticate"] = f"Bearer{error}"


class Forbidden(DownstreamError):
    """This listener does not serve the request's Host or Origin (DNS rebinding)."""

    rejection = "forbidden"
    status = 403


class TooLarge(DownstreamError):
    """The body is larger than `limits.body_bytes`."""

    brief = "The body is too large"
    rejection = "too_large"
    status = 413


class UnsupportedEncoding(DownstreamError):
    """The body has a Content-Encoding, which no client of MCP needs and many servers refuse."""

    rejection = "unsupported_encoding"
    status = 415

    def __init__(self) -> None:
        super().__init__("The gateway takes no Content-Encoding; send the body as it is")
        self.headers["Accept-Encoding"] = "identity"  # with 415, it says what is accepted (RFC 9110, 15.5.16)


class Busy(DownstreamError):
    """A limit is reached: that of one caller (429), or else one of the gateway."""

    rejection = reason = "busy"
    fix = "raise the limit that the message names, or add a replica"
    code = mcp.INTERNAL_ERROR

    def __init__(
        self,
        message: str,
        *,
        status: int = 503,
        retry_after_seconds: int = 1,
        reached: Mapping[str, float] | None = None,
        is_shared: bool = False,
    ) -> None:
        """`reached` are the keys to raise, with their values; `is_shared` if all without a credential share them."""
        raised = " or ".join(f"{key} ({value:.15g} when it happened)" for key, value in (reached or {}).items())
        mine = "You have as much under way as one caller may have; let some of it end first, or answer it"
        why = ". You sent no credential, and all such callers count as one" if is_shared else ""
        own = ", or give each client a credential of its own" if is_shared else ""
        is_counted = any(key.startswith(COUNTED_BY_CALLER) for key in reached or ())
        look = "see Callers on the status page: stop one that should not have so many, or " if is_counted else ""
        super().__init__(
            message + why,
            status=status,
            brief=mine + why if status == 429 else "The gateway is busy; try again later",
            fix=f"{look}raise {raised}, or add a replica{own}" if raised else "",
        )
        self.headers["Retry-After"] = str(retry_after_seconds)


class UpstreamError(GatewayError):
    """The upstream failed; the message names route, cause and what to check."""

    reason = "upstream_error"
    brief = "The server behind this route failed"
    fix = "look into the upstream's own log at this time"
    is_counted = False
    """Whether the metrics already count this error."""


class Unreachable(UpstreamError):
    """The upstream cannot be reached, or did not finish the handshake in time; nothing was run."""

    reason = "upstream_unreachable"
    brief = "The server behind this route cannot be reached"
    fix = "check that the server runs and that routes[].upstream is right; `mrtr-gateway probe URL` shows details"


class ChildUnreachable(Unreachable):
    """The upstream is a command, which cannot be started, or whose process does not finish the handshake."""

    fix = "check that the command is right; `mrtr-gateway probe --stdio -- COMMAND` shows details"


class DescriptorsShort(Unreachable):
    """This process has no file descriptor left for it, which says nothing of the upstream."""

    brief = "The gateway is busy; try again later"
    fix = (
        "raise the hard limit (LimitNOFILE, `ulimit -Hn`) to 2 x hold.max_calls + limits.connections + 300, or lower "
        "these"
    )
    is_counted = True


class NoHandshake(Unreachable):
    """The upstream refuses `initialize`: it is not a legacy MCP server, or not any more."""

    brief = "The server behind this route refused the connection"
    fix = "check the path of upstream.url; `mrtr-gateway probe URL` shows which protocol the server speaks"


class Redirected(Unreachable):
    """The upstream redirects requests to where the gateway does not follow."""

    fix = "set upstream.url to the final address, which `mrtr-gateway probe URL` shows"


class SessionLost(UpstreamError):
    """The upstream refused the session id before it took the call; nothing was run."""

    reason = "session_lost"
    brief = "The server behind this route has ended its session; nothing was run, so call again"
    fix = (
        "if the server was restarted, do nothing: the next call opens a new session. If the url leads to several "
        "instances without sticky sessions, give the route the url of one instance; `mrtr-gateway probe URL` asks it"
    )


class CallLost(UpstreamError):
    """The call was sent, but its result will not come; it may have had effects."""

    reason = "call_lost"
    brief = "The call was lost; it may have had effects: check them before calling again"
    fix = (
        "look into the upstream's own log to see why it broke off; `mrtr-gateway probe URL` shows whether it answers "
        "now. Check the call's effects before repeating it"
    )

    @classmethod
    def by(cls, where: str, why: str) -> Self:
        """Return the error for what the server at `where` did, which leaves open whether the call was run."""
        return cls(f"{where} {why}; the call may have had effects")


class CallSilent(CallLost):
    """The upstream said nothing for so long that the call was given up."""

    fix = f"{hung('timeouts.idle_seconds of the route')}. Check the call's effects before repeating it"


class Unheeded(CallLost):
    """The upstream did not take a message, or did not answer a ping, in timeouts.answer_seconds."""

    fix = f"{hung('timeouts.answer_seconds')}. Check the call's effects before repeating it"


WRONG_ADDRESS: Final = (
    "If it never ended, its address in replica.peers is wrong, here or at another replica, which loses its calls"
)
IF_HUNG: Final = "If it hangs, restart it: its calls then continue elsewhere where they can"


class OwnerLost(CallLost):
    """The replica that held the call has ended."""

    reason = "owner_lost"

    def __init__(self, owner: str, message: str) -> None:
        fix = (
            f"see why {owner} ended, in its own log or that of what runs it (`journalctl -u mrtr-gateway`, `kubectl "
            f"logs --previous`), and check the call's effects before repeating it. {WRONG_ADDRESS}. A call survives "
            "if the server keeps event ids, or if its tool may run twice: docs/continuity.md"
        )
        super().__init__(message, fix=fix)


def bug() -> CallLost:
    """Return the error for a call that a bug has ended; whoever catches the bug logs and counts it."""
    return CallLost("Internal error of the gateway; its log says more. The call may have had effects")


class TaskCancelled(CallLost):
    """The task of the call was cancelled."""

    brief = ""

    def __init__(self) -> None:
        super().__init__("The server cancelled the task of this call, which may have had effects")


class CallGone(CallLost):
    """The upstream lost the session while the call ran; unlike with SessionLost, the call may have had effects."""

    reason = "session_lost"
    fix = (
        "find out why the upstream restarted or dropped its sessions; `mrtr-gateway probe URL` shows whether it "
        "answers now. Check the call's effects before repeating it"
    )


class CannotAsk(UpstreamError):
    """The upstream asked a question in a mode in which the answer cannot reach it."""

    reason = "upstream_cannot_ask"
    brief = "The server behind this route asked the user, but an answer can never reach it"
    fix = "run the server with sessions, not in stateless mode"


class Refused(UpstreamError):
    """The upstream refused this request's credentials.

    Its status, challenge and nonce (RFC 9449) go to the client only if the credentials are the client's own. Otherwise
    the client could not do anything about them.
    """

    reason = "upstream_refused"
    brief = "The server behind this route refused the credentials"
    fix = (
        "check the credential: with credentials.mode `forward` it is the caller's own; with `replace`, renew "
        "credentials.token or token_file, then run `kill -HUP PID`"
    )

    def __init__(
        self,
        message: str,
        *,
        status: int,
        challenge: str | None = None,
        nonce: str | None = None,
        is_clients: bool = True,
    ) -> None:
        super().__init__(message, data={"status": status}, status=status if is_clients else None)
        if not is_clients:
            return
        if challenge is not None:
            self.headers["WWW-Authenticate"] = challenge
        if nonce is not None:
            self.headers["DPoP-Nonce"] = nonce


class NoKeys(GatewayError):
    """The issuer's keys are not available: until they are, the gateway can neither accept nor reject a token."""

    reason = "no_keys"
    brief = ""
    retry_after_seconds = 10
    fix = "check principal.jwks_url, and check that this host can reach the issuer"
    status = 503


class OwnerStalled(GatewayError):
    """The replica that holds the call is alive but does not serve the request; a retry may succeed."""

    reason = "owner_stalled"
    brief = (
        "The replica that holds this call does not serve the request; the call may still wait there: call again with "
        "the same requestState and inputResponses"
    )
    retry_after_seconds = 1
    fix = "check that replica: it may lack CPU time or connections; `mrtr-gateway doctor --config FILE` asks it"
    status = 503

    def __init__(self, member: str, why: str = "does not react") -> None:
        super().__init__(
            f"The replica {member} that holds this call {why}; the call may still wait there: call again with the "
            "same requestState and inputResponses"
        )
        self.why = why


class StateFromFuture(OwnerStalled):
    """A genuine state was sealed by a replica whose clock is ahead: it opens once the clocks agree, or elsewhere."""

    fix = "compare the clocks of the replicas, for example with chronyc tracking: they must agree to within 60 s"

    def __init__(self, member: str) -> None:
        if member:
            super().__init__(member, "has a clock that is more than 60 s ahead of this replica's")
        else:  # no replica holds the call
            GatewayError.__init__(
                self,
                "The replica that sealed this requestState has a clock that is more than 60 s ahead of this one's; "
                "call again with the same requestState and inputResponses",
            )


def ahead_or_behind(ahead_seconds: float) -> str:
    """How far a clock differs, in words."""
    return f"{abs(ahead_seconds):.0f} s {'ahead of' if ahead_seconds > 0 else 'behind'}"


def clock_fix(whose: str, ahead_seconds: float) -> str:
    """The operator's next step if the clock of another replica is so much ahead of this one's, or behind it."""
    return f"{whose}'s clock is {ahead_or_behind(ahead_seconds)} this replica's; {StateFromFuture.fix}"


class OwnerSilent(OwnerStalled):
    """This replica could not give the request to the owner, but nothing proves that the owner is dead.

    `is_local`: the cause is on this replica (descriptors, name resolution, local address), so it says nothing about
    the owner. `is_connected`: the owner's kernel accepted a connection, but its process did not respond.
    """

    def __init__(self, member: str, why: str, *, is_local: bool = False, is_connected: bool = False) -> None:
        super().__init__(member, why)
        self.is_local = is_local
        self.is_connected = is_connected
        if is_local:
            self.fix = (
                "check this replica, not the owner: its open files (ulimit -n), its name resolution, the names in "
                "replica.peers, and the address in replica.listen, from which it connects"
            )


class SessionStalled(OwnerStalled):
    """The replica that has the session of a legacy client is alive but does not serve the request."""

    brief = "The replica that has this session does not react; send the request again"

    def __init__(self, member: str, found: OwnerStalled) -> None:
        message = f"The replica {member} that has this session {found.why}; send the request again"
        GatewayError.__init__(self, message, fix=found.fix)


class TakenCallLost(OwnerStalled):
    """Another replica took a new call of this one, or a request of its session, and broke off its reply."""

    reason = "call_lost"
    brief = CallLost.brief
    retry_after_seconds = 0  # a repeated call may run twice
    fix = "find out why that replica ended or hangs; check the call's effects before repeating it"

    def __init__(self, member: str, what: str = "to which another one gave this call", status: int = 503) -> None:
        message = f"The replica {member}, {what}, did not complete its reply; the call may have had effects"
        GatewayError.__init__(self, message, status=status)


class Stopping(GatewayError):
    """This replica shuts down, and can neither finish the call nor hand it over."""

    reason = "stopping"
    brief = "The gateway is shutting down; the request may have had effects"
    retry_after_seconds = 0  # a repeated call may run twice
    fix = (
        "raise hold.drain_seconds to give calls more time to end; other replicas take over only those that can be "
        "resumed or run again: docs/continuity.md"
    )
    status = 503


class ShuttingDown(Stopping):
    """This replica begins nothing new; `what` says what its client can do."""

    brief = ""
    retry_after_seconds = 1

    def __init__(self, what: str) -> None:
        super().__init__(f"The gateway is shutting down; {what}, another replica or a new process will answer")


class LocalProtocolError(Exception):
    """The exchange's table forbids the event in this state: a bug in the gateway."""

"""One request as its client sent it."""

import re
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw
from multidict import CIMultiDictProxy
from yarl import URL

from gateway import world
from gateway.http.known_call import known_call
from gateway.http.server.body import read_body
from gateway.http.server.request import HttpRequest
from gateway.http.upstream_headers import joined
from gateway.identity.principal import is_trusted, of_headers, parsed_address
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import DownstreamError
from gateway.protocol.header_mismatch import KnownValues
from gateway.protocol.request import ParsedBody, Request, check, read
from gateway.runtime.budget import Budget
from gateway.seal.claims import Bearer, Claims
from gateway.seal.peer_messages import PeerRequest
from gateway.seal.request_state import Envelope
from gateway.seal.request_state import check as check_state
from gateway.telemetry import ClientRequest, Operation, Span, Traces

_NO_URL: Final = URL()
_MAX_PROXIES: Final = 10
_NOTED_CHARACTERS: Final = 200


TRACE_VALUE: Final = re.compile(r"[\x20-\x7e]{1,8192}")
"""The values of trace context that the gateway gives to a propagator to parse."""


class Caller(msgspec.Struct, frozen=True):
    """The authenticated sender of a request."""

    principal: bytes
    distrusted_header: str | None
    """The header that names principals, if no trusted proxy set it: it counts for nothing and does not go upstream."""


class Incoming(msgspec.Struct, eq=False):
    """One request as its client sent it, wherever it arrived."""

    path: str
    headers: CIMultiDictProxy[str]
    remote: str | None
    body: bytes = b""
    peer_request: PeerRequest | None = None
    """The message that carried it here, if another replica forwarded it."""
    request_id: str = ""
    """The id of the HTTP request (`X-Request-Id`), given by the replica to which the client spoke."""
    exchange_id: str = ""
    """The id of the exchange that it begins or continues, as far as that is known."""
    method: str = "POST"
    url: URL = _NO_URL
    """The path and the query as the client wrote them; empty if another replica forwarded the request."""
    has_headers: bool = True
    """False if the gateway made it from a message without headers, so that there is nothing to compare."""
    span: Span | None = None
    """The span of its round; set after the checks, if requests are traced."""
    known: KnownValues | None = None
    """The values of `headers`, if these are known from an earlier request."""
    caller: Caller | None = None
    """Set once the caller is authenticated."""
    opened: ParsedBody | DownstreamError | None = None
    """The outcome of `parsed`; an error is never raised itself, because its traceback would lead back here and keep
    the body."""
    checked: Request | None = None
    """The outcome of `request`."""
    state: Envelope | None = None
    """What the state in the body says, if all of it was checked before the round began."""
    rpc_method: str | None = None
    """The JSON-RPC method in the body, with its tool, prompt or URI: their beginnings, for log and status page. Empty
    if it has none, None until someone asks."""
    target: str | None = None
    in_session: bool = False
    """Whether it is a message in a valid session of a legacy client, which an error of this one message must not end
    (`GatewayError.status_in_session`). Set once the session is found."""

    def found_session(self) -> None:
        """The session is valid that this request names; a GET or DELETE is about the session itself."""
        self.in_session = self.method == "POST"

    @property
    def about(self) -> dict[str, str | None]:
        """What each line of the log about it has."""
        ids: dict[str, str | None] = {"request_id": self.request_id}
        return {**ids, "exchange_id": self.exchange_id} if self.exchange_id else ids

    def identify(self) -> str:
        """Return the id of the exchange that it begins, which the exchange takes over."""
        self.exchange_id = self.exchange_id or world.token_hex(16)
        return self.exchange_id

    def note(self) -> None:
        """Note what the body asks for, which is dropped before a long call ends."""
        # Apart from what serves the request: this changes nothing of how a body is read, or refused.
        if self.rpc_method is None:
            self.rpc_method = ""  # a body without a method, such as a batch, is not read again either
            with suppress(ValueError, RecursionError):
                message = jsonrpc.message(self.body)
                self.rpc_method = (message.method or "")[:_NOTED_CHARACTERS]
                field = mcp.TARGET_FIELD.get(message.method or "")
                if field is not None and isinstance(message.params, Raw):
                    target = jsonrpc.text(jsonrpc.fields(message.params).get(field))
                    self.target = target and target[:_NOTED_CHARACTERS]

    def parsed(self) -> ParsedBody:
        """Return the body as JSON-RPC, parsed at the first call only; raises ParseError or InvalidRequest."""
        if self.opened is None:
            try:
                self.opened = read(self.body)
            except DownstreamError as exc:
                self.opened = copy(exc)
                raise
        if isinstance(self.opened, DownstreamError):
            raise copy(self.opened)
        return self.opened

    def request(self) -> Request:
        """Return the modern request, checked at the first call only; raises the DownstreamError of what is wrong."""
        if self.checked is None:
            known = self.known
            if known is None:
                self.checked = check(self.parsed(), self.compared())
            elif known.call is None or (request := known.call.read(self.body)) is None:
                request = self.checked = check(self.parsed(), self.headers, known.repeated)
                known.call = known.call or known_call(self.body, request)
            else:
                self.checked = request
        return self.checked

    def receive_now(self, http: HttpRequest, limit: int) -> bool:
        """Take a plain body that came with its head, as small ones do; returns False for any other."""
        content, head = http.body, http.head
        if content.is_complete and not head.is_encoded and head.length <= limit and content.size <= limit:
            self.body = content.read_now()
        return bool(self.body)

    async def receive(self, http: HttpRequest, limit: int, seconds: float, budget: Budget) -> None:
        """Wait for the body, which no local variable has: what waits here waits until the call has ended.

        Raises TooLarge, UnsupportedEncoding, InvalidRequest or Busy.
        """
        self.body = await read_body(http, limit, seconds, budget)

    def open_state(self, states: Claims[Envelope], caller: Caller) -> Envelope:
        """Open the state in the body, and check all of it; raises InvalidState."""
        request = self.request()
        state = states.open(request.request_state or "")
        self.exchange_id = state.exchange
        check_state(state, self.bearer(caller), request)
        self.state = state
        return state

    def keep_once(self) -> None:
        """Keep the body as it was parsed, without white space; a second copy of a large one costs too much."""
        text = self.opened.text if isinstance(self.opened, ParsedBody) else b""
        if text and text is not self.body:
            self.body = text

    def drop_body(self, id_: bytes | None) -> None:
        """Keep nothing of the body but the request's id: what serves the request has taken the rest."""
        self.body, self.checked = b"", None
        self.opened = ParsedBody(None if id_ is None else Raw(bytes(id_)), "", {}, None)

    def bearer(self, caller: Caller) -> Bearer:
        """Who brings the claims in this request, or gets those in its reply."""

        def value_of(name: str) -> str | None:
            return joined(self.headers, name) if name != caller.distrusted_header else None

        return Bearer(self.path, caller.principal, world.wall(), partial(of_headers, value_of=value_of))

    def begin_span(self, traces: Traces, about: Operation, id_: Raw | bytes, meta: jsonrpc.Fields) -> Span:
        """Begin the span of this request; `meta` is the `_meta` of its params."""
        texts = {name: text for name, raw in meta.items() if (text := jsonrpc.text(raw)) is not None}
        headers = {name.lower(): joined(self.headers, name) or "" for name in self.headers}
        rpc_id = jsonrpc.text(Raw(id_)) or bytes(id_).decode()
        carried = _bounded(traces.carried(texts)), _bounded(traces.carried(headers))
        return traces.round(about, ClientRequest(rpc_id, self.request_id, self.remote, *carried))

    def begin_round_span(self, traces: Traces, route: str) -> None:
        """Begin the span of its round; a forwarded round continues its span on another replica."""
        request = self.request()
        if self.peer_request is not None:
            self.span = traces.elsewhere(self.peer_request.trace)
        else:
            about = Operation(request.method, request.target, request.said.version, route)
            self.span = self.begin_span(traces, about, request.id, request.said.user_meta)

    @property
    def rpc_id(self) -> bytes | None:
        """JSON of the request's id; None if the body has none, or has not been received."""
        try:
            id_ = self.parsed().id
        except DownstreamError as exc:
            return exc.request_id
        return bytes(id_) if id_ is not None else None

    def compared(self) -> CIMultiDictProxy[str] | None:
        """Return the headers, which must repeat the body; None if there are none."""
        return self.headers if self.has_headers else None


def received(http: HttpRequest, caller: Caller | None, body: bytes = b"", checked: Request | None = None) -> Incoming:
    """Return a request over HTTP whose client spoke to this replica; `body` and `checked` if they are known."""
    head = http.head
    return Incoming(
        head.path,
        head.headers,
        http.wire.remote,
        body,
        request_id=http.id,
        method=head.method,
        url=head.url,
        known=head.values,
        caller=caller,
        checked=checked,
    )


def client_address(peer: str | None, headers: CIMultiDictProxy[str], proxies: tuple[str, ...]) -> str | None:
    """The address nearest to the gateway that is no trusted proxy's: each of those tells of the one before it."""
    told = (joined(headers, "X-Forwarded-For") or "").rsplit(",", _MAX_PROXIES)
    while told and is_trusted(peer, proxies) and (address := parsed_address(told.pop().strip())) is not None:
        peer = str(address).partition("%")[0]  # a zone may be any text, and means nothing here
    return peer


def _bounded(values: Mapping[str, str]) -> dict[str, str]:
    """Drop the values that are too long or malformed for a propagator."""
    return {name: value for name, value in values.items() if TRACE_VALUE.fullmatch(value)}

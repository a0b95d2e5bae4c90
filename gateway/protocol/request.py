"""Checks one modern request: it turns a body with its headers into a `Request`.

The order of the checks is part of the protocol (JSON, JSON-RPC shape, `_meta`, headers against body, version,
method); the client gets the error of the first one that fails.

Sources: specification 2026-07-28 basic/index (`_meta`), basic/transports/streamable-http (Request Metadata, Server
Validation), server/utilities/logging.
"""

from collections.abc import ItemsView
from typing import Final, Literal

import msgspec
from msgspec import Raw

from gateway.protocol import header_mismatch, jsonrpc, mcp
from gateway.protocol.errors import (
    DownstreamError,
    InvalidParams,
    InvalidRequest,
    InvalidState,
    MethodNotFound,
    Notification,
    ParseError,
    UnsupportedVersion,
)
from gateway.protocol.header_mismatch import HeaderValues, Repeated
from gateway.protocol.json_text.json_bounds import MAX_DEPTH, TooMany, check_bounds, may_nest_deeper
from gateway.protocol.request_meta import Declarations, declarations, meta_of

_OURS: Final = ("_meta", "inputResponses", "requestState", "task")
"""Params that do not go upstream; `task` would start a 2025-11-25 task, which modern clients do not understand."""
_ANSWERING: Final = frozenset({mcp.TASKS_UPDATE, mcp.TASKS_INPUT})
_USUAL_DIGITS: Final = 20
_QUOTE: Final = b'"'[0]
_NO_ANSWERS: Final[jsonrpc.Fields] = {}
_NO_ID: Final = Raw(b"null")
_NOTHING: Final = Raw(b"")


class ParsedBody(msgspec.Struct, frozen=True):
    """A JSON-RPC body, opened as far as `_meta`; what 2026-07-28 requires is not checked yet."""

    id: Raw | None
    method: str
    params: jsonrpc.Fields
    meta: jsonrpc.Fields | None
    declarations: Declarations | None = None
    """What `meta` says, if it is valid."""
    tool: bytes | None = None
    """JSON of the name of the tool, if this is the usual call, or the usual retry; then `params` lacks `_meta`."""
    text: bytes = b""
    """The body without white space, of which the rest are views; empty if it is not known."""

    @property
    def target(self) -> str | None:
        """The text that `Mcp-Name` repeats: of a tool, a prompt, a URI or a task."""
        field = "taskId" if self.method.startswith("tasks/") else mcp.TARGET_FIELD.get(self.method)
        return jsonrpc.text(self.params.get(field)) if field is not None else None


class TextParams(msgspec.Struct, frozen=True, gc=False):
    """Params as one text, opened by whoever reads them: seldom are they read, and opened they take more memory."""

    text: bytes

    def items(self) -> ItemsView[str, Raw]:
        """As of `Fields`, like `get`: each one opens the text anew."""
        return jsonrpc.fields(self.text).items()

    def get(self, key: str) -> Raw | None:
        """One value, if it is there."""
        return jsonrpc.fields(self.text).get(key)


Params = jsonrpc.Fields | TextParams


class Request(msgspec.Struct, frozen=True, gc=False):
    """A checked modern request.

    `params` goes upstream: it lacks `_meta`, `inputResponses` and `requestState`. `target` is the tool, prompt or URI,
    or empty.
    """

    id: Raw
    method: str
    params: Params
    target: str
    said: Declarations
    """What `_meta` says; the requests of one client often share it."""
    input_responses: jsonrpc.Fields | None = None
    request_state: str | None = None
    task: Raw | None = None
    """The `task` parameter of 2025-11-25; clients of the extension do not send it."""

    @property
    def params_size(self) -> int:
        """How many bytes the params take."""
        params = self.params
        return len(params.text) if isinstance(params, TextParams) else sum(map(len, params.values()))

    def held(self) -> "Request":
        """The same for a call that waits long: its body, of which each value is a part, need not stay in memory.

        What only the first round needs is gone: its id, which each leg has of its own, what the pool key holds, the
        answers that it brought.
        """
        params = self.params
        text = params if isinstance(params, TextParams) else TextParams(jsonrpc.exact(jsonrpc.encode(params)))
        return self._shrunk(_NO_ID, text)

    def taken(self) -> "Request":
        """The same for a retry whose answers the call has taken: nothing of its body stays in memory but the id."""
        return self._shrunk(self.id.copy(), {})

    def _shrunk(self, id_: Raw, params: Params) -> "Request":
        """The same with these, and without what only the first round needs."""
        answers = None if self.input_responses is None else _NO_ANSWERS
        return msgspec.structs.replace(
            self, id=id_, params=params, said=self.said.held(), input_responses=answers, task=None
        )


class _UsualParams(msgspec.Struct, gc=False):
    name: Raw
    arguments: Raw
    meta: Raw = msgspec.field(name="_meta")
    responses: Raw = msgspec.field(name="inputResponses", default=_NOTHING)
    state: Raw = msgspec.field(name="requestState", default=_NOTHING)


class _UsualCall(msgspec.Struct, gc=False):
    jsonrpc: Literal["2.0"]
    id: Raw
    method: Literal["tools/call"]
    params: _UsualParams


decode_usual = msgspec.json.Decoder(_UsualCall).decode
_CALLS: Final = b'"method":"tools/call"'
_USUAL: Final = b'{"jsonrpc":"2.0","id":,"method":"tools/call","params":{"name":,"arguments":,"_meta":}}'
_OF_RETRY: Final = b',"inputResponses":,"requestState":'


def _usual_call(body: bytes) -> ParsedBody | None:
    """Open a body that calls a tool, or answers its questions, and is as short as it can be; None for any other body.

    As the values' lengths add up to the body's, it has no other members, no white space, and no member twice.
    """
    if body.find(_CALLS) < 0:  # the decoder would find out as well, but takes several times as long
        return None
    try:
        if not body.isascii():
            _ = body.decode()
        call = decode_usual(body)
        params, id_ = call.params, call.id
        name, arguments, meta = params.name, params.arguments, params.meta
        more = len(body) - len(_USUAL) - len(id_) - len(name) - len(arguments) - len(meta)
        if more:  # answers and a state, and nothing else
            answers, state = bytes(params.responses), bytes(params.state)
            is_retry = more == len(_OF_RETRY) + len(answers) + len(state) and answers and state[:1] == b'"'
            if not is_retry or may_nest_deeper(answers, MAX_DEPTH - 2):
                return None
        if not (bytes(id_).isdigit() and len(id_) < _USUAL_DIGITS) and not jsonrpc.is_id(id_):
            return None
        tool, data = bytes(name), bytes(arguments)
        opened, said, is_shallow = meta_of(meta)
    except (ValueError, RecursionError, DownstreamError):
        return None
    if not is_shallow or tool[0] != _QUOTE or may_nest_deeper(data, MAX_DEPTH - 2):
        return None
    fields = {"name": name, "arguments": arguments}
    if more:
        fields["inputResponses"], fields["requestState"] = params.responses, params.state
    return ParsedBody(id_, call.method, fields, opened, said, tool, body)


def members(body: bytes) -> tuple[jsonrpc.Fields, Raw | bytes]:
    """Open a body one level, as `jsonrpc.compact` does; raises ParseError or InvalidRequest."""
    try:
        check_bounds(body)
        return jsonrpc.compact(body)
    except jsonrpc.RepeatedKey as exc:
        error = InvalidRequest("The request repeats a key; send each key once")
        error.request_id = jsonrpc.id_of(exc.opened)
        raise error from exc
    except msgspec.ValidationError as exc:
        raise InvalidRequest("The body must be one JSON-RPC object; batches were removed from MCP") from exc
    except TooMany as exc:
        raise InvalidRequest(f"The body has {exc}; send fewer in one request") from exc
    except ValueError as exc:
        raise ParseError(f"The body is not valid JSON: {exc}") from exc


def read(body: bytes) -> ParsedBody:
    """Open a body; raises ParseError or InvalidRequest.

    This costs time: read a body once, and only after the caller is verified, if callers are verified.
    """
    usual = _usual_call(body)
    if usual is not None:
        return usual
    opened, text = members(body)
    id_, method = jsonrpc.id_of(opened), jsonrpc.text(opened.get("method"))
    try:
        return _shape(opened, id_, method, bytes(text))
    except DownstreamError as exc:
        exc.request_id = id_
        raise


def _shape(opened: jsonrpc.Fields, id_: bytes | None, method: str | None, text: bytes) -> ParsedBody:
    if bytes(opened.get("jsonrpc", b"")) != b'"2.0"':
        raise InvalidRequest('"jsonrpc" must be "2.0"')
    if method is None:
        if "result" in opened or "error" in opened:
            raise InvalidRequest("A client must not send JSON-RPC responses; put the answers into inputResponses")
        raise InvalidRequest('"method" must be a string')
    if "id" in opened and id_ is None:
        raise InvalidRequest('"id" must be a string or an integer')
    params = jsonrpc.object_of(opened["params"], '"params"', InvalidRequest) if "params" in opened else {}
    raw_id = Raw(id_) if id_ is not None else None
    if "_meta" not in params:
        return ParsedBody(raw_id, method, params, None, text=text)
    meta = meta_of(params["_meta"])
    return ParsedBody(raw_id, method, params, meta.members, meta.declarations, text=text)


def check(parsed: ParsedBody, headers: HeaderValues | None, repeated: Repeated | None = None) -> Request:
    """Check a modern request; raises the DownstreamError of the first check that fails, or Notification.

    `headers` is None if it came without any, over stdio.
    `repeated` is what the body must say to agree with `headers`; if it does not, these are compared in full.
    """
    if parsed.id is None:
        raise Notification(f"{parsed.method[:80]} is a notification")
    # If `_meta` was not valid, it is read again for its error.
    said = parsed.declarations or declarations(parsed.meta or {})
    method, tool = parsed.method, parsed.tool
    params = parsed.params
    if repeated is not None and tool is not None and repeated[:3] == (said.version, method, tool):
        target: str | None = repeated.target
    else:
        target = parsed.target
        if headers is not None:
            header_mismatch.check(method, target, said.version, headers)
    if said.version not in mcp.SUPPORTED_VERSIONS:
        raise UnsupportedVersion(said.version)
    # SEP-2322's tasks are withdrawn for clients of the extension.
    is_first_form = method in mcp.FIRST_FORM_METHODS and said.declared.legacy_tasks and not said.declared.tasks
    if method not in mcp.METHODS and not is_first_form:
        raise MethodNotFound(f"Method not found: {method[:80]}")
    asking = method in mcp.ASKING
    if not asking:
        target = ""
    elif target is None:
        raise InvalidParams(f'{method} needs "params.{mcp.TARGET_FIELD[method]}", a string')
    answers = params.get("inputResponses") if asking or method in _ANSWERING else None
    responses = _input_responses(answers) if answers is not None else None
    sealed = params.get("requestState") if asking else None
    state = jsonrpc.text(sealed) if sealed is not None else None
    if sealed is not None and state is None:
        raise InvalidState("malformed")
    if tool is None or answers is not None:
        params = {key: value for key, value in params.items() if key not in _OURS}
    return Request(parsed.id, method, params, target, said, responses, state, parsed.params.get("task"))


def _input_responses(raw: Raw) -> jsonrpc.Fields:
    responses = jsonrpc.object_of(raw, '"params.inputResponses"', InvalidParams, InvalidParams)
    for key, value in responses.items():
        if not bytes(value).startswith(b"{"):
            raise InvalidParams(f"inputResponses[{key[:80]!r}] must be an object: the result of that input request")
    return responses

"""Checks one modern request: it turns a body with its headers into a `Request`.

The order of the checks is part of the protocol (JSON, JSON-RPC shape, `_meta`, headers against body, version,
method); the client gets the error of the first one that fails.

Sources: specification 2026-07-28 basic/index (`_meta`), basic/transports/streamable-http (Request Metadata, Server
Validation), server/utilities/logging.
"""

import re
from functools import _lru_cache_wrapper, lru_cache
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from gateway.protocol import header_mismatch, jsonrpc, mcp
from gateway.protocol.errors import (
    DownstreamError,
    InvalidParams,
    InvalidRequest,
    InvalidState,
    MethodNotFound,
    ParseError,
    UnsupportedVersion,
)
from gateway.protocol.header_mismatch import HeaderValues, Repeated

T = TypeVar("T")
_VERSION: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_PROTOCOL_META: Final = frozenset(
    {
        mcp.META_VERSION,
        mcp.META_CLIENT_INFO,
        mcp.META_CAPABILITIES,
        mcp.META_LOG_LEVEL,
        mcp.META_PROGRESS_TOKEN,
    }
)
_OURS: Final = ("_meta", "inputResponses", "requestState", "task")
"""Params that do not go upstream; `task` would start a 2025-11-25 task, which modern clients do not understand."""
_ANSWERING: Final = frozenset({mcp.TASKS_UPDATE, mcp.TASKS_INPUT})
_PROGRESS_TOKEN: Final = mcp.META_PROGRESS_TOKEN.encode()
_USUAL_DIGITS: Final = 20
_USUAL_DEPTH: Final = 6
"""In `_meta`; with the two levels around it, this is within the smallest `limits.json_depth`."""
_QUOTE: Final = b'"'[0]
_REMEMBERED: Final = 1_024
_MAX_DECLARATION_BYTES: Final = 16_384
_REMEMBERED_BYTES: Final = 1_024
_UNKNOWN_CLIENT: Final = Raw(b'{"name":"unknown","version":"0"}')
"""`clientInfo` is optional in 2026-07-28 and required by `initialize`."""


_NO_META: Final[jsonrpc.Fields] = {}
_NO_ID: Final = Raw(b"null")


class Capabilities(msgspec.Struct, frozen=True):
    """The kinds of questions that the client of one request declared it can answer."""

    form: bool = False
    url: bool = False
    sampling: bool = False
    sampling_tools: bool = False
    roots: bool = False
    tasks: bool = False
    """The extension io.modelcontextprotocol/tasks."""
    legacy_tasks: bool = False
    """The tasks of 2025-11-25, which SEP-2322 extended first."""


class ParsedBody(msgspec.Struct, frozen=True):
    """A JSON-RPC body, opened as far as `_meta`; what 2026-07-28 requires is not checked yet."""

    id: Raw | None
    method: str
    params: jsonrpc.Fields
    meta: jsonrpc.Fields | None
    declarations: "_Declarations | None" = None
    """What `meta` says, if it is valid."""
    tool: bytes | None = None
    """JSON of the name of the tool, if this is the usual call, whose numbers were checked."""


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A checked modern request.

    `params` goes upstream: it lacks `_meta`, `inputResponses` and `requestState`. `user_meta` is the part of `_meta`
    that goes upstream: it lacks the per-request protocol fields. `target` is the tool, prompt or URI, or empty.
    """

    id: Raw
    method: str
    version: str
    params: jsonrpc.Fields
    user_meta: jsonrpc.Fields
    target: str
    client_info: Raw
    capabilities: Raw
    declared: Capabilities
    log_level: str | None
    progress_token: Raw | None
    input_responses: jsonrpc.Fields | None
    request_state: str | None
    task: Raw | None = None
    """The `task` parameter of 2025-11-25; clients of the extension do not send it."""

    def held(self) -> "Request":
        """The same for a call that waits long: its body, of which each value is a part, need not stay in memory.

        What only the first round needs is gone: its id, which each leg has of its own, and what the pool key holds.
        """
        return msgspec.structs.replace(
            self,
            id=_NO_ID,
            params={key: value.copy() for key, value in self.params.items()},
            user_meta={key: value.copy() for key, value in self.user_meta.items()} if self.user_meta else _NO_META,
            progress_token=self.progress_token and self.progress_token.copy(),
            client_info=_UNKNOWN_CLIENT,
            capabilities=jsonrpc.EMPTY,
        )


class _Declared(msgspec.Struct):
    elicitation: dict[str, Raw] | None = None
    sampling: dict[str, Raw] | None = None
    roots: dict[str, Raw] | None = None
    tasks: dict[str, Raw] | None = None
    extensions: dict[str, Raw] | None = None


_decode_declared = msgspec.json.Decoder(_Declared).decode


def _repeated_key(body: bytes) -> InvalidRequest:
    error = InvalidRequest("The request repeats a key; send each key once")
    error.request_id = _usable_id(jsonrpc.fields(body))
    return error


class _UsualParams(msgspec.Struct, gc=False):
    name: Raw
    arguments: Raw
    meta: Raw = msgspec.field(name="_meta")


class _UsualCall(msgspec.Struct, gc=False):
    jsonrpc: Literal["2.0"]
    id: Raw
    method: Literal["tools/call"]
    params: _UsualParams


_decode_usual = msgspec.json.Decoder(_UsualCall).decode
_USUAL: Final = b'{"jsonrpc":"2.0","id":,"method":"tools/call","params":{"name":,"arguments":,"_meta":}}'


def _usual_call(body: bytes, max_depth: int) -> ParsedBody | None:
    """Open a body that calls a tool, and is as short as it can be; None for any other body.

    As the values' lengths add up to the body's, it has no other members, no white space, and no member twice.
    """
    try:
        if not body.isascii():
            _ = body.decode()
        call = _decode_usual(body)
        params, id_ = call.params, call.id
        name, arguments, meta = params.name, params.arguments, params.meta
        if len(body) != len(_USUAL) + len(id_) + len(name) + len(arguments) + len(meta):
            return None
        if not (bytes(id_).isdigit() and len(id_) < _USUAL_DIGITS) and not jsonrpc.is_id(id_):
            return None
        tool, data = bytes(name), bytes(arguments)
        jsonrpc.check_numbers(data)  # for `check`, which refuses what this does
        opened, declarations, is_shallow = _meta(meta)
    except (ValueError, RecursionError, DownstreamError):
        return None
    if not is_shallow or tool[0] != _QUOTE or data.count(b"{") + data.count(b"[") > max_depth - 2:
        return None
    fields = {"name": name, "arguments": arguments, "_meta": meta}
    return ParsedBody(id_, call.method, fields, opened, declarations, tool)


def read(body: bytes, max_depth: int) -> ParsedBody:
    """Open a body; raises ParseError or InvalidRequest.

    This costs time: read a body once, and only after the caller is verified, if callers are verified.
    """
    try:
        usual = _usual_call(body, max_depth)
        if usual is not None:
            return usual
        jsonrpc.check_bounds(body, max_depth)
        opened = jsonrpc.distinct(body)
    except jsonrpc.RepeatedKey as exc:
        raise _repeated_key(body) from exc
    except msgspec.ValidationError as exc:
        raise InvalidRequest("The body must be one JSON-RPC object; batches were removed from MCP") from exc
    except jsonrpc.TooMany as exc:
        raise InvalidRequest(f"The body has {exc}; send fewer in one request") from exc
    except ValueError as exc:
        raise ParseError(f"The body is not valid JSON: {exc}") from exc
    usable_id = _usable_id(opened)
    try:
        return _shape(opened, Raw(usable_id) if usable_id is not None else None)
    except DownstreamError as exc:
        exc.request_id = usable_id
        raise


def _usable_id(opened: jsonrpc.Fields) -> bytes | None:
    id_ = opened.get("id")
    if id_ is None:
        return None
    data = bytes(id_)
    return data if (data.isdigit() and len(data) < _USUAL_DIGITS) or jsonrpc.is_id(id_) else None


def _shape(opened: jsonrpc.Fields, id_: Raw | None) -> ParsedBody:
    if bytes(opened.get("jsonrpc", b"")) != b'"2.0"':
        raise InvalidRequest('"jsonrpc" must be "2.0"')
    method = jsonrpc.text(opened.get("method"))
    if method is None:
        if "result" in opened or "error" in opened:
            raise InvalidRequest("A client must not send JSON-RPC responses; put the answers into inputResponses")
        raise InvalidRequest('"method" must be a string')
    if "id" in opened and id_ is None:
        raise InvalidRequest('"id" must be a string or an integer')
    return _with_meta(id_, method, _object(opened.get("params"), '"params"', InvalidRequest))


def _with_meta(id_: Raw | None, method: str, params: jsonrpc.Fields) -> ParsedBody:
    if "_meta" not in params:
        return ParsedBody(id_, method, params, None)
    meta, declarations, _ = _meta(params["_meta"])
    return ParsedBody(id_, method, params, meta, declarations)


def _meta(raw: Raw) -> "tuple[jsonrpc.Fields, _Declarations | None, bool]":
    """Open `_meta`: its members, what it says, and whether it is no deeper than what is usual.

    A client says the same in every request, so small ones are remembered. The results must not be changed.
    """
    data = bytes(raw)
    found = _METAS.get(data)
    if found is None:
        found = _opened_meta(raw, data)
        if len(data) <= _REMEMBERED_BYTES and data.find(_PROGRESS_TOKEN) < 0:  # else each differs
            if len(_METAS) >= _REMEMBERED:
                del _METAS[next(iter(_METAS))]
            _METAS[data] = found
    return found


_METAS: "Final[dict[bytes, tuple[jsonrpc.Fields, _Declarations | None, bool]]]" = {}


def _opened_meta(raw: Raw, data: bytes) -> "tuple[jsonrpc.Fields, _Declarations | None, bool]":
    meta = _object(raw, '"params._meta"', InvalidParams)
    try:
        jsonrpc.check_bounds(data, _USUAL_DEPTH)
    except ValueError:
        is_shallow = False
    else:
        is_shallow = True
    try:
        return meta, _declarations(meta) if mcp.META_VERSION in meta else None, is_shallow
    except DownstreamError:
        return meta, None, is_shallow


def _object(raw: Raw | None, name: str, error: type[DownstreamError]) -> jsonrpc.Fields:
    if raw is None:
        return {}
    try:
        return jsonrpc.distinct(raw)
    except jsonrpc.RepeatedKey as exc:
        raise InvalidRequest(f"{name} repeats a key; send each key once") from exc
    except jsonrpc.TooMany as exc:
        raise error(f"{name} has {exc}; send fewer in one request") from exc
    except ValueError as exc:
        raise error(f"{name} must be an object") from exc


def is_modern(parsed: ParsedBody, version_header: str | None) -> bool:
    """Whether the request is modern: the header or `_meta` names a modern version.

    Any version in `_meta` makes a request modern, because no legacy client sends that key; for an unknown version the
    client then gets the error that lists the supported ones.
    """
    if parsed.meta is not None and mcp.META_VERSION in parsed.meta:
        return True
    return names_modern(version_header)


def names_modern(version: str | None) -> bool:
    """Whether this is the name of a modern version, even of one that the gateway does not support."""
    version = (version or "").strip()
    return _VERSION.fullmatch(version) is not None and version >= mcp.MODERN


def check(parsed: ParsedBody, headers: HeaderValues, repeated: Repeated | None = None) -> Request:
    """Check a modern request; raises the DownstreamError of the first check that fails.

    `repeated` is what the body must say to agree with `headers`; if it does not, these are compared in full.
    """
    assert parsed.id is not None, "the caller answers notifications"
    meta = parsed.declarations or _declarations(parsed.meta or {})
    version, declared_raw, declared, log_level, progress_token, client_info, user_meta = meta
    tool = parsed.tool
    if repeated is not None and tool is not None and repeated[:3] == (version, parsed.method, tool):
        target: str | None = repeated.target
    else:
        target = header_mismatch.check(parsed.method, parsed.params, version, headers)
    if version not in mcp.SUPPORTED_VERSIONS:
        raise UnsupportedVersion(version)
    if parsed.method not in mcp.METHODS and not _is_first_form(parsed.method, declared):
        raise MethodNotFound(f"Method not found: {parsed.method[:80]}")
    asking = parsed.method in mcp.ASKING
    if asking and target is None:
        field = mcp.TARGET_FIELD[parsed.method]
        raise InvalidParams(f'{parsed.method} needs "params.{field}", a string')
    if asking and tool is None:
        _check_numbers(parsed.params)
    answers = asking or parsed.method in _ANSWERING
    params = parsed.params
    if tool is None:
        params = {key: value for key, value in params.items() if key not in _OURS}
    else:
        params = {"name": params["name"], "arguments": params["arguments"]}
    return Request(
        id=parsed.id,
        method=parsed.method,
        version=version,
        params=params,
        user_meta=user_meta,
        target=target or "",
        client_info=client_info,
        capabilities=declared_raw,
        declared=declared,
        log_level=log_level,
        progress_token=progress_token,
        input_responses=_input_responses(parsed.params) if answers and "inputResponses" in parsed.params else None,
        request_state=_request_state(parsed.params) if asking and "requestState" in parsed.params else None,
        task=parsed.params.get("task"),
    )


def _is_first_form(method: str, declared: Capabilities) -> bool:
    """Whether a method exists for this client: SEP-2322's tasks are withdrawn for clients of the extension."""
    return method in mcp.FIRST_FORM_METHODS and declared.legacy_tasks and not declared.tasks


class _Declarations(NamedTuple):
    """What the `_meta` of a request says."""

    version: str
    capabilities: Raw
    declared: Capabilities
    log_level: str | None
    progress_token: Raw | None
    client_info: Raw
    user_meta: jsonrpc.Fields
    """Not to be changed, since the requests of one client share it."""


def _declarations(meta: jsonrpc.Fields) -> _Declarations:
    version = _required_version(meta)
    capabilities, declared = _capabilities(meta)
    log_level, progress_token, client_info = _log_level(meta), _progress_token(meta), _client_info(meta)
    user_meta = {key: value for key, value in meta.items() if key not in _PROTOCOL_META}
    return _Declarations(version, capabilities, declared, log_level, progress_token, client_info, user_meta)


def _check_numbers(params: jsonrpc.Fields) -> None:
    """Refuse numbers that cannot be compared, since a requestState is bound to them, before anything runs."""
    for key, value in params.items():
        if key == "_meta" or bytes(value)[0] == _QUOTE:
            continue
        try:
            jsonrpc.check_numbers(value)
        except ValueError as exc:
            raise InvalidParams(
                f'"params.{key[:80]}" has a number that the gateway cannot handle ({exc}); send it as a string, or '
                "keep it within the range of a double and 4300 digits"
            ) from exc


def _required_version(meta: jsonrpc.Fields) -> str:
    version = jsonrpc.text(meta.get(mcp.META_VERSION))
    if version is None:
        raise InvalidParams(f'"params._meta" needs {mcp.META_VERSION!r}, a string like {mcp.MODERN!r}')
    return version


def _bounded(meta: jsonrpc.Fields, key: str) -> Raw | None:
    """A value of `_meta` within its bound; the session pool groups by it, so it stays in memory."""
    raw = meta.get(key)
    if raw is not None and len(bytes(raw)) > _MAX_DECLARATION_BYTES:
        raise InvalidParams(f"{key!r} is larger than {_MAX_DECLARATION_BYTES} bytes; send less")
    return raw


def _capabilities(meta: jsonrpc.Fields) -> tuple[Raw, Capabilities]:
    raw = _bounded(meta, mcp.META_CAPABILITIES)
    if raw is None:
        raise InvalidParams(f'"params._meta" needs {mcp.META_CAPABILITIES!r}, an object (it may be empty)')
    try:
        return raw, _remembered(_declared, bytes(raw))
    except jsonrpc.RepeatedKey as exc:
        raise InvalidParams(f"{mcp.META_CAPABILITIES!r} repeats a key; send each key once") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f"{mcp.META_CAPABILITIES!r} is not ClientCapabilities: {exc}") from exc


def _remembered(check: "_lru_cache_wrapper[T]", raw: bytes) -> T:
    """Apply a cached check, without caching a large declaration: a stranger could fill the cache with those."""
    return check(raw) if len(raw) <= _REMEMBERED_BYTES else check.__wrapped__(raw)


def capabilities_of(raw: bytes) -> Capabilities:
    """The kinds of questions that a client's declaration allows; raises ValueError or RecursionError."""
    return _remembered(_declared, raw)


@lru_cache(maxsize=1024)
def _declared(raw: bytes) -> Capabilities:
    """Cached, because a client declares the same capabilities in every request."""
    _check_keys(raw)
    opened = jsonrpc.inspect(_decode_declared, raw)
    elicitation = opened.elicitation
    return Capabilities(
        # An empty object means form mode (client/elicitation, Capabilities).
        form=elicitation is not None and (_declares(elicitation, "form") or not _declares(elicitation, "url")),
        url=_declares(elicitation, "url"),
        sampling=opened.sampling is not None,
        sampling_tools=_declares(opened.sampling, "tools"),
        roots=opened.roots is not None,
        tasks=_declares(opened.extensions, mcp.TASKS),
        legacy_tasks=opened.tasks is not None,
    )


def _declares(capability: jsonrpc.Fields | None, mode: str) -> bool:
    return capability is not None and mode in capability and not jsonrpc.is_null(capability[mode])


def _log_level(meta: jsonrpc.Fields) -> str | None:
    if mcp.META_LOG_LEVEL not in meta:
        return None
    level = jsonrpc.text(meta[mcp.META_LOG_LEVEL])
    if level not in mcp.LOG_LEVELS:
        raise InvalidParams(f"{mcp.META_LOG_LEVEL!r} must be one of {', '.join(mcp.LOG_LEVELS)}")
    return level


def _progress_token(meta: jsonrpc.Fields) -> Raw | None:
    token = meta.get(mcp.META_PROGRESS_TOKEN)
    if token is not None and not jsonrpc.is_id(token):
        raise InvalidParams('"params._meta.progressToken" must be a string or an integer')
    return token


def _client_info(meta: jsonrpc.Fields) -> Raw:
    raw = _bounded(meta, mcp.META_CLIENT_INFO)
    if raw is None:
        return _UNKNOWN_CLIENT
    try:
        is_implementation = _remembered(_is_implementation, bytes(raw))
    except jsonrpc.RepeatedKey as exc:
        raise InvalidParams(f"{mcp.META_CLIENT_INFO!r} repeats a key; send each key once") from exc
    if not is_implementation:
        raise InvalidParams(f'{mcp.META_CLIENT_INFO!r} must be an object with "name" and "version", strings')
    return raw


@lru_cache(maxsize=1024)
def _is_implementation(raw: bytes) -> bool:
    try:
        info = _check_keys(raw)
    except jsonrpc.RepeatedKey:
        raise
    except ValueError:
        return False
    return jsonrpc.text(info.get("name")) is not None and jsonrpc.text(info.get("version")) is not None


def _check_keys(raw: bytes | Raw) -> jsonrpc.Fields:
    """Open an object; raises RepeatedKey if it, or an object in it, has a key twice: parsers choose differently."""
    opened = jsonrpc.distinct(raw)
    for value in opened.values():
        if bytes(value)[:1] == b"{":
            _ = _check_keys(value)
    return opened


def _input_responses(params: jsonrpc.Fields) -> jsonrpc.Fields | None:
    raw = params.get("inputResponses")
    if raw is None:
        return None
    try:
        responses = jsonrpc.distinct(raw)
    except jsonrpc.RepeatedKey as exc:
        raise InvalidParams('"params.inputResponses" repeats a key; answer each question once') from exc
    except jsonrpc.TooMany as exc:
        raise InvalidParams(f'"params.inputResponses" has {exc}') from exc
    except ValueError as exc:
        raise InvalidParams('"params.inputResponses" must be an object of answers by key') from exc
    for key, value in responses.items():
        if not bytes(value).startswith(b"{"):
            raise InvalidParams(f"inputResponses[{key[:80]!r}] must be an object: the result of that input request")
    return responses


def _request_state(params: jsonrpc.Fields) -> str | None:
    if "requestState" not in params:
        return None
    state = jsonrpc.text(params["requestState"])
    if state is None:
        raise InvalidState("malformed")
    return state

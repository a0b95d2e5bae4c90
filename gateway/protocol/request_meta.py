"""Reads the `_meta` of a modern request: what its client says of itself, in every request.

Sources: specification 2026-07-28 basic/index (`_meta`), server/utilities/logging.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import DownstreamError, InvalidParams
from gateway.protocol.json_text.json_bounds import check_bounds

T = TypeVar("T")
_PROTOCOL_META: Final = frozenset(
    {
        mcp.META_VERSION,
        mcp.META_CLIENT_INFO,
        mcp.META_CAPABILITIES,
        mcp.META_LOG_LEVEL,
        mcp.META_PROGRESS_TOKEN,
    }
)
_PROGRESS_TOKEN: Final = mcp.META_PROGRESS_TOKEN.encode()
_USUAL_DEPTH: Final = 6
"""With the two levels around it, this is within MAX_DEPTH."""
_REMEMBERED: Final = 1_024
_REMEMBERED_BYTES: Final = 1_024  # so each cache has at most 1 MiB of text, whatever clients vary
_MAX_DECLARATION_BYTES: Final = 16_384
NO_META: Final[jsonrpc.Fields] = {}
UNKNOWN_INFO: Final = Raw(b'{"name":"unknown","version":"0"}')
"""`clientInfo` and `serverInfo` are optional in 2026-07-28 and required by `initialize`."""


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


class Declarations(msgspec.Struct, frozen=True):
    """What the `_meta` of a request says; the requests of one client often share it."""

    version: str
    capabilities: Raw
    declared: Capabilities
    log_level: str | None
    progress_token: Raw | None
    client_info: Raw
    user_meta: jsonrpc.Fields
    """What goes upstream: it lacks the fields of the protocol."""
    is_shared: bool = False
    """Whether it is remembered, and so the same object in the next request of its client."""

    def held(self) -> "Declarations":
        """The same for a call that waits long: no view of its body, and not what the key of its sessions has.

        What the requests of its client share has neither, and takes no memory of its own.
        """
        if self.is_shared:
            return self
        token, meta = self.progress_token, self.user_meta
        return msgspec.structs.replace(
            self,
            capabilities=jsonrpc.EMPTY,
            progress_token=token and token.copy(),
            client_info=UNKNOWN_INFO,
            user_meta={key: value.copy() for key, value in meta.items()} if meta else NO_META,
        )


class Meta(NamedTuple):
    """An open `_meta`; not to be changed, since the requests of one client share it."""

    members: jsonrpc.Fields
    declarations: Declarations | None
    """What it says, if it is valid."""
    is_shallow: bool
    """Whether it is no deeper than what is usual."""


def _remembered(read: Callable[[bytes], T]) -> Callable[[bytes | Raw], T]:
    """Have what a client repeats read once; nothing is remembered that is large, or differs in each request."""
    known = lru_cache(_REMEMBERED)(read)

    @wraps(read)
    def look_up(raw: bytes | Raw) -> T:
        text = bytes(raw)
        return known(text) if _is_repeated(text) else read(text)

    return look_up


def _is_repeated(raw: bytes) -> bool:
    # The SDKs use the id of the request as its progress token.
    return len(raw) <= _REMEMBERED_BYTES and raw.find(_PROGRESS_TOKEN) < 0


@_remembered
def meta_of(raw: bytes) -> Meta:
    """Open `_meta`; raises InvalidParams or InvalidRequest unless it is an object."""
    members = jsonrpc.object_of(Raw(raw), '"params._meta"', InvalidParams)
    is_shallow = False
    with suppress(ValueError):
        check_bounds(raw, _USUAL_DEPTH)
        is_shallow = True
    try:
        said = declarations(members, is_shared=_is_repeated(raw)) if mcp.META_VERSION in members else None
        return Meta(members, said, is_shallow)
    except DownstreamError:
        return Meta(members, None, is_shallow)


def declarations(meta: jsonrpc.Fields, *, is_shared: bool = False) -> Declarations:
    """Read what the members of a `_meta` say; raises InvalidParams."""
    version, log_level = jsonrpc.text(meta.get(mcp.META_VERSION)), jsonrpc.text(meta.get(mcp.META_LOG_LEVEL))
    progress_token = meta.get(mcp.META_PROGRESS_TOKEN)
    if version is None:
        raise InvalidParams(f'"params._meta" needs {mcp.META_VERSION!r}, a string like {mcp.MODERN!r}')
    capabilities = _bounded(meta, mcp.META_CAPABILITIES)
    if capabilities is None:
        raise InvalidParams(f'"params._meta" needs {mcp.META_CAPABILITIES!r}, an object (it may be empty)')
    try:
        declared = capabilities_of(capabilities)
    except jsonrpc.RepeatedKey as exc:
        raise InvalidParams(f"{mcp.META_CAPABILITIES!r} repeats a key; send each key once") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidParams(f"{mcp.META_CAPABILITIES!r} is not ClientCapabilities: {exc}") from exc
    if mcp.META_LOG_LEVEL in meta and log_level not in mcp.LOG_LEVELS:
        raise InvalidParams(f"{mcp.META_LOG_LEVEL!r} must be one of {', '.join(mcp.LOG_LEVELS)}")
    if progress_token is not None and not jsonrpc.is_id(progress_token):
        raise InvalidParams('"params._meta.progressToken" must be a string or an integer')
    client_info = _client_info(_bounded(meta, mcp.META_CLIENT_INFO))
    user_meta = {key: value for key, value in meta.items() if key not in _PROTOCOL_META}
    own = version, capabilities, declared, log_level, progress_token, client_info, user_meta
    return Declarations(*own, is_shared)


class _Declared(msgspec.Struct):
    elicitation: dict[str, Raw] | None = None
    sampling: dict[str, Raw] | None = None
    roots: dict[str, Raw] | None = None
    tasks: dict[str, Raw] | None = None
    extensions: dict[str, Raw] | None = None


_decode_declared = msgspec.json.Decoder(_Declared).decode


def _bounded(meta: jsonrpc.Fields, key: str) -> Raw | None:
    """A value of `_meta` within its bound; the session pool groups by it, so it stays in memory."""
    raw = meta.get(key)
    if raw is not None and len(bytes(raw)) > _MAX_DECLARATION_BYTES:
        raise InvalidParams(f"{key!r} is larger than {_MAX_DECLARATION_BYTES} bytes; send less")
    return raw


@_remembered
def capabilities_of(raw: bytes) -> Capabilities:
    """The kinds of questions that a client's declaration allows; raises ValueError or RecursionError."""
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


def _client_info(raw: Raw | None) -> Raw:
    if raw is None:
        return UNKNOWN_INFO
    try:
        info = _check_keys(raw)
    except jsonrpc.RepeatedKey as exc:
        raise InvalidParams(f"{mcp.META_CLIENT_INFO!r} repeats a key; send each key once") from exc
    except ValueError:
        info = {}
    if jsonrpc.text(info.get("name")) is None or jsonrpc.text(info.get("version")) is None:
        raise InvalidParams(f'{mcp.META_CLIENT_INFO!r} must be an object with "name" and "version", strings')
    return raw


def _check_keys(raw: bytes | Raw) -> jsonrpc.Fields:
    """Open an object; raises RepeatedKey if it, or an object in it, has a key twice: parsers choose differently."""
    opened = jsonrpc.distinct(raw)
    for value in opened.values():
        if bytes(value)[:1] == b"{":
            _ = _check_keys(value)
    return opened

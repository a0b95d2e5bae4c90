"""The id of a task as its client knows it: sealed, bound to the caller, sufficient for any replica.

A handle travels in the header `Mcp-Name`, so it stays below 1 KB. The key of a question is sealed too: it holds the id
with which the server waits for the answer, so that another replica can deliver it after the death of the owner.
"""

import hmac
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal.cipher import Keyring
from gateway.seal.request_state import SKEW_SECONDS, Digest, Upstream

T = TypeVar("T")
PURPOSE: Final = "task"
MAX_HANDLE_BYTES: Final = 1024
_MAX_KEY_BYTES: Final = 4096


class TaskHandle(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where a task is; times are seconds since the epoch.

    `exchange` is the gateway's own id of the task, and `owner` with `epoch` the process that follows it. `upstream`
    has the session and, as `call`, the server's id of the task; it is left out if the handle would be too large.
    """

    version: int = 1
    issued: float
    expires: float
    route: str
    principal: bytes
    names: tuple[str, ...]
    headers: bytes
    exchange: str
    owner: str
    epoch: str
    ttl_ms: int
    upstream: Upstream | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could go on with the task."""
        return self.upstream is not None


class QuestionKey(msgspec.Struct, frozen=True, array_like=True):
    """What the key of a question holds."""

    exchange: str
    method: str
    upstream_id: bytes


class TaskSealer:
    """Seals and opens handles and keys; raises InvalidState, whose reason is for metrics and logs only."""

    def __init__(self, keyring: InForce[Keyring]) -> None:
        self._keyring = keyring
        self._encode = msgspec.msgpack.Encoder().encode
        self._handles = msgspec.msgpack.Decoder(TaskHandle)
        self._keys = msgspec.msgpack.Decoder(QuestionKey)

    def seal(self, handle: TaskHandle) -> str:
        """The handle; one that is too large leaves out what only another replica would need."""
        sealed = self._keyring.value.seal(self._encode(handle))
        if len(sealed) > MAX_HANDLE_BYTES and handle.upstream is not None:
            return self.seal(replace(handle, upstream=None))
        return sealed

    def open(self, sealed: str, route: str, principal: bytes, digest: Digest, now: float) -> TaskHandle:
        """The content of a handle that this caller got on this route, and whose time is not over."""
        if len(sealed) > 2 * MAX_HANDLE_BYTES:
            raise InvalidState("too_large")
        handle = self._opened(sealed, self._handles)
        if handle.issued > now + SKEW_SECONDS:
            raise InvalidState("future")
        if handle.expires < now:
            raise InvalidState("expired")
        if handle.route != route:
            raise InvalidState("other_route")
        if not hmac.compare_digest(handle.principal, principal):
            raise InvalidState("other_principal")
        if not hmac.compare_digest(handle.headers, digest(handle.names) if handle.names else b""):
            raise InvalidState("other_headers")
        return handle

    def seal_key(self, key: QuestionKey) -> str:
        """The key of a question; each is different."""
        return self._keyring.value.seal(self._encode(key))

    def open_key(self, sealed: str) -> QuestionKey:
        """The content of a key."""
        if len(sealed) > _MAX_KEY_BYTES:
            raise InvalidState("too_large")
        return self._opened(sealed, self._keys)

    def _opened(self, sealed: str, decoder: msgspec.msgpack.Decoder[T]) -> T:
        try:
            return decoder.decode(self._keyring.value.open(sealed))
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise InvalidState("version") from exc

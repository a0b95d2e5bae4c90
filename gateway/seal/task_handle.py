"""The id of a task as its client knows it: sealed, bound to the caller, sufficient for any replica.

A handle travels in the header `Mcp-Name`, so it stays below 1 KB. The key of a question is sealed too: it holds the id
with which the server waits for the answer, so that another replica can deliver it after the death of the owner.
"""

import hmac
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal import token_check
from gateway.seal.keyring import Keyring
from gateway.seal.request_state import Digest, Upstream

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
        self._decode_handle = msgspec.msgpack.Decoder(TaskHandle).decode
        self._decode_key = msgspec.msgpack.Decoder(QuestionKey).decode

    def seal(self, handle: TaskHandle) -> str:
        """The handle; one that is too large leaves out what only another replica would need."""
        sealed = self._keyring.value.seal(self._encode(handle))
        if len(sealed) > MAX_HANDLE_BYTES and handle.upstream is not None:
            return self.seal(replace(handle, upstream=None))
        return sealed

    def open(self, sealed: str, route: str, principal: bytes, digest: Digest, now: float) -> TaskHandle:
        """The content of a handle that this caller got on this route, and whose time is not over."""
        handle = self._keyring.value.open_as(sealed, self._decode_handle, 2 * MAX_HANDLE_BYTES)
        token_check.check(handle, route, principal, now, handle.expires)
        if not hmac.compare_digest(handle.headers, digest(handle.names) if handle.names else b""):
            raise InvalidState("other_headers")
        return handle

    def seal_key(self, key: QuestionKey) -> str:
        """The key of a question; each is different."""
        return self._keyring.value.seal(self._encode(key))

    def open_key(self, sealed: str) -> QuestionKey:
        """The content of a key."""
        return self._keyring.value.open_as(sealed, self._decode_key, _MAX_KEY_BYTES)

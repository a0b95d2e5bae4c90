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
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import Keys
from gateway.seal.request_state import Whereabouts

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
    upstream: Whereabouts | None = None


class QuestionKey(msgspec.Struct, frozen=True, array_like=True):
    """What the key of a question holds."""

    exchange: str
    method: str
    upstream_id: bytes
    digest: bytes
    """Of the question, because a server may give the id to a later one."""


class TaskSealer:
    """Seals and opens handles and keys; raises InvalidState, whose reason is for metrics and logs only."""

    def __init__(self, keys: InForce[Keys]) -> None:
        # Twice as much opens as should be sealed: `seal` gives the smaller one out though it may not fit either.
        self._handles = Claims(keys, PURPOSE, TaskHandle, 2 * MAX_HANDLE_BYTES, InForce(MAX_HANDLE_BYTES))
        self.questions = Claims(keys, PURPOSE, QuestionKey, _MAX_KEY_BYTES)
        """The keys of questions, each of which is different."""

    def seal(self, handle: TaskHandle) -> str:
        """The handle; one that is too large leaves out what only another replica would need."""
        return self._handles.seal(handle, replace(handle, upstream=None))

    def open(self, sealed: str, bearer: Bearer) -> TaskHandle:
        """The content of a handle that this caller got on this route, and whose time is not over."""
        handle = self._handles.open(sealed)
        bearer.check(handle.route, handle.principal, issued=handle.issued, expires=handle.expires)
        if not hmac.compare_digest(handle.headers, bearer.digest(handle.names)):
            raise InvalidState("other_headers")
        return handle

"""Reads the bodies of requests, within limits of size or time, out of a budget of the whole process."""

import asyncio
import re
from contextlib import suppress
from typing import Final

from gateway.config import InForce, Limits
from gateway.http.server.request import BodyBroken, HttpRequest
from gateway.protocol.errors import Busy, InvalidRequest, TooLarge, UnsupportedEncoding
from gateway.runtime.budget import Budget, Share
from gateway.runtime.pieces import Turn

_PIECE_BYTES: Final = 65_536
"""The size of what a body is kept in while it arrives."""
_ENCODING: Final = "Content-Encoding"
_END_BYTES: Final = 512
_LAST_ID: Final = re.compile(rb'[{,]\s*"id"\s*:\s*(-?[0-9]{1,20}|"[ !#-\[\]-~]{0,200}")\s*\}\s*\Z')
"""An id that is the last member of its message. The brace is the last one, so the member is not one of `params`."""


class BodyReader:
    """Reads the bodies that reach one process; if too much is unfinished, the oldest body gives way."""

    def __init__(self, limits: InForce[Limits]) -> None:
        self.budget = Budget("limits.receiving_bytes", limits.part(_receiving_bytes))

    def read_now(self, http: HttpRequest, limit: int) -> bytes:
        """Return a plain body that came with its head, as small ones do; empty for any other."""
        content = http.body
        head = http.head
        is_plain = content.is_complete and not head.is_encoded
        return content.read_now() if is_plain and head.length <= limit and content.size <= limit else b""

    async def read(self, http: HttpRequest, limit: int, seconds: float) -> bytes:
        """Return the whole body; raises TooLarge, UnsupportedEncoding, InvalidRequest or Busy."""
        if any(value.strip().lower() not in ("", "identity") for value in http.head.headers.getall(_ENCODING, ())):
            raise UnsupportedEncoding
        if http.head.length > limit:
            raise _too_large(limit)
        asked = http.head.headers.get("Expect", "").lower()
        if http.head.is_1_1 and asked == "100-continue":  # 1.0 has no interim replies
            http.wire.say_continue()
        return await _Reading(http, limit, self.budget).run(seconds)


async def last_id(http: HttpRequest, seconds: float) -> bytes | None:
    """Return the id of a request whose body is refused, as JSON, from the end of what is left of the body.

    The official SDKs write the id last. Nothing else of the body is kept.
    """
    if _ENCODING in http.head.headers or "Expect" in http.head.headers:
        return None
    end = b""
    with suppress(TimeoutError, BodyBroken):
        async with asyncio.timeout(seconds):
            while chunk := await http.body.read():
                end = (end + chunk)[-_END_BYTES:]
        found = _LAST_ID.search(end)
        return None if found is None else found[1]
    return None


class _Reading:
    """One body under way."""

    def __init__(self, http: HttpRequest, limit: int, budget: Budget) -> None:
        self._http, self._limit, self._budget = http, limit, budget
        self._deadline: asyncio.Timeout
        self._size = 0
        self._pieces: list[bytes] = []
        """Of about one size, since one buffer that grows leaves holes in the memory that the next one cannot use."""
        self._small = bytearray()
        """The last bytes, until they make a piece."""
        self._gave_way = False

    async def run(self, seconds: float) -> bytes:
        share = self._budget.share(self._give_way)
        try:
            async with asyncio.timeout(seconds) as self._deadline:
                turn = Turn()
                while chunk := await self._http.body.read():
                    self._take(chunk, share)
                    await turn.give_way()
        except TimeoutError as exc:
            if self._gave_way:
                raise self._busy() from exc
            self._http.body.fail()  # else the connection would wait for the rest, to discard it
            raise InvalidRequest("The body did not arrive within limits.receive_seconds") from exc
        except BodyBroken as exc:
            raise InvalidRequest("The body is damaged: its chunks are malformed, or it is incomplete") from exc
        finally:
            share.release()
        return b"".join((*self._pieces, self._small))

    def _give_way(self) -> None:
        self._gave_way = True
        self._pieces.clear()
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def _take(self, piece: bytes, share: Share) -> None:
        self._size += len(piece)
        if self._size > self._limit:
            raise _too_large(self._limit)
        if len(piece) >= _PIECE_BYTES and not self._small:
            self._pieces.append(piece)
        else:
            self._small += piece
        if len(self._small) >= _PIECE_BYTES:
            self._pieces.append(bytes(self._small))
            self._small.clear()
        share.hold(self._size)
        if self._gave_way:
            raise self._busy()

    def _busy(self) -> Busy:
        return Busy(
            f"Unfinished request bodies took more than {self._budget.limit} bytes ({self._budget.name}), and this was "
            "the oldest of them; send the request again",
            status=503,
        )


def _receiving_bytes(limits: Limits) -> int:
    return max(limits.receiving_bytes, limits.body_bytes)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes (limits.body_bytes)")

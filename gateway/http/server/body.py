"""Reads the bodies of requests, within limits of size or time, out of a budget of the whole process."""

import asyncio
import re
from contextlib import suppress
from typing import Final

from gateway.http.server.request import BodyBroken, HttpRequest
from gateway.protocol.errors import Busy, InvalidRequest, TooLarge, UnsupportedEncoding
from gateway.runtime.budget import Budget
from gateway.runtime.pieces import Turn

_PIECE_BYTES: Final = 65_536
"""The size of what a body is kept in while it arrives."""
_ENCODING: Final = "Content-Encoding"
_END_BYTES: Final = 512
_LAST_ID: Final = re.compile(rb'[{,]\s*"id"\s*:\s*(-?[0-9]{1,20}|"[ !#-\[\]-~]{0,200}")\s*\}\s*\Z')
"""An id that is the last member of its message. The brace is the last one, so the member is not one of `params`."""


async def read_body(http: HttpRequest, limit: int, seconds: float, budget: Budget) -> bytes:
    """Return the whole body; raises TooLarge, UnsupportedEncoding, InvalidRequest or Busy.

    If too much is unfinished of all bodies in the budget, the oldest gives way.
    """
    if any(value.strip().lower() not in ("", "identity") for value in http.head.headers.getall(_ENCODING, ())):
        raise UnsupportedEncoding
    if http.head.length > limit:
        raise _too_large(limit)
    asked = http.head.headers.get("Expect", "").lower()
    if http.head.is_1_1 and asked == "100-continue":  # 1.0 has no interim replies
        http.wire.say_continue()
    return await _arriving(http, limit, seconds, budget)


async def _arriving(http: HttpRequest, limit: int, seconds: float, budget: Budget) -> bytes:
    pieces, small, size = list[bytes](), bytearray(), 0

    def give_way() -> None:
        pieces.clear()
        if not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time())

    share = budget.share(give_way)
    try:
        async with asyncio.timeout(seconds) as deadline:
            turn = Turn()
            while not share.is_over and (chunk := await http.body.read()):
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                _keep(chunk, pieces, small)
                share.hold(size)
                await turn.give_way()
    except TimeoutError as exc:
        if not share.is_over:
            http.body.fail()  # else the connection would wait for the rest, to discard it
            raise InvalidRequest("The body did not arrive within limits.receive_seconds") from exc
    except BodyBroken as exc:
        raise InvalidRequest("The body is damaged: its chunks are malformed, or it is incomplete") from exc
    finally:
        gave_way = share.is_over
        share.release()
    if gave_way:
        raise Busy(
            f"Unfinished request bodies took more than {budget.limit} bytes ({budget.name}), and this was the oldest "
            "of them; send the request again",
            reached={budget.name: budget.limit},
        )
    return b"".join((*pieces, small))


def _keep(chunk: bytes, pieces: list[bytes], small: bytearray) -> None:
    """Add to the pieces of a body; `small` has its last bytes, until they make a piece.

    The pieces have about one size: one buffer that grows would leave holes in the memory that the next cannot use.
    """
    if len(chunk) >= _PIECE_BYTES and not small:
        pieces.append(chunk)
    else:
        small += chunk
    if len(small) >= _PIECE_BYTES:
        pieces.append(bytes(small))
        small.clear()


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
        if (found := _LAST_ID.search(end)) is not None:
            return found[1]
    return None


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The body is larger than {limit} bytes (limits.body_bytes)")

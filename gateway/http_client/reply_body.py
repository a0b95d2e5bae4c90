"""How the rest of a body is read once its head says where it ends: no parser is needed then.

A body ends after a known length, with the connection, or behind its last chunk (`reply_parser.ChunkedRest`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
_MAX_CHUNKS: Final = 4
"""More of them in a packet are left to llhttp, which takes less time for each."""

Ending = Literal["kept", "closed"]
"""What becomes of the connection behind a complete reply."""


@dataclass(slots=True, eq=False)
class SizedRest:
    """The rest of a body of which so many bytes are missing."""

    missing: int
    content_type: str
    ending: Ending

    def feed(self, data: bytes) -> tuple[None, Sequence[bytes], "SizedRest | Ending"]:
        """See `reply_parser.Read`."""
        missing, self.missing = self.missing, self.missing - len(data)
        if self.missing > 0:
            return None, (data,), self
        return None, (data[:missing],), "closed" if self.missing else self.ending


class UnsizedRest:
    """The rest of a body that ends with the connection."""

    def feed(self, data: bytes) -> tuple[None, Sequence[bytes], "UnsizedRest"]:
        """See `reply_parser.Read`."""
        return None, (data,), self


def chunks(data: bytes, begin: int = 0) -> tuple[Sequence[bytes], bool] | None:
    """What a few chunks hold, without extensions and trailers, and whether the last one is here; None for all else."""
    parts: list[bytes] = []
    while begin < len(data):
        size = _CHUNK_SIZE.match(data, begin)
        if size is None or len(parts) > _MAX_CHUNKS:
            return None
        begin = size.end()
        end = begin + int(size[1], 16)
        if data[end : end + 2] != b"\r\n":
            return None
        if end == begin:
            return (parts, True) if len(data) == end + 2 else None
        parts.append(data[begin:end])
        begin = end + 2
    return parts, False

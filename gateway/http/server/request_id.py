"""The id of one HTTP request, by which logs, replies or other replicas name it."""

import itertools
import re
from collections.abc import Iterator
from typing import Final

HEADER: Final = "X-Request-Id"
_WELL_FORMED: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/@-]{0,127}")
"""The forms that are in use: UUIDs, ULIDs, hex, base64, host and counter. An id ends in logs and headers."""


def request_id(given: str | None, own: Iterator[str]) -> str:
    """Return the id that the client or a proxy gave, if it is one short word; else the next of `own`."""
    if given is not None and _WELL_FORMED.fullmatch(given):
        return given
    return next(own)


def numbered(prefix: str) -> Iterator[str]:
    """Return an endless series of ids, unique if no other process has this prefix."""
    return map(f"{prefix}-%x".__mod__, itertools.count(1))

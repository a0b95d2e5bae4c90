"""The id of one HTTP request, by which logs, replies or other replicas name it."""

import re
from collections.abc import Iterator
from typing import Final

from aiohttp import web

HEADER: Final = "X-Request-Id"
KEY: Final = web.RequestKey("request_id", str)
"""The key of a client's request for its id; the listener repeats the id in the head of the reply."""
_WELL_FORMED: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/@-]{0,127}")
"""Whatever proxies and clients make of it in practice: UUIDs, ULIDs, hex, base64, host-and-counter."""


def request_id(given: str | None, own: Iterator[str]) -> str:
    """The id that the client or a proxy gave, if it is well-formed and short; else the next of `own`.

    It ends in logs, headers and messages: what could be mistaken for more than a word is not taken.
    """
    if given is not None and _WELL_FORMED.fullmatch(given):
        return given
    return next(own)


def numbered(prefix: str) -> Iterator[str]:
    """Ids that are this process's own, for as long as no other has its `prefix`."""
    number = 0
    while True:
        number += 1
        yield f"{prefix}-{number:x}"

"""What clients and upstreams said, in the log: off unless `debug.bodies` says so.

It is for one process, as the log itself is. What is shown is masked by key and by look and cut; still it holds what
people typed and tools answered, for no rule knows a secret without a sign.
"""

import json
import re
from enum import StrEnum
from typing import Any, Final

from gateway.telemetry.log import MASK, Event, get_logger, mask, names_secret

log = get_logger()

SHOWN_CHARACTERS: Final = 4096
"""Of one message, after the masking."""
_PARSED_BYTES: Final = 262_144
"""Beyond this a message is not parsed to be shown: its beginning is masked as text."""
_SPARE_BYTES: Final = 8192
"""What is masked behind the part that is shown, so that nothing is cut before it was recognised."""
_PAIR: Final = re.compile(r'(?P<open>"(?P<key>(?:[^"\\]|\\.){1,100})"\s*:\s*)(?P<value>"(?:[^"\\]|\\.)*"?)')


class Direction(StrEnum):
    """Who said it to whom."""

    FROM_CLIENT = "from_client"
    TO_CLIENT = "to_client"
    TO_UPSTREAM = "to_upstream"
    FROM_UPSTREAM = "from_upstream"


class Bodies:
    """The switch, and what it switches."""

    on = False
    """Look here first: a message that is not shown costs nothing more."""

    def show(self, direction: Direction, data: bytes, *, route: str, request_id: str | None) -> None:
        """Log one message; `request_id` is None where no request is behind it."""
        size, text = len(data), shown(data)
        log.info(Event.BODY, direction=direction, bytes=size, text=text, route=route, request_id=request_id)


bodies: Final = Bodies()


def shown(data: bytes) -> str:
    """Return the message as it may stand in a log: one line, without what looks like a secret, cut."""
    text = _masked(data)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(data)} bytes)"


def _masked(data: bytes) -> str:
    if len(data) <= _PARSED_BYTES:
        try:
            return json.dumps(_without_secrets(json.loads(data)), ensure_ascii=False, separators=(",", ":"))
        except (ValueError, RecursionError):
            pass  # what is no JSON may be shown all the same: it is often why somebody looks
    text = data[: SHOWN_CHARACTERS + _SPARE_BYTES].decode("utf-8", "replace")
    return mask(_PAIR.sub(_pair, text))


def _without_secrets(value: Any) -> Any:
    match value:
        case dict():
            return {
                mask(key): MASK if names_secret(key) and item is not None else _without_secrets(item)
                for key, item in value.items()
            }
        case list():
            return [_without_secrets(item) for item in value]
        case str():
            return mask(value)
        case _:
            return value


def _pair(match: re.Match[str]) -> str:
    return f'{match["open"]}"{MASK}"' if names_secret(match["key"]) else match[0]

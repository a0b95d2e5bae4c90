"""Logs the messages of both sides; off unless `debug.bodies` is set.

Like the log itself, the switch is one per process. Messages are masked by key and by pattern, and cut. They still hold
what people typed and tools answered: no rule recognises a secret that looks like ordinary text.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final

from gateway.telemetry.log import Event, get_logger
from gateway.telemetry.redaction import MASK, mask, names_secret

log = get_logger()

SHOWN_CHARACTERS: Final = 4096
"""Of one message, after masking."""
_PARSED_BYTES: Final = 262_144
"""A larger message is not parsed: its beginning is masked as text."""
_SPARE_BYTES: Final = 8192
"""Masked beyond the part that is shown, so that no secret is cut in two and missed."""
# The last quote may be missing, because the text is cut.
_PAIR: Final = re.compile(r'(?P<open>"(?P<key>(?:[^"\\]|\\.){1,100})"\s*:\s*)(?P<value>"(?:[^"\\]|\\.)*"?)')


class Direction(StrEnum):
    """The sender or receiver of a message."""

    FROM_CLIENT = "from_client"
    TO_CLIENT = "to_client"
    TO_UPSTREAM = "to_upstream"
    FROM_UPSTREAM = "from_upstream"


class Bodies:
    """Logs messages if switched on."""

    on = False
    """Check this first: while it is off, a message costs nothing more."""

    def show(self, direction: Direction, data: bytes, *, route: str, about: Mapping[str, str | None]) -> None:
        """Log one message; `about` names the request that it belongs to, if any."""
        size, text = len(data), shown(data)
        log.info(Event.BODY, direction=direction, bytes=size, text=text, route=route, **about)


bodies: Final = Bodies()


def shown(data: bytes) -> str:
    """Return the message for the log: one line, without anything that looks like a secret, cut."""
    text = None
    if len(data) <= _PARSED_BYTES:
        # Malformed messages are shown too: they are often the reason for looking.
        with suppress(ValueError, RecursionError):
            text = json.dumps(_without_secrets(json.loads(data)), ensure_ascii=False, separators=(",", ":"))
    if text is None:
        beginning = data[: SHOWN_CHARACTERS + _SPARE_BYTES].decode("utf-8", "replace")
        text = mask(_PAIR.sub(_pair, beginning))
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(data)} bytes)"


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

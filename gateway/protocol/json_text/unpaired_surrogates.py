r"""Mends JSON with unpaired surrogates: `"\ud83d"` without its other half, from tools that cut text in UTF-16 units.

RFC 8259 (section 8.2) leaves them to the reader. JavaScript and Python's json write and read them. msgspec refuses the
whole document, even if it only skips them, and so does pydantic, with which the Python SDK reads. So each half becomes
U+FFFD, as `toWellFormed()` of JavaScript has it.
"""

import re
from typing import Final

_HALF: Final = re.compile(
    # a high half that no low half follows
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    # a low half that no high half precedes
    rb"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_REPLACEMENT: Final = rb"\\ufffd"
_BACKSLASH: Final = b"\xfe"
"""Replaces an escaped backslash while the others are searched; the byte does not occur in UTF-8."""
MAX_HALVES: Final = 10_000
"""Text that was cut has one half for each cut, so more of them are refused."""


def well_formed(data: bytes) -> bytes | None:
    """The text with U+FFFD for each half; None if it has none.

    Raises ValueError if it is not UTF-8, or has more than MAX_HALVES halves.
    """
    if b"\\ud" not in data and b"\\uD" not in data:
        return None
    if not data.isascii():
        _ = data.decode()
    found, halves = _HALF.subn(_REPLACEMENT, data.replace(b"\\\\", _BACKSLASH), MAX_HALVES + 1)
    if halves > MAX_HALVES:
        raise ValueError(f"more than {MAX_HALVES} unpaired surrogates")
    return found.replace(_BACKSLASH, b"\\\\") if halves else None

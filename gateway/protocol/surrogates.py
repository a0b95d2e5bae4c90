r"""Half surrogate pairs in JSON: `"\ud83d"` without its other half, as tools write that cut text in UTF-16 units.

RFC 8259 (section 8.2) leaves them to the reader. JavaScript and Python's json write and read them; msgspec refuses the
whole document, even where it only skips. So a document that msgspec refused is read once more in another spelling:

    hidden()    in spliced text: the backslash of each half becomes a byte that UTF-8 cannot have. Length and
                structure stay; `shown()` is the exact way back. Keys cannot be read in this form.
    escaped()   every backslash stands for itself, so that keys can be read as well; `unescaped()` is the way back.
    replaced()  each half becomes U+FFFD: for what is looked at and never passed on.

Every function takes UTF-8, and works with one pass of C code after the other: the text may have megabytes.
"""

import json
import re
from collections.abc import Iterable
from typing import Final

import msgspec

_HALF: Final = re.compile(
    rb"\\(?=u[dD][89abAB])(?!u[dD][89abAB]..\\u[dD][c-fC-F])"  # a high half that no low half follows
    rb"|(?<!\\u[dD][89abAB]..)\\(?=u[dD][c-fC-F])"  # a low half that no high half precedes
)
_HIDDEN: Final = b"\xff"
_HIDDEN_HALF: Final = re.compile(rb"\xffu....")
_BACKSLASH: Final = b"\xfe"
"""Stands for an escaped backslash while the others are looked at; UTF-8 has neither byte."""
_SPELLED: Final = (b"\\u005c", b"\\u005C")


def hidden(data: bytes) -> bytes | None:
    """The text with its halves out of sight; None when it has none. Raises ValueError when it is not UTF-8."""
    if b"\\ud" not in data and b"\\uD" not in data:
        return None
    if not data.isascii():
        _ = data.decode()
    apart = data.replace(b"\\\\", _BACKSLASH)
    found = _HALF.sub(_HIDDEN, apart)
    return found.replace(_BACKSLASH, b"\\\\") if found != apart else None


def shown(text: bytes) -> bytes:
    """What was `hidden`, or a part of it, as it was."""
    return text.replace(_HIDDEN, b"\\")


def replaced(text: bytes) -> bytes:
    """What is `hidden`, with U+FFFD for each half."""
    return _HIDDEN_HALF.sub(rb"\\ufffd", text)


def escaped(text: bytes) -> bytes:
    """What is `hidden`, spelled so that a decoded string has two backslashes for each of its own, one for a half."""
    text = text.replace(b"\\\\", _BACKSLASH)
    for spelled in _SPELLED:
        text = text.replace(spelled, spelled * 2)
    return text.replace(_HIDDEN, b"\\\\").replace(_BACKSLASH, b"\\\\\\\\")


def unescaped(text: bytes) -> bytes:
    """What was `escaped`, or a part of it, as it was before it was hidden."""
    text = text.replace(b"\\\\\\\\", _BACKSLASH)
    for spelled in _SPELLED:
        text = text.replace(spelled * 2, spelled)
    return text.replace(b"\\\\", b"\\").replace(_BACKSLASH, b"\\\\")


def strings(decoded: Iterable[str]) -> list[str]:
    """The strings that were read from `escaped` text, with their halves as Python has them."""
    written = msgspec.json.encode(list(decoded)).replace(b"\\\\\\\\", _BACKSLASH)
    found: list[str] = json.loads(written.replace(b"\\\\", b"\\").replace(_BACKSLASH, b"\\\\"))
    return found


def written(text: str) -> bytes:
    """A string with halves as JSON."""
    return json.dumps(text).encode()

r"""Reads JSON with unpaired surrogates: `"\ud83d"` without its other half, from tools that cut text in UTF-16 units.

RFC 8259 (section 8.2) leaves them to the reader. JavaScript and Python's json write and read them, but msgspec refuses
the whole document, even if it only skips them. So a document that msgspec refused is read again in another spelling:

    hidden()    in spliced text: the backslash of each half becomes a byte that UTF-8 cannot have. Length and
                structure stay; `shown()` is the exact way back. Keys cannot be read in this form.
    escaped()   every backslash stands for itself, so that keys can be read as well; `unescaped()` is the way back.
    replaced()  each half becomes U+FFFD: for text that is inspected but never passed on.

`of_refused()` begins with the error of msgspec, `fields()` and `compacted()` do the whole way there and back. Every
function takes UTF-8 and runs in C code, because the text may have megabytes.
"""

import json
import re
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw

_HALF: Final = re.compile(
    # a high half that no low half follows
    rb"\\(?=u[dD][89abAB][0-9a-fA-F]{2})(?!u[dD][89abAB]..\\u[dD][c-fC-F])"
    # a low half that no high half precedes
    rb"|(?<!\\u[dD][89abAB]..)\\(?=u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_HIDDEN: Final = b"\xff"
_HIDDEN_HALF: Final = re.compile(rb"\xffu....")
_BACKSLASH: Final = b"\xfe"
"""Replaces an escaped backslash while the others are searched; neither byte occurs in UTF-8."""
MAX_HALVES: Final = 10_000
"""Text that was cut has one half for each cut, so more of them are refused."""
_SPELLED: Final = (b"\\u005c", b"\\u005C")
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def hidden(data: bytes) -> bytes | None:
    """The text with its halves hidden; None if it has none.

    Raises ValueError if it is not UTF-8, or has more than MAX_HALVES halves.
    """
    if b"\\ud" not in data and b"\\uD" not in data:
        return None
    if not data.isascii():
        _ = data.decode()
    apart = data.replace(b"\\\\", _BACKSLASH)
    found, halves = _HALF.subn(_HIDDEN, apart, MAX_HALVES + 1)
    if halves > MAX_HALVES:
        raise ValueError(f"more than {MAX_HALVES} unpaired surrogates")
    return found.replace(_BACKSLASH, b"\\\\") if halves else None


def of_refused(raw: Raw | bytes, refused: msgspec.DecodeError) -> bytes:
    """As `hidden`, for JSON that msgspec refused; raises `refused` if unpaired surrogates are not the cause."""
    if isinstance(refused, msgspec.ValidationError) or (found := hidden(bytes(raw))) is None:
        try:
            raise refused
        finally:
            del refused  # its traceback refers to this frame, and the cycle would keep the message
    return found


def fields(raw: Raw | bytes, refused: msgspec.DecodeError) -> dict[str, Raw]:
    """The members of an object that msgspec refused; raises `refused` if unpaired surrogates are not the cause."""
    found = of_refused(raw, refused)
    try:
        try:
            opened = _decode_fields(found)
        except UnicodeDecodeError:
            opened = _decode_fields(escaped(found))
            values = (Raw(unescaped(bytes(value))) for value in opened.values())
            return dict(zip(strings(opened), values, strict=True))
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    return {key: Raw(shown(bytes(value))) for key, value in opened.items()}


def compacted(data: bytes) -> bytes:
    """The same JSON without white space; raises ValueError."""
    found = hidden(data)
    try:
        written = msgspec.json.format(data if found is None else found, indent=-1)
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc
    return written if found is None else shown(written)


def shown(text: bytes) -> bytes:
    """The original of `hidden` text, or of a part of it."""
    return text.replace(_HIDDEN, b"\\")


def replaced(text: bytes) -> bytes:
    """Hidden text with U+FFFD for each half."""
    return _HIDDEN_HALF.sub(rb"\\ufffd", text)


def escaped(text: bytes) -> bytes:
    """Hidden text in a spelling that decodes to two backslashes for each real one, and to one for a half."""
    text = text.replace(b"\\\\", _BACKSLASH)
    for spelled in _SPELLED:
        text = text.replace(spelled, spelled * 2)
    return text.replace(_HIDDEN, b"\\\\").replace(_BACKSLASH, b"\\\\\\\\")


def unescaped(text: bytes) -> bytes:
    """The original of `escaped` text, or of a part of it."""
    text = text.replace(b"\\\\\\\\", _BACKSLASH)
    for spelled in _SPELLED:
        text = text.replace(spelled * 2, spelled)
    return text.replace(b"\\\\", b"\\").replace(_BACKSLASH, b"\\\\")


def strings(decoded: Iterable[str]) -> list[str]:
    """Strings decoded from `escaped` text, with their halves as Python represents them."""
    written = msgspec.json.encode(list(decoded)).replace(b"\\\\\\\\", _BACKSLASH)
    found: list[str] = json.loads(written.replace(b"\\\\", b"\\").replace(_BACKSLASH, b"\\\\"))
    return found


def written(text: str) -> bytes:
    """A string with halves as JSON."""
    return json.dumps(text).encode()

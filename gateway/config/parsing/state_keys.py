"""Decodes state keys from hex or base64 text."""

import base64
import binascii
import re

KEY_BYTES = 32
"""The least that a key has."""
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){32,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")


def decode_key(text: str) -> bytes:
    """Return a key's bytes, 32 or more; raises ValueError, without the text, if it is not a key.

    Sixty-four hex digits are valid base64 too. Hex wins: no random base64 key has only hex digits.
    """
    if _HEX.fullmatch(text):
        return bytes.fromhex(text)
    if not text:
        raise ValueError("is empty")
    if not _BASE64.fullmatch(text):
        raise ValueError("is not base64 or hex")
    plain = text.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        key = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error:
        raise ValueError("is not base64 or hex") from None
    if len(key) < KEY_BYTES:
        raise ValueError(f"has {len(key)} bytes, but at least {KEY_BYTES} are needed")
    return key


def read_key_lines(text: str) -> tuple[str, ...]:
    """Return a key file's keys: one per line, `#` comments and blank lines left out."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)

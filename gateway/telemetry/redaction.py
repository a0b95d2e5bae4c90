"""Redacts what the log, the traces or the status page show: no secrets, no control characters, no endless text.

Anything that looks like a credential is masked, even where none is expected.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from structlog.typing import EventDict, WrappedLogger

from gateway.protocol.errors import clean

MASK = "[hidden]"
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:authorization|cookies?|tokens?|keys?|secrets?|passwords?|credentials?|api_?keys?|request_?state)$"
)
_BODY_KEY = re.compile(r"^(?:body|payload|params|arguments|answers|content|input_?responses)$")
_SECRET_TEXT = re.compile(
    r"(?P<scheme>\b(?:bearer|dpop|basic)\s+)[\w.~+/=-]{6,}"  # RFC 6750, 9449, 7617
    r"|(?P<seal>\bmrtr1\.)[\w.=-]+"
    r"|(?P<jwt>\beyJ)[\w-]{8,}(?:\.[\w-]*)+"
    r"|(?P<userinfo>://)[^/\s@]+(?=@)"
    r"|\b[0-9a-f]{64,}\b"  # 32 bytes or more in hexadecimal
    r"|(?P<base64>(?<![\w+/-])[\w+/-]{43,}={0,2})",  # 32 bytes or more
    re.IGNORECASE | re.ASCII,
)
_URL_QUERY = re.compile(r"(\bhttps?://[^\s?\"'<>]*\?)[^\s\"'<>]+", re.IGNORECASE)
_NAMED_ARGUMENT = re.compile(r"([\w-]+)(?:=|: *)", re.ASCII)
_MIXED = re.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[\w+-]{12,}")
_WORD = re.compile(r"[0-9A-Za-z_-]+")
_SHORTEST_SECRET = 8
_LONGEST_WORD = 43
"""Longer ones may be keys in base64."""
_NUMBERS = (bool, int, float)
MAX_CHARACTERS = 16_384
"""The longest value of a line, such as a traceback."""
_SEVERAL_LINES = ("exception", "stack")
"""Keys whose values keep their line ends."""
REPEATED = frozenset({"event", "level", "route", "upstream", "method", "target", "outcome", "caller"})
"""Keys of which few values differ, so that they are written once and remembered. None is a secret's; a `target` is a
client's, and is redacted like any other value."""


def mask(text: str) -> str:
    """Return `text` without what looks like a token, a JWT, a sealed state or a key, and of URLs the secret parts."""
    if len(text) < _SHORTEST_SECRET:
        return text
    masked = _SECRET_TEXT.sub(_masked, text)
    return _URL_QUERY.sub(rf"\1{MASK}", masked) if "?" in masked else masked


class Secrets:
    """Secrets that are known, such as those that a server was given and may repeat."""

    def __init__(self, values: Iterable[str], shortest: int = 4, mask: str = MASK) -> None:
        """To mask a value that is shorter than `shortest` would garble ordinary words."""
        self._mask = mask
        # The longest first, because one may be part of another.
        self._values = sorted({value for value in values if len(value) >= shortest}, key=len, reverse=True)

    def masked(self, text: str) -> str:
        """Return the text with every secret masked."""
        for value in self._values:
            text = text.replace(value, self._mask)
        return text


def _masked(match: re.Match[str]) -> str:
    candidate = match["base64"]
    # Tracebacks are full of long paths. Path segments are short or of one case; those of a random key are not.
    if candidate is not None and not any(map(_MIXED.fullmatch, candidate.rstrip("=").split("/"))):
        return candidate
    return (match["scheme"] or match["seal"] or match["userinfo"] or "") + MASK


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")


@lru_cache(maxsize=1024)
def names_secret(key: str) -> bool:
    """Return whether a key names a secret, in any spelling."""
    return bool(_SECRET_KEY.search(_snake(key)))


def secret_arguments(command: Sequence[str]) -> dict[int, int]:
    """Which arguments of a command look as if they hold a secret: by index, where in the text it begins.

    `--api-key=x`, `--api-key x`, `API_KEY=x`, `--header "X-Api-Key: x"`, and the query of a URL.
    """
    found: dict[int, int] = {}
    for index, text in enumerate(command[1:], start=1):
        option = command[index - 1]
        named = _NAMED_ARGUMENT.match(text)
        queried = _URL_QUERY.match(text)
        if named is not None and names_secret(named[1].lstrip("-")):
            start = named.end()
        elif option.startswith("-") and not text.startswith("-") and names_secret(option.lstrip("-")):
            start = 0
        elif queried is not None:
            start = len(queried[1])
        else:
            continue
        if text[start:] and not text[start:].isdecimal():  # --max-tokens=500
            found[index] = start
    return found


@lru_cache(maxsize=1024)
def _is_secret(key: str) -> bool:
    return names_secret(key) or bool(_BODY_KEY.match(_snake(key)))


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask secrets by key and by pattern, at every depth; the result is plain JSON."""
    return {key: plain(key, value) for key, value in event.items()}


def plain(key: str, value: object) -> Any:
    """Return a JSON value without secrets; bytes are a body, so only their length is logged.

    A number is never a secret, whatever its key: `keys=2` is a count.
    """
    if value is None or (isinstance(value, _NUMBERS) and math.isfinite(value)):
        return value
    if _is_secret(key):
        return MASK
    shown: Any
    keeps_lines = key in _SEVERAL_LINES
    match value:
        case str():
            shown = _text(value, keeps_lines=keeps_lines)
        case bytes() | bytearray() | memoryview():
            shown = f"<{len(value)} bytes>"
        case Mapping():
            shown = {_text(str(name)): plain(str(name), item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            shown = [plain(key, item) for item in value]
        case _:
            shown = _text(str(value), keeps_lines=keeps_lines)
    return shown


def _text(text: str, *, keeps_lines: bool = False) -> str:
    """Return text without secrets and control characters, in a bounded length."""
    if len(text) < _LONGEST_WORD and _WORD.fullmatch(text) is not None:
        return text  # no pattern of a secret matches a short word: a JWT, for one, has a dot
    if len(text) <= MAX_CHARACTERS:
        text = mask(text)
    else:
        # The middle is cut out: the end of a traceback says most. The words beside the cut go too, because half a
        # token, or one that lost its `Bearer`, is not recognised as a secret.
        half = MAX_CHARACTERS // 2
        first, last = mask(text[:half]).rsplit(None, 1), mask(text[-half:]).split(None, 2)
        text = f"{first[0] if len(first) > 1 else ''} […] {last[2] if len(last) > 2 else ''}"
    return "\n".join(clean(line, MAX_CHARACTERS) for line in (text.split("\n") if keeps_lines else (text,)))

"""The corrections that errors in values suggest: each one, taken literally, is accepted."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from msgspec import inspect

from gateway.config.parsing.formats import FORMS
from gateway.config.parsing.problems import nearest, shown

_QUANTITY: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)", re.ASCII)
_SECONDS: Final = {"ms": 0.001, "": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES: Final = {"": 1, "b": 1} | {
    f"{letter}{rest}": 1024**power for power, letter in enumerate("kmg", 1) for rest in ("", "b", "i", "ib")
}
_UNITS: Final = {"_seconds": _SECONDS, "_bytes": _BYTES}

Number = inspect.IntType | inspect.FloatType


def for_number(kind: Number, value: object, path: str, default: object) -> str:
    """Return the number that a text such as `10m` means for this key, else a valid example."""
    meant = value if isinstance(value, float) else None
    if isinstance(value, str):
        units = next((units for suffix, units in _UNITS.items() if path.endswith(suffix)), {"": 1})
        match = _QUANTITY.fullmatch(value.strip().replace("_", ""))
        factor = units.get(match[2].lower()) if match else None
        meant = float(match[1]) * factor if match and factor is not None else None
    if isinstance(kind, inspect.IntType) and meant is not None and meant != int(meant):
        meant = None
    if meant is not None and (kind.ge is None or meant >= kind.ge) and (kind.le is None or meant <= kind.le):
        return f"write {meant:g}" if meant < 1e6 else f"write {int(meant)}"
    number = default if type(default) in (int, float) else kind.ge or 0
    return f"write e.g. {number:g}"


def for_text(form: str, value: object, default: object) -> str:
    """Return what the value was probably meant to be, else the default or the example of its form."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        for meant in _meant(form, str(value)):
            with suppress(ValueError):
                # A value that is shown cut, or with a part hidden, would not be accepted as it is written.
                if FORMS[form].parse(meant) is not None and shown(meant) == json.dumps(meant):
                    return f"write {shown(meant)}"
    # The default, if there is one, because another key may have the example of the form.
    return f'write "{default if isinstance(default, str) and default else FORMS[form].example}"'


def _meant(form: str, text: str) -> Iterator[str]:
    """Yield what a text that does not fit this form may be a part of, or a misspelling."""
    if form == "url":
        scheme, _, rest = text.rpartition("://")
        yield f"{nearest(scheme, ('http', 'https')) or 'http'}://{rest}{'' if '/' in rest else '/mcp'}"
    elif form == "address":
        yield f"127.0.0.1:{text}"
        yield f"127.0.0.1{text}"
    elif form == "path":
        yield f"/{text}"


def for_list(kind: inspect.VarTupleType, value: object, *, secret: bool) -> str:
    """Return how to write a value, or its words, as a list."""
    if isinstance(value, dict):
        fields = kind.item_type.fields if isinstance(kind.item_type, inspect.StructType) else ()
        known = [field.name for field in fields]
        if value and set(value) <= set(known):
            return 'write "- " before its first key, and indent its other keys by the same two characters'
        if known:
            return f'write each entry as an item that begins with "- {known[0]}: ..."'
        return "write its entries as a list"
    if not isinstance(value, str) or secret:
        return "write [ ] around it"
    whole = shown(value)
    if "(hidden)" in whole or "..." in whole:
        return "write its words as a list, each in quotes"
    try:
        words = shlex.split(value)
    except ValueError:  # an open quotation
        words = value.split()
    listed = [word.strip(",") for word in words if word.strip(",")] or [value]
    return f"write {json.dumps(listed, ensure_ascii=False)}"


def section_of(kind: inspect.StructType, text: str) -> str | None:
    """Return a section in which a single text stands under the key that it was probably meant for, if there is one."""
    for field in kind.fields:
        inner, extra, _ = plain(field.type)
        if isinstance(inner, inspect.StructType):
            found = section_of(inner, text)
        elif isinstance(inner, inspect.LiteralType):
            found = shown(text) if text in inner.values else None
        else:
            found = None
            with suppress(ValueError):
                if extra.get("form") == "url" and FORMS["url"].parse(text) is not None:
                    found = shown(text)
        if found is not None:
            return f"{{{field.name}: {found}}}"
    return None


def plain(kind: inspect.Type) -> tuple[inspect.Type, dict[str, Any], bool]:
    """Return a type without its annotations and without `None`, the annotations, and whether it may be `None`."""
    extra: dict[str, Any] = {}
    is_optional = False
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            extra, kind = {**extra, **(kind.extra or {})}, kind.type
        else:
            is_optional = True
            kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind, extra, is_optional

"""The corrections that errors in values suggest: each one, taken literally, is accepted."""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_network
from typing import Any, Final

from msgspec import inspect

from gateway.config.parsing.formats import FORMS
from gateway.config.parsing.problems import joined, nearest, shown

_QUANTITY: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)", re.ASCII)
_SECONDS: Final = {"ms": 0.001, "": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES: Final = {"": 1, "b": 1} | {
    f"{letter}{rest}": 1024**power for power, letter in enumerate("kmg", 1) for rest in ("", "b", "i", "ib")
}
_UNITS: Final = {"_seconds": _SECONDS, "_bytes": _BYTES}

_QUOTES: Final = "\"'\u201c\u201d\u2018\u2019 \t\n"
_BROKEN_SCHEME: Final = re.compile(r"(https?)(?::/?|//?)([^:/].*)")
_VARIABLE: Final = re.compile(r"\$\(?([A-Za-z_][A-Za-z0-9_]*)\)?", re.ASCII)
_SECTIONS: Final = {
    "routes": 'routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
    "upstream": 'upstream: {url: "http://127.0.0.1:9000/mcp"}',
    "command": 'command: ["npx", "some-server"]',
}
"""What must not be missing or empty."""

Number = inspect.IntType | inspect.FloatType


def as_reference(text: str) -> str | None:
    """Return the reference to a variable that a text was probably meant to be, if any: `${X}` for `$X` or `$(X)`."""
    match = _VARIABLE.fullmatch(text)
    return None if match is None else f"${{{match[1]}}}"


def for_number(kind: Number, value: object, path: str, default: object) -> str:
    """Return the number that a text such as `10m` means for this key, else a valid example."""
    meant = value if isinstance(value, float) else None
    if isinstance(value, str):
        if reference := as_reference(value):
            return f"write {reference}"
        units = next((units for suffix, units in _UNITS.items() if path.endswith(suffix)), {"": 1})
        match = _QUANTITY.fullmatch(value.strip().replace("_", "").replace(",", ""))
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
        if reference := as_reference(str(value)):
            return f"write {reference}"
        for meant in _meant(form, str(value).strip(_QUOTES), default):
            with suppress(ValueError):
                # A value that is shown cut, or with a part hidden, would not be accepted as it is written.
                if FORMS[form].parse(meant) is not None and shown(meant) == json.dumps(meant):
                    return f"write {shown(meant)}"
    # The default, if there is one, because another key may have the example of the form.
    return f'write "{default if isinstance(default, str) and default else FORMS[form].example}"'


def _meant(form: str, text: str, default: object) -> Iterator[str]:
    """Yield what a text that does not fit this form may be a part of, or a misspelling."""
    scheme, _, rest = text.rpartition("://")
    authority = rest.partition("/")[0]
    yield text
    if form == "url":
        if broken := _BROKEN_SCHEME.fullmatch(text):
            scheme, rest = broken.groups()
            authority = rest.partition("/")[0]
        path = rest[len(authority) :].replace(" ", "%20") or "/mcp"
        host = f"127.0.0.1:{authority}" if authority.isdecimal() else authority
        if not host.endswith(":"):  # another scheme
            yield f"{nearest(scheme, ('http', 'https')) or 'http'}://{host}{path}"
    elif form == "address":
        host, _, port = authority.rpartition(":")
        yield authority
        yield f"127.0.0.1:{authority}"
        yield f"0.0.0.0:{port}" if host == "*" else f"[{host}]:{port}"
        yield f"127.0.0.1:{port}"
        port = (default if isinstance(default, str) else FORMS[form].example).rpartition(":")[2]
        yield f"{authority}:{port}"
        yield f"[{authority}]:{port}"
    elif form == "host":
        yield authority
    elif form == "origin":
        yield f"{scheme or 'https'}://{authority}"
    elif form == "path":
        yield f"/{rest[len(authority) :] if scheme else rest}".replace("//", "/").rstrip("/")
    elif form in {"header", "replica id"}:
        yield text.rstrip(":").replace(" ", "-")
    elif form == "network":
        with suppress(ValueError):
            yield str(ip_network(text, strict=False))


def for_missing(name: str) -> str:
    """Return what to add for a key that must be there."""
    return f"add {_SECTIONS.get(name, 'it')}"


def for_section(kind: inspect.StructType, value: object, name: str) -> str:
    """Return how to write a value as a section."""
    known = [field.name for field in kind.fields]
    if isinstance(value, str):
        key, _, rest = value.partition(":")
        if (found := section_of(kind, value)) is not None:
            return f"write {found}"
        if key in known and rest:
            return f'write a space after "{key}:"'
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return 'remove the "- " before its keys'
    if (name or "routes") in _SECTIONS:
        return f"write {_SECTIONS[name or 'routes']}"
    return f"write its keys below it, such as {known[0]}{'' if value else ', or remove it'}"


def for_dict(kind: inspect.DictType) -> str:
    """Return an example of a mapping."""
    name, value = (FORMS.get(plain(each)[1].get("form", "")) for each in (kind.key_type, kind.value_type))
    return f"write {name.example if name else 'name'}: {value.example if value else 'value'}, one pair a line"


def for_list(items: inspect.Type, value: object, *, secret: bool) -> str:
    """Return how to write a value, or its words, as a list."""
    if isinstance(value, dict):
        fields = items.fields if isinstance(items, inspect.StructType) else ()
        known = [field.name for field in fields]
        if value and set(value) <= set(known):
            return 'write "- " before its first key, and indent its other keys by the same two characters'
        if known:
            return f'write each entry as an item that begins with "- {known[0]}: ..."'
        return "write its entries as a list"
    if not isinstance(value, str) or not value or secret:
        return "write [ ] around it" if value else "write its entries as a list, or remove it"
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


def keys_below(section: inspect.StructType, path: str = "") -> Iterator[tuple[str, inspect.Field]]:
    """Yield each key of a section and of those in it, behind the path of its section; `[]` stands for an index."""
    for field in section.fields:
        yield path, field
        kind, place = plain(field.type)[0], joined(path, field.name)
        if isinstance(kind, inspect.VarTupleType):
            kind, place = kind.item_type, f"{place}[]"
        if isinstance(kind, inspect.StructType):
            yield from keys_below(kind, place)

"""Decodes a plain tree into structs, collecting every error in types, ranges, keys or text forms.

`msgspec.convert` would stop at the first error. This walker uses the same type information
(`msgspec.inspect`), puts the default in place of a refused value, and goes on.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, UnsetType, inspect

from gateway.config.parsing import advice
from gateway.config.parsing.environment import substitute
from gateway.config.parsing.formats import FORMS
from gateway.config.parsing.problems import Given, Problem, joined, nearest, shown
from gateway.config.parsing.retired_keys import retired
from gateway.config.parsing.yaml_tree import number

_Extra = Mapping[str, Any]
_INDEX = re.compile(r"\[\d+\]")
_BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
"""What YAML 1.1 reads these words as."""
_FAMILIAR = {
    "mcpServers": 'each server is an item of routes: {path: "/name", upstream: {command: [program, argument]}}',
    "args": "write the arguments into command, after the program",
    "headers": "write them into set_headers of the route",
    "type": "remove it: url or command says it, or transport",
    "auth": "principal says how callers are identified",
    "cors": "list the origins of pages in security.allowed_origins",
    "metrics": "admin has the address of /metrics",
    **dict.fromkeys(("host", "port"), 'write both into listen: "127.0.0.1:8080"'),
}
"""Keys that other programs have, each with what does the same here."""


class Walker:
    """One walk over one tree.

    `problems` are the errors found; `spoilt` are the paths that hold a default because of them. `written` has the
    paths of misspelt keys, by what was probably meant.
    """

    def __init__(self, shape: inspect.StructType, env: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self.spoilt: list[str] = []
        self.written: dict[str, str] = {}
        self._env = env
        self._shape = shape

    def _refuse(self, path: str, text: str) -> UnsetType:
        self.problems.append(Problem(path, text))
        self.spoilt.append(path)
        return UNSET

    def read(self, kind: inspect.Type, value: object, path: str, default: object = None) -> object:
        """Return one value of any kind, UNSET if it is refused; in a struct, that leaves the default."""
        kind, extra, is_optional = advice.plain(kind)
        if type(value) is str:  # not `Given`: the value of a variable is not substituted again
            try:
                value = substitute(value, self._env)
            except ValueError as exc:
                return self._refuse(path, str(exc))
        if value is UNSET:
            self.spoilt.append(path)
            return UNSET
        if is_optional and (value is None or (isinstance(value, Given) and value == "")):
            return None  # an empty variable too, so that the environment can unset a value
        return self._read_plain(kind, value, path, {**extra, "default": default})

    def _read_plain(self, kind: inspect.Type, value: object, path: str, extra: _Extra) -> object:
        found: object
        match kind:
            case inspect.StructType():
                found = self._struct(kind, value, path)
            case inspect.VarTupleType():
                found = self._list(kind, value, path)
            case inspect.DictType():
                found = self._dict(kind, value, path)
            case inspect.LiteralType():
                found = self._choice(kind, value, path)
            case inspect.BoolType():
                found = self._truth(value, path)
            case inspect.IntType() | inspect.FloatType():
                found = self._number(kind, value, path, extra)
            case inspect.StrType():
                found = self._text(kind, value, path, extra)
            case _:
                raise TypeError(f"{path}: the model uses {kind}, which the loader cannot read")
        return found

    def _struct(self, kind: inspect.StructType, value: object, path: str) -> object:
        if not isinstance(value, dict):
            fix = advice.for_section(kind, value, path.rpartition(".")[2])
            return self._refuse(path or "document", f"{_as_read(value)}, but a section is expected; {fix}")
        fields = {field.name: field for field in kind.fields}
        # A misspelt key is read as if it were spelt right, so that a wrong value is reported in the same run.
        meant = {self._unknown(key, value, fields, path): item for key, item in value.items() if key not in fields}
        section = {**meant, **value}
        found = {name: self._field(field, section, path) for name, field in fields.items()}
        return kind.cls(**{name: item for name, item in found.items() if item is not UNSET})

    def _field(self, field: inspect.Field, section: Mapping[str | None, object], path: str) -> object:
        """Return the field's value; UNSET keeps the default, and a required field gets an empty value."""
        place = joined(path, field.name)
        if field.name in section:
            value = self.read(field.type, section[field.name], place, field.default)
        else:
            missing = f"is missing; {advice.for_missing(field.name)}"
            value = self._refuse(place, missing) if field.required else UNSET
        return _empty(field.type) if value is UNSET and field.required else value

    def _unknown(
        self, key: str, section: dict[str, object], known: Mapping[str, inspect.Field], path: str
    ) -> str | None:
        """Refuse a key; return the one that was probably meant."""
        if (instead := retired(joined(path, key))) is not None:
            self._refuse(joined(path, key), f"was removed: {instead}")
            return None
        homes = [home or "the top level" for home, field in advice.keys_below(self._shape) if field.name == key]
        # Of two sections that have similar keys, the one that has this key is likelier than a misspelling.
        meant = None if key in _FAMILIAR else nearest(key, known, 0.9 if homes else 0.7)
        if meant:
            hint = f'did you mean "{meant}"?'
        elif key in _FAMILIAR:
            hint = _FAMILIAR[key]
        elif homes:
            here = _INDEX.sub("[]", path)
            below = [home for home in homes if home.startswith(here)]
            hint = f"it is a key of {' or of '.join(below or homes)}; move it there"
            if not below:
                hint += f", out of {here}"
        else:
            hint = f"remove it, or use one of: {', '.join(known)}"
        self._refuse(joined(path, key), f"unknown key; {hint}")
        if meant is None:
            return None
        self.spoilt.append(joined(path, meant))
        if meant not in section:
            self.written[joined(path, meant)] = joined(path, key)
        return meant

    def _list(self, kind: inspect.VarTupleType, value: object, path: str) -> object:
        items, extra, _ = advice.plain(kind.item_type)
        if not isinstance(value, list):
            is_missing = value is None and kind.min_length
            fix = advice.for_missing(path) if is_missing else advice.for_list(items, value, secret="secret" in extra)
            return self._refuse(path, f"{_as_read(value, extra)}, but a list is expected; {fix}")
        if len(value) < (kind.min_length or 0):
            return self._refuse(path, f"is an empty list; {advice.for_missing(path.rpartition('.')[2])}")
        found = [self.read(kind.item_type, item, joined(path, place)) for place, item in enumerate(value)]
        if isinstance(items, inspect.StrType):
            # So that the rules name the other texts by their own places.
            return tuple("" if item is UNSET else item for item in found)
        return tuple(item for item in found if item is not UNSET)

    def _dict(self, kind: inspect.DictType, value: object, path: str) -> object:
        if not isinstance(value, dict):
            return self._refuse(path, f"{_as_read(value)}, but a mapping is expected; {advice.for_dict(kind)}")
        found: dict[object, object] = {}
        for key, item in value.items():
            place = joined(path, key)
            found[self.read(kind.key_type, key, place)] = self.read(kind.value_type, item, place)
        return {key: item for key, item in found.items() if UNSET not in (key, item)}

    def _choice(self, kind: inspect.LiteralType, value: object, path: str) -> object:
        if isinstance(value, str) and value in kind.values:
            return str(value)
        meant = nearest(str(value), map(str, kind.values))
        hint = f'did you mean "{meant}"?' if meant else "write " + " or ".join(map(str, kind.values))
        return self._refuse(path, f"{shown(value)} is not one of the choices; {hint}")

    def _truth(self, value: object, path: str) -> object:
        if isinstance(value, Given):
            value = {"true": True, "false": False}.get(value, value)
        if isinstance(value, bool):
            return value
        return self._refuse(path, f"{_as_read(value)}; write {_BOOLEANS.get(str(value).lower(), 'true or false')}")

    def _number(self, kind: advice.Number, value: object, path: str, extra: _Extra) -> object:
        if isinstance(value, Given):
            found = number(value)
            value = value if found is None else found
        wanted = (int,) if isinstance(kind, inspect.IntType) else (int, float)
        if type(value) not in wanted:  # `isinstance` would take true for 1
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            fix = advice.for_number(kind, value, path, extra.get("default"))
            return self._refuse(path, f"{_as_read(value)}, but {noun} is expected; {fix}")
        assert isinstance(value, int | float)
        if kind.ge is not None and value < kind.ge:
            return self._refuse(path, f"{value} is too small; write {kind.ge} or more")
        if kind.le is not None and value > kind.le:
            return self._refuse(path, f"{value} is too large; write {kind.le} or less")
        return value if isinstance(kind, inspect.IntType) else float(value)

    def _text(self, kind: inspect.StrType, value: object, path: str, extra: _Extra) -> object:
        name, is_secret = extra.get("form", ""), extra.get("secret")
        form = FORMS.get(name)
        if not isinstance(value, str):
            if form and not is_secret:
                fix = advice.for_text(name, value, extra.get("default"))
                return self._refuse(path, f"{shown(value)} is not {form.name}; {fix}")
            fix = "write one text" if value is None or isinstance(value, dict | list) else "put it in quotes"
            return self._refuse(path, f"{_as_read(value, extra)}, but a text is expected; {fix}")
        if len(value) < (kind.min_length or 0):
            return self._refuse(path, "is empty; give a text, or remove it")
        if form is None:
            return str(value)
        try:
            normal = form.parse(str(value))  # a `Given` must not stay in the configuration
        except ValueError as exc:
            problem = str(exc)
        else:
            if normal:
                return normal
            fix = advice.for_text(name, value, extra.get("default"))
            problem = f"is not {form.name}; {'remove what cannot be printed' if is_secret else fix}"
        return self._refuse(path, f"{'a secret' if is_secret else shown(value)} {problem}")


def _empty(kind: inspect.Type) -> object:
    inner, _, _ = advice.plain(kind)
    return inner.cls() if isinstance(inner, inspect.StructType) else ()


def _as_read(value: object, extra: _Extra | None = None) -> str:
    """Describe a value of the wrong type, without its content if it may be secret."""
    if value is None:
        return "is empty"
    kinds = {dict: "a mapping", list: "a list", bool: "true or false"}
    kind = kinds.get(type(value), "a text" if isinstance(value, str) else "a number")
    if isinstance(value, dict | list) or (extra and extra.get("secret")):
        return f"is {kind}"
    return f"{shown(value)} is {kind}"

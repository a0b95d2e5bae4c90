"""Decodes a plain tree into structs, collecting every error in types, ranges, keys or text forms.

`msgspec.convert` would stop at the first error. This walker uses the same type information
(`msgspec.inspect`), puts the default in place of a refused value, and goes on.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import inspect

from gateway.config.parsing.environment import substitute
from gateway.config.parsing.formats import FORMS
from gateway.config.parsing.kind_names import kind_name
from gateway.config.parsing.problems import Given, Problem, joined, nearest, shown
from gateway.config.parsing.retired_keys import retired
from gateway.config.parsing.yaml_tree import UNREAD, Unreadable, number

_Extra = Mapping[str, Any]


class Walker:
    """One walk over one tree.

    `problems` are the errors found; `spoilt` are the paths that hold a default because of them.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self.spoilt: list[str] = []
        self._env = env

    def read(self, shape: inspect.StructType, tree: object) -> object:
        """Return the struct that `tree` describes, with defaults in place of refused values.

        If the tree as a whole cannot be read, the result is not a struct, and the empty path is spoilt.
        """
        found = self._read(shape, tree, "", {})
        if not isinstance(found, shape.cls):
            self.spoilt.append("")
        return found

    def _refuse(self, path: str, text: str) -> Unreadable:
        self.problems.append(Problem(path, text))
        self.spoilt.append(path)
        return UNREAD

    def _read(self, kind: inspect.Type, value: object, path: str, extra: _Extra) -> object:
        """Read one value of any kind; `extra` holds its annotations: `form`, `secret`."""
        if isinstance(kind, inspect.Metadata):
            return self._read(kind.type, value, path, {**extra, **(kind.extra or {})})
        if type(value) is str:
            try:
                value = substitute(value, self._env)
            except ValueError as exc:
                return self._refuse(path, str(exc))
        if isinstance(value, Unreadable):
            self.spoilt.append(path)
            return UNREAD
        if isinstance(kind, inspect.UnionType):
            # An empty variable is null, so that the environment can unset a value.
            if value is None or (isinstance(value, Given) and value == ""):
                return None
            (inner,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
            return self._read(inner, value, path, extra)
        return self._read_plain(kind, value, path, extra)

    def _read_plain(self, kind: inspect.Type, value: object, path: str, extra: _Extra) -> object:
        match kind, value:
            case inspect.StructType(), dict():
                return self._struct(kind, value, path)
            case inspect.VarTupleType(), list() if len(value) >= (kind.min_length or 0):
                items = (self._read(kind.item_type, item, joined(path, at), extra) for at, item in enumerate(value))
                return tuple(item for item in items if item is not UNREAD)
            case inspect.DictType(), dict():
                found: dict[object, object] = {}
                for name, item in value.items():
                    place = joined(path, name)
                    found[self._read(kind.key_type, name, place, {})] = self._read(kind.value_type, item, place, {})
                return {name: item for name, item in found.items() if UNREAD not in (name, item)}
            case _:
                pass
        given, form = "a secret" if extra.get("secret") else shown(value), extra.get("form", "")
        try:
            if (single := _single(kind, value, form)) is not UNREAD:
                return single
        except ValueError as exc:
            return self._refuse(path, f"{given} {exc}")
        example = f', e.g. "{FORMS[form].example}"' if form else ""
        return self._refuse(path or "document", f"expected {kind_name(kind, path, form)}{example}; got {given}")

    def _struct(self, kind: inspect.StructType, section: dict[str, object], path: str) -> object:
        fields = {field.name: field for field in kind.fields}
        for key in section:
            if key not in fields:
                self._refuse_key(path, key, fields)
        found: dict[str, object] = {}
        for name, field in fields.items():
            place = joined(path, name)
            if name in section:
                found[name] = self._read(field.type, section[name], place, {})
            elif field.required and place not in self.spoilt:
                self._refuse(place, f"is missing; expected {kind_name(field.type)}")
            if field.required and found.get(name, UNREAD) is UNREAD:
                found[name] = field.type.cls() if isinstance(field.type, inspect.StructType) else ()
        return kind.cls(**{name: value for name, value in found.items() if value is not UNREAD})

    def _refuse_key(self, path: str, key: str, known: Mapping[str, inspect.Field]) -> None:
        """Refuse an unknown key; the one that was probably meant has no value then."""
        if (instead := retired(joined(path, key))) is not None:
            self._refuse(joined(path, key), f"was removed: {instead}")
        elif meant := nearest(key, known):
            self._refuse(joined(path, key), f'unknown key; did you mean "{meant}"?')
            self.spoilt.append(joined(path, meant))
        else:
            self._refuse(joined(path, key), f"unknown key; remove it, or use one of: {', '.join(known)}")


def _single(kind: inspect.Type, value: object, form: str) -> object:
    """Return a single value; UNREAD if it is not of this kind. Raises ValueError if its text form says more."""
    match kind, value:
        case inspect.LiteralType(), str() if value in kind.values:
            return str(value)  # a `Given` must not stay in the configuration
        case inspect.BoolType(), bool() | Given("true" | "false"):
            return value in (True, "true")
        case ((inspect.IntType() | inspect.FloatType()), _):
            return _number(kind, number(value) if isinstance(value, Given) else value)
        case inspect.StrType(), str() if form:
            return FORMS[form].parse(str(value)) or UNREAD
        case inspect.StrType(), str() if len(value) >= (kind.min_length or 0):
            return str(value)
        case _:
            return UNREAD


def _number(kind: inspect.IntType | inspect.FloatType, value: object) -> object:
    of = int if isinstance(kind, inspect.IntType) else float
    if type(value) not in (int, of):  # true is an int, too
        return UNREAD
    assert isinstance(value, int | float)
    return of(value) if (kind.ge or 0) <= value <= (kind.le or value) else UNREAD

"""Names the kinds of values, for errors and for docs/configuration.md."""

from typing import Final

from msgspec import inspect

from gateway.config.parsing.formats import FORMS

_UNITS: Final = {"_seconds": "seconds", "_bytes": "bytes", "_ms": "milliseconds"}


def kind_name(kind: inspect.Type, key: str = "", form: str = "") -> str:  # noqa: PLR0911 - one for each kind
    """Return what a value of this key must be; `form` is the text form that its annotation names."""
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            return kind_name(inner, key, (extra or {}).get("form", form))
        case inspect.UnionType(types=types):
            (inner,) = (each for each in types if not isinstance(each, inspect.NoneType))
            return f"{kind_name(inner, key, form)}, or null"
        case inspect.StructType(fields=(first, *_)):
            return f"section, e.g. {{{first.name}: ...}}"
        case inspect.VarTupleType(item_type=item, min_length=least):
            return f"{'non-empty ' if least else ''}list of: {kind_name(item)}"
        case inspect.DictType(key_type=name, value_type=value):
            return f"map of {kind_name(name)} to {kind_name(value)}"
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high) | inspect.FloatType(ge=low, le=high):
            number = "whole number" if isinstance(kind, inspect.IntType) else "number"
            return f"{next((unit for end, unit in _UNITS.items() if key.endswith(end)), number)}, {low} to {high}"
        case inspect.StrType():
            return FORMS[form].name if form else "text"
        case _:
            raise TypeError(f"the model uses {kind}, which the loader cannot read")

"""What all sections of the configuration have in common: they are frozen, strict, and printed without secrets."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, inspect

from gateway.config.parsing.formats import redacted_url


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section that hides what its annotations call secret when it is printed, and redacts its URLs."""

    def __repr__(self) -> str:
        kind = inspect.type_info(type(self))
        assert isinstance(kind, inspect.StructType)
        shown = (f"{field.name}={_shown(field.type, getattr(self, field.name))!r}" for field in kind.fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(kind: inspect.Type, value: Any) -> Any:
    notes = _notes(kind)
    if not value or not notes.keys() & {"secret", "program", "form"}:
        return value
    if "program" in notes:
        return value[0], "..."
    if "secret" not in notes:
        return redacted_url(value) if notes["form"] == "url" else value
    if isinstance(value, Mapping):
        return f"<{', '.join(value)} hidden>"
    return f"<{len(value)} hidden>" if isinstance(value, tuple) else "<hidden>"


def _notes(kind: inspect.Type) -> dict[str, Any]:
    """Return what the annotations of a type, or of what it holds, say."""
    match kind:
        case inspect.Metadata():
            return {**_notes(kind.type), **(kind.extra or {})}
        case inspect.UnionType():
            return {name: note for each in kind.types for name, note in _notes(each).items()}
        case inspect.VarTupleType():
            return _notes(kind.item_type)
        case inspect.DictType():
            return _notes(kind.value_type)
        case _:
            return {}

"""Sections of the configuration that hide their secrets when printed."""

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct, structs

from gateway.config.parsing.formats import redacted_url


class Discreet(Struct, frozen=True, kw_only=True):
    """A section that hides its secrets when printed, and redacts its URLs."""

    _secrets: ClassVar[frozenset[str]] = frozenset()
    _urls: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = (f"{name}={self._shown(name, value)!r}" for name, value in structs.asdict(self).items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def _shown(self, name: str, value: Any) -> Any:
        if name in self._urls and value is not None:
            return redacted_url(value)
        return _hidden(value) if name in self._secrets else value


def _hidden(value: object) -> str | None:
    """A placeholder for secrets, with their number or names."""
    if isinstance(value, tuple):
        return f"<{len(value)} hidden>"
    if isinstance(value, Mapping):
        return f"<{', '.join(value)} hidden>" if value else "{}"
    return None if value is None else "<hidden>"

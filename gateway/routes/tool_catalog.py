"""What is known of the tools of a modern server: the arguments that headers repeat, and whether a tool may run twice.

It is known by principal, because servers may show each caller other tools.
"""

from typing import Final

from gateway.protocol.tool_list import Tool
from gateway.runtime.newest import Newest

_MAX_CALLERS: Final = 1_000
_MAX_TOOLS: Final = 100_000
"""Of all callers together."""
_MAX_NAME: Final = 256


class ToolCatalog:
    """The tools by principal, as lists name them; what was used longest ago is forgotten first."""

    def __init__(self) -> None:
        self._callers: Newest[bytes, dict[str, Tool]] = Newest(_MAX_CALLERS)
        self._count = 0
        """Of all tools."""

    def of(self, principal: bytes) -> dict[str, Tool] | None:
        """The tools of a caller; None if they were not listed."""
        if principal in self._callers:
            self._callers.move_to_end(principal)
        return self._callers.get(principal)

    def keep(self, principal: bytes, tools: dict[str, Tool]) -> None:
        """Keep a list, as far as it was read."""
        self.forget(principal)
        kept = {name: tool for name, tool in tools.items() if len(name) <= _MAX_NAME}
        self._count += len(kept) - len(self._callers.keep(principal, kept) or ())
        while self._count > _MAX_TOOLS:
            self.forget(next(iter(self._callers)))

    def forget(self, principal: bytes) -> None:
        """Forget the tools of a caller, because the server says that their headers have changed."""
        self._count -= len(self._callers.pop(principal, ()))

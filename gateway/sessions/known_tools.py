"""The tools of a server, as far as the lists told that the callers of one pool key were shown."""

from typing import Final

from gateway.protocol.tool_list import Tool
from gateway.upstream.channel import Headers

UNKNOWN_TOOL: Final = Tool()
_TOOLS_KEPT: Final = 10_000
"""Bounds the tools of a server that renames them without announcing it."""
_CREDENTIALS_KEPT: Final = 64


class KnownTools:
    """What answers to tools/list said, as far as they were read, until a change may have made it wrong."""

    __slots__ = ("_former", "_listed", "by_name")

    def __init__(self) -> None:
        self.by_name: dict[str, Tool] | None = None
        """None when unknown. Replaced with each change, never altered."""
        self._former: dict[str, Tool] | None = None
        """Those known before a change may have been missed; calls that began then are judged by these."""
        self._listed: set[str | None] = set()
        """Credentials with which the tools were listed since they last changed."""

    def __bool__(self) -> bool:
        """Whether any tool is known, or was."""
        return bool(self.by_name or self._former)

    def learn(self, tools: dict[str, Tool], headers: Headers, *, is_whole: bool = True) -> None:
        """Take over a list, as far as it was read; only one that `is_whole` shows all that this credential may see.

        Tools that another credential was shown stay known: a list of a narrower scope must not switch the header
        check of another tool off.
        """
        others = self._listed - {headers.get("Authorization")}
        known = self.by_name if others and self.by_name is not None else {}
        self.by_name = {**known, **tools} if len(known) < _TOOLS_KEPT else tools
        # A credential that is forgotten only has the tools listed once more.
        listed = {headers.get("Authorization")} if is_whole else set()
        self._listed = others | listed if len(others) < _CREDENTIALS_KEPT else set()

    def find(self, name: str, headers: Headers) -> Tool | None:
        """What is known of a tool, which need not be shown to this credential; None if the tools have to be listed."""
        if self.by_name is None:
            return None
        found = self.by_name.get(name)
        return UNKNOWN_TOOL if found is None and headers.get("Authorization") in self._listed else found

    def latest(self, name: str) -> Tool:
        """What is known of a tool, or was before a change may have been missed."""
        return (self.by_name or self._former or {}).get(name, UNKNOWN_TOOL)

    def changed(self) -> None:
        """The server says that its tools are others now."""
        self._former = self.by_name = None
        self._listed.clear()

    def may_have_changed(self) -> None:
        """The server may have said so where nobody heard it."""
        self._former, self.by_name = self.by_name or self._former, None
        self._listed.clear()

import pytest

from gateway.protocol.tool_list import Tool
from gateway.routes import tool_catalog as module
from gateway.routes.tool_catalog import ToolCatalog


def test_the_tools_of_all_callers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TOOLS", 3)
    catalog, long = ToolCatalog(), "d" * 300
    catalog.keep(b"ada", {"a": Tool(), "b": Tool(), long: Tool()})
    catalog.keep(b"eve", {"c": Tool(), long: Tool()})
    assert (catalog.of(b"eve"), catalog.of(b"ada")) == ({"c": Tool()}, {"a": Tool(), "b": Tool()})
    catalog.keep(b"bob", {"e": Tool()})
    assert (catalog.of(b"eve"), catalog.of(b"ada") is None) == (None, False), "ada's were used after eve's"
    catalog.keep(b"bob", {})
    catalog.keep(b"ada", dict.fromkeys("abcd", Tool()))
    assert catalog.of(b"ada") is None, "one caller with more than the limit has nothing"

"""The pages about metrics and logs are complete."""

import ast
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

from gateway.telemetry import Event
from tests.parts.launch import REPOSITORY

SOURCES = sorted((REPOSITORY / "gateway").rglob("*.py"))
SPREAD = {event: {"replica", "process"} for event in (Event.CONFIG_LOADED, Event.CONFIG_REJECTED)}
"""Fields that no logging call names: the maker of `Reload` passes one of these."""


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(name, str(REPOSITORY / "scripts" / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def written() -> dict[str, set[str]]:
    """By event, the fields that the code logs with it: keywords, and the keys of unpacked dicts, `about` for one."""
    found: dict[str, set[str]] = {event.name: set() for event in Event}
    writers: dict[str, set[str]] = {}
    through: list[tuple[str, str]] = []
    trees = [ast.parse(source.read_text()) for source in SOURCES]
    ids = {key for tree in trees for node in ast.walk(tree) if _is_about(node) for key in _keys(node)}
    for tree in trees:
        about = {key for node in ast.walk(tree) if _names_about(node) for key in _keys(node)} or ids
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
            first = call.args[0]
            fields = {keyword.arg for keyword in call.keywords if keyword.arg}
            for unpacked in (keyword.value for keyword in call.keywords if keyword.arg is None):
                name = ast.unparse(unpacked)
                fields |= ids if name.endswith(".about") else about if name.endswith("about") else _keys(unpacked)
            if isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name) and first.value.id == "Event":
                found[first.attr] |= fields
                through.append((ast.unparse(call.func).rpartition(".")[2], first.attr))
            elif ast.unparse(call).startswith("log.warning(event"):
                writers[_function_of(tree, call)] = fields
    for writer, name in through:
        found[name] |= writers.get(writer, set())
    return found


def _function_of(tree: ast.Module, call: ast.Call) -> str:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return next(each.name for each in functions if call in ast.walk(each))


def _is_about(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "about"


def _names_about(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == "_about"
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "about"


def _keys(node: ast.AST) -> set[Any]:
    dicts = [part for part in ast.walk(node) if isinstance(part, ast.Dict)]
    return {key.value for part in dicts for key in part.keys if isinstance(key, ast.Constant)}


def test_every_event_is_logged_somewhere_and_its_fields_are_the_documented_ones() -> None:
    told = script("print_events").EVENTS
    documented = {event.name: set(told[event].fields) - SPREAD.get(event, set()) for event in Event}
    assert written() == documented


def test_every_level_of_an_event_is_documented() -> None:
    told = script("print_events").EVENTS
    text = "\n".join(source.read_text() for source in SOURCES)
    for level, name in re.findall(r"log\.(debug|info|warning|error|exception)\(\s*Event\.(\w+)", text):
        assert level.replace("exception", "error") in told[Event[name]].level.split(", "), name


def test_every_metric_that_the_pages_name_exists() -> None:
    metrics = (REPOSITORY / "docs" / "metrics.md").read_text()
    declared = set(re.findall(r"^### `(\w+)`$", metrics, re.MULTILINE))
    pages = [*REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "README.md"]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"mcp_(?:gateway|server)_[a-z_]*[a-z]", page.read_text())
        if "decisions" not in page.parts
    }
    known = declared | {f"{name}_{end}" for name in declared for end in ("count", "sum", "bucket")}
    assert [each for each in sorted(named) if each[1] not in known] == []

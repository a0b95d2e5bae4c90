"""Reads YAML text into a plain tree, refusing the surprises of YAML 1.1.

PyYAML keeps the last of two equal keys, reads `on` as true and `1:30` as 90, and follows aliases without end.
So this file composes nodes and builds the values itself. The tree consists of dict, list, str, int, float, bool
and None, with `Surprise` for a scalar that YAML 1.1 reads unexpectedly, and `UNREAD` for a refused value.
"""

import re
from enum import Enum
from typing import Any, Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gateway.config.parsing.problems import Problem, Surprise, joined, shown

MAX_TEXT_CHARACTERS = 262_144
_MAX_DEPTH = 32
_TAG = "tag:yaml.org,2002:"
_ALIAS = "!alias"
_KINDS = ("str", "null", "bool", "int", "float", "timestamp", "merge", "value")
_SCALARS = {_ALIAS, *(f"{_TAG}{kind}" for kind in _KINDS)}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}(?:[eE][-+]?[0-9]{1,2})?", re.ASCII)
_SPELT = {"true": True, "True": True, "false": False, "False": False}


class Unreadable(Enum):
    """Stands for a value that was refused, with a problem reported."""

    UNREAD = "unread"


UNREAD: Final = Unreadable.UNREAD


def read_tree(text: str) -> tuple[object, list[Problem]]:
    """Return the tree of a YAML document, and its problems; an empty document is an empty mapping."""
    if len(text) > MAX_TEXT_CHARACTERS:
        return UNREAD, [Problem("document", f"has over {MAX_TEXT_CHARACTERS} characters; split the routes")]
    try:
        node, problems = _compose(text)
    except _TooDeepError:
        return UNREAD, [Problem("document", f"is nested deeper than {_MAX_DEPTH} levels; flatten it")]
    except yaml.YAMLError as exc:
        return UNREAD, [_syntax_problem(exc)]
    return ({} if node is None else _build(node, problems)), problems


def lines(text: str) -> dict[str, int]:
    """Return the line of each key and of each item of a list, by its path; nothing for a text that cannot be read."""
    found: dict[str, int] = {}
    try:
        node, _ = _compose(text)
    except (yaml.YAMLError, _TooDeepError):
        return found
    if node is not None:
        _note_lines(node, "", found)
    return found


def _note_lines(node: Node, path: str, found: dict[str, int]) -> None:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                place = joined(path, key.value)
                found[place] = key.start_mark.line + 1
                _note_lines(value, place, found)
    elif isinstance(node, SequenceNode):
        for number_, item in enumerate(node.value):
            place = joined(path, number_)
            found[place] = item.start_mark.line + 1
            _note_lines(item, place, found)


def _compose(text: str) -> tuple[Node | None, list[Problem]]:
    composer = _Composer(text)
    try:
        return composer.get_single_node(), composer.refused
    finally:
        composer.dispose()  # it references itself


def number(text: str) -> int | float | None:
    """Return the number that a plain decimal text denotes, or None."""
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else None


class _TooDeepError(Exception):
    """The document is nested too deeply."""


class _Composer(yaml.SafeLoader):
    """Composes nodes; notes aliases instead of following them, and stops at `_MAX_DEPTH`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.refused: list[Problem] = []
        self.depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            return self._refuse_alias()
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _TooDeepError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _refuse_alias(self) -> Node:
        event = self.get_event()  # type: ignore[no-untyped-call]
        line = f"line {event.start_mark.line + 1}"
        self.refused.append(Problem(line, f"alias {shown(event.anchor)} is not allowed; write the value out"))
        return ScalarNode(_ALIAS, "", event.start_mark, event.end_mark)


def _syntax_problem(exc: yaml.YAMLError) -> Problem:
    """Name the place and the reason, but do not quote the line: it may contain a key."""
    mark = getattr(exc, "problem_mark", None) or getattr(exc, "context_mark", None)
    where = f"line {mark.line + 1}" if mark else "document"
    what = getattr(exc, "problem", None) or getattr(exc, "reason", None) or "cannot be read"
    return Problem(where, f"is not YAML: {what}; check indentation, colons and quotes here")


def _build(node: Node, problems: list[Problem]) -> object:
    if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
        return _mapping(node, problems)
    if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
        return [_build(item, problems) for item in node.value]
    if isinstance(node, ScalarNode) and node.tag in _SCALARS:
        return _scalar(node)
    problems.append(Problem(_line(node), "has a YAML tag, which is not supported; remove it"))
    return UNREAD


def _line(node: Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _mapping(node: MappingNode, problems: list[Problem]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key_node, value_node in node.value:
        key = key_node.value
        if not isinstance(key, str) or key_node.tag != f"{_TAG}str":
            what = f"{shown(key)} is not a text key" if isinstance(key, str) else "has a key that is not text"
            problems.append(Problem(_line(key_node), f"{what}; put it in quotes if that is the intended key"))
        elif key in tree:
            problems.append(Problem(_line(key_node), f"duplicate key {shown(key)}; keep one of them"))
        else:
            tree[key] = _build(value_node, problems)
    return tree


def _scalar(node: ScalarNode) -> object:
    """Return the value if YAML 1.1 and 1.2 agree on it, else a Surprise."""
    text, kind = node.value, node.tag.removeprefix(_TAG)
    if node.tag == _ALIAS:
        return UNREAD
    if kind in {"str", "null"}:
        return text if kind == "str" else None
    if kind == "bool" and text in _SPELT:
        return _SPELT[text]
    found = number(text) if kind in {"int", "float"} else None
    return Surprise(text, _reading(kind, text)) if found is None else found


def _reading(kind: str, text: str) -> str:
    """Describe how YAML 1.1 reads the text."""
    if kind == "bool":
        return "true" if text.lower() in {"on", "yes", "true"} else "false"
    if kind in {"int", "float"}:
        return "a number in another notation"
    return {"timestamp": "a date", "merge": "a merge key"}.get(kind, f"a YAML {kind}")

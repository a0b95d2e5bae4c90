"""Reads YAML text into a plain tree, as YAML 1.2 does: `on`, `1:30` and `0600` are texts.

PyYAML keeps the last of two equal keys, reads `on` as true and `1:30` as 90, and follows aliases without end. So this
file composes nodes and builds the values itself. The tree consists of dict, list, str, int, float, bool and None, with
`UNSET` for a value that was refused, with a problem.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import yaml
from msgspec import UNSET, UnsetType
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from gateway.config.parsing.problems import Problem, joined, shown

MAX_TEXT_CHARACTERS = 262_144
_MAX_DEPTH = 32
_NOT_UTF_8 = range(0xDC80, 0xDD00)  # what `surrogateescape` makes of such a byte
_TAG = "tag:yaml.org,2002:"
# 18 digits fit into 64 bits. YAML 1.1 reads a leading zero as octal.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}(?:[eE][-+]?[0-9]{1,2})?", re.ASCII)
_SPELT = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
}


# What PyYAML says, and what that means to a person; True: where it says that the construct begins.
_CAUSES: Final = (
    (r"character '\\t'", "has a tab; indent with spaces, which YAML requires", False),
    (
        r"cannot start any token|chomping",
        "has a character that no value may begin with; put the value in quotes",
        False,
    ),
    (r"scanning an (alias|anchor)", "has a value that begins with * or &; put it in quotes", False),
    (r"scanning a quoted scalar", "has a quotation that does not end; close it", True),
    (r"escape", "has a backslash in double quotes; write it twice, or use single quotes", False),
    (r"parsing a flow", "has a bracket that is not closed, or a comma is missing; add it", True),
    (r"expected ':'", "has no colon after a key; write key: value", True),
    (
        r"mapping values are not allowed",
        "has a colon where no key can be; end the key above with a colon and a space, or put the value in quotes",
        False,
    ),
    (r"<block end>", "is not aligned with the lines around it; indent it as they are", False),
    (r"<document start>", "has text after the end of what is written; write key: value", False),
    (r"another document", "has a second document; remove the line ---, or what follows", False),
)


class Document(NamedTuple):
    """A document as far as it can be read."""

    tree: object
    problems: list[Problem]
    places: dict[str, tuple[int, int]]
    """The line and the column of each key and of each item of a list, by its path, and of the whole as ``""``."""


def read_tree(text: str) -> Document:
    """Read a YAML document; an empty one is an empty mapping."""
    if len(text) > MAX_TEXT_CHARACTERS:
        return Document(UNSET, [_whole(f"has over {MAX_TEXT_CHARACTERS} characters; split the routes")], {})
    try:
        if problems := list(_unsupported(text)):  # before nodes are made, which aliases could multiply
            return Document(UNSET, problems, {})
        node = yaml.compose(text, _TextLoader)
    except ReaderError as exc:
        before = text[: exc.position].rsplit("\n", 1)
        place = text.count("\n", 0, exc.position) + 1, len(before[-1]) + 1
        what = f"the character {exc.character:#04x} is not allowed; remove it"
        if exc.character in _NOT_UTF_8:
            what = "is not UTF-8 text; save it as UTF-8"
        return Document(UNSET, [Problem("", what, place)], {})
    except yaml.MarkedYAMLError as exc:
        return Document(UNSET, [_not_yaml(exc)], {})
    tree = _Tree()
    return Document({} if node is None else tree.build(node, ""), tree.problems, tree.places)


def _not_yaml(exc: yaml.MarkedYAMLError) -> Problem:
    """Return the place and the reason, but not the line: it may contain a key."""
    said, mark = f"{exc.context}: {exc.problem}", exc.problem_mark
    for pattern, text, is_where_it_begins in _CAUSES:
        if re.search(pattern, said):
            begun = exc.context_mark if is_where_it_begins else None
            return Problem("", f"is not YAML: it {text}", _place(begun or mark))
    return Problem("", f"is not YAML: {exc.problem}; check indentation, colons and quotes here", _place(mark))


def _whole(text: str) -> Problem:
    return Problem("document", text, (1, 1))


def number(text: str) -> int | float | None:
    """Return the number that a plain decimal text denotes, or None."""
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else None


class _TextLoader(yaml.SafeLoader):
    """Takes every plain scalar for a text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = {}


def _unsupported(text: str) -> Iterator[Problem]:
    """Yield a problem for each alias, and for nesting that is too deep to follow."""
    depth, aliases = 0, set()
    for event in yaml.parse(text, _TextLoader):
        if isinstance(event, yaml.AliasEvent) and event.anchor not in aliases:
            assert event.start_mark is not None
            aliases.add(event.anchor)
            text = f"alias {shown(event.anchor)} is not allowed; write the value out"
            yield Problem("", text, _place(event.start_mark))
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            yield _whole(f"is nested deeper than {_MAX_DEPTH} levels; flatten it")
            return


class _Tree:
    """Builds the plain tree of nodes."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.places: dict[str, tuple[int, int]] = {"": (1, 1)}

    def build(self, node: Node, path: str) -> object:
        """Return the plain tree of a node."""
        if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._item(item, item, joined(path, number_)) for number_, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag == f"{_TAG}str":
            found = number(node.value)
            plain = _SPELT.get(node.value, node.value) if found is None else found
            return plain if node.style is None else node.value  # in quotes, it is a text whatever it spells
        if not isinstance(node, MappingNode) or node.tag != f"{_TAG}map":
            return self._refuse(node, "has a YAML tag, which is not supported; remove it, or put the value in quotes")
        tree: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str) or key_node.tag != f"{_TAG}str":
                if isinstance(key_node, MappingNode):
                    text = "has the {{ of a template that was not filled in; write ${NAME} for a variable"
                    return self._refuse(key_node, text)
                self._refuse(key_node, "has a key that is not text; put it in quotes if that is the intended key")
            elif key in tree:
                self._refuse(key_node, f"duplicate key {shown(key)}; keep one of them")
            else:
                tree[key] = self._item(key_node, value_node, joined(path, key))
        return tree

    def _item(self, begin: Node, node: Node, path: str) -> object:
        self.places[path] = _place(begin.start_mark)
        return self.build(node, path)

    def _refuse(self, node: Node, text: str) -> UnsetType:
        self.problems.append(Problem("", text, _place(node.start_mark)))
        return UNSET


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1

"""docs/papers.md names code and tests that exist."""

import ast
import re

import pytest

from tests.parts.launch import REPOSITORY

PAGE = (REPOSITORY / "docs" / "papers.md").read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:gateway|tests)/[\w/]+\.py)", PAGE))))
def test_every_file_exists(path: str) -> None:
    assert (REPOSITORY / path).is_file()


@pytest.mark.parametrize(("path", "name"), sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))))
def test_every_test_exists(path: str, name: str) -> None:
    tree = ast.parse((REPOSITORY / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

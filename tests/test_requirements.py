import ast
from functools import cache
from pathlib import Path

import pytest

from tests.requirements import REQUIREMENTS, Requirement

REPOSITORY = Path(__file__).parent.parent


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((REPOSITORY / file).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.sentence[:60])
def test_every_requirement_has_tests_that_exist(requirement: Requirement) -> None:
    assert requirement.tests
    for node in requirement.tests:
        file, _, name = node.partition("::")
        assert name in names_in(file), f"{requirement.link} names {node}"


def test_no_sentence_is_listed_twice() -> None:
    sentences = [requirement.sentence for requirement in REQUIREMENTS]
    assert len(set(sentences)) == len(sentences)


def test_every_sentence_demands_something() -> None:
    assert all("MUST" in each.sentence or "SHOULD" in each.sentence for each in REQUIREMENTS)

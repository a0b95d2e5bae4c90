"""docs/threats.md names files and tests that exist, and has a row for every threat and fault."""

import ast
import re
from functools import cache
from typing import Final

import pytest

from tests.parts.launch import REPOSITORY

PAGE: Final = REPOSITORY / "docs" / "threats.md"
THREATS, FAULTS = 48, 36
ROWS: Final = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text().replace("| |\n", "|  |\n").splitlines()
    if re.match(r"\| [TF]\d+ \|", line)
]
IDS: Final = [row[0] for row in ROWS]
_CODE: Final = re.compile(r"`([^`]+)`")


@cache
def names_in(file: str) -> set[str]:
    """The names of a file's tests; empty if the file does not exist."""
    path = REPOSITORY / file
    if not path.is_file():
        return set()
    functions = [
        each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {each.name for each in functions if each.name.startswith("test_")}


def test_every_threat_and_every_fault_has_one_row() -> None:
    assert [f"T{number}" for number in range(1, THREATS + 1)] + [
        f"F{number}" for number in range(1, FAULTS + 1)
    ] == IDS


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_row_names_its_promise_with_files_and_tests_that_exist(row: list[str]) -> None:
    _, threat, promise, files, tests, *_ = row
    assert threat
    assert promise
    named = _CODE.findall(files)
    assert named
    assert [file for file in named if not (REPOSITORY / file).is_file()] == []
    shown_by = [node.partition("::") for node in _CODE.findall(tests)]
    assert shown_by
    assert [f"{file}::{name}" for file, _, name in shown_by if name not in names_in(file)] == []


def test_the_security_model_and_this_page_lead_to_each_other() -> None:
    assert "(security.md)" in PAGE.read_text()
    assert "(threats.md)" in (REPOSITORY / "docs" / "security.md").read_text()

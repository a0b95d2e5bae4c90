"""The pre-commit hooks and the issue forms have the form that their programs expect."""

import re
from pathlib import Path

import pytest
import yaml

from tests.parts.launch import REPOSITORY

TARGETS = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))
ELEMENTS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


def test_each_pre_commit_hook_is_local_and_calls_a_target_of_the_makefile() -> None:
    (repository,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    called = [hook["entry"].split() for hook in repository["hooks"]]
    assert {command[0] for command in called} == {"make"}
    assert {command[-1] for command in called} == {"format", "lint", "types"} <= TARGETS


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_has_the_keys_that_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert {element["type"] for element in form["body"]} <= ELEMENTS
    fields = [element for element in form["body"] if element["type"] != "markdown"]
    assert all(element["attributes"]["label"] for element in fields)
    assert len({element["id"] for element in fields}) == len(fields)


def test_the_forms_are_found() -> None:
    assert [path.stem for path in FORMS] == ["bug_report", "feature_request"]

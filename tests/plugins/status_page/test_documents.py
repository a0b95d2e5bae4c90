"""The pages of the documentation that the status page links to."""

import tomllib
from pathlib import Path

import pytest

from gateway.plugins.status_page.documents import TITLES, document

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("name", TITLES)
def test_a_page_is_that_of_this_version(name: str) -> None:
    assert document(name) == (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["", "none.md", "tracing.md", "../README.md", "../docs/status.md"])
def test_no_other_file_is_served(name: str) -> None:
    assert document(name) is None


def test_the_package_has_each_page() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"] == {f"docs/{name}": f"gateway/docs/{name}" for name in TITLES}

"""The unit tier of what depends on aiohttp, with the oldest one that the package allows. The suite has the newest.

Few files of the gateway import aiohttp, and what the package promises about versions concerns them alone. So these are
the tests that start no program and import such a file, however indirectly. In all others another aiohttp would only
make another client or fake of the tests, at a cost of six minutes.
"""

import os
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.parts.launch import PARTS, REPOSITORY
from tests.support.programs import output
from tests.test_layers import FILES, imports_of, needed

pytestmark = pytest.mark.real

OLDEST: Final = PARTS / "aiohttp312"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables of a program that finds the oldest aiohttp before the installed one."""
    (packages,) = OLDEST.glob("lib/python3*/site-packages")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**outer, "PYTHONPATH": str(packages)}


def test_it_is_the_oldest_that_the_package_allows(environment: dict[str, str]) -> None:
    version = output(sys.executable, "-c", "import aiohttp; print(aiohttp.__version__)", env=environment).strip()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (requirement,) = (each for each in project["dependencies"] if each.startswith("aiohttp>"))
    assert version == requirement.removeprefix("aiohttp>=").partition(",")[0] + ".0"


def reached(file: Path) -> set[Path]:
    """The files of the package and the tests that a file imports, itself included."""
    found, new = {file}, [file]
    while new:
        more = needed(new.pop()) - found
        found |= more
        new += more
    return found


def test_the_tests_that_depend_on_aiohttp_pass(environment: dict[str, str]) -> None:
    users = {file for file in FILES if any(name.split(".")[0] == "aiohttp" for _, name in imports_of(file))}
    reach = {file: reached(file) & users for file in sorted((REPOSITORY / "tests").rglob("test_*.py"))}
    assert set().union(*reach.values()) == users, "each has a test"
    files = [file for file, found in reach.items() if found]
    chosen = ("-m", "pytest", "-q", "-m", "not processes and not real", *files)
    _ = output(sys.executable, *chosen, cwd=REPOSITORY, env=environment)

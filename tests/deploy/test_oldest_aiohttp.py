"""The unit tier with the oldest aiohttp that the package allows. The rest of the suite runs with the newest."""

import os
import subprocess
import sys
import tomllib
from typing import Final

import pytest

from tests.parts.launch import PARTS, REPOSITORY

pytestmark = pytest.mark.real

OLDEST: Final = PARTS / "aiohttp312"


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables of a program that finds the oldest aiohttp before the installed one."""
    (packages,) = OLDEST.glob("lib/python3*/site-packages")
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**outer, "PYTHONPATH": str(packages)}


def test_it_is_the_oldest_that_the_package_allows(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import aiohttp; print(aiohttp.__version__)"]
    version = subprocess.check_output(command, env=environment, text=True).strip()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (requirement,) = (each for each in project["dependencies"] if each.startswith("aiohttp>"))
    assert version == requirement.removeprefix("aiohttp>=").partition(",")[0] + ".0"


@pytest.mark.timeout(1200)  # nine thousand tests, in one process beside those of this run
def test_the_unit_tier_passes(environment: dict[str, str]) -> None:
    # What is installed stays as it is, even if pyproject.toml is newer.
    command = ["make", "--silent", "--assume-old=.venv/stamp", "unit", "WORKERS=1"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr

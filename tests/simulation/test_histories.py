"""A thousand histories that follow from the source itself: new ones for each change, the same for everybody."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HISTORIES = 1000


def first_seed() -> int:
    """A seed of this source."""
    digest = hashlib.sha256()
    for path in sorted((REPOSITORY / "gateway").rglob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:4]) * HISTORIES


@pytest.mark.timeout(600)
def test_a_thousand_histories_go_well() -> None:
    first = first_seed()
    command = (sys.executable, "-m", "tests.simulation", "--seeds", f"{first}:{first + HISTORIES}")
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr

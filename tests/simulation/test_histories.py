"""A thousand histories, the same for everybody: their seeds mean something new with each change of the simulation."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_thousand_histories_go_well() -> None:
    command = (sys.executable, "-m", "tests.simulation", "--seeds", "0:1000")
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr

"""In the whole suite, a test of real programs has a second try, which has a time limit too."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts.launch import REPOSITORY

TESTS = """
import pathlib, time

def test_fails_at_first():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    is_second = seen.exists()
    seen.touch()
    assert is_second

def test_never_ends():
    time.sleep(30)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("folder", "expected"), [("chaos", "1 failed, 1 passed, 2 rerun"), ("seal", "2 failed")])
def test_tests_of_programs_have_a_second_try_with_a_time_limit_of_its_own(
    tmp_path: Path, folder: str, expected: str
) -> None:
    file = tmp_path / "tests" / folder / "test_it.py"
    file.parent.mkdir(parents=True)
    _ = file.write_text(TESTS)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path, "--reruns=1", "--timeout=2")
    command = (sys.executable, "-m", "pytest", *options, file)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False, text=True)
    assert f" {expected} in " in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("failed at first: ") == (2 if folder == "chaos" else 0)

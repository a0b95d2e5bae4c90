"""A call costs no more instructions than its budget, which does not depend on how busy the machine is."""

import shutil
import sys
from pathlib import Path

import pytest

from bench import instructions

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),  # under valgrind a program is fifty times slower, and the machine has other tests to run
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions; Debian has it"),
]


def test_a_call_stays_within_its_budget_of_instructions(tmp_path: Path) -> None:
    rows = instructions.count(f"{sys.executable} -m gateway", tmp_path, ["echo", "passed", "ask", "forwarded"])
    print(instructions.table(rows, markdown=False))
    assert instructions.over_budget(rows) == []
    assert all(row.gateway.python_calls > 50 for row in rows), "the calls were not counted"

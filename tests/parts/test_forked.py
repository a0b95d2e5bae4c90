"""A program that was forked is like one that was executed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parts.forked import fork
from tests.parts.launch import execute

pytestmark = pytest.mark.processes

PROGRAM = """
from __future__ import annotations
import json, os, random, sys, uuid
from beside import WORD
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "word": WORD,
    "environment": os.environ.get("MRTR_FORKED"), "home": os.environ.get("HOME"), "input": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "main": sys.modules["__main__"].__dict__ is globals(),
}))
print(json.dumps([random.random(), uuid.uuid4().hex, os.getpid()]), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text('WORD = "imported"\n')
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def circumstances(folder: Path, name: str) -> dict[str, Any]:
    environment = {"PATH": os.environ["PATH"], "MRTR_FORKED": "yes"}
    return {
        "environment": environment,
        "cwd": folder,
        "stdout": folder / f"{name}.out",
        "stderr": folder / f"{name}.err",
    }


async def test_a_forked_program_sees_what_an_executed_one_sees(program: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(program), "3"]
    forked = await fork(command, **circumstances(tmp_path, "forked"))
    executed = await execute(command, **circumstances(tmp_path, "executed"))
    assert (await forked.wait(), await executed.wait()) == (3, 3)
    assert (tmp_path / "executed.err").read_text().count("\n") == 1, "no more than it prints itself"
    seen = json.loads((tmp_path / "forked.out").read_text())
    assert seen == json.loads((tmp_path / "executed.out").read_text())
    assert (seen["word"], seen["leads"], seen["main"]) == ("imported", True, True)


async def test_each_forked_program_draws_random_values_of_its_own(program: Path, tmp_path: Path) -> None:
    names = ("one", "two", "three")
    started = [await fork([sys.executable, str(program), "0"], **circumstances(tmp_path, name)) for name in names]
    assert [await each.wait() for each in started] == [0, 0, 0]
    drawn = [json.loads((tmp_path / f"{name}.err").read_text()) for name in names]
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [3, 3, 3]
    assert [pid for _, _, pid in drawn] == [each.pid for each in started]

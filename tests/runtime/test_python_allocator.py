"""Objects come from the chosen allocator; those from the other one are freed and resized as ever."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gateway.runtime.python_allocator import PythonAllocator, is_usual
from tests.parts.launch import REPOSITORY, free_port

COUNT = """
import sys

def counted():
    before = sys.getallocatedblocks()
    kept = [object() for _ in range(10_000)]
    return sys.getallocatedblocks() - before
"""
"""How many of 10,000 objects come from Python's own allocator, about: it counts no others."""
MANY = 5_000
"""Far more than happen to be allocated beside, and far fewer than all."""

USE = """
from gateway.runtime.python_allocator import PythonAllocator
allocator = PythonAllocator()
allocator.use_c_library(wanted=True)
"""

MIXED = """
import gc, random

chance = random.Random(7)

def change(kept):
    for _ in range(100_000):
        place = chance.randrange(len(kept))
        it = kept[place]
        match chance.randrange(5):
            case 0: kept[place] = {str(name): [name] for name in range(chance.randrange(40))}
            case 1: kept[place] = bytearray(chance.randrange(1, 2000))
            case 2: kept[place] = []
            case _ if isinstance(it, list): it.extend(map(float, range(chance.randrange(90))))
            case _ if isinstance(it, bytearray): del it[chance.randrange(len(it)):]; it.append(1)
            case _: it[len(it)] = it.pop(str(len(it) // 2), None)

kept = [[] for _ in range(3000)]
change(kept)
for wanted in (True, False, True):
    allocator.use_c_library(wanted=wanted)
    change(kept)
del kept
gc.collect()
"""

WATCH = """
import os, pathlib, threading, time
from gateway.routes.held_calls import Lot

lots = []
begin = Lot.__init__

def begin_and_show(lot, *arguments):
    begin(lot, *arguments)
    lots.append(lot)

def watch():
    while counted() > 5_000:
        time.sleep(0.05)
        for lot in lots:
            lot.when_many()
    pathlib.Path(os.environ["COUNTED"], str(os.getpid())).touch()

Lot.__init__ = begin_and_show
threading.Thread(target=watch, daemon=True).start()
"""
"""Says that many calls are held, and makes a file once objects come from the C library."""


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def python(script: str, *options: str, **environment: str) -> str:
    """Run a script in a new process, and return what it prints."""
    command, environment = [sys.executable, *options, "-c", script], clean_environment() | environment
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_choice_counts_for_new_objects() -> None:
    back = "allocator.use_c_library(wanted=False)"
    script = f"{COUNT}print(counted())\n{USE}print(counted())\n{back}\nprint(counted())"
    first, chosen, last = map(int, python(script).split())
    assert first > MANY
    assert chosen < MANY
    assert last > MANY


@pytest.mark.parametrize("chosen", ["pymalloc", "pymalloc_debug"])
def test_the_choice_of_an_operator_stays(chosen: str) -> None:
    assert int(python(f"{COUNT}{USE}print(counted())", PYTHONMALLOC=chosen)) > MANY


@pytest.mark.parametrize("option", ["dev", "tracemalloc"])
def test_an_allocator_that_something_watches_stays(option: str) -> None:
    assert int(python(f"{COUNT}{USE}print(counted())", "-X", option)) > MANY


def test_a_python_with_which_it_was_not_tried_keeps_its_allocator() -> None:
    newer = "from gateway.runtime import python_allocator\npython_allocator._NEWEST = (3, 10)\n"
    assert int(python(f"{newer}{COUNT}{USE}print(counted())")) > MANY


def test_a_trace_goes_on_to_its_end() -> None:
    own = "allocator.use_c_library(wanted=False)\n"
    begin = "import tracemalloc; tracemalloc.start(); kept = [bytes(200) for _ in range(1000)]\n"
    end = "allocator.use_c_library(wanted=True); del kept; print(tracemalloc.get_traced_memory()[0])"
    assert int(python(USE + own + begin + end)) < 100_000


def test_objects_of_both_allocators_are_resized_and_freed_as_ever() -> None:
    assert python(USE + MIXED) == ""


def test_there_is_no_choice_without_what_it_takes() -> None:
    python, c_library = SimpleNamespace(_PyMem_GetCurrentAllocatorName=lambda: b"pymalloc"), Mock(["malloc_trim"])
    assert is_usual(python, c_library)
    assert not is_usual(python, Mock([])), "such as musl, or the C library of macOS"
    assert not is_usual(Mock([]), c_library), "such as PyPy"


def test_a_choice_can_be_made_again_and_again() -> None:
    allocator = PythonAllocator()
    for wanted in (False, True, True, False, False):
        allocator.use_c_library(wanted=wanted)
        assert len([object() for _ in range(1000)]) == 1000


@pytest.mark.processes
@pytest.mark.parametrize(("command", "workers"), [("serve", 1), ("serve", 2), ("wrap", 1)])
async def test_each_process_that_holds_calls_chooses(command: str, workers: int, tmp_path: Path) -> None:
    """As soon as they are many. The supervisor of several workers holds no calls, and is not looked at."""
    _ = (tmp_path / "sitecustomize.py").write_text(COUNT + WATCH)
    config = tmp_path / "gateway.yaml"
    _ = config.write_text(
        json.dumps(
            {
                "listen": f"127.0.0.1:{free_port()}",
                "admin": None,
                "workers": workers,
                "state": {"keys": ["0f" * 32]},
                "hold": {"drain_delay_seconds": 0, "drain_seconds": 0},
                "log": {"format": "json"},
                "routes": [{"upstream": {"url": "http://127.0.0.1:9/mcp"}}],
            }
        )
    )
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY))), "COUNTED": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", command, "--config", str(config)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment() | paths,
    )
    assert process.stderr is not None
    pids = {process.pid} if workers == 1 else set()
    async with asyncio.timeout(60):
        while len(pids) < workers:
            text = await process.stderr.readline()
            assert text, f"the process ended with {await process.wait()}"
            line = json.loads(text)
            if line["event"] == "worker.started":
                pids.add(line["pid"])
        while not all((tmp_path / str(pid)).exists() for pid in pids):
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _ = await process.communicate()
    assert process.returncode == 0

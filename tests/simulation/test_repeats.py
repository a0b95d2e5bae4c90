"""A history repeats itself: in the same process after other histories, and in another process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.simulation.history import History
from tests.simulation.plan import draw

_ROOT: Final = Path(__file__).parents[2]
_SEEDS: Final = (3, 8, 21, 7)
"""With kills, with drains, with cold calls, with subscriptions to several resources; each with calls that ask."""


def told(seeds: tuple[int, ...]) -> list[str]:
    """The trace of each of these histories."""
    return ["\n".join(History(draw(seed), traces=True).run().trace) for seed in seeds]


def test_a_history_has_the_same_trace_whatever_ran_before_it_and_in_whatever_process() -> None:
    """No order may come from addresses of objects or from hashes of strings, and no value from outside."""
    first = told(_SEEDS)
    assert all(len(trace.splitlines()) > 300 for trace in first)
    assert told(_SEEDS[::-1])[::-1] == first

    code = f"import sys; from {__name__} import told; sys.stdout.write('\\0'.join(told({_SEEDS})))"
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(_ROOT)}
    run = subprocess.run(
        (sys.executable, "-c", code), cwd=_ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\0") == first

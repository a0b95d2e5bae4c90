"""`make fuzz`: random exchanges that no test has drawn yet, then new examples for every other random test.

    python -m tests.property.explore 60

Half of the seconds go to the exchange. What is found is printed as an `@example` for the test that it breaks.
"""

import subprocess
import sys
import time
import traceback
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

from tests.property.test_exchange_properties import World, live
from tests.property.test_task_properties import TaskWorld
from tests.support.randomness import EXPLORE

ROOT: Final = Path(__file__).parents[2]
STEPS: Final = 60
FINDINGS: Final = 5
"""Enough to begin with: what they have in common is usually one defect."""


def fails(seed: int, steps: int, kind: type[World]) -> bool:
    """Whether this world breaks a promise."""
    try:
        live(seed, steps, kind)
    except Exception:  # noqa: BLE001  (whatever an exchange raises is a finding)
        return True
    return False


def shortest(seed: int, steps: int, kind: type[World]) -> int:
    """The least number of steps after which the world of this seed fails."""
    return next((fewer for fewer in range(1, steps) if fails(seed, fewer, kind)), steps)


def explore_exchanges(seconds: float) -> int:
    """Live through new worlds for so long; the number of findings."""
    first = SystemRandom().randrange(2**32)
    seeds = Random(first)
    until = time.monotonic() + seconds
    worlds = lived = found = 0
    while time.monotonic() < until and found < FINDINGS:
        seed, kind = seeds.randrange(2**32), (World, TaskWorld)[worlds % 2]
        worlds += 1
        try:
            lived += live(seed, STEPS, kind)
        except Exception:  # noqa: BLE001  (as above)
            found += 1
            traceback.print_exc(limit=-2)
            print(f"{kind.__name__}: @example({seed}, {shortest(seed, STEPS, kind)})", flush=True)
    print(f"{worlds} exchanges of {lived} steps in all, begun with {first}: {found} failed", flush=True)
    return found


def explore_examples(seconds: float) -> int:
    """Run all tests that hypothesis feeds, again and again for so long; the number of runs that failed."""
    until = time.monotonic() + seconds
    failed = 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", f"--hypothesis-profile={EXPLORE}"]
    while time.monotonic() < until and not failed:
        failed += subprocess.run([*command, "--timeout=0"], cwd=ROOT, check=False).returncode != 0
    return failed


def main() -> int:
    """Explore for the seconds of the command line."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    found = explore_exchanges(seconds / 2)
    return 1 if explore_examples(seconds / 2) + found else 0


if __name__ == "__main__":
    sys.exit(main())

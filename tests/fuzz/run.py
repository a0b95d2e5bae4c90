"""`make fuzz`: runs every fuzzer with new values, sharing the time, and prints what each did.

    python -m tests.fuzz.run 600

A third goes to the pure targets, a third to the listeners and the upstream side of a real gateway, a sixth to the
search for superlinear passes, and a sixth to the random tests of hypothesis, half of that to those of exchanges. What
is found is printed, and saved in `.fuzz/` unless hypothesis found it. The exit code is 1 if anything was found.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.targets import TARGETS
from tests.support.randomness import EXPLORE

ROOT: Final = Path(__file__).parents[2]
FOUND: Final = ROOT / ".fuzz"
SIDES: Final = ("client", "passthrough", "peer", "admin", "upstream")
OVERTIME_SECONDS: Final = 300
"""How long after its time a fuzzer may still wait for the gateway to come to rest."""


class Job(NamedTuple):
    """One fuzzer, and its part of the time; one that is not told its time is run again until that is over."""

    name: str
    module: str
    arguments: tuple[str, ...]
    part: float

    def command(self, seconds: float) -> list[str]:
        """Its command line; SECONDS stands for its time."""
        words = [f"{seconds:.0f}" if word == "SECONDS" else word for word in self.arguments]
        return [sys.executable, "-m", self.module, *words]


EXAMPLES: Final = ("-q", "-m", "hypothesis", f"--hypothesis-profile={EXPLORE}", "--timeout=0")
JOBS: Final = (
    *(Job(name, "tests.fuzz.guided", (name, "SECONDS", str(FOUND)), 1 / 3 / len(TARGETS)) for name in TARGETS),
    *(Job(side, "tests.fuzz.black_box", (side, "SECONDS", str(FOUND)), 1 / 3 / len(SIDES)) for side in SIDES),
    Job("pumping", "tests.fuzz.pumping", ("SECONDS",), 1 / 6),
    Job("exchanges", "pytest", (*EXAMPLES, "tests/property"), 1 / 12),
    Job("examples", "pytest", EXAMPLES, 1 / 12),
)


def run(job: Job, seconds: float) -> tuple[int, str]:
    """Run one fuzzer for its time; its exit code, and the last line that it printed."""
    begun = time.monotonic()
    while True:
        try:
            done = subprocess.run(
                job.command(seconds),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds + OVERTIME_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            return 1, f"did not end in {exc.timeout:.0f} s"
        passed = time.monotonic() - begun
        if done.returncode or "SECONDS" in job.arguments or passed > seconds:
            break
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        print("\n".join(line for line in lines if not line.startswith(("INFO:", "WARNING:"))), flush=True)
    return done.returncode, f"{lines[-1] if lines else 'nothing printed'} ({passed:.0f} s)"


def main() -> int:
    """Share the seconds of the command line."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    FOUND.mkdir(exist_ok=True)
    said: list[tuple[Job, int, str]] = []
    for job in JOBS:
        code, last = run(job, max(1, seconds * job.part))
        said.append((job, code, last))
        print(f"{job.name:12} {'FOUND' if code else 'ok':6} {last}", flush=True)
    found = [job.name for job, code, _ in said if code]
    print(f"findings: {', '.join(found)}; their inputs are in {FOUND}" if found else "no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

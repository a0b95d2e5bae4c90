"""Fuzzes one pure target with new inputs, guided by coverage where atheris is installed.

    python -m tests.fuzz.guided TARGET SECONDS FOLDER

Without atheris, which has wheels for some Pythons only, it draws mutants of the corpus without guidance. Each new
finding is saved in FOLDER and printed at once. The exit code is 1 if there is one.
"""

import os
import sys
import time
from pathlib import Path
from random import SystemRandom
from typing import Final

try:
    import atheris
except ImportError:
    atheris = None

if atheris is not None:
    with atheris.instrument_imports(include=["gateway", "jwt", "yarl"]):
        import tests.fuzz.targets  # noqa: F401

from tests.fuzz.mutator import TOKENS, Mutator
from tests.fuzz.targets import CORPUS, TARGETS, Findings, Target

MAX_BYTES: Final = 16_384
HUNG_SECONDS: Final = 20
"""A single input that takes longer is a finding; libFuzzer reports it, and ends."""


class Campaign:
    """The executions of one target, and what they found."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self.executions = 0
        self.findings = Findings(target.name, folder)

    def try_one(self, data: bytes) -> None:
        """Run the target once; a finding is saved, and does not end the campaign."""
        self.executions += 1
        finding = self._target.judge(data)
        if finding is not None:
            self.findings.report(finding.signature, data, finding.trace)


def with_guidance(campaign: Campaign, target: Target, seconds: float, folder: Path) -> None:
    """Let libFuzzer draw the inputs; it ends the process itself, so the numbers go out before."""
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in TOKENS))
    drawn = folder / f"drawn-{target.name}"
    drawn.mkdir(exist_ok=True)
    until = time.monotonic() + seconds

    def once(data: bytes) -> None:
        campaign.try_one(data)
        if time.monotonic() > until:
            end(campaign, "with atheris")

    options = [f"-max_len={MAX_BYTES}", f"-timeout={HUNG_SECONDS}", "-rss_limit_mb=2048", "-verbosity=0"]
    paths = [f"-dict={words}", f"-artifact_prefix={folder}/{target.name}-", str(drawn), str(CORPUS / target.name)]
    atheris.Setup([sys.argv[0], *options, *paths], once)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


def without_guidance(campaign: Campaign, target: Target, seconds: float) -> None:
    """Draw mutants of the corpus."""
    seeds = target.seeds()
    mutator = Mutator(SystemRandom().randrange(2**32), seeds, MAX_BYTES)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        campaign.try_one(mutator.mutate(mutator.random.choice(seeds)))
    end(campaign, "without guidance: atheris is not installed")


def end(campaign: Campaign, how: str) -> None:
    """Print the numbers and exit, past libFuzzer, which would count an exception as a crash."""
    print(f"{campaign.executions} executions, {len(campaign.findings)} findings ({how})", flush=True)
    sys.stdout.flush()
    os._exit(1 if campaign.findings else 0)


def main() -> None:
    """Fuzz the target of the command line."""
    name, seconds, place = sys.argv[1:]
    target, folder = TARGETS[name], Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(target, folder)
    if atheris is None:
        without_guidance(campaign, target, float(seconds))
    else:
        with_guidance(campaign, target, float(seconds), folder)


if __name__ == "__main__":
    main()

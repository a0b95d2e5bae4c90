"""Runs programs to their end."""

import subprocess
from pathlib import Path
from typing import Any


class ProgramError(AssertionError):
    """A program failed; the message ends with its output."""


def verdict(*command: str | Path, **options: Any) -> tuple[int, str]:
    """Its exit code, and what it says on both streams."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    return done.returncode, done.stdout


def output(*command: str | Path, **options: Any) -> str:
    """What it prints; raises ProgramError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}"[-8000:]
        raise ProgramError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{said}")
    return done.stdout

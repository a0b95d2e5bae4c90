"""Finds or builds the demo's two Python environments; the two SDK releases cannot share one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gateway.tools.demo.children import DemoFailed

OLD = ("MRTR_DEMO_OLD_PYTHON", "1.30.0")
MODERN = ("MRTR_DEMO_MODERN_PYTHON", "2.3.0")

_PIP_OPTIONS: Final = ("--quiet", "--disable-pip-version-check", "--no-compile")
_ASK_VERSION = "from importlib.metadata import version; print(version('mcp'))"


def interpreters(cache: Path) -> tuple[str, str]:
    """Return the paths of two Python interpreters, with the old and the modern SDK release; raises DemoFailed."""
    found: dict[str, str] = {}
    missing: dict[str, tuple[str, Path]] = {}
    for variable, release in (OLD, MODERN):
        home = cache.absolute() / f"mcp-{release}"
        found[release] = str(home / "bin" / "python")
        if named := os.environ.get(variable):
            if (present := _release(named)) is None:
                raise DemoFailed(
                    f"{variable} names {named}, which cannot import mcp.\n"
                    f"Fix: install mcp=={release} there, or unset {variable}."
                )
            say(f"mcp {present}: using {variable}")
            found[release] = named
        elif _release(found[release]) == release:
            say(f"mcp {release}: found in {home}")
        else:
            say(f"mcp {release}: building {home} (first run only)")
            missing[release] = variable, home
    _at_once(
        (
            # A build that was stopped has left half an environment.
            [sys.executable, "-m", "venv", "--clear", str(home)],
            f"cannot create the environment {home}",
            (
                "install the venv module (Debian and Ubuntu: apt install python3-venv) and make sure that the folder "
                "is writable, or choose another one with --cache"
            ),
        )
        for _, home in missing.values()
    )
    _at_once(
        (
            [found[release], "-m", "pip", "install", *_PIP_OPTIONS, f"mcp=={release}"],
            f"cannot install mcp=={release}",
            (
                "make sure that pip can reach a package index (PIP_INDEX_URL, HTTPS_PROXY), or set "
                f"{variable} to an interpreter that has this release"
            ),
        )
        for release, (variable, _) in missing.items()
    )
    return found[OLD[1]], found[MODERN[1]]


def say(line: str) -> None:
    """Print a line of the demo's own."""
    print(f"  {line}", flush=True)


def _release(python: str) -> str | None:
    try:
        # Isolated, because PYTHONPATH is meant for the gateway's environment.
        done = subprocess.run([python, "-I", "-c", _ASK_VERSION], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _at_once(steps: Iterable[tuple[list[str], str, str]]) -> None:
    """Run commands beside each other; if one fails, or the demo is stopped, none goes on. Raises DemoFailed.

    A step is a command, what has failed if it fails, and the fix.
    """
    with contextlib.ExitStack() as stack:
        running: list[tuple[subprocess.Popen[str], str, str]] = []
        for command, what, fix in steps:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            _ = stack.callback(process.kill)
            running.append((process, what, fix))
        for process, what, fix in running:
            said, _ = process.communicate()
            if process.returncode:
                last = [line for line in said.splitlines() if line.strip()][-6:]
                why = "\n".join(f"  {line}" for line in last) or f"  exit status {process.returncode}"
                raise DemoFailed(f"{what}:\n{why}\nFix: {fix}.")

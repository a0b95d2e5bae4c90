"""Finds or builds the demo's two Python environments; the two SDK releases cannot share one."""

import os
import subprocess
import sys
from pathlib import Path

OLD = ("MRTR_DEMO_OLD_PYTHON", "1.30.0")
MODERN = ("MRTR_DEMO_MODERN_PYTHON", "2.3.0")

_ASK_VERSION = "from importlib.metadata import version; print(version('mcp'))"


class PartsError(Exception):
    """An environment is not available; the message says what failed, why, and how to fix it."""


def default_cache() -> Path:
    """Return the folder for the environments, by the XDG rules, which require an absolute path."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "mrtr-gateway" / "demo"


def interpreter(part: tuple[str, str], cache: Path) -> str:
    """Return the path of a Python interpreter with the required SDK release."""
    variable, release = part
    if named := os.environ.get(variable):
        if (found := _release(named)) is None:
            raise PartsError(
                f"{variable} names {named}, which cannot import mcp.\n"
                f"Fix: install mcp=={release} there, or unset {variable}."
            )
        say(f"mcp {found}: using {variable}")
        return named
    home = cache.absolute() / f"mcp-{release}"
    python = str(home / "bin" / "python")
    if _release(python) == release:
        say(f"mcp {release}: found in {home}")
        return python
    say(f"mcp {release}: building {home} (first run only, about 20 seconds)")
    _step(
        [sys.executable, "-m", "venv", "--clear", str(home)],
        f"cannot create the environment {home}",
        "install the venv module (Debian and Ubuntu: apt install python3-venv) and make sure that the folder is "
        "writable, or choose another one with --cache",
    )
    _step(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"mcp=={release}"],
        f"cannot install mcp=={release}",
        "make sure that pip can reach a package index (PIP_INDEX_URL, HTTPS_PROXY), or set "
        f"{variable} to an interpreter that has this release",
    )
    return python


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


def _step(command: list[str], what: str, fix: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-6:]
        why = "\n".join(f"  {line}" for line in last) or f"  exit status {done.returncode}"
        raise PartsError(f"{what}:\n{why}\nFix: {fix}.")

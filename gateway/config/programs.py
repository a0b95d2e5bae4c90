"""The programs of stdio servers: the environment that they get, and whether they are on this machine."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from gateway.config.model.config import Config
from gateway.config.model.route import Upstream
from gateway.config.parsing.problems import Problem

INHERITED: Final = (
    *("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "LOGNAME"),
    *("PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER"),
)
"""The variables that every child inherits from the gateway, whose environment may hold keys."""
_FIRST_LINE: Final = re.compile(rb"#![ \t]*([^ \t\n]+)")
_FIRST_LINE_BYTES: Final = 256
"""As much of it as Linux reads."""


class NotHere(NamedTuple):
    """The key that keeps a command from starting here, and why."""

    key: str
    why: str
    searched: str = ""
    """The PATH in which its name was looked up, if it is a name."""

    @property
    def in_full(self) -> str:
        """Why, with the PATH; for an operator, not for clients."""
        return f"{self.why} ({self.searched})" if self.searched else self.why


def environment(upstream: Upstream, own: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of a child."""
    inherited = (*INHERITED, *upstream.inherit_env)
    return {name: own[name] for name in inherited if name in own} | upstream.env


def not_here(upstream: Upstream) -> NotHere | None:
    """Return what keeps the command from starting here, as far as is known beforehand."""
    folder = Path(upstream.cwd or ".")
    if not folder.is_dir():
        return NotHere("cwd", f"there is no folder {folder}")
    # A path is relative to the folder in which the child runs; a name is looked up in PATH.
    name, searched, where = str((folder / upstream.name).absolute()), "", ""
    if os.sep not in upstream.name:
        name, where = upstream.name, " in PATH"
        searched = environment(upstream, os.environ).get("PATH", os.defpath)
    if found := shutil.which(name, path=searched):
        interpreter = _interpreter(found)
        if not interpreter or shutil.which((folder / interpreter).absolute()):
            return None
        # As it is written: a carriage return behind it is a part of its name.
        return NotHere("command", f"the interpreter {interpreter!r} of {upstream.name} is not an executable program")
    if shutil.which(name, os.F_OK, searched):
        return NotHere("command", f"the program {upstream.name}{where} is not executable by this user", searched)
    return NotHere("command", f"there is no program {upstream.name}{where}", searched)


def _interpreter(program: str) -> str:
    """Return what the first line of a script names; empty for any other program, or one that cannot be read."""
    try:
        with Path(program).open("rb") as file:
            named = _FIRST_LINE.match(file.readline(_FIRST_LINE_BYTES))
    except OSError:
        return ""
    return os.fsdecode(named[1]) if named else ""


def absent(config: Config) -> Iterator[Problem]:
    """Yield a problem for each absolute path of a program that is not on this machine.

    Any other program, or a folder, may be there on the machine that the configuration is for.
    """
    for place, route in enumerate(config.routes):
        missing = not_here(route.upstream) if Path(route.upstream.name).is_absolute() else None
        if missing is not None and missing.key == "command":
            yield Problem(f"routes[{place}].upstream.command", f"{missing.why} on this machine")

"""Prints the shell completion of the command line, made from its parser."""

import argparse
from pathlib import Path
from typing import Any, Final

import shtab

SHELLS: Final = ("bash", "fish", "zsh")


class CommandLine(argparse.ArgumentParser):
    """A parser of which shells complete the arguments that are paths."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """See `argparse`."""
        argument = super().add_argument(*names, **options)
        if options.get("type") is Path:
            argument.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
        return argument


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the text that a shell evaluates when it starts."""
    # zsh does not call it an eval if `source` reads the text.
    return shtab.complete(parser, shell).replace("[-1] == eval ]]", "[-1] == (eval|file) ]]") + "\n"

"""Prints the shell completion of the command line, made from its parser."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import shtab

SHELLS: Final = ("bash", "fish", "zsh")


class FileArgument(argparse.Action):
    """Stores the path of a file, and shells complete it."""

    complete = shtab.FILE

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | Path | None,
        _option: str | None = None,
    ) -> None:
        """Store it."""
        setattr(namespace, self.dest, values)


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the text that a shell evaluates when it starts."""
    # zsh does not call it an eval if `source` reads the text.
    return shtab.complete(parser, shell).replace("[-1] == eval ]]", "[-1] == (eval|file) ]]") + "\n"

"""Prints what became of calls whose owner was killed, as a table."""

from typing import Final

import pytest

Found = dict[tuple[str, str], str]
"""What became of a call, by (server and tool, state)."""

FOUND: Final = pytest.StashKey[Found]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOUND] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash[FOUND]
    if not found:
        return
    terminalreporter.section("SIGKILL of a call's owner")
    rows, columns = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    widths = [max(map(len, rows)), *(max(len(column), 10) for column in columns)]
    for cells in [["", *columns], *([row, *(found.get((row, column), "-") for column in columns)] for row in rows)]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        terminalreporter.write_line(line.rstrip())

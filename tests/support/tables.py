"""Tables of the results of the real clients and servers, printed at the end of the run.

A run may be split over several processes: each tells the first one what it noted.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import pytest

SERVERS: Final = "servers behind the gateway"
TABLE: Final = "any client (rows) with any server (columns)"
KILLED: Final = "SIGKILL of a call's owner"

Words = dict[str, str]
"""The result by process: `ok`, `FAILED`, a step, or the reason why the case does not apply."""
Table = dict[tuple[str, str], Words]
"""By (row, column)."""

_TABLES: Final = pytest.StashKey[dict[str, Table]]()
_SAID: Final = "tables"


def begin(config: pytest.Config) -> None:
    config.stash[_TABLES] = {title: {} for title in (KILLED, SERVERS, TABLE)}


def words(config: pytest.Config, title: str, row: str, column: str) -> Words:
    """One cell, for writing."""
    return config.stash[_TABLES][title].setdefault((row, column), {})


def tell(config: pytest.Config) -> None:
    """Hand these notes to the parent process."""
    if (output := getattr(config, "workeroutput", None)) is not None:
        output[_SAID] = {title: [*map(list, table.items())] for title, table in config.stash[_TABLES].items()}


def hear(config: pytest.Config, output: Mapping[str, dict[str, list[tuple[tuple[str, str], Words]]]]) -> None:
    """Add the notes of another process; a crashed process has none."""
    for title, cells in output.get(_SAID, {}).items():
        for (row, column), said in cells:
            words(config, title, row, column).update(said)


def lines(config: pytest.Config) -> Iterator[tuple[str, Iterator[str]]]:
    """The lines of each table that is not empty."""
    for title, table in config.stash[_TABLES].items():
        if table:
            yield title, _lines(table)


def _lines(table: Table) -> Iterator[str]:
    rows, columns = (list(dict.fromkeys(key[place] for key in table)) for place in (0, 1))
    reasons: list[str] = []
    widths = [max(map(len, rows)), *(max(len(column), 12) for column in columns)]
    yield _line(["", *columns], widths)
    for row in rows:
        yield _line([row, *(_cell(table.get((row, column), {}), reasons) for column in columns)], widths)
    for number, reason in enumerate(reasons, 1):
        yield f"n.a. {number}: {reason}"


def _line(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cell(said: Words, reasons: list[str]) -> str:
    """`ok` if all agree, otherwise each result. A text with blanks is a reason, and gets a number."""
    shown = {}
    for who, word in said.items():
        if " " not in word:
            shown[who] = word
            continue
        if word not in reasons:
            reasons.append(word)
        shown[who] = f"n.a. {reasons.index(word) + 1}"
    if not shown:
        return "-"
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return " ".join(f"{who}:{word}" for who, word in shown.items())

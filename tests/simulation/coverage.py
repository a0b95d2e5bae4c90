"""Counts what histories have met: rows of the exchange's table, classes of errors, kinds of faults, pairs of them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

from gateway.exchange.machine import TRANSITIONS, Exchange
from gateway.protocol import errors
from tests.simulation.plan import FAULTS, HABITS, MORE_FAULTS, MORE_HABITS, Plan

Row = tuple[str, str]
_ELSEWHERE: Final = (
    # only clients of SEP-1442, which are not simulated, end their calls so
    ("open", "Stopped"),
    ("away", "Stopped"),
    ("ended", "Cancelled"),
    # a stream in whose place another one has come is still being written when that one breaks
    ("away", "Left"),
)
"""Rows that only tests/exchange meets."""


@dataclass
class Met:
    """What has been met, and how often."""

    histories: int = 0
    rows: Counter[Row] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Row] = field(default_factory=Counter)
    habits: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Met") -> None:
        """Add what other histories have met."""
        self.histories += other.histories
        for name in ("rows", "errors", "faults", "pairs", "habits"):
            getattr(self, name).update(getattr(other, name))

    def note(self, plan: Plan) -> None:
        """A history of this plan was run."""
        self.histories += 1
        kinds = sorted({fault.kind for fault in plan.faults})
        self.faults.update(kinds)
        self.pairs.update(combinations(kinds, 2))
        self.habits.update({call.habit for call in plan.calls})


met = Met()
"""What was met in this process."""


def watch() -> None:
    """Count from now on. This is the one thing that the simulation does to the program from outside."""
    for key, handler in TRANSITIONS.items():
        TRANSITIONS[key] = _counted((str(key[0]), key[1].__name__), handler)
    before = errors.GatewayError.__init__

    def count(self: errors.GatewayError, *args: Any, **kwargs: Any) -> None:
        met.errors[type(self).__name__] += 1
        before(self, *args, **kwargs)

    errors.GatewayError.__init__ = count  # type: ignore[method-assign]


def _counted(row: Row, handler: Any) -> Any:
    def counted(exchange: Exchange, event: Any) -> Any:
        met.rows[row] += 1
        return handler(exchange, event)

    return counted


def all_rows() -> list[Row]:
    """Every row of the table that can be met here."""
    rows = ((str(state), event.__name__) for state, event in TRANSITIONS)
    return [row for row in rows if row not in _ELSEWHERE]


def report(found: Met) -> list[str]:
    """The tables, as lines."""
    return [
        *_table("rows of the exchange", map(" ".join, all_rows()), {" ".join(k): n for k, n in found.rows.items()}),
        *_table("faults", (*FAULTS, *MORE_FAULTS), found.faults),
        *_table("habits of clients", (*HABITS, *MORE_HABITS), found.habits),
        *_table(
            "pairs of faults",
            (" + ".join(pair) for pair in combinations(sorted(FAULTS), 2)),
            {" + ".join(k): n for k, n in found.pairs.items()},
        ),
        f"errors: {', '.join(f'{name} {count}' for name, count in sorted(found.errors.items()))}",
    ]


def _table(title: str, names: Iterable[str], counts: Any) -> list[str]:
    names = list(names)
    missing = [name for name in names if not counts.get(name)]
    seldom = sorted((counts[name], name) for name in names if counts.get(name))[:3]
    lines = [f"{title}: {len(names) - len(missing)} of {len(names)}"]
    if seldom:
        lines.append(f"  seldom: {', '.join(f'{name} ({count})' for count, name in seldom)}")
    if missing:
        lines.append(f"  never: {', '.join(missing)}")
    return lines

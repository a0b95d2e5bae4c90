"""Histories that tests tell: calls and tasks in a cluster that lives through some faults."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tests.simulation.history import History, Outcome
from tests.simulation.plan import Call, Fault, Plan
from tests.simulation.server import Kind

HOLD: Final = {"ttl_seconds": 90.0, "drain_delay_seconds": 1.0, "drain_seconds": 4.0}
NO_EVENTS: Final = Kind(has_events=False)
"""A server whose streams cannot be resumed."""
OWN_KEYS: Final[dict[str, Any]] = {"state": {}, "replica": {"id": "gw-1"}}
"""The sections of a replica whose keys end with its process."""
TASKS: Final[dict[str, Any]] = {"tasks": {"ttl_seconds": 100}, "legs": {"limit_seconds": 4.0}}
REPLAY: Final[dict[str, Any]] = {"route": {"continuation": "replay"}}


class Told(NamedTuple):
    """A history, and what its client was told."""

    parts: tuple[Call | Fault, ...]
    replies: str
    """A pattern of all `replies`, with `; ` between them."""
    how: Mapping[str, Any] = {}
    """See `plan`."""
    runs: int | None = None
    """How often the tool ran, if the oracle does not know."""


def call(
    *replicas: int,
    tag: str = "c1",
    at: float = 0.0,
    caller: str = "ann",
    think: float = 3.0,
    habit: str = "plain",
    tool: str = "pay",
    path: str = "/mcp",
    is_legacy: bool = False,
    **script: Any,
) -> Call:
    """A call of one client, whose requests go to these replicas in turn."""
    return Call(tag, at, tool, caller, script, think, habit, replicas or (1,), path, is_legacy)


def task(*replicas: int, think: float = 2.0, **how: Any) -> Call:
    """A call that becomes a task of its client."""
    return call(*(replicas or (1, 2, 3)), tag="t1", tool="chore", think=think, **{"patience": 20.0, **how})


def plan(*parts: Call | Fault, seed: int = 1, replicas: int = 3, kind: Kind | None = None, **how: Any) -> Plan:
    """What happens; words that end with `_seconds` are of the section `hold`, and all others are sections."""
    hold = HOLD | {name: how.pop(name) for name in [*how] if name.endswith("_seconds")}
    config = {"hold": hold, "sessions": {"idle_seconds": 30}, **how}
    calls = [each for each in parts if isinstance(each, Call)]
    tasks = tuple(each for each in calls if each.tag.startswith("t"))
    faults = tuple(each for each in parts if isinstance(each, Fault))
    others = tuple(each for each in calls if each not in tasks)
    return Plan(seed, replicas, kind or Kind(has_lasting_tasks=bool(tasks)), config, others, faults, tasks=tasks)


def played(*parts: Call | Fault, **how: Any) -> Outcome:
    """What became of it."""
    return History(plan(*parts, **how)).run()


def replies(outcome: Outcome) -> list[str]:
    """What the first client was told by each replica; of a task its statuses, without repetitions."""
    if outcome.tasks:
        statuses = [status for _, status in outcome.tasks[0].views]
        return [each for each, before in zip(statuses, ["", *statuses], strict=False) if each != before]
    return [
        f"gw-{told.replica} {told.status} {told.reason or told.result.get('resultType')}"
        for told in outcome.records[0].told
    ]

"""Makes a failing history small: fewer calls, faults, replicas, as long as it fails in the same way."""

import re
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.history import History
from tests.simulation.oracle import complaints
from tests.simulation.plan import Plan


def kind_of(complaint: str) -> str:
    """A complaint without what differs from history to history."""
    words = re.sub(r"^[clt]\d+: ", "", complaint)
    return re.sub(r"gw-\d|\d+(\.\d+)?", "#", words)[:50]


def fails(plan: Plan, kinds: set[str]) -> bool:
    """Whether a plan fails in one of these ways."""
    return any(kind_of(each) in kinds for each in complaints(History(plan).run()))


def shrunk(plan: Plan, kinds: set[str], say: Callable[[str], None] = lambda _: None) -> Plan:
    """The smallest plan found that fails in one of these ways."""
    size = len(plan.calls)
    while size >= 1:
        for start in range(0, len(plan.calls), size):
            tags = {call.tag for call in plan.calls[start : start + size]}
            smaller = plan.without_calls(tags)
            if (smaller.calls or smaller.listeners or smaller.tasks) and fails(smaller, kinds):
                plan = smaller
                say(f"{len(plan.calls)} calls")
                break
        else:
            size //= 2
    for place in reversed(range(len(plan.faults))):
        smaller = plan.without_faults({place})
        if fails(smaller, kinds):
            plan = smaller
            say(f"{len(plan.faults)} faults")
    for name in ("listeners", "changes", "tasks"):
        for place in reversed(range(len(getattr(plan, name)))):
            kept = getattr(plan, name)
            smaller = replace(plan, **{name: kept[:place] + kept[place + 1 :]})
            if fails(smaller, kinds):
                plan = smaller
                say(f"{len(getattr(plan, name))} {name}")
    for tag in [call.tag for call in plan.calls]:
        for changes in ({"habit": "plain"}, {"script": {"questions": 1}}, {"script": {"questions": 0}}):
            calls = tuple(replace(call, **changes) if call.tag == tag else call for call in plan.calls)
            if calls != plan.calls and fails(replace(plan, calls=calls), kinds):
                plan = replace(plan, calls=calls)
    while plan.replicas > 1:
        fewer = plan.replicas - 1
        calls = tuple(replace(call, replicas=tuple(min(each, fewer) for each in call.replicas)) for call in plan.calls)
        faults = tuple(
            replace(each, target=min(each.target, fewer), other=min(each.other, fewer)) for each in plan.faults
        )
        listeners, tasks = (
            tuple(replace(each, replicas=tuple(min(number, fewer) for number in each.replicas)) for each in of)
            for of in (plan.listeners, plan.tasks)
        )
        smaller = replace(plan, replicas=fewer, calls=calls, faults=faults, listeners=listeners, tasks=tasks)
        if not fails(smaller, kinds):
            break
        plan = smaller
        say(f"{fewer} replicas")
    return plan

"""Which faults can be the cause of what became of something: they overlap its life, and touch what it used."""

import math
from typing import Final, Protocol

from tests.simulation.history import WARM_SECONDS, Outcome
from tests.simulation.plan import Fault, Plan
from tests.simulation.world import START

DRAINS: Final = frozenset({"term", "term twice", "int"})
DEATHS: Final = frozenset({"kill", "power", *DRAINS})
CUTS: Final = frozenset({"cut", "cold cut", "modern cut"})
SILENCES: Final = frozenset({"part", "one way", "peers", "stop", "stall", "slow", "jump"})
_EVERYWHERE: Final = frozenset({"server", *CUTS, "slow", "split", "dns"})
"""Faults that are not those of one replica."""
_AFTER_SECONDS: Final = {"split": math.inf, "drift": math.inf}
"""How long a fault is felt after its end, if that is not half a second."""


class Life(Protocol):
    """What has met faults: a call, or a stream."""

    began: float
    ended: float | None
    used: set[int]
    """The replicas that it has sent requests to."""


def met(outcome: Outcome, life: Life, kinds: frozenset[str], until: float | None = None) -> list[Fault]:
    """The faults of these kinds that something has met: they overlap its life, and touch a process that it used.

    If one of its replicas could fail it, others may have served it.
    """
    plan, end = outcome.plan, until or life.ended or math.inf
    faults = [each for each in outcome.faults if begins(each) <= end and ends(plan, each) >= life.began]
    is_anywhere = any(each.kind in DEATHS | SILENCES and _touches(each, life.used) for each in faults)
    return [each for each in faults if each.kind in kinds and (is_anywhere or _touches(each, life.used))]


def begins(fault: Fault) -> float:
    """When a fault begins."""
    return START + WARM_SECONDS + fault.at


def ends(plan: Plan, fault: Fault) -> float:
    """When nobody feels a fault any more."""
    hold = plan.config["hold"]
    drain = hold["drain_delay_seconds"] + hold["drain_seconds"] + 7.0 if fault.kind in DRAINS else 0.0
    return begins(fault) + fault.seconds + drain + _AFTER_SECONDS.get(fault.kind, 0.5)


def _touches(fault: Fault, replicas: set[int]) -> bool:
    return fault.kind in _EVERYWHERE or fault.target in replicas or (fault.kind == "peers" and fault.other in replicas)

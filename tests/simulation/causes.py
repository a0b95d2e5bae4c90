"""Which faults can be the cause of what became of something: they overlap its life, and touch what it used."""

import math
from typing import Final, Protocol

from tests.simulation.faults import SLOW_SECONDS
from tests.simulation.history import WARM_SECONDS, Outcome
from tests.simulation.plan import Fault
from tests.simulation.world import START

WHOLE_DRAINS: Final = frozenset({"term", "int"})
DRAINS: Final = WHOLE_DRAINS | {"term twice"}
DEATHS: Final = frozenset({"kill", "power", *DRAINS})
CUTS: Final = frozenset({"cut", "cold cut", "modern cut"})
SILENCES: Final = frozenset({"part", "one way", "peers", "stop", "stall", "slow", "jump"})
_EVERYWHERE: Final = frozenset({"server", "child", *CUTS, "slow", "split", "dns"})
"""Faults that are not those of one replica."""
_AFTER_SECONDS: Final = {"split": math.inf, "drift": math.inf}
"""How long a fault is felt after its end, if that is not half a second."""
ARRIVES_SECONDS: Final = SLOW_SECONDS + 0.1
"""How long a message is on its way at most while everything is slow."""


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
    end = until or life.ended or math.inf
    faults = [each for each in outcome.faults if begins(each) <= end and ends(outcome, each) >= life.began]
    is_anywhere = any(each.kind in DEATHS | SILENCES and _touches(each, life.used) for each in faults)
    return [each for each in faults if each.kind in kinds and (is_anywhere or _touches(each, life.used))]


def begins(fault: Fault) -> float:
    """When a fault begins."""
    return START + WARM_SECONDS + fault.at


def ends(outcome: Outcome, fault: Fault) -> float:
    """When nobody feels a fault any more."""
    after = _AFTER_SECONDS.get(fault.kind, 0.5)
    if fault.kind == "child" and is_slow(outcome, begins(fault)):
        after = ARRIVES_SECONDS  # its gateway hears of it from its pipes
    if fault.kind not in DRAINS:
        return begins(fault) + fault.seconds + after
    hold = outcome.plan.config["hold"]
    drain = hold["drain_delay_seconds"] + hold["drain_seconds"] + 7.0
    return max(begins(fault) + fault.seconds + drain, _starts_again(outcome, fault)) + after


def is_slow(outcome: Outcome, when: float) -> bool:
    """Whether everything was slow at a time."""
    slow = [each for each in outcome.faults if each.kind == "slow"]
    return any(begins(each) <= when <= begins(each) + each.seconds for each in slow)


def _starts_again(outcome: Outcome, fault: Fault) -> float:
    """When a replica that was asked to end runs again: if it stood still, it heard of that only when it went on."""
    name = f"gw-{fault.target}"
    starts = (each.at for each in outcome.lines if (each.event, each.process) == ("server.started", name))
    return next((at for at in starts if at > begins(fault)), -math.inf)


def _touches(fault: Fault, replicas: set[int]) -> bool:
    return fault.kind in _EVERYWHERE or fault.target in replicas or (fault.kind == "peers" and fault.other in replicas)

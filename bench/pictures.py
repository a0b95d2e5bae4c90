"""`python -m bench.pictures RUN.json FOLDER`: the pictures of docs/benchmarks.md, from one run of the benchmarks.

The same run gives the same bytes. Each picture says when, on what and of which versions it was made.
"""

import json
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.cluster import ANSWERED, ANSWERED_LATE
from bench.scenarios import FORWARDER
from bench.timeline import CALLED

OURS = "mrtr-gateway"
COLOURS = {OURS: "#c2410c", "nginx": "#15803d", "Envoy": "#7c3aed", FORWARDER: "#475569"}
OTHER = "#475569"
GRID = "#e2e8f0"
BESIDE = (OURS, "aiohttp", "nginx", "Envoy")
"""What each operation is measured with, by the names in the run's versions."""
FORMS = {"rivals": ("modern call", "o", True), "rivals-legacy": ("legacy call, in a session", "s", False)}
"""By scenario: what is called, the marker, and whether it is filled."""
LOSSES = {
    "echo": ("echo", OURS),
    "ask": ("ask", OURS),
    "passed-ask": ("ask of a legacy client,\npassed through", OURS),
    "large-both": ("100 kB there and back", f"{OURS}, bridged"),
    "huge-both": ("1 MB there and back", f"{OURS}, bridged"),
}
"""By scenario: its name, and the row of the gateway."""
TIMELINES = {"timeline": "server with event ids", "timeline-plain": "server without"}
ERRORS = "errors per second"
KILL_ROWS = {"calls per second": COLOURS[OURS], "answered questions\nper second": COLOURS[OURS], ERRORS: "#b91c1c"}

Run = dict[str, Any]
Slices = list[dict[str, float]]


def footer(run: Run, shown: Collection[str], *, once: bool) -> str:
    """When, on what and how the figures were taken, and the versions of what a picture shows."""
    about = run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if name in shown)
    machine = f"{about['cpus']} x {about['processor']}, Linux {about['kernel']}, Python {about['python']}"
    taken = "one run" if once else f"medians of {about['rounds']} rounds, with the least and the most"
    return f"{about['date']}; {machine}; {taken}\n{versions}"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def new_figure(run: Run, title: str, height: float, shown: Collection[str] = (OURS,), *, once: bool) -> Figure:
    figure = Figure(figsize=(9, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.42 / height, 1, 1 - 0.42 / height))
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.text(0.01, 0.06 / height, footer(run, shown, once=once), fontsize=6.5, color="#475569", va="bottom")
    return figure


def brief(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def plain_log(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: brief(value))
    axes.minorticks_off()
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)


def dot(axes: Axes, row: float, values: Sequence[float], colour: str, marker: str, *, filled: bool) -> None:
    least, middle, most = spread(values)
    axes.plot([least, most], [row, row], color=colour, linewidth=1.2, alpha=0.6)
    axes.plot([middle], [row], marker, color=colour, markerfacecolor=colour if filled else "white", markersize=6)


def beside(axes: Axes, edge: float, row: float, text: str, *, left: bool = False, **style: Any) -> None:
    """Write numbers to the right of what is drawn, or to the left."""
    offset, side = (-7, "right") if left else (7, "left")
    axes.annotate(
        text, (edge, row), (offset, 0), textcoords="offset points", ha=side, va="center", fontsize=8, **style
    )


def draw_echo(run: Run) -> Figure:
    """CPU and p99 of an echo at each proxy, for both forms of the call."""
    forms = {scenario: run[scenario]["slices"] for scenario in FORMS}
    names = list(dict.fromkeys(name for slices in forms.values() for name in slices if name != "upstream, no proxy"))
    middle = {name: statistics.median(each["cpu_us"] for each in rows_of(forms, name)) for name in names}
    names.sort(key=middle.__getitem__, reverse=True)
    title, versions = "One echo through each proxy, the same call at all of them", run["environment"]["versions"]
    figure = new_figure(run, title, 1.8 + 0.42 * len(names), versions, once=False)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, label in zip(
        panels, ("cpu_us", "p99_ms"), ("CPU of a call, µs", "p99 of 8 clients, ms"), strict=True
    ):
        plain_log(axes)
        for row, name in enumerate(names):
            colour, told, most = COLOURS.get(name, OTHER), [], 0.0
            for number, (scenario, (_, marker, filled)) in enumerate(FORMS.items()):
                values = [each[key] for each in forms[scenario].get(name, [])]
                if values:
                    dot(axes, row + 0.14 - 0.28 * number, values, colour, marker, filled=filled)
                    told.append(brief(statistics.median(values)))
                    most = max(most, *values)
            beside(axes, most, row, " · ".join(told), weight="bold" if name == OURS else "normal")
        axes.set_xlabel(label)
        axes.set_xlim(axes.get_xlim()[0], 20 * axes.get_xlim()[1])  # the numbers beside the dots
    panels[0].set_yticks(range(len(names)), names)
    handles = [
        Line2D(
            [], [], color=OTHER, linestyle="", marker=marker, markerfacecolor=OTHER if filled else "white", label=label
        )
        for label, marker, filled in FORMS.values()
    ]
    panels[0].legend(handles=handles, fontsize=8, loc="lower left")
    return figure


def rows_of(forms: dict[str, dict[str, Slices]], name: str) -> Slices:
    """The slices of a proxy in the first form of the call that it has."""
    return next(slices[name] for slices in forms.values() if name in slices)


def draw_losses(run: Run) -> Figure:
    """The CPU of other operations, as a ratio to the byte forwarder's."""
    scenarios = list(LOSSES)[::-1]
    title = "What an operation costs, beside proxies that only copy bytes"
    figure = new_figure(run, title, 1.6 + 0.6 * len(scenarios), BESIDE, once=False)
    axes = figure.subplots()
    plain_log(axes)
    axes.axvline(1, color=COLOURS[FORWARDER], linestyle="--", linewidth=1)
    for row, scenario in enumerate(scenarios):
        ratios = run[scenario]["ratios"]
        for place, (name, shown) in enumerate({"nginx": "nginx", "Envoy": "Envoy", LOSSES[scenario][1]: OURS}.items()):
            if name in ratios:
                least, middle, most = spread(ratios[name])
                dot(axes, row + 0.24 - 0.24 * place, ratios[name], COLOURS[shown], "o", filled=True)
                left = 0.75 < most < 1  # to the right, the dashed line would cross the number
                beside(axes, least if left else most, row + 0.24 - 0.24 * place, f"{middle:.2f}", left=left)
    axes.set_yticks(range(len(scenarios)), [LOSSES[name][0] for name in scenarios])
    axes.set_xlabel("CPU, as a ratio to the aiohttp forwarder in the same round (dashed: the forwarder itself)")
    axes.set_xlim(axes.get_xlim()[0], 1.2 * axes.get_xlim()[1])  # the numbers beside the dots
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2])
    axes.minorticks_off()
    handles = [
        Line2D([], [], color=COLOURS[name], linestyle="", marker="o", label=name) for name in ("nginx", "Envoy", OURS)
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside right upper")
    return figure


def draw_held(run: Run) -> Figure:
    """The resident memory of one gateway by the calls that it holds."""
    held = {int(calls): kib / 1024 for calls, kib in run["parked"]["rss_kib_holding"].items()}
    cold, kib = run["cold"], run["cold"]["rss_kib"]
    each_cold = (kib["records"] - kib["bare"]) * 1024 / cold["records"]
    figure = new_figure(run, "Memory of one gateway that holds calls for people who think", 4.2, once=True)
    axes = figure.subplots()
    axes.plot(list(held), list(held.values()), "o-", color=COLOURS[OURS])
    most = max(held)
    axes.annotate(
        f"held: {run['parked']['kib_per_call']:.1f} KiB a call, and two connections",
        (most, held[most]),
        (-8, 8),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9,
        color=COLOURS[OURS],
    )
    colour = COLOURS["nginx"]
    axes.plot(
        [0, cold["records"]], [kib["bare"] / 1024, kib["records"] / 1024], "s-", color=colour, markerfacecolor="white"
    )
    axes.annotate(
        f"cold, with hold.cold_seconds: {each_cold:,.0f} bytes a call, no connection",
        (cold["records"], kib["records"] / 1024),
        (-8, -14),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        color=colour,
    )
    axes.set_ylim(0, 1.15 * held[most])
    axes.set_xlabel("calls held")
    axes.set_ylabel("resident memory, MiB")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color=GRID)
    return figure


def draw_kill(run: Run) -> Figure:
    """Calls, questions and errors per second while one of three replicas is killed, for two servers."""
    figure = new_figure(run, "One of three replicas is killed under load, and started again", 5.6, once=True)
    panels = figure.subplots(3, 2, sharex=True, sharey="row")
    for column, (scenario, server) in enumerate(TIMELINES.items()):
        outcome = run[scenario]
        edges = [outcome["part_seconds"] * number for number in range(len(outcome["parts"]) + 1)]
        for axes, (label, colour), values in zip(
            panels[:, column], KILL_ROWS.items(), per_second(outcome), strict=True
        ):
            filled = label == ERRORS
            axes.stairs(values, edges, baseline=0 if filled else None, fill=filled, color=colour, linewidth=1.2)
            axes.axvspan(outcome["killed_seconds"], outcome["restarted_seconds"], color=GRID, linewidth=0, zorder=0)
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.2 * max(values), 8))
            axes.label_outer()
        panels[0, column].set_title(f"{server}; the killed replica held {outcome['held']:.0f} calls", fontsize=9)
        panels[2, column].annotate(
            told(outcome), (0.97, 0.92), xycoords="axes fraction", ha="right", va="top", fontsize=8
        )
        panels[2, column].set_xlabel("seconds (grey: two replicas)")
    for axes, label in zip(panels[:, 0], KILL_ROWS, strict=True):
        axes.set_ylabel(label)
    return figure


def per_second(outcome: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Calls, questions and errors in each part of the time."""
    calls, questions, errors = [], [], []
    for each in outcome["parts"]:
        counts = Counter(each)
        calls.append(counts.pop(CALLED, 0) / outcome["part_seconds"])
        questions.append((counts.pop(ANSWERED, 0) + counts.pop(ANSWERED_LATE, 0)) / outcome["part_seconds"])
        errors.append(counts.total() / outcome["part_seconds"])
    return calls, questions, errors


def told(outcome: dict[str, Any]) -> str:
    """All that did not go as usual, by what became of it."""
    totals = sum(map(Counter, outcome["parts"]), Counter[str]())
    unusual = [f"{count} {fate}" for fate, count in sorted(totals.items()) if fate not in {CALLED, ANSWERED}]
    return "\n".join([*unusual, f"{outcome['doubles']} executed twice"])


PICTURES = {"echo": draw_echo, "losses": draw_losses, "held": draw_held, "kill": draw_kill}


def draw(run: Run, folder: Path) -> None:
    """Write all pictures."""
    # The text stays text, so that it can be searched and read aloud; ids and dates are the same in each drawing.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 9}
    with mpl.rc_context(settings):
        for name, make in PICTURES.items():
            make(run).savefig(folder / f"bench-{name}.svg", metadata={"Date": None, "Creator": None})


def main() -> int:
    source, folder = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

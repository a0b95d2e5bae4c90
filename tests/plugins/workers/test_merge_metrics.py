"""Several scrapes as one: what is added, what is not, and that the text stays one a scraper can read."""

import math
from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.plugins.workers.merge_metrics import lasting, merge, parse, write
from gateway.protocol import mcp
from gateway.telemetry import Metrics, Outcome, SessionState, Step
from tests.support.gateway_process import Series, series

COUNTER = "# HELP c_total Things.\n# TYPE c_total counter\n"
GAUGE = "# HELP g Things.\n# TYPE g gauge\n"
BUILD = "# HELP mcp_gateway_build_info The version.\n# TYPE mcp_gateway_build_info gauge\n"
BORN = "# HELP process_start_time_seconds Since.\n# TYPE process_start_time_seconds gauge\n"
HISTOGRAM = "# HELP h_seconds Time.\n# TYPE h_seconds histogram\n"
A_BUCKETS = 'h_seconds_bucket{le="2.0",r="a"} 1.0\nh_seconds_bucket{le="10.0",r="a"} 1.0\n'
A_END = 'h_seconds_bucket{le="+Inf",r="a"} 2.0\nh_seconds_count{r="a"} 2.0\nh_seconds_sum{r="a"} 0.5\n'
A = A_BUCKETS + A_END
B = A.replace('"a"', '"b"')
TWO_A = A.replace(" 2.0", " 4.0").replace(" 1.0", " 2.0").replace(" 0.5", " 1.0")

MERGES = {
    "counters are added": ([COUNTER + "c_total 1.0\n", COUNTER + "c_total 2.5\n"], COUNTER + "c_total 3.5\n"),
    "gauges are added": ([GAUGE + "g 3.0\n", GAUGE + "g -1.0\n", GAUGE + "g 4.0\n"], GAUGE + "g 6.0\n"),
    "labels keep series apart": (
        [GAUGE + 'g{r="a"} 1.0\ng{r="b"} 2.0\n', GAUGE + 'g{r="b"} 3.0\n'],
        GAUGE + 'g{r="a"} 1.0\ng{r="b"} 5.0\n',
    ),
    "a version is not added": (
        [BUILD + 'mcp_gateway_build_info{version="1"} 1.0\n'] * 2,
        BUILD + 'mcp_gateway_build_info{version="1"} 1.0\n',
    ),
    "the start is the first one": (
        [BORN + f"process_start_time_seconds {value}\n" for value in (8.5, 7.25, 9.0)],
        BORN + "process_start_time_seconds 7.25\n",
    ),
    "buckets are added in their order": ([HISTOGRAM + A, HISTOGRAM + A], HISTOGRAM + TWO_A),
    "buckets that are new come together": (
        [HISTOGRAM + A, HISTOGRAM + B + A],
        HISTOGRAM + TWO_A + B,
    ),
    "a metric that one lacks is there": (
        [COUNTER + "c_total 1.0\n", GAUGE + "g 2.0\n"],
        COUNTER + "c_total 1.0\n" + GAUGE + "g 2.0\n",
    ),
    "a metric without series is there": ([COUNTER, COUNTER + "c_total 1.0\n"], COUNTER + "c_total 1.0\n"),
    "one scrape stays as it is": ([HISTOGRAM + A + GAUGE + "g 1e+22\n"], HISTOGRAM + A + GAUGE + "g 1e+22\n"),
    "numbers that are none": ([GAUGE + "g +Inf\n", GAUGE + "g 1.0\n"], GAUGE + "g Inf\n"),
    "a label may have blanks and look like a line": (
        [COUNTER + 'c_total{x="# HELP a \\" 7\u2028b"} 1.0\n'] * 2,
        COUNTER + 'c_total{x="# HELP a \\" 7\u2028b"} 2.0\n',
    ),
    "nothing": ([], ""),
}


@pytest.mark.parametrize(("texts", "expected"), MERGES.values(), ids=MERGES.keys())
def test_scrapes_become_one(texts: list[str], expected: str) -> None:
    assert write(merge(map(parse, texts))) == expected


def test_merging_changes_none_of_the_scrapes() -> None:
    scrapes = [parse(COUNTER + "c_total 1.0\n"), parse(COUNTER + "c_total 2.0\n")]
    assert merge(scrapes) == merge(scrapes)
    assert [write(one) for one in scrapes] == [COUNTER + "c_total 1.0\n", COUNTER + "c_total 2.0\n"]


def test_only_counters_and_histograms_outlive_a_process() -> None:
    kept = lasting(
        parse(
            COUNTER + "c_total 1.0\n" + GAUGE + "g 1.0\n" + HISTOGRAM + A + BORN + "process_start_time_seconds 1.0\n"
        )
    )
    assert write(kept) == COUNTER + "c_total 1.0\n" + HISTOGRAM + A


@pytest.mark.parametrize("text", ["c_total 1.0\n", COUNTER + "c_total one\n", "# TYPE c counter\n", "<html>"])
def test_a_text_that_is_not_a_scrape_is_an_error(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse(text)


@pytest.mark.parametrize(
    ("name", "values", "merged"),
    [
        ("mcp_gateway_ready", ("1.0", "0.0"), 0),
        ("mcp_gateway_config_last_reload_successful", ("1.0", "0.0"), 0),
        ("mcp_gateway_connections", ("4.0", "9.0"), 13),
        ("mcp_gateway_held_calls_of_one_caller", ("4.0", "9.0"), 9),
        ("mcp_gateway_held_calls_of_one_caller_limit", ("10.0", "10.0"), 10),
        ("mcp_gateway_sessions_of_one_caller", ("4.0", "9.0"), 9),
        ("mcp_gateway_sessions_of_one_caller_limit", ("10.0", "10.0"), 10),
    ],
)
def test_the_worst_worker_counts_where_a_sum_means_nothing(name: str, values: tuple[str, str], merged: float) -> None:
    scrapes = [parse(f"# HELP {name} x.\n# TYPE {name} gauge\n{name} {value}\n") for value in values]
    assert merge(scrapes)[name].samples == {name: merged}


@pytest.mark.parametrize(
    ("workers", "up"),
    [
        ([(None, 0), (7.5, 1)], {"/mcp": 1}),  # the first has served no request
        ([(7.5, 0), (8.5, 1)], {"/mcp": 1}),
        ([(8.5, 0), (7.5, 1)], {"/mcp": 0}),
        ([(8.5, 1), (9.5, 0), (7.5, 1)], {"/mcp": 0}),
        ([(None, 0), (None, 0)], {}),
    ],
)
def test_the_worker_that_saw_the_upstream_last_says_whether_it_is_up(
    workers: list[tuple[float | None, int]], up: dict[str, int]
) -> None:
    def scrape(reaction: float | None, is_up: int) -> str:
        metrics = Metrics()
        if reaction is not None:
            metrics.upstream_reactions["/mcp",].set(reaction)
            metrics.upstream_up["/mcp",].set(is_up)
        return metrics.render().decode()

    found = merge(parse(scrape(*worker)) for worker in workers)
    assert found["mcp_gateway_upstream_up"].samples == {
        f'mcp_gateway_upstream_up{{route="{route}"}}': value for route, value in up.items()
    }
    times = [reaction for reaction, _ in workers if reaction is not None]
    latest = found["mcp_gateway_upstream_reaction_timestamp_seconds"].samples.values()
    assert [*latest] == ([max(times)] if times else [])


# Against prometheus_client's own parser, with all the metrics that there are.


def process(seed: int) -> str:
    """The metrics of a process that did something."""
    chance = Random(seed)
    metrics = Metrics("1.2.3", ["/a", "/b"])
    metrics.held_calls_limit.set(10)
    for _ in range(40):
        route = chance.choice(["/a", "/b"])
        method = chance.choice([mcp.TOOLS_CALL, "x"])
        outcome = chance.choice(list(Outcome))
        metrics.operations[route, method, "2026-07-28", outcome, ""].observe(chance.random() * 100)
        metrics.continuations[route, chance.choice(list(Step))].inc()
        metrics.sessions[route, SessionState.IDLE].inc()
        metrics.held_calls[route,].inc()
        metrics.hold_times[route,].observe(chance.random())
    return metrics.render().decode()


def added(texts: Iterable[str]) -> Series:
    total: Series = {}
    for text in texts:
        for key, value in series(text).items():
            total[key] = total.get(key, 0) + value
    return total


def test_the_sums_are_those_of_the_real_parser() -> None:
    texts = [process(seed) for seed in range(5)]
    found, expected = series(write(merge(map(parse, texts)))), added(texts)
    expected["mcp_gateway_build_info", frozenset({("version", "1.2.3")})] = 1
    born = ("process_start_time_seconds", frozenset[tuple[str, str]]())
    expected[born] = expected[born] / 5
    for name in ("process_open_fds", "process_max_fds"):
        key = name, frozenset[tuple[str, str]]()
        expected[key] = max(series(text)[key] for text in texts)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert math.isclose(found[key], value), key


def test_every_family_is_written_once_with_its_help_and_ordered_buckets() -> None:
    texts = [process(seed) for seed in range(3)]
    text = write(merge(map(parse, texts)))
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert comments == [line for line in texts[0].splitlines() if line.startswith("#")]
    for family in text_string_to_metric_families(text):
        # One after the other, by child: the bounds go up to infinity, and the counts never down.
        bounds = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
        for (bound, count), (next_bound, next_count) in pairwise(bounds):
            assert bound == math.inf or (bound < next_bound and count <= next_count), family.name

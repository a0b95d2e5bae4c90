"""The series of one registry: plain numbers, of which `prometheus_client` sees a copy when the metrics are read.

The library's own counters and histograms lock on every call.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

DURATIONS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""The buckets of OpenTelemetry's conventions for MCP."""
Zero = tuple[Iterable[str], ...]
"""The values of each label but `route` that are shown before the first step."""


class Count:
    """One series of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, number: int = 1) -> None:
        """Count more, or less."""
        self.value += number

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


class Counts(dict[tuple[str, ...], Count]):
    """The series of a counter or a gauge, by the values of its labels."""

    def __init__(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, labels: tuple[str, ...]
    ) -> None:
        super().__init__()
        self._kind, self._name, self._text, self._labels = kind, name, text, labels

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return the family without a sample; the library takes long, and not every process is asked."""
        return self._kind(self._name, self._text, labels=self._labels)

    def __missing__(self, values: tuple[str, ...]) -> Count:
        count = self[values] = Count()
        return count

    def value(self, *values: str) -> int:
        """Return the whole number of one series, which does not begin with that."""
        count = self.get(values)
        return 0 if count is None else int(count.value)

    def collected(self) -> Metric:
        """Return the family with a sample of each series."""
        family = self.family()
        for values, count in self.items():
            family.add_metric(values, count.value)
        return family


class Times:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_first", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._first = bounds, bounds[0]
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, number: float) -> None:
        """Count one observation."""
        self.counts[0 if number <= self._first else bisect_left(self._bounds, number)] += 1
        self.sum += number


class Histogram(dict[tuple[str, ...], Times]):
    """The series of a histogram, by the values of its labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: Sequence[float]) -> None:
        super().__init__()
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds

    def family(self) -> HistogramMetricFamily:
        """Return the family without a sample, as `Counts` does."""
        return HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def __missing__(self, values: tuple[str, ...]) -> Times:
        times = self[values] = Times(self._bounds)
        return times

    def collected(self) -> Metric:
        """Return the family with the samples of each series."""
        family, names = self.family(), [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for values, times in self.items():
            family.add_metric(values, [*zip(names, accumulate(times.counts), strict=True)], times.sum)
        return family


class Series(Collector):
    """The series of one registry, in the order in which they were declared."""

    def __init__(self) -> None:
        self.declared: list[Counts | Histogram] = []
        self._of_routes: list[tuple[Counts, Zero]] = []
        self._routes: dict[str, None] = {}
        """Those whose series are created at the next reading: they are hundreds, and not every process is asked."""

    @cached_property
    def registry(self) -> CollectorRegistry:
        """What the library reads; made at the first reading."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, in the order in which they were declared."""
        for route in self._routes:
            for series, values in self._of_routes:
                for labels in product((route,), *values):
                    _ = series[labels]
        self._routes.clear()
        for each in self.declared:
            yield each.collected()

    def show_zeroes(self, route: str) -> None:
        """Show the series of a route from zero on: otherwise an alert misses a counter's first step."""
        self._routes[route] = None

    def counter(self, name: str, text: str, *labels: str, zero: Zero | None = None) -> Counts:
        """Declare a counter; `zero` shows its series from zero on."""
        return self._declare(CounterMetricFamily, name, text, labels, zero)

    def gauge(self, name: str, text: str, *labels: str, zero: Zero | None = None) -> Counts:
        """Declare a gauge, as `counter` does."""
        return self._declare(GaugeMetricFamily, name, text, labels, zero)

    def _declare(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        labels: tuple[str, ...],
        zero: Zero | None,
    ) -> Counts:
        series = Counts(kind, f"mcp_gateway_{name}", text, labels)
        self.declared.append(series)
        if zero is not None and labels[0] == "route":
            self._of_routes.append((series, zero))
        elif zero is not None:
            _ = [series[values] for values in product(*zero)]
        return series

    def histogram(self, name: str, text: str, labels: tuple[str, ...], bounds: Sequence[float]) -> Histogram:
        """Declare a histogram under its whole name, with the upper bounds of its buckets."""
        histogram = Histogram(name, text, labels, bounds)
        self.declared.append(histogram)
        return histogram

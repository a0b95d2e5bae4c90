"""The series of one registry, counted without the library's locks.

`prometheus_client` locks on every call and offers no public way to add many observations at once. So a counter and a
histogram keep plain numbers, and hand them to the library when the metrics are read.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

DURATIONS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""The buckets of OpenTelemetry's conventions for MCP."""

M = TypeVar("M", bound=MetricWrapperBase)


class Children(dict[tuple[str, ...], M], Generic[M]):
    """Caches a metric's children by label values: `.labels()` locks and converts on every call."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric = metric
        self.name: str = metric._name  # noqa: SLF001

    def __missing__(self, values: tuple[str, ...]) -> M:
        child = self[values] = self._metric.labels(*values) if values else self._metric
        return child


class Times:
    """What one series of a histogram observed since the metrics were read last."""

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds: Sequence[float] = histogram._upper_bounds  # noqa: SLF001
        self._counts = [0] * len(histogram._buckets)  # noqa: SLF001
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def show(self) -> None:
        """Move the counts to the histogram."""
        self._histogram._sum.inc(self._sum)  # noqa: SLF001
        self._sum = 0.0
        for number, count in enumerate(self._counts):
            if count:
                self._histogram._buckets[number].inc(count)  # noqa: SLF001
                self._counts[number] = 0


class Count:
    """One series of a counter."""

    __slots__ = ("_metric", "_more")

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self._more = 0

    def inc(self, number: int = 1) -> None:
        """Count more."""
        self._more += number

    def show(self) -> None:
        """Move the increments to the counter."""
        if self._more:
            self._metric.inc(self._more)
            self._more = 0


class Counters(dict[tuple[str, ...], Count]):
    """The series of a counter by their label values."""

    def __init__(self, metric: Counter) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, values: tuple[str, ...]) -> Count:
        count = self[values] = Count(self._metric.labels(*values) if values else self._metric)
        return count


class Pending(Collector):
    """What all series counted and observed, which it moves to the library's whenever the metrics are read."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, ...], Times] = {}
        self.counters: list[Counters] = []

    def observe(self, histograms: Children[Histogram], route: str, number: float) -> None:
        """Observe a number in the series of a route."""
        key = (histograms.name, route)
        times = self.of.get(key)
        if times is None:
            times = self.of[key] = Times(histograms[route,])
        times.observe(number)

    def collect(self) -> Iterable[Metric]:
        """Move the numbers; the metrics themselves follow in the registry."""
        for times in self.of.values():
            times.show()
        for counters in self.counters:
            for count in counters.values():
                count.show()
        return ()


class Series:
    """The registry; each kind of metrics is a subclass that declares its own series."""

    def __init__(self) -> None:
        # `_created` would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._pending = Pending()
        self._registry.register(self._pending)  # before the metrics: they are collected in this order
        self._of_routes: list[tuple[Children[Gauge] | Counters, tuple[Iterable[str], ...]]] = []

    def show_zeroes(self, route: str) -> None:
        """Create the series of a route at zero: otherwise an alert misses a counter's first step."""
        for series, values in self._of_routes:
            for labels in product((route,), *values):
                _ = series[labels]

    def _counter(self, name: str, text: str, *labels: str, zero: tuple[Iterable[str], ...] | None = None) -> Counters:
        """`zero` has the values of each label but `route` that are shown before the first step."""
        counters = Counters(Counter(f"mcp_gateway_{name}", text, labels, registry=self._registry))
        self._pending.counters.append(counters)
        if zero is not None and labels[0] == "route":
            self._of_routes.append((counters, zero))
        elif zero is not None:
            _ = [counters[values] for values in product(*zero)]
        return counters

    def _gauge(
        self, name: str, text: str, *labels: str, zero: tuple[Iterable[str], ...] | None = None
    ) -> Children[Gauge]:
        """`zero` as for a counter; only a gauge of routes has it."""
        gauges = Children(Gauge(f"mcp_gateway_{name}", text, labels, registry=self._registry))
        if zero is not None:
            self._of_routes.append((gauges, zero))
        return gauges

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: Iterable[float]
    ) -> Children[Histogram]:
        return Children(Histogram(name, text, labels, registry=self._registry, buckets=tuple(buckets)))

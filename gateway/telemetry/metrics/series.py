"""The series of one registry: plain numbers, of which `prometheus_client` sees a copy when the metrics are read.

The library's own counters and histograms lock on every call.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product
from typing import Any, Final, TypeVar, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.metrics.labels import OTHER, OTHER_ERROR

DURATIONS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
"""The buckets of OpenTelemetry's conventions for MCP."""
ANY: Final = None
"""In place of the values of a label: the program or its configuration chooses them."""
Values = Iterable[str] | None
Zero = bool | tuple[Iterable[str], ...]
"""Whether the series are shown before the first step, or only those of some values of each label but `route`."""


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

    def show(self, family: Any, values: tuple[str, ...]) -> None:
        """Add a sample to the library's family."""
        family.add_metric(values, self.value)


class Times:
    """One series of a histogram."""

    __slots__ = ("_bounds", "_counts", "_first", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._first = bounds, bounds[0]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, number: float) -> None:
        """Count one observation."""
        # Most requests end within the first bound: one comparison takes a seventh of the time of a bisection.
        self._counts[0 if number <= self._first else bisect_left(self._bounds, number)] += 1
        self._sum += number

    def show(self, family: Any, values: tuple[str, ...]) -> None:
        """Add the samples to the library's family."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric(values, [*zip(names, accumulate(self._counts), strict=True)], self._sum)


S = TypeVar("S", Count, Times)


class Labelled(dict[tuple[str, ...], S]):
    """The series of one metric, by the values of its labels.

    A value that is not among those of its label becomes `other`: clients and upstreams make no series.
    """

    def __init__(
        self, kind: type[Metric], name: str, text: str, labels: dict[str, Values], bounds: Sequence[float] = ()
    ) -> None:
        """`bounds` are the upper bounds of a histogram's buckets."""
        super().__init__()
        self._kind, self._name, self._text, self._bounds = kind, name, text, bounds
        self._known = {label: None if known is None else frozenset(known) for label, known in labels.items()}

    def __missing__(self, values: tuple[str, ...]) -> S:
        found = tuple(
            value if known is None or value in known else OTHER_ERROR if label == "error_type" else OTHER
            for value, (label, known) in zip(values, self._known.items(), strict=True)
        )
        if found != values:
            return self[found]  # not kept under the values that came: strangers would choose how many there are
        series = self[values] = cast("S", Times(self._bounds) if self._bounds else Count())
        return series

    def collected(self) -> Metric:
        """Return the library's family with the samples of each series."""
        family: Metric = self._kind(self._name, self._text, labels=tuple(self._known))  # type: ignore[call-arg]
        for values, series in self.items():
            series.show(family, values)
        return family


class Series(Collector):
    """The series of one registry, in the order in which they were declared."""

    def __init__(self) -> None:
        self.declared: list[Labelled[Count] | Labelled[Times]] = []
        self._of_routes: list[tuple[Labelled[Count], tuple[Iterable[str], ...]]] = []
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

    def counter(self, name: str, text: str, /, *, zero: Zero = False, **labels: Values) -> Labelled[Count]:
        """Declare a counter, with the values of each label."""
        return self._declare(CounterMetricFamily, name, text, zero, labels)

    def gauge(self, name: str, text: str, /, *, zero: Zero = False, **labels: Values) -> Labelled[Count]:
        """Declare a gauge, as `counter` does."""
        return self._declare(GaugeMetricFamily, name, text, zero, labels)

    def _declare(
        self, kind: type[Metric], name: str, text: str, zero: Zero, labels: dict[str, Values]
    ) -> Labelled[Count]:
        series: Labelled[Count] = Labelled(kind, f"mcp_gateway_{name}", text, labels)
        self.declared.append(series)
        if zero:
            shown = tuple(filter(None, labels.values())) if isinstance(zero, bool) else zero
            if "route" in labels:
                self._of_routes.append((series, shown))
            else:
                _ = [series[values] for values in product(*shown)]
        return series

    def histogram(self, name: str, text: str, bounds: Sequence[float], /, **labels: Values) -> Labelled[Times]:
        """Declare a histogram under its whole name, with the upper bounds of its buckets."""
        series: Labelled[Times] = Labelled(HistogramMetricFamily, name, text, labels, bounds)
        self.declared.append(series)
        return series

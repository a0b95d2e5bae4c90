"""The series of a registry: what they count without locks is there when they are read."""

from gateway.telemetry.metrics.series import ANY, DURATIONS, Series


class Kind:
    """A kind of metrics with one series of each sort."""

    def __init__(self) -> None:
        self.series = series = Series()
        self.plain = series.counter("plain_total", "Without labels.")[()]
        self.bare = series.counter("bare_total", "Without zeroes.", route=ANY)
        self.ended = series.counter("ended_total", "By route.", zero=True, route=ANY, why=("asked", "unasked"))
        self.refused = series.counter("refused_total", "Without a route.", zero=True, reason=("busy",))
        self.open = series.gauge("open", "A gauge of routes.", zero=True, route=ANY)
        self.loose = series.gauge("loose", "A gauge without zeroes.", route=ANY)
        self.times = series.histogram("mcp_gateway_seconds", "Times.", DURATIONS, route=ANY)

    def value(self, name: str, **labels: str) -> float | None:
        return self.series.registry.get_sample_value(f"mcp_gateway_{name}", labels)

    def observe(self, seconds: float) -> None:
        self.times["/mcp",].observe(seconds)


def test_a_counter_is_complete_at_every_reading() -> None:
    kind = Kind()
    kind.plain.inc()
    kind.plain.inc(3)
    assert kind.value("plain_total") == 4
    assert kind.value("plain_total") == 4
    kind.plain.inc()
    assert kind.value("plain_total") == 5


def test_a_histogram_is_complete_at_every_reading() -> None:
    kind = Kind()
    kind.observe(0.03)
    kind.observe(400)
    labels = {"route": "/mcp"}
    for _ in range(2):
        assert kind.value("seconds_count", **labels) == 2
        assert kind.value("seconds_sum", **labels) == 400.03
        assert kind.value("seconds_bucket", **labels, le="0.02") == 0
        assert kind.value("seconds_bucket", **labels, le="0.05") == 1
        assert kind.value("seconds_bucket", **labels, le="300.0") == 1
        assert kind.value("seconds_bucket", **labels, le="+Inf") == 2
    kind.observe(0.03)
    assert kind.value("seconds_bucket", **labels, le="0.05") == 2


def test_a_series_with_zeroes_is_there_before_its_first_step() -> None:
    kind = Kind()
    assert kind.value("refused_total", reason="busy") == 0
    assert kind.value("open", route="/mcp") is None
    kind.series.show_zeroes("/mcp")
    assert kind.value("open", route="/mcp") == 0
    assert [kind.value("ended_total", route="/mcp", why=why) for why in ("asked", "unasked")] == [0, 0]
    assert kind.value("bare_total", route="/mcp") is kind.value("loose", route="/mcp") is None


def test_a_value_that_is_not_in_its_list_is_other() -> None:
    kind = Kind()
    for odd in ("busy ", "odd", "odd"):
        kind.refused[odd,].inc()
    assert (kind.value("refused_total", reason="other"), list(kind.refused)) == (3, [("busy",), ("other",)])
    kind.open["/odd",].set(7)
    assert kind.value("open", route="/odd") == 7


def test_the_duration_buckets_are_those_of_the_semantic_conventions() -> None:
    assert DURATIONS == (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)

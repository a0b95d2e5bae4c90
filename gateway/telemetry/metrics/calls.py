"""Counts calls between their rounds, from parking to the retry."""

from typing import Final

from gateway.telemetry.metrics.label_values import bounded
from gateway.telemetry.metrics.labels import STATE_REASONS, ColdEnding, Step
from gateway.telemetry.metrics.series import Series

_HOLDS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_ROUNDS: Final = (1, 2, 3, 4, 5, 6, 8, 10)


class CallMetrics(Series):
    """The metrics of parked calls, their retries, their sealed states."""

    def __init__(self) -> None:
        super().__init__()
        self._held = self._gauge("held_calls", "Calls parked between two rounds.", "route", zero=())
        self._limit = self._gauge("held_calls_limit", "Maximum number of parked calls.")[()]
        self._cold = self._gauge("cold_calls", "Parked calls that were let go of, to be resumed.", "route", zero=())
        self._cooled = self._counter("calls_cooled_total", "Parked calls that were let go of.", "route", zero=())
        self._cold_endings = self._counter(
            "cold_calls_ended_total",
            "Cold calls that ended, by how they ended.",
            *("route", "ending"),
            zero=(ColdEnding,),
        )
        self._hold_times = self._histogram(
            "mcp_gateway_hold_duration_seconds", "Time that a call was parked.", ("route",), _HOLDS
        )
        self._rounds = self._histogram(
            "mcp_gateway_rounds_per_exchange", "Number of rounds of an exchange.", ("route",), _ROUNDS
        )
        self._continuations = self._counter(
            "continuations_total", "Retries, by the step that served them.", "route", "step", zero=(Step,)
        )
        self._seals = self._counter("seals_total", "requestState values that this process sealed.")[()]
        self._state_rejections = self._counter(
            "state_rejected_total", "requestState values that were rejected.", "reason", zero=(STATE_REASONS,)
        )

    def call_parked(self, route: str) -> None:
        """Add a parked call; `call_released` must follow."""
        self._held[route,].inc()

    def call_released(self, route: str, seconds: float) -> None:
        """Remove a parked call, which was resumed or expired after `seconds`."""
        self._held[route,].inc(-1)
        self._hold_times[route,].observe(seconds)

    def set_held_limit(self, calls: int) -> None:
        """Show `hold.max_calls`."""
        self._limit.set(calls)

    def show_cold_call(self, route: str, change: int) -> None:
        """Add or remove a cold call."""
        self._cold[route,].inc(change)

    def call_cooled(self, route: str) -> None:
        """Count a call that was let go of."""
        self._cooled[route,].inc()

    def cold_call_ended(self, route: str, ending: ColdEnding) -> None:
        """Count how a cold call ended."""
        self._cold_endings[route, ending].inc()

    def exchange_finished(self, route: str, rounds: int) -> None:
        """Count an exchange's rounds at its end."""
        self._rounds[route,].observe(rounds)

    def continued(self, route: str, step: Step) -> None:
        """Count a retry by how it was served."""
        self._continuations[route, step].inc()

    def sealed(self) -> None:
        """Count one nonce used."""
        self._seals.inc()

    def state_rejected(self, reason: str) -> None:
        """Count a requestState that was not accepted, by one of `STATE_REASONS`."""
        self._state_rejections[bounded(reason, STATE_REASONS),].inc()

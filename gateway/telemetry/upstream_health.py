"""Judges the health of an upstream by the traffic of its route, and counts its child processes."""

from collections.abc import Mapping
from shlex import quote
from typing import Final

from gateway import world
from gateway.protocol.errors import DescriptorsShort, GatewayError, UpstreamError
from gateway.telemetry.log import Event, get_logger
from gateway.telemetry.metrics.labels import UpstreamEra
from gateway.telemetry.metrics.registry import Metrics
from gateway.telemetry.process_status import Failure
from gateway.telemetry.recent_errors import RecentError, RecentErrors

log = get_logger()

_FAILURES: Final = frozenset({"upstream_unreachable", "session_lost", "call_lost"})
"""After these an upstream counts as failing; an upstream that refuses a caller is available."""

_PROBE_COMMAND: Final = "probe --stdio -- COMMAND"
_CHILD_FIX: Final = "look in the gateway's log for the last lines of its stderr (`child.ended`)"


def log_failure(
    event: Event, error: GatewayError, route: str, upstream: str | None, about: Mapping[str, str | None]
) -> None:
    """Log why the upstream, or another replica, failed a request; `about` has the ids of the request."""
    log.warning(
        event, route=route, upstream=upstream, reason=error.reason, cause=error.message, fix=error.fix, **about
    )


class UpstreamHealth:
    """The health of one route's upstream."""

    def __init__(self, route: str, metrics: Metrics, errors: RecentErrors, *, url: str | None) -> None:
        """`url` is what may be shown of it; None if the upstream is a command."""
        self.answered = float("-inf")
        """Monotonic time of the last answer outside a session: to a probe, or to a request that was passed through."""
        self.has_served = False
        """Whether it has answered more than probes outside a session."""
        self._route = route
        self._probe = _PROBE_COMMAND if url is None else f"probe {quote(url)}"
        if errors.config_file:  # it also has the credentials and certificates with which the gateway asks
            self._probe = f"doctor --config {errors.config_file} --route {quote(route)}"
        self._metrics = metrics
        self._errors = errors
        self._failure: RecentError | None = None
        self._failing_since = self.judged = float("-inf")
        """Monotonic times of the first failure after an answer, and of the last failure of which that was asked."""

    def ok(self, *, is_probe: bool = False) -> None:
        """The upstream has answered."""
        self.answered = world.monotonic()
        self.has_served |= not is_probe

    def note(self, error: GatewayError, served: float | None) -> None:
        """Record an error of a request; `served`: when a session was served last (monotonic), if that was asked."""
        self.advise(error)
        noted = self._errors.note(error, self._route)
        is_its = isinstance(error, UpstreamError) and not isinstance(error, DescriptorsShort)
        if noted is not None and is_its and noted.kind in _FAILURES:
            before, self._failure = self._failure, noted
            if served is not None:
                self.judged = noted.last
                if (answered := max(served, self.answered)) >= self._failing_since:
                    # The one before was perhaps too soon after another one to be judged.
                    first = noted if before is None or before.last <= answered else before
                    self._failing_since = first.last

    def advise(self, error: GatewayError) -> None:
        """Complete the commands of an error's fix, for the log and the status page alike."""
        fix = error.fix.replace("--config FILE", f"--config {self._errors.config_file or 'FILE'}")
        for asks in ("probe URL", _PROBE_COMMAND):
            fix = fix.replace(asks, self._probe)
        error.advise(fix)

    def count(self, error: GatewayError) -> None:
        """Count an error in the metrics, once, if it is the upstream's."""
        if isinstance(error, UpstreamError) and not error.is_counted:
            self._metrics.upstream_failures[self._route, error.reason].inc()
            error.is_counted = True

    def era_probed(self, *, is_modern: bool | None) -> None:
        """A probe of the era is over; None if it has not found out."""
        era = UpstreamEra.UNKNOWN if is_modern is None else UpstreamEra.MODERN if is_modern else UpstreamEra.LEGACY
        self._metrics.era_probes[self._route, era].inc()
        if is_modern is not None:
            log.info(Event.ERA_FOUND, route=self._route, era=era)

    def malformed(self) -> None:
        """The server has sent what is not JSON-RPC: some children print logs on stdout."""
        self._metrics.upstream_failures[self._route, "malformed"].inc()

    def child_started(self) -> None:
        """A child has begun."""
        self._metrics.children[self._route,].inc()

    def child_ended(self, how: str, *, asked: bool) -> None:
        """All processes of a child have ended; one that was not asked to end has failed."""
        self._metrics.children[self._route,].inc(-1)
        self._metrics.children_ended[self._route, "asked" if asked else "unasked"].inc()
        if not asked:
            self._errors.say("child_ended", f"A child of route {self._route} {how}", _CHILD_FIX, self._route)

    @property
    def failure(self) -> Failure | None:
        """The last failure, however long ago."""
        if (last := self._failure) is None:
            return None
        ago, since = (world.monotonic() - moment for moment in (last.last, self._failing_since))
        return Failure(kind=last.kind, cause=last.text, fix=last.fix, seconds_ago=ago, since_seconds_ago=since)

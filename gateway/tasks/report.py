"""Reports how one task of a client goes, in metrics or in the log."""

from gateway import world
from gateway.protocol.errors import GatewayError, UpstreamError
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import Event, TaskOutcome, get_logger

log = get_logger()

_TARGET_CHARACTERS = 200


class TaskReport:
    """Reports one task, and its end only once."""

    def __init__(self, live: LiveRoute, task: str, issued: float) -> None:
        """`task` is the gateway's own id of the task; `issued` is wall-clock time."""
        self._live = live
        self._issued = issued
        self._about = {"route": live.route.path, "upstream": live.route.upstream.name, "task": task}

    def begun(self, target: str, request_id: str | None) -> None:
        """A call became a task."""
        log.info(Event.TOOL_TASK_BEGUN, **self._about, target=target[:_TARGET_CHARACTERS], request_id=request_id)

    def taken_over(self, owner: str, *, owner_is_dead: bool) -> None:
        """This replica goes on with a task of another one."""
        log.info(Event.TOOL_TASK_TAKEN_OVER, **self._about, owner=owner, owner_is_dead=owner_is_dead)

    def ended(self, outcome: TaskOutcome) -> None:
        """The task is over, as its server or its client wants."""
        self._live.process.metrics.task_ended(self._live.route.path, outcome)
        log.info(Event.TOOL_TASK_ENDED, **self._about, outcome=outcome, seconds=self._seconds)

    def lost(self, outcome: TaskOutcome, error: GatewayError) -> None:
        """Nobody will learn how the task ends."""
        self._live.process.metrics.task_ended(self._live.route.path, outcome)
        say = log.warning if isinstance(error, UpstreamError) else log.info
        say(
            Event.TOOL_TASK_LOST,
            **self._about,
            outcome=outcome,
            seconds=self._seconds,
            cause=error.message,
            fix=error.fix,
        )

    @property
    def _seconds(self) -> float:
        return round(max(world.wall() - self._issued, 0), 3)

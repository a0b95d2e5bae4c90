"""The parts of one process of which an operator can ask."""

from collections.abc import Iterable, Iterator

from gateway.admin.reload import Reload
from gateway.bridge.driver import Driver
from gateway.cluster.membership import Membership
from gateway.config import Config, InForce, Validity
from gateway.downstream.handler import RequestHandler
from gateway.downstream.legs import Seen
from gateway.http.server.listener import Listener
from gateway.parking.lot import Lot
from gateway.routes.live_route import LiveRoute
from gateway.routes.route_table import RouteTable
from gateway.runtime.call_bytes import CallBytes
from gateway.runtime.tasks import Tasks
from gateway.seal.keyring import Keys
from gateway.tasks.live_task import TaskTable
from gateway.telemetry import Metrics
from gateway.telemetry.recent_errors import RecentErrors


class ProcessParts:
    """What metrics and the status page read of a process."""

    in_force: InForce[Config]
    certificates: InForce[Validity]
    """Of the certificates that are in use, whatever their files have since."""
    reload: Reload
    keys: InForce[Keys]
    downstream: RequestHandler
    client_listener: Listener
    tasks: Tasks
    calls: CallBytes
    lot: Lot[Driver]
    task_table: TaskTable
    routes: RouteTable
    members: Membership
    metrics: Metrics
    recent_errors: RecentErrors
    began: float
    """Monotonic."""

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.in_force.value

    @property
    def fullest_holder(self) -> tuple[int, bytes]:
        """The most calls that one principal holds, and the principal; mirrored ones count apart."""
        lots = (self.lot, self.downstream.legacy.mirrored.lot)
        return max(((count, who) for lot in lots for who, count in lot.per_principal.items()), default=(0, b""))

    def sessions_in_use(self) -> Iterator[tuple[LiveRoute, bytes, int]]:
        """Yield the use of `sessions.max_per_principal` by route and principal; relayed sessions count apart."""
        for live in self.routes.live.values():
            for principal, count in live.upstream.pool.in_use:
                yield live, principal, count
        for path, principal, count in self.downstream.legacy.sessions.in_use:
            if path in self.routes.live:
                yield self.routes.live[path], principal, count

    def fullest_callers(self) -> dict[str, tuple[int, bytes]]:
        """Return the most sessions in use that one principal has on each route, and the principal."""
        fullest = dict.fromkeys(self.routes.live, (0, b""))
        for live, principal, count in self.sessions_in_use():
            fullest[live.route.path] = max(fullest[live.route.path], (count, principal))
        return fullest

    def lost_at_end(self, calls: Iterable[Seen]) -> int:
        """Count what ends without a result if the process ends first, as `drain` would have it."""
        process = self.routes.process
        tasks = (task for task in self.task_table if not task.is_over)
        cold = 0 if process.draining.is_resumable else len(self.lot.cold)
        alone = len(process.passing) + self.downstream.legacy.sessions.open_requests
        return sum(call.at_end == "lost" for call in {*calls, *tasks}) + cold + alone

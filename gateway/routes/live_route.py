"""What the exchanges of one route share."""

from typing import TYPE_CHECKING

import msgspec

from gateway.cluster.witness import Witness
from gateway.config import Config, Route
from gateway.exchange.machine import Policy
from gateway.http.client import Client
from gateway.routes.parking import Lot
from gateway.runtime.coarse_timer import Deadlines
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Sealer
from gateway.sessions.pool import Pool
from gateway.telemetry import Metrics
from gateway.telemetry.recent_errors import Health
from gateway.upstream.era_probe import EraProbe

if TYPE_CHECKING:  # these know their bridge
    from gateway.bridge.driver import Driver
    from gateway.bridge.subscription import Subscription
    from gateway.passthrough.forwarder import LongLivedStream


class LiveRoute(msgspec.Struct, frozen=True, eq=False):
    """One route at work, under one configuration."""

    config: Config
    """As it holds on this route."""
    route: Route
    client: Client
    """Towards this route's upstream."""
    pool: Pool
    lot: Lot["Driver"]
    sealer: Sealer
    metrics: Metrics
    tasks: Tasks
    alarms: Deadlines
    policies: dict[str, Policy]
    """By method; a method that is not here may not ask."""
    owner: str
    epoch: str
    listeners: set["Subscription"]
    era: EraProbe | None
    """None where the upstream is a child: nothing can be passed through to it."""
    health: Health
    streams: set["LongLivedStream"]
    """Those of old clients, and of a modern upstream's subscriptions."""
    witness: Witness

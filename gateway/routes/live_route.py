"""The three lifetimes of a route at work: its process, its upstream, its present configuration.

A reload makes a new `LiveRoute`; calls in flight keep the one that they began with. The new one has the same
`LiveUpstream` as long as everything that shapes a session stays the same. A process has one `ProcessScope`.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec
from msgspec import Raw

from gateway import world
from gateway.cluster.draining import Draining
from gateway.cluster.router import Router
from gateway.cluster.witness import Witness
from gateway.config import Config, InForce, Route, RouteSettings
from gateway.exchange.machine import Policy
from gateway.http.error_texts import Sender
from gateway.http.incoming import Incoming
from gateway.http.server.traffic import Traffic
from gateway.http.upstream_client import Bounds, Client
from gateway.protocol.errors import GatewayError, InvalidState
from gateway.routes.deadlines import Deadlines
from gateway.routes.tool_catalog import ToolCatalog
from gateway.runtime.call_bytes import CallBytes
from gateway.runtime.own_ids import numbered
from gateway.runtime.tasks import Tasks
from gateway.seal import sep_1655_items
from gateway.seal.caller_tags import CallerTags
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import Keyring
from gateway.seal.request_state import Envelope
from gateway.seal.sep_1655_items import Item
from gateway.sessions.pool.pool import Pool
from gateway.telemetry import Metrics, Traces
from gateway.telemetry.upstream_health import UpstreamHealth
from gateway.upstream.children.stdio_era import StdioEra
from gateway.upstream.http.era_probe import EraProbe


class Endable(Protocol):
    """A stream that stays open until its client leaves, or until it is ended."""

    def end(self) -> None:
        """End it properly; its client may open another one."""


class ProcessScope(msgspec.Struct, frozen=True, eq=False):
    """What lives as long as the process."""

    states: Claims[Envelope]
    items: Claims[Item]
    tags: CallerTags
    addresses: InForce[Keyring]
    """Seals where legacy servers want their messages (`passthrough.sse_endpoint`)."""
    metrics: Metrics
    tasks: Tasks
    owner: str
    """The id of this replica, as states name it."""
    epoch: str
    """A random id of this start of the process."""
    witness: Witness
    router: Router
    traffic: Traffic
    calls: CallBytes
    """What the calls under way weigh."""
    draining: Draining
    serves_host: bool
    """Whether the only client is the host that started this process (`wrap`): all sessions share one child."""
    traces: Traces | None
    passing: dict[Incoming, float] = msgspec.field(default_factory=dict)
    """The requests that pass through, long-lived streams apart, and since when (monotonic): the oldest first."""
    call_ids: Iterator[bytes] = msgspec.field(default_factory=numbered)
    """The ids of upstream calls."""

    def is_own(self, owner: str, epoch: str) -> bool:
        """Whether this process has what these names stand for, or had it."""
        return (owner, epoch) == (self.owner, self.epoch)


class LiveUpstream(msgspec.Struct, frozen=True, eq=False):
    """What lives as long as the upstream of a route, across reloads that do not concern it."""

    settings: InForce[RouteSettings]
    bounds: InForce[Bounds]
    client: Client
    pool: Pool
    health: UpstreamHealth
    era: EraProbe | None = None
    """None if the upstream is a child process."""
    stdio: StdioEra | None = None
    """Set if the upstream is a child process."""
    subscriptions: dict[Endable, None] = msgspec.field(default_factory=dict)
    streams: dict[Endable, None] = msgspec.field(default_factory=dict)
    """Streams of legacy clients, and subscriptions that are passed through to a modern upstream."""
    unheard: list[GatewayError] = msgspec.field(default_factory=list)
    """Why calls broke without their clients, for a line in the log."""
    tools: ToolCatalog = msgspec.field(default_factory=ToolCatalog)
    """The tools of a modern upstream."""

    @property
    def transport(self) -> str | None:
        """The transport that the upstream speaks: `stdio`, `sse` or `streamable-http`; None if it is not known yet."""
        if self.era is None:
            return "stdio"
        configured, found = self.settings.value.route.upstream.transport, self.era.speaks_sse
        if configured != "auto":
            return configured
        return None if found is None else "sse" if found else "streamable-http"

    @property
    def is_modern(self) -> bool | None:
        """Whether the upstream is modern, as the last probe of its era found; None if a probe has to find out."""
        probed = self.era or self.stdio
        return probed is not None and probed.known

    @property
    def last_ok_seconds_ago(self) -> float | None:
        """How long ago the upstream last answered; None if it has not yet."""
        last = max(self.health.answered, self.pool.served)
        return world.monotonic() - last if last > float("-inf") else None

    def note(self, error: GatewayError) -> None:
        """Record an error of a request of this route; the same error may be given several times."""
        # Failures come in crowds, and it takes time to ask all sessions: one failure a second does.
        is_judged = world.monotonic() - self.health.judged > 1.0
        self.health.note(error, self.pool.served if is_judged else None)

    @property
    def has_served(self) -> bool:
        """Whether a session was ever opened, or the upstream is modern and needs none."""
        greeted = self.stdio is not None and self.stdio.launcher.has_initialized
        return greeted or bool(self.is_modern) or self.health.has_served or self.pool.served > float("-inf")

    def retire(self) -> None:
        """Serve no further request: keep no session, and no process that waits for one."""
        self.pool.retire()
        if self.stdio is not None:
            self.stdio.retire()

    def end_streams(self) -> None:
        """End every stream that would otherwise stay open until its client leaves."""
        for stream in (*self.subscriptions, *self.streams):
            stream.end()


class LiveRoute(msgspec.Struct, frozen=True, eq=False):
    """What lives as long as one configuration of a route, or a call that began under it."""

    config: Config
    """The configuration as it holds on this route."""
    route: Route
    policies: dict[str, Policy]
    """By method; a method that is missing may not ask."""
    deadlines: Deadlines
    upstream: LiveUpstream
    process: ProcessScope

    def sender(self, principal: bytes) -> Sender:
        """Return what the log says of a caller."""
        return self.route.path, self.process.tags.of(principal)

    def kept_item(self, sealed: Raw, name: str, bearer: Bearer) -> Item | None:
        """What the gateway gave a client to keep under this name (SEP-1655).

        None if this caller did not get it on this route, or its time is over, which is counted.
        """
        items, seconds = self.process.items, self.config.state.session_ttl_seconds
        try:
            return sep_1655_items.opened(items, sealed, name, bearer, seconds)
        except InvalidState as exc:
            self.process.metrics.state_rejections[exc.reason,].inc()
            return None

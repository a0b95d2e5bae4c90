"""Wires the parts of one gateway process: its listeners, its routes, the way to other replicas.

A reload is `Gateway.apply`. Everything that can fail comes first; then the configuration in force is replaced, and
every part that was given the holder follows.
"""

import asyncio
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Final

from gateway import __version__, world
from gateway.admin.probes import Admin
from gateway.admin.process_parts import ProcessParts
from gateway.admin.reload import Reload
from gateway.auth.authenticator import Authenticator
from gateway.bridge.driver import Driver  # noqa: TC001  (one import style; it costs nothing here)
from gateway.cluster.draining import Draining
from gateway.cluster.membership import Membership
from gateway.cluster.peer_client import PeerClient
from gateway.cluster.peer_connections import PeerConnections
from gateway.cluster.router import Router
from gateway.cluster.witness import Witness
from gateway.cluster.worker import Worker, member_id
from gateway.config import Config, ConfigFile, InForce, cautions, contexts, digest, validity
from gateway.downstream.access_log import access
from gateway.downstream.continuation import Continuation
from gateway.downstream.handler import RequestHandler
from gateway.downstream.legacy_routing import LegacyRouting
from gateway.downstream.rejections import no_route
from gateway.http.error_texts import texts
from gateway.http.server.listen_errors import explained
from gateway.http.server.listener import Listener
from gateway.http.server.traffic import Traffic
from gateway.http.upstream_client import Bounds, Client
from gateway.http_client.client import HttpClient
from gateway.legacy_front.session_ids import session_ids
from gateway.legacy_front.session_table import SessionTable
from gateway.mirror.streamable.streamed_call import Shared
from gateway.mirror.streamable.tokens import Tokens
from gateway.parking.lot import Lot
from gateway.passthrough import sse_endpoint
from gateway.plugins.loader import find, plugin
from gateway.protocol.errors import Stopping
from gateway.routes.live_route import ProcessScope
from gateway.routes.route_table import RouteTable
from gateway.runtime.budget import Budget
from gateway.runtime.call_bytes import CallBytes
from gateway.runtime.tasks import Tasks
from gateway.seal.caller_tags import CallerTags
from gateway.seal.keyring import key_id, ring
from gateway.seal.peer_messages import PeerSealer
from gateway.seal.request_state import states
from gateway.seal.sep_1655_items import items
from gateway.seal.task_handle import TaskSealer
from gateway.server.key_purposes import state_keys
from gateway.server.peer_listener import PeerListener
from gateway.tasks.live_task import TaskTable
from gateway.telemetry import Event, Metrics, bodies, get_logger, open_traces
from gateway.telemetry.recent_errors import RecentErrors

if TYPE_CHECKING:
    from gateway.plugins.status_page.pages import StatusPages

log = get_logger()

_FLUSH_SECONDS: Final = 3.0
"""How long sending the last spans may take at the end."""


class Gateway(ProcessParts):
    """One process."""

    def __init__(
        self,
        config: Config,
        worker: Worker | None = None,
        file: ConfigFile | None = None,
        *,
        serves_host: bool = False,
    ) -> None:
        """Give `worker` if this process is one of several that share `listen`; `file` is what a reload reads.

        `serves_host`: the only client is the host that started this process (`wrap`), so one child serves everything.
        Raises ConfigError if a file that the configuration names cannot be used, and TracesUnavailable.
        """
        self.began = world.monotonic()
        self.in_force = in_force = InForce(config)
        self._worker = worker
        self.metrics = Metrics(__version__, [route.path for route in config.routes])
        self.tasks = Tasks(self.metrics)
        self.recent_errors = RecentErrors("" if file is None else quote(str(file.path.absolute())))
        self._hold = hold = in_force.part(lambda config: config.hold)
        limits, timeouts = in_force.part(lambda config: config.limits), in_force.part(lambda config: config.timeouts)
        results = Budget("limits.results_bytes", limits.part(lambda it: it.results_bytes))
        self.lot: Lot[Driver] = Lot(hold, results, self.tasks)
        self.calls = CallBytes(limits)
        self.keys = state_keys(in_force, worker.key if worker is not None else None)
        self.task_table = TaskTable(hold, TaskSealer(self.keys))
        self._peer_sealer = PeerSealer(self.keys)
        self._traffic = Traffic(limits, timeouts, self.metrics)
        own = member_id(config.replica, worker)
        self._peer_connections = PeerConnections(timeouts, config.replica.listen, own, self._peer_sealer, self.tasks)
        replica = in_force.part(lambda config: config.replica)
        self.members = Membership(replica, worker, self._peer_connections, self.tasks)
        self._traces = open_traces(__version__, self.members.own) if config.traces else None
        self.draining = Draining(in_force.part(lambda config: worker is not None or bool(config.state.keys)))
        self._peers = PeerClient(self._peer_connections, self.members, self.metrics, self.draining)
        self._witness = Witness(self.members, self._peers, self.tasks)
        self._assemble(serves_host=serves_host)
        traffic = self._traffic
        for budget in (self.calls, self.lot.results, traffic.receiving, traffic.sending, self.sessions.budget):
            self.metrics.watch_budget(budget.name, budget.status)
        self.metrics.watch_budget("limits.calls_bytes_per_principal", self.calls.fullest_share)
        self.metrics.watch_budget("limits.cold_bytes", self.lot.cold.status)
        self.metrics.watch_budget("limits.arriving_bytes", self.routes.arriving)
        self.client_listener = Listener(
            self.downstream.handle,
            config.listen,
            self._traffic,
            reuse_port=worker is not None,
            tls=self._tls.listener,
            begin=self.downstream.direct.begin,
        )
        self.listeners: list[Listener] = []
        """All that were opened."""
        self.listen = ""
        """The address that clients can reach; known after `start`."""
        self.admin = ""
        self.metrics.config_loaded()
        self.certificates = in_force.part(validity)
        texts.left_out = f" of route {config.routes[0].path}" if serves_host else ""
        self._show_settings(config)
        in_force.after_replace(self._show_settings)
        self.reload = Reload(file, in_force, self, self.tasks, replica=self.members.own)
        # Those who can ask: an operator, another replica, another worker of this host.
        is_asked = config.admin is not None or config.replica.listen is not None or worker is not None
        self._pages: StatusPages | None = None
        if is_asked and (status_pages := find("status-page")) is not None:
            self._pages = status_pages(self, self._peers)

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the state keys; the first one seals."""
        return tuple(map(key_id, self.keys.value.present))

    async def start(self) -> None:
        """Open the listeners; raises OSError when an address is taken."""
        config, worker, pages = self.config, self._worker, self._pages
        peers = PeerListener(self.in_force, self._peer_sealer, self.downstream, self._witness, pages, self._traffic)
        if (address := config.replica.listen) is not None:
            shared = Listener(peers.handle, address, self._traffic, reuse_port=worker is not None)
            _ = await self._open(shared, address)
        if worker is not None:  # for the other workers of this host
            address = worker.socket("peer")
            _ = await self._open(Listener(partial(peers.handle, is_local=True), address, self._traffic), address)
        # After the peer listener: replicas that hear of this one ask at its address for its id.
        await self.members.begin()
        self.listen = await self._open(self.client_listener, config.listen)
        admin = Admin(self, pages)
        address = config.admin if worker is None else worker.socket("admin")  # where the supervisor asks
        if address is not None:
            self.admin = await self._open(Listener(admin.handle, address, self._traffic, leaves_spares=False), address)
        # Only now: a gateway that cannot listen ends, and would end each child that it has started.
        self.routes.begin_children()
        self.reload.begin()
        log.info(
            Event.SERVER_STARTED,
            version=__version__,
            listen=self.listen,
            admin=self.admin,
            replica=self.members.own,
            routes={route.path: route.upstream.name for route in config.routes},
            key_ids=self.key_ids,
            configuration=digest(config),
            open_files=world.most_descriptors(),
        )
        self._log_cautions()

    def _assemble(self, *, serves_host: bool) -> None:
        """Make the routes, and what serves their requests; no child of theirs is started before one is needed."""
        in_force, keys, tasks = self.in_force, self.keys, self.tasks
        process = ProcessScope(
            states=states(keys, in_force.part(lambda config: config.limits.state_bytes)),
            items=items(keys),
            tags=CallerTags(keys),
            addresses=ring(keys, sse_endpoint.PURPOSE, opens_former=True),
            metrics=self.metrics,
            tasks=tasks,
            owner=self.members.own,
            epoch=world.token_hex(8),  # tells this process from a former one of its id
            witness=self._witness,
            router=Router(self.members, self._peers, self._witness, self.draining, self.metrics),
            traces=self._traces,
            traffic=self._traffic,
            calls=self.calls,
            draining=self.draining,
            serves_host=serves_host,
        )
        self._tls = contexts(self.config)
        self._client = client = Client(
            in_force.part(lambda config: Bounds(config.limits, config.timeouts)), HttpClient(tasks)
        )
        self.routes = RouteTable(self.config, self._tls, client, process, self.recent_errors)
        self._authenticator = authenticator = Authenticator(self.config, self._tls, client, tasks)
        continuation = Continuation(process, self.lot, self.task_table, authenticator)
        self.sessions = SessionTable(session_ids(keys), in_force, self.metrics)
        mirrored = Shared(Tokens(keys), self._hold, self.lot.results, tasks)
        legacy = LegacyRouting(self.sessions, mirrored)
        self.downstream = RequestHandler(in_force, self.routes, authenticator, continuation, legacy)
        self._load_plugins(self.config)

    def _load_plugins(self, config: Config) -> None:
        """Load what answers clients by this configuration; raises ImportError, with nothing changed."""
        downstream, stages, legacy = self.downstream, self.downstream.stages, self.downstream.legacy
        if legacy.stateless is None and any("sep-1442" in route.dialects for route in config.routes):
            shared = Shared(Tokens(self.keys, "sep-1442, "), self._hold, self.lot.results, self.tasks)
            legacy.stateless = plugin("sep-1442")(shared, downstream.handle_hop, downstream.continuation.give_up)
        # An upstream over HTTP may have an OAuth of its own, and so may an issuer that the gateway requires.
        has_oauth = config.principal.source == "jwt" or any(route.upstream.url for route in config.routes)
        if has_oauth and stages.oauth_proxy is None and (oauth_proxy := find("oauth")) is not None:
            stages.oauth_proxy = oauth_proxy(self.in_force, self.routes)

    async def _open(self, listener: Listener, address: str) -> str:
        """Listen and return the address."""
        self.listeners.append(listener)  # `close` ends it even if its start fails or is cancelled
        with explained(self.config, address):
            return await listener.start()

    def apply(self, config: Config) -> None:
        """Serve new requests by another configuration; calls that run or wait keep the one that they began with.

        Raises ConfigError, with nothing changed, if a file that the configuration names has become unusable.
        """
        tls = contexts(config)
        self._load_plugins(config)
        self._authenticator.use(config, tls)
        self.in_force.replace(config)
        for listener in self.listeners:
            listener.forget_heads()  # what is remembered with a head holds for the former configuration
        self.routes.rebuild(config, tls)
        self.sessions.keep_only(self.routes.live, no_route("that the configuration had before"))
        if tls.listener is not None or self.client_listener.is_secure:
            self.tasks.spawn(self.client_listener.secure(tls.listener), "change the certificate")
        self._log_cautions()

    def reloaded(self, *, applied: bool) -> None:
        """See `Reloadable`."""
        self.metrics.config_reloaded(applied=applied)

    def _show_settings(self, config: Config) -> None:
        self.metrics.show_certificates({key: ends.timestamp() for key, (_, ends) in self.certificates.value.items()})
        self.metrics.held_calls_limit.set(config.hold.max_calls)
        bodies.on, texts.are_brief = config.debug.bodies, config.errors == "brief"
        access.use(config)

    def _log_cautions(self) -> None:
        for sentence in cautions(self.config, self.certificates.value, is_served=True):
            log.warning(Event.CONFIG_CAUTION, note=sentence)

    async def close(self) -> None:
        """Close everything; replies that were just written still go out."""
        self.reload.close()
        calls = (*self.downstream.legs.seen, *self.lot.waiting())
        lost = None if self.draining.has_parted else self.lost_at_end(calls)  # `server.parted` has told of those
        is_resumable = self.draining.is_resumable
        self.draining.part([task.id for task in self.task_table] if is_resumable else ())
        self.task_table.leave(is_resumable=is_resumable)
        for live in self.routes.live.values():
            live.upstream.retire()
        self.sessions.end_all(Stopping("The gateway has shut down, and the session with it"))
        # The cancellations and ends of sessions that these have begun still go upstream.
        await self.tasks.settle(self.config.timeouts.cancel_seconds)
        # All at once, because each waits up to two seconds for what it still serves.
        _ = await asyncio.gather(*(listener.close() for listener in self.listeners))
        await self.routes.end_children()
        await self.tasks.close()
        self._client.close()
        self._peer_connections.close()
        if self._traces is not None:
            # In a thread: probes and scrapes are answered meanwhile, even if the collector hangs.
            await asyncio.to_thread(self._traces.close, _FLUSH_SECONDS)
        log.info(Event.SERVER_STOPPED, **({} if lost is None else {"lost": lost}))

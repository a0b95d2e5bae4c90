"""Wiring, start, drain and stop of one gateway process."""

import asyncio
import gc
import resource
import secrets
import signal
import ssl
import time
from typing import Final

from gateway import __version__
from gateway.admin.probes import Admin
from gateway.admin.snapshot import Process, take_snapshot
from gateway.auth.authenticator import Authenticator
from gateway.auth.host_check import admin_names
from gateway.auth.oauth_proxy import OAuthProxy
from gateway.bridge.driver import Driver  # noqa: TC001  (one import style; it costs nothing here)
from gateway.cluster.membership import Membership, Worker
from gateway.cluster.peer_client import PeerClient, PeerListener
from gateway.cluster.retry_routing import RetryRouting
from gateway.cluster.witness import Witness
from gateway.config import Config, cautions, contexts, digest
from gateway.downstream.handler import Downstream
from gateway.http.client import Client
from gateway.http.listener import Handler, Listener
from gateway.passthrough import sse_endpoint
from gateway.passthrough.forwarder import Passthrough
from gateway.passthrough.sse_endpoint import EndpointRewriter
from gateway.protocol.errors import Stopping
from gateway.routes.live_route import ProcessScope
from gateway.routes.parking import Lot
from gateway.routes.table import RouteTable
from gateway.runtime.tasks import Tasks
from gateway.seal.cipher import Keyring
from gateway.seal.peer_messages import PeerSealer
from gateway.seal.request_state import Sealer
from gateway.server.reload import Read, Reload
from gateway.telemetry import Event, Metrics, Traces, bodies, get_logger, open_traces
from gateway.telemetry.recent_errors import RecentErrors

log = get_logger()

_POLL_SECONDS: Final = 0.05
_RESTS: Final = 2
"""How often in a row nothing must be left to do before a drain is over; see `Listener.is_writing`."""
_FLUSH_SECONDS: Final = 3.0
"""How long the last spans may take to be sent at the end."""
_EPHEMERAL_KEY_BYTES: Final = 32
_SALT_BYTES: Final = 16


class Gateway:
    """One process: its listeners, routes, sessions and parked calls."""

    def __init__(
        self,
        config: Config,
        worker: Worker | None = None,
        read: Read | None = None,
        traces: Traces | None = None,
    ) -> None:
        """`worker` when this process is one of several that share `listen`; `read` reads the configuration again.

        Raises TracesUnavailable, where `traces` are not given and the configuration wants them.
        """
        self.config = config
        self.metrics = Metrics(__version__, [route.path for route in config.routes])
        self.metrics.set_held_limit(config.hold.max_calls)
        bodies.on = config.debug.bodies
        self.tasks = Tasks(self.metrics)
        self.troubles = RecentErrors()
        self.began = time.monotonic()
        self.lot: Lot[Driver] = Lot(config.hold)
        self._worker = worker
        self._own_key: tuple[bytes, ...] = (worker.key,) if worker is not None else ()
        self._keys = self._ring(config)
        self._survives = worker is not None or bool(config.state.keys)
        """Whether anybody else can open the states of this process."""
        self._keyring = Keyring(self._keys, "state")
        self._sealer = Sealer(self._keyring, config.limits.state_bytes)
        self._hops = PeerSealer(Keyring(self._keys, "peer"))
        self._named = EndpointRewriter(Keyring(self._keys, sse_endpoint.PURPOSE))
        self.members = Membership(config.replica, worker, self.tasks)
        if traces is None and config.traces:
            traces = open_traces(__version__, self.members.own)
        self._traces = traces
        self._peers = PeerClient(config, self.members, self._hops, self.metrics)
        self._witness = Witness(self.members, self._peers, self.lot, self.tasks)
        self._epoch = secrets.token_hex(8)
        self._client: Client
        self.routes: RouteTable
        self._door: PeerListener
        self._callers: Authenticator
        self._front: Listener
        self._listeners: list[Listener] = []
        self.listen = ""
        """The address that clients can reach; known after `start`."""
        self.admin = ""
        self.ready = False
        self.reload = Reload(
            read,
            config,
            self.change,
            self.tasks,
            lambda applied: self.metrics.config_reloaded(applied=applied),
            replica=self.members.own,
        )

    async def start(self) -> None:
        """Open the listeners; raises OSError when an address is taken."""
        config, tls = self.config, contexts(self.config)
        self._client = Client(config.limits, config.timeouts)
        scope = ProcessScope(
            sealer=self._sealer,
            metrics=self.metrics,
            tasks=self.tasks,
            owner=self.members.own,
            epoch=self._epoch,
            witness=self._witness,
        )
        self.routes = RouteTable(config, tls, self._client, scope, self.troubles)
        self._callers = Authenticator(config, self._client, self.tasks)
        succession = RetryRouting(self.members, self._peers, self._witness)
        wellknown = OAuthProxy(config, self._client_for)
        self.downstream = Downstream(
            config,
            self.routes,
            self.lot,
            self._callers,
            succession,
            Passthrough(config, wellknown.challenge, self._named, self.metrics, self._epoch),
            wellknown,
            self.metrics,
            self._traces,
        )
        await self._open_door()
        await self.members.begin()
        self.listen = await self._open(self.downstream.handle, self.config.listen, shared=True, tls=tls.listener)
        self._front = self._listeners[-1]
        mark = secrets.token_bytes(_SALT_BYTES) if self._worker is None else self._worker.mark
        admin = Admin(self.metrics, lambda: self.ready, lambda: take_snapshot(self._process(), mark), self._allowed)
        if self._worker is not None:
            self.admin = await self._open(admin.handle, self._worker.socket("admin"))
        elif self.config.admin is not None:
            self.admin = await self._open(admin.handle, self.config.admin)
        self.ready = True
        log.info(
            Event.SERVER_STARTED,
            version=__version__,
            listen=self.listen,
            admin=self.admin,
            replica=self.members.own,
            routes={route.path: route.upstream.name for route in self.config.routes},
            key_ids=self._keyring.key_ids,
            configuration=digest(self.config),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )
        _caution(config)
        self.reload.begin()

    def _client_for(self, path: str) -> Client | None:
        """The HTTP client of the route at a path; None if a reload removed the route."""
        live = self.routes.live.get(path)
        return live.upstream.client if live is not None else None

    def _allowed(self) -> frozenset[str] | None:
        """By which names browsers may ask for the status; None on a worker's socket, which no browser reaches."""
        return None if self._worker is not None else admin_names(self.config)

    def _process(self) -> Process:
        return Process(
            config=self.config,
            is_ready=self.ready,
            began=self.began,
            key_ids=self.key_ids,
            in_flight=self.downstream.in_flight,
            connections=self._front.connections,
            bugs=self.tasks.failures,
            rejected=self.reload.rejected,
            lot=self.lot,
            routes=self.routes,
            members=self.members,
            metrics=self.metrics,
            troubles=self.troubles,
        )

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the state keys, the sealing one first."""
        return self._keyring.key_ids

    async def _open_door(self) -> None:
        """Let the other replicas in."""
        door = self._door = PeerListener(
            self.config, self.members, self._hops, self.downstream.handle_hop, self._witness.tell, self.metrics
        )
        if self.config.replica.listen is not None:
            _ = await self._open(door.handle, self.config.replica.listen, shared=True)
        if self._worker is not None:
            _ = await self._open(door.handle_local, self._worker.socket("peer"))

    async def _open(
        self, handler: Handler, address: str, *, shared: bool = False, tls: ssl.SSLContext | None = None
    ) -> str:
        """Listen; `shared` for an address that all workers have."""
        reuse = shared and self._worker is not None
        listener = Listener(handler, address, self.config.limits, reuse_port=reuse, tls=tls)
        taken = await listener.start()
        self._listeners.append(listener)
        return taken

    def change(self, config: Config) -> None:
        """Serve by another configuration from now on; what runs or waits ends by the one that it began with.

        Raises ConfigError, with nothing changed, when a file cannot be used any more.
        """
        tls = contexts(config)
        self._callers.change(config)
        ring = self._ring(config)
        if ring != self._keys:
            # Replies that are on their way between replicas keep the rings they began with.
            self._keyring, self._hops.keyring = Keyring(ring, "state"), Keyring(ring, "peer")
            self._named.keyring = Keyring(ring, sse_endpoint.PURPOSE)
            self._keys = ring
        self._client.change(config.limits, config.timeouts)
        self.routes.change(config, tls)
        self.downstream.change(config)
        self._sealer.change(self._keyring, config.limits.state_bytes)
        self._survives = self._worker is not None or bool(config.state.keys)
        self.lot.hold = config.hold
        self.members.change(config.replica)
        self._peers.timeouts = config.timeouts
        self._door.config = config
        for listener in self._listeners:
            listener.change(config.limits)
        if tls.listener is not None or self._front.is_secure:
            self.tasks.spawn(self._front.secure(tls.listener), "change the certificate")
        self.metrics.set_held_limit(config.hold.max_calls)
        bodies.on = config.debug.bodies
        self.config = config
        _caution(config)

    def _ring(self, config: Config) -> tuple[bytes, ...]:
        """The state keys; last the one that seals where there are none, for it may have sealed what still waits."""
        keys = config.state.raw_keys()
        if not keys and not self._own_key:
            self._own_key = _ephemeral_key()
        return (*keys, *self._own_key)

    async def drain(self, *, delay_seconds: float) -> None:
        """Take no new calls, give those that run or wait until hold.drain_seconds, and let nobody hang after that."""
        hold, loop = self.config.hold, asyncio.get_running_loop()
        self.ready = False
        self.reload.closed = True
        log.info(
            Event.SERVER_DRAINING,
            held=len(self.lot),
            in_flight=self.downstream.in_flight,
            delay_seconds=delay_seconds,
            deadline_seconds=delay_seconds + hold.drain_seconds,
        )
        await asyncio.sleep(delay_seconds)  # load balancers notice; what they still send is served
        self.downstream.stop()
        for live in self.routes.live.values():
            live.upstream.end_streams()
        if not self.members.alone:
            for driver in self.downstream.running - self.downstream.relayed:
                driver.hand_over()
        deadline, rests = loop.time() + hold.drain_seconds, 0
        while rests < _RESTS and loop.time() < deadline:
            rests = 0 if self._is_busy() else rests + 1
            await asyncio.sleep(_POLL_SECONDS)
        self._part()

    def _is_busy(self) -> bool:
        """Whether a call is held, or a request has not been answered to its last byte."""
        writing = any(listener.is_writing for listener in self._listeners)
        return bool(len(self.lot) or self.downstream.busy or writing)

    def _part(self) -> None:
        """What still waits goes to another replica if one can go on with it; the rest ends with an error."""
        error = Stopping("The gateway shut down before the call ended; it was cancelled and may have had effects")
        left = self.downstream.running | self.downstream.relayed | set(self.lot)
        kept = [driver for driver in left if self._survives and driver.let_go()]
        for driver in left.difference(kept):
            driver.stop(error)
        if left:
            log.info(Event.SERVER_PARTED, let_go=len(kept), cancelled=len(left) - len(kept))

    async def close(self) -> None:
        """Close everything; replies that were just written still go out."""
        self.reload.closed = True
        for live in self.routes.live.values():
            await live.upstream.pool.close()
        await self.tasks.settle(self.config.timeouts.cancel_seconds)
        for listener in self._listeners:
            await listener.close()
        await self.routes.end_children()
        await self.tasks.close()
        await self._client.close()
        await self._peers.close()
        if self._traces is not None:
            # In a thread: whoever scrapes or probes meanwhile is not kept waiting by a collector that hangs.
            await asyncio.to_thread(self._traces.close, _FLUSH_SECONDS)
        log.info(Event.SERVER_STOPPED)


def _caution(config: Config) -> None:
    for sentence in cautions(config):
        log.warning(Event.CONFIG_CAUTION, note=sentence)


def _raise_open_files() -> None:
    """A held call takes two upstream connections: use as many files as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(config: Config, worker: Worker | None = None, read: Read | None = None) -> None:
    """Run until SIGTERM or SIGINT; a second signal ends at once. Raises OSError when an address is taken.

    `read` reads the configuration file again, for SIGHUP.
    """
    _raise_open_files()
    gateway = Gateway(config, worker, read)
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload.ask)
    await gateway.start()
    _calm_collector()
    first = await signals.get()
    # At a terminal there is no load balancer that would have to notice.
    delay = gateway.config.hold.drain_delay_seconds if first is signal.SIGTERM else 0
    drained = gateway.tasks.start(gateway.drain(delay_seconds=delay), "drain")
    hurried = loop.create_task(signals.get())
    _ = await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
    _ = hurried.cancel()
    await gateway.close()


def _calm_collector() -> None:
    """Ten thousand held calls are a million objects that a full collection would walk again and again.

    What start-up made lives for ever and is frozen. Opening 9,728 held calls cost 20 % less CPU with this.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _ephemeral_key() -> tuple[bytes, ...]:
    log.warning(
        Event.CONFIG_LOADED,
        note="state.keys is empty: states are sealed with a key of this process alone and end with it; "
        "run `mrtr-gateway keygen` and set state.keys",
    )
    return (secrets.token_bytes(_EPHEMERAL_KEY_BYTES),)

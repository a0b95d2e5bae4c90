"""Drains a process: calls in flight get `hold.drain_seconds`, the rest is handed over.

Other replicas begin the new calls that it receives; without other replicas it refuses them. The listener of the
clients closes as soon as no call is held here or runs here, and at the latest at the deadline, so that a balancer
sends the next connection elsewhere; without other replicas, it closes at the end. Requests on open connections are
still served.
"""

import asyncio
from typing import Final

from gateway import world
from gateway.protocol.errors import Stopping
from gateway.server.process import Gateway
from gateway.telemetry import Event, get_logger

log = get_logger()

_POLL_SECONDS: Final = 0.05
_IDLE_POLLS: Final = 2
"""A drain is over after so many polls in a row that find nothing left to do; see `Listener.is_writing`."""
_LAST_SECONDS: Final = 1.0
"""At the end: how long the last replies may take, such as those that other replicas end by the deadline."""
AFTER_SECONDS: Final = 5.0
"""For the work of a process after its drain, besides timeouts.cancel_seconds."""


async def drain(gateway: Gateway, *, delay_seconds: float) -> None:
    """Take no new calls, and return when every call has ended or was handed over."""
    gateway.reload.close()  # so no reload changes the keys from now on
    draining, clients, alone = gateway.draining, gateway.client_listener, gateway.members.alone
    seconds, loop = gateway.config.hold.drain_seconds, asyncio.get_running_loop()
    log.info(
        Event.SERVER_DRAINING,
        held=len(gateway.lot),
        in_flight=gateway.downstream.in_flight,
        delay_seconds=delay_seconds,
        deadline_seconds=delay_seconds + seconds,
    )
    after = gateway.config.timeouts.cancel_seconds + AFTER_SECONDS
    draining.announce(world.monotonic() + delay_seconds + seconds + after)
    clients.send_away()
    await asyncio.sleep(delay_seconds)  # load balancers notice meanwhile; what they still send is served
    deadline = loop.time() + seconds
    legs, sessions = gateway.downstream.legs, gateway.sessions
    draining.begin(None if alone else world.monotonic() + seconds)
    for live in gateway.routes.live.values():
        live.upstream.end_streams()
    if not alone:
        for driver in legs.running:
            # It would also end the legs of clients that are connected to other replicas, and can stay there.
            if driver not in legs.relayed:
                driver.hand_over()
        # While calls of this replica are held or run; what it passes on to other replicas does not count.
        while loop.time() < deadline and (len(gateway.lot) or legs.running or legs.relayed or sessions.open_requests):
            await asyncio.sleep(_POLL_SECONDS)
        # A balancer sends a refused connection to another replica, and no request is lost with it.
        await clients.stop_accepting()
    await _until_idle(gateway, deadline)
    _end_remaining(gateway)
    # The requests of those who have just connected are still refused: who is cut off cannot tell whether they ran.
    await clients.stop_accepting()
    await _until_idle(gateway, loop.time() + _LAST_SECONDS)
    if not draining.is_resumable:
        gateway.lot.cold.give_up_all()


async def _until_idle(gateway: Gateway, deadline: float) -> None:
    """Wait until no call is held, and every reply is completely written."""
    loop, idle_polls = asyncio.get_running_loop(), 0
    while loop.time() < deadline:
        # Another process goes on with a task or a cold call without any state of this one, if it has the keys.
        is_needed = not gateway.draining.is_resumable and (gateway.task_table.working or len(gateway.lot.cold))
        writing = any(listener.is_writing for listener in gateway.listeners)
        is_busy = is_needed or len(gateway.lot) or gateway.downstream.busy or writing
        idle_polls = 0 if is_busy else idle_polls + 1
        if idle_polls >= _IDLE_POLLS:
            return
        await asyncio.sleep(_POLL_SECONDS)


def _end_remaining(gateway: Gateway) -> None:
    """Leave each call to another replica if that can continue it; end the others with an error."""
    error = Stopping("The gateway shut down before the call ended; it was cancelled and may have had effects")
    legs = gateway.downstream.legs
    left = [*dict.fromkeys((*legs.running, *legs.relayed, *gateway.lot))]
    # The lot also has finished calls, whose results are kept for a repeated retry.
    unfinished = [driver for driver in left if not driver.is_finished]
    cut = len(gateway.routes.process.passing) + gateway.sessions.open_requests
    gateway.sessions.end_all(error)
    kept = {driver for driver in left if gateway.draining.is_resumable and driver.let_go()}
    for driver in left:
        if driver not in kept:
            driver.stop(error)
    if (stateless := gateway.downstream.legacy.stateless) is not None:
        stateless.end_all(error)
    let_go = [driver.id for driver in unfinished if driver in kept]
    gateway.draining.part(let_go)
    if unfinished or cut:
        cancelled = len(unfinished) - len(let_go)
        say = log.warning if cancelled or cut else log.info
        say(Event.SERVER_PARTED, let_go=len(let_go), cancelled=cancelled, cut=cut)

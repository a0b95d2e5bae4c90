"""Runs `mrtr-gateway wrap`: one process without a port, which a host starts instead of its server."""

import asyncio
import signal
from typing import Final

from gateway.config import Config
from gateway.config.programs import not_here
from gateway.server.process import Gateway
from gateway.server.serve import give_memory_back, on_signal
from gateway.stdio_front.front import StdioFront
from gateway.stdio_front.host import Host, take_standard_streams
from gateway.telemetry import Event, get_logger

log = get_logger()

_LAST_WORDS_SECONDS: Final = 1.0
"""How long the host may take to read what is left."""


async def wrap(config: Config) -> bool:
    """Serve the host until it closes stdin or stdout, the server ends, or a signal comes.

    Returns False if the host asked for the server and never got it, or could not have got it if it had asked.
    """
    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop() -> None:
        if not stopped.done():
            stopped.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        on_signal(number, stop)
    gateway = Gateway(config, serves_host=True)
    (live,) = gateway.routes.live.values()
    host = Host(live.config.limits.body_bytes, live.process.traffic.sending)
    await host.open(*take_standard_streams())
    gateway.routes.begin_children()
    front = StdioFront(host, gateway.downstream, live)
    give_memory_back(gateway)
    upstream = live.route.upstream
    missing = None if upstream.command is None else not_here(upstream)
    log.info(Event.HOST_JOINED, upstream=upstream.name)
    about = {"route": live.route.path, "upstream": upstream.name}
    if missing is not None:  # before the host asks, which it may never do
        fix = "correct the command, or install the program"
        log.warning(Event.UPSTREAM_FAILED, **about, cause=f"it cannot be started: {missing.in_full}", fix=fix)
    serving = gateway.tasks.start(front.run(), "host")
    _ = await asyncio.wait((serving, host.gone, front.ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    if serving.done() and not stopped.done():
        finishing = gateway.tasks.start(front.finish(config.hold.drain_seconds), "drain")
        _ = await asyncio.wait((finishing, host.gone, stopped), return_when=asyncio.FIRST_COMPLETED)
        _ = finishing.cancel()
    _ = serving.cancel()
    has_served = live.upstream.has_served
    if front.was_asked and not has_served and missing is None:
        failure = live.upstream.health.failure
        cause = "no session with it was opened" + (f": {failure.cause}" if failure else "")
        log.warning(Event.UPSTREAM_FAILED, **about, cause=cause, fix=failure.fix if failure else None)
    await front.close()
    await host.close(_LAST_WORDS_SECONDS)
    await gateway.close()
    return has_served or (missing is None and not front.was_asked)

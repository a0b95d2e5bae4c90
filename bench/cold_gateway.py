"""A gateway process with many cold calls from the start, so that a benchmark need not open a million of them.

Each record is made by the gateway's own code, as that of a call which went cold: with an exchange, a session, a call,
a cursor and a question of its own, of the lengths that the calls of `bench/upstream.py` have. Their states do not
exist, so they are never answered: the calls that the benchmark opens over HTTP are, among them.
"""

import asyncio
import os
import secrets
import sys
import time
from pathlib import Path

import uvloop

from gateway.config import load
from gateway.parking.cold_calls import ColdCall, packed
from gateway.parking.orphans import Remains
from gateway.routes.live_route import LiveRoute
from gateway.seal.request_state import Whereabouts
from gateway.server.process import Gateway
from gateway.server.serve import _raise_open_files, _tune_garbage_collection
from gateway.telemetry import configure_logging


def record(live: LiveRoute, number: int, principal: bytes) -> ColdCall:
    session, call = secrets.token_hex(16), b'"gw-%b-%x"' % (secrets.token_hex(6).encode(), number)
    upstream = Whereabouts(session, "2025-11-25", call, b"", f"0~{call.decode()}~m{number}")
    remains, headers = packed(Remains(upstream, ((b"0", "elicitation/create"),)), {})
    due = int(time.monotonic()) + 86_400 + number % 600
    return ColdCall(
        secrets.token_urlsafe(16),
        round=1,
        due=due,
        live=live,
        principal=principal,
        is_taken_over=False,
        is_apart=False,
        packed=remains,
        headers=headers,
    )


async def serve(config: Path, records: int) -> None:
    _raise_open_files()
    gateway = Gateway(load(config, os.environ))
    configure_logging("warning", "json")
    await gateway.start()
    (live,) = gateway.routes.live.values()
    for number in range(records):
        # A thousand calls of each caller; the texts of a caller are one object, as in the gateway.
        if number % 1000 == 0:
            principal = secrets.token_bytes(32)
        gateway.lot.cold.add(record(live, number, principal))
        if number % 1000 == 0:
            await asyncio.sleep(0)
    _tune_garbage_collection()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))

"""An update of all replicas under load: no new call is refused, and no call that a person answers in time is lost.

Stop-first ends a replica and then starts it again. Start-first starts another one before: here that is a further
place of the balancer, which is empty at first. nginx looks at no health check, so a draining replica gets new calls
until it closes its listener; HAProxy notices /readyz before that.
"""

import asyncio
from typing import Final, Literal

import pytest

from tests.chaos.stage import Call, accept
from tests.e2e.wire import wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import BalancerName, Cluster, cluster, needs
from tests.support.gateway_process import Gateway
from tests.support.steady_load import Load, followed
from tests.support.workbench import Client

ANSWERED_AFTER: Final = 1.0
"""How far into the drain people answer, in seconds: new calls reach a draining replica all that time."""
HOLD: Final = {"drain_delay_seconds": 2, "drain_seconds": 10}
SENT_ON: Final = "mcp_gateway_calls_sent_on_total"

pytestmark = pytest.mark.real


async def drained(c: Cluster, replica: Gateway, server: OldServer, client: Client, name: str) -> float:
    """End one replica with a call that waits for its person; return the new calls that it sent on."""
    parked = Call(server, "ask_slow", name)
    state = await parked.begin(client.on(replica.url))
    await replica.drain()
    await asyncio.sleep(HOLD["drain_delay_seconds"] + ANSWERED_AFTER)
    sent_on = await replica.metric(SENT_ON)
    answers = accept(parked.name)
    answer = await followed(client.on(c.url), parked.tool, parked.arguments, state=state, answers=answers)
    assert parked.outcome(answer) == "result"
    assert (parked.runs, parked.answers) == (1, 1)
    assert await replica.exited() == 0
    return sent_on


# Each balancer with each order and each number, and each order with each number.
@pytest.mark.parametrize(
    ("balancer", "order", "replicas"),
    [
        ("nginx", "stop-first", 2),
        ("nginx", "start-first", 3),
        ("haproxy", "stop-first", 3),
        ("haproxy", "start-first", 2),
    ],
)
@needs("nginx", "haproxy")
async def test_an_update_refuses_no_new_call_and_loses_none(
    balancer: BalancerName, order: Literal["stop-first", "start-first"], replicas: int
) -> None:
    places = replicas + (order == "start-first")
    async with (
        old_server("py130") as server,
        cluster(server.url, replicas=places, balancer=balancer, hold=HOLD) as c,
        wire(c.url) as client,
    ):
        empty = c.replicas[-1] if order == "start-first" else None
        if empty is not None:
            empty.terminate()
            assert await empty.exited() == 0
        load, sent_on = Load(server, client), 0.0
        async with load.running():
            for replica in c.replicas[:replicas]:
                if empty is not None:
                    await empty.start()
                sent_on += await drained(c, replica, server, client, f"parked at {replica.config['replica']['id']}")
                if empty is None:
                    await replica.start()
                empty = replica if order == "start-first" else None
        load.assert_nothing_was_refused_or_lost()
        assert sent_on > 0 or balancer == "haproxy", "nginx sends new calls to a replica that drains"
        await c.settled()

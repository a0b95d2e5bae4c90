"""The owner of a call is killed, its client comes back without answers, and the replica that asked again ends too."""

import pytest

from tests.chaos.stage import Call, built, others
from tests.e2e.wire import wire
from tests.parts.launch import old_server
from tests.support.cluster import cluster, installed
from tests.support.gateway_process import HELD

SERVERS = ("py130-store", "ts132-store")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not all(map(built, SERVERS)), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
]


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("end", ["killed", "drained"])
async def test_a_call_keeps_its_way_upstream_when_it_is_only_asked_again(name: str, end: str) -> None:
    hold = {"drain_delay_seconds": 0, "drain_seconds": 0.5}
    async with old_server(name) as server, cluster(server.url, hold=hold) as c, wire(c.url) as client:
        owner = c.replicas[0]
        call = Call(server, "ask_slow", "asked again")
        state = await call.begin(client.on(owner.url))
        await owner.kill()
        living = others(c, owner)
        again = await client.on(living[0].url).call(call.tool, call.arguments, state=state, answers={})
        assert again.asks
        (holder,) = [replica for replica in living if await replica.metric(HELD)]
        if end == "killed":
            await holder.kill()
        else:
            holder.terminate()
            assert await holder.exited(10) == 0
        (last,) = [replica for replica in living if replica is not holder]
        assert call.outcome(await call.retry(client.on(last.url), again.state)) == "result"
        assert (call.runs, call.answers, call.ends) == (1, 1, ["finished"])
        assert not server.ledger("cancelled")

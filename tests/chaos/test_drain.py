"""SIGTERM to a replica that holds calls: which clients are served until when."""

import pytest

from tests.chaos.stage import Call
from tests.e2e.wire import wire
from tests.parts.launch import old_server
from tests.support.cluster import cluster, needs
from tests.support.gateway_process import Gateway
from tests.support.workbench import Client

pytestmark = [
    pytest.mark.real,
    needs("nginx"),
]


async def stopping(replica: Gateway, client: Client) -> None:
    """Wait until the replica begins no new calls itself."""

    async def sends_on() -> bool:
        answer = await client.on(replica.url).call("echo", {"text": "new"})
        if answer.result["resultType"] == "input_required":  # in flight at that moment
            answer = await client.on(replica.url).call("echo", {"text": "new"}, state=answer.state)
        assert answer.text == "new"
        return await replica.metric("mcp_gateway_calls_sent_on_total") > 0

    await replica.until(sends_on, "sends new calls on")


async def test_a_drain_accepts_new_calls_for_a_while_and_keeps_held_ones_longer() -> None:
    hold = {"drain_delay_seconds": 1.5, "drain_seconds": 20}
    async with old_server("py130") as server, cluster(server.url, hold=hold) as c, wire(c.url) as client:
        owner, other, _ = c.replicas
        direct = client.on(owner.url)
        calls = [Call(server, "ask_slow", name) for name in ("directly", "through a peer", "late, through a peer")]
        states = [await call.begin(direct) for call in calls]
        await owner.drain()
        assert (await direct.call("echo", {"text": "new"})).text == "new"
        asked_late = Call(server, "ask_slow", "asked while it drains")
        calls.append(asked_late)
        states.append(await asked_late.begin(direct))
        assert calls[1].outcome(await calls[1].retry(client.on(other.url), states[1])) == "result"
        await stopping(owner, client)
        assert calls[0].outcome(await calls[0].retry(direct, states[0])) == "result"
        for late in (2, 3):
            assert calls[late].outcome(await calls[late].retry(client.on(other.url), states[late])) == "result"
        # No call waits any more, so the replica does not wait either.
        assert await owner.exited(10) == 0
        assert [(call.runs, call.answers) for call in calls] == [(1, 1)] * 4
        assert not server.ledger("cancelled")

"""State keys are rotated while calls wait: three phases reject no state, fewer do."""

from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.stage import Call, built
from tests.e2e.wire import Wire, wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, installed
from tests.support.gateway_process import STATE_KEY, Gateway

NEXT_KEY = "1e" * 32
PHASES = [[STATE_KEY, NEXT_KEY], [NEXT_KEY, STATE_KEY], [NEXT_KEY]]
"""Add the new key, seal with it, and remove the old one when no state of it is left."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not built("py130-store"), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
]


async def restart(replica: Gateway, keys: list[str]) -> None:
    replica.config["state"] = {**replica.config["state"], "keys": keys}
    replica.terminate()
    assert await replica.exited() == 0
    await replica.start()


class Waiting:
    """One call of each replica, parked again and again."""

    def __init__(self, server: OldServer, c: Cluster, client: Wire) -> None:
        self.server = server
        self.c = c
        self.client = client
        self.calls: list[Call] = []
        self.open: list[tuple[Call, str]] = []

    async def park(self) -> None:
        for replica in self.c.replicas:
            call = Call(self.server, "ask_slow", f"call {len(self.calls)}")
            self.calls.append(call)
            self.open.append((call, await call.begin(self.client.on(replica.url))))

    async def answer(self) -> None:
        """Answer each at a replica that did not ask."""
        for number, (call, state) in enumerate(self.open, 1):
            replica = self.c.replicas[number % len(self.c.replicas)]
            assert call.outcome(await call.retry(self.client.on(replica.url), state)) == "result"
        self.open.clear()

    def rejected(self) -> list[dict[str, object]]:
        return self.c.log("state.rejected") + self.c.log("peer.rejected")


async def reload(replica: Gateway, keys: list[str]) -> None:
    said = await replica.reload({**replica.config, "state": {**replica.config["state"], "keys": keys}})
    assert [line["event"] for line in said] == ["config.loaded"]


@pytest.mark.parametrize(("name", "change"), [("py130-store", restart), ("py130", reload)])
async def test_a_rotation_in_three_phases_rejects_no_state(
    name: str, change: Callable[[Gateway, list[str]], Awaitable[None]]
) -> None:
    """With restarts, other replicas resume the calls; with SIGHUP, the calls stay."""
    async with old_server(name) as server, cluster(server.url, replicas=2) as c, wire(c.url) as client:
        waiting = Waiting(server, c, client)
        await waiting.park()
        for keys in PHASES:
            if len(keys) == 1:
                await waiting.answer()  # as state.ttl_seconds would have it
                await waiting.park()
            for replica in c.replicas:
                await change(replica, keys)
                await waiting.answer()
                await waiting.park()
        await waiting.answer()
        assert waiting.rejected() == []
        assert [(call.runs, call.answers) for call in waiting.calls] == [(1, 1)] * len(waiting.calls)
        assert not server.ledger("cancelled")


async def test_a_rotation_without_one_phase_rejects_states() -> None:
    async with old_server("py130-store") as server, cluster(server.url) as c, wire(c.url) as client:
        call = Call(server, "ask_slow", "of the old key")
        owner, hasty, other = c.replicas
        state = await call.begin(client.on(owner.url))
        await restart(hasty, [NEXT_KEY])
        refused = await call.retry(client.on(hasty.url), state)
        assert refused.refusal == (400, -32602)
        assert call.outcome(refused) == "invalid_request_state"
        assert await hasty.metric("mcp_gateway_state_rejected_total", reason="unknown_key") == 1
        # Its own states open nowhere else, and it cannot speak to its peers.
        mine = Call(server, "ask_slow", "of the new key")
        ahead = await mine.begin(client.on(hasty.url))
        assert (await mine.retry(client.on(owner.url), ahead)).refusal == (400, -32602)
        assert await owner.metric("mcp_gateway_state_rejected_total", reason="unknown_key") == 1
        assert mine.outcome(await mine.retry(client.on(hasty.url), ahead)) == "result"
        assert call.outcome(await call.retry(client.on(other.url), state)) == "result"
        assert [(each.runs, each.answers) for each in (call, mine)] == [(1, 1)] * 2

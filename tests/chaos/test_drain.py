"""SIGTERM to a replica that holds calls: which clients are served until when, and what is left at the deadline."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.stage import Call, Gate, steps
from tests.e2e.wire import wire
from tests.parts.launch import old_server
from tests.support.cluster import cluster, installed
from tests.support.gateway_process import Gateway
from tests.support.workbench import Client

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not installed("nginx"), reason="apt install nginx-light"),
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


async def test_connected_clients_are_sent_to_another_replica(tmp_path: Path) -> None:
    """One call is in its first round; the tool of the other still works after the answer."""
    hold = {"drain_delay_seconds": 0, "drain_seconds": 20}
    async with old_server("py130") as server, cluster(server.url, hold=hold) as c, wire(c.url) as client:
        owner, other, third = c.replicas
        direct, loop = client.on(owner.url), asyncio.get_running_loop()
        before, after = Gate(tmp_path / "before"), Gate(tmp_path / "after")
        first = Call(server, "ask_slow", "first round", before=before)
        second = Call(server, "ask_slow", "second round", after=after)
        state = await second.begin(direct)
        legs = [
            loop.create_task(direct.call(first.tool, first.arguments)),
            loop.create_task(second.retry(direct, state)),
        ]
        await first.began()
        await second.answered()
        await owner.drain()
        sent_away = await asyncio.gather(*legs)
        assert [answer.asks for answer in sent_away] == [[], []]
        waiting = [
            loop.create_task(client.on(other.url).call(call.tool, call.arguments, state=answer.state))
            for call, answer in zip((first, second), sent_away, strict=True)
        ]
        before.open()
        after.open()
        asked, done = await asyncio.gather(*waiting)
        assert second.outcome(done) == "result"
        assert first.outcome(await first.retry(client.on(third.url), asked.state)) == "result"
        assert await owner.exited(10) == 0
        assert [(call.runs, call.answers, call.ends) for call in (first, second)] == [(1, 1, ["finished"])] * 2
        taken = await steps(c.living)
        assert taken["forwarded"] == 3
        assert not taken["resumed"] + taken["replayed"] + taken["lost"]


@pytest.mark.parametrize(
    ("name", "tool", "step"),
    [("py130-store", "ask_slow", "resumed"), ("py130", "ask_read", "replayed"), ("py130", "ask_slow", "lost")],
)
async def test_calls_left_at_the_deadline_continue_elsewhere_or_are_lost(
    name: str, tool: str, step: str, tmp_path: Path
) -> None:
    """One call is parked; the client of the other waits through another replica."""
    hold: dict[str, Any] = {"drain_delay_seconds": 0, "drain_seconds": 1}
    async with old_server(name) as server, cluster(server.url, hold=hold) as c, wire(c.url) as client:
        owner, other, third = c.replicas
        after = Gate(tmp_path / "after")
        parked, waited = Call(server, tool, "parked"), Call(server, tool, "waited for", after=after)
        states = [await call.begin(client.on(owner.url)) for call in (parked, waited)]
        waiting = asyncio.get_running_loop().create_task(waited.retry(client.on(other.url), states[1]))
        await waited.answered()
        await owner.drain()
        told = await waiting
        assert await owner.exited() == 0
        assert owner.log("server.parted")[-1]["let_go"] == (0 if step == "lost" else 2)
        if step == "lost":
            assert (told.status, waited.outcome(told)) == (503, "stopping")
            await waited.ended("cancelled")
            # An open question is answered with `cancel` first, which may end the tool.
            await parked.wait(lambda call: bool(call.ends), "ended")
            assert parked.outcome(await parked.retry(client.on(third.url), states[0])) == "owner_lost"
            assert [(call.runs, call.answers) for call in (parked, waited)] == [(1, 0), (1, 1)]
            return
        if step == "resumed":
            assert not server.ledger("cancelled")
        assert told.asks == []
        final = asyncio.get_running_loop().create_task(
            client.on(third.url).call(waited.tool, waited.arguments, state=told.state)
        )
        after.open()
        assert waited.outcome(await final) == "result"
        assert parked.outcome(await parked.retry(client.on(third.url), states[0])) == "result"
        runs = 1 if step == "resumed" else 2
        assert (parked.runs, parked.answers) == (runs, 1)
        assert (waited.runs, waited.answers) == (runs, runs)
        assert (await steps(c.living))[step] == 2
        await c.settled()

"""A rolling restart of all replicas while eighty users think: SIGTERM, exit 0, start again, and the next one.

Behind HAProxy, which looks whether a replica is back. nginx leaves one out for 1 s that it could not reach, and knows
none that lives when three are restarted faster than that.
"""

import asyncio

import pytest

from tests.chaos.stage import Call, built
from tests.e2e.wire import Answer, Wire, wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, installed
from tests.support.gateway_process import Gateway

ONCE, TWICE = "ask_slow", "ask_read"
PATHS = {"py130": "/mcp", "py130-store": "/store"}
PHASES = [(what, number) for number in range(3) for what in ("drains", "is gone", "is back")]
"""When users answer."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not all(map(built, ("py130", "py130-store"))), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not installed("haproxy"), reason="apt install haproxy"),
]


class Person:
    """A user whom one replica asks, and who answers in one phase, at any replica."""

    def __init__(self, server: OldServer, tool: str, owner: int, phase: int) -> None:
        self.call = Call(server, tool, f"{tool}, asked by {owner}, answers in {phase}")
        self.owner = owner
        self.phase = phase
        self.state = ""

    @property
    def in_time(self) -> bool:
        """Whether the owner still waits then."""
        return self.phase < PHASES.index(("is gone", self.owner))

    @property
    def path(self) -> str:
        return PATHS[self.call.server.name]

    async def ask(self, c: Cluster, client: Wire) -> None:
        self.state = await self.call.begin(client.on(c.replicas[self.owner].base + self.path))

    async def answer(self, c: Cluster, client: Wire) -> Answer:
        return await self.call.retry(client.on(c.base + self.path), self.state)

    def judge(self, answer: Answer) -> None:
        stored = self.call.server.name == "py130-store"
        saved = self.in_time or stored or self.call.tool == TWICE
        assert self.call.outcome(answer) == ("result" if saved else "owner_lost")
        assert self.call.runs == (1 if self.in_time or stored or self.call.tool == ONCE else 2)
        assert self.call.answers == saved


async def draining(replica: Gateway) -> None:
    async def says_so() -> bool:
        return await replica.ready() == 503

    await replica.until(says_so, "drains")


async def test_users_answer_during_a_rolling_restart() -> None:
    hold = {"drain_delay_seconds": 0, "drain_seconds": 1.5}
    async with old_server("py130") as plain, old_server("py130-store") as stored:
        routes = [{"path": PATHS[server.name], "upstream": {"url": server.url}} for server in (plain, stored)]
        async with (
            cluster(plain.url, balancer="haproxy", hold=hold, routes=routes) as c,
            wire(c.url) as client,
        ):
            people = [
                Person(server, tool, owner, phase)
                for server, tool in ((plain, ONCE), (plain, TWICE), (stored, ONCE))
                for owner in range(3)
                for phase in range(len(PHASES))
            ]
            await asyncio.gather(*(person.ask(c, client) for person in people))
            await restart_all(c, client, people)
        late = [person for person in people if not person.in_time and person.call.server is plain]
        # Questions of lost calls get `cancel`; a resumed call was never cancelled.
        told = [entry["result"]["action"] for entry in plain.ledger("answered", ONCE)]
        assert told.count("cancel") == len([person for person in late if person.call.tool == ONCE])
        assert not stored.ledger("cancelled")


async def restart_all(c: Cluster, client: Wire, people: list[Person]) -> None:
    async def answers(phase: tuple[str, int]) -> None:
        who = [person for person in people if PHASES[person.phase] == phase]
        replies = await asyncio.gather(*(person.answer(c, client) for person in who))
        for person, reply in zip(who, replies, strict=True):
            person.judge(reply)

    for number, replica in enumerate(c.replicas):
        replica.terminate()
        await draining(replica)
        await answers(("drains", number))
        assert await replica.exited() == 0
        await answers(("is gone", number))
        await replica.start()
        await answers(("is back", number))
    await c.settled()

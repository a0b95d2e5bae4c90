"""Hostile clients of the soak, which send what no client should."""

import asyncio
import time
from contextlib import suppress
from random import Random
from typing import Final

from tests.chaos.soak import BROKEN, World
from tests.fuzz.black_box import framed, modern
from tests.fuzz.mutator import Mutator
from tests.support.workbench import Client

PATIENCE_SECONDS: Final = 8.0
BIG: Final = {"name": "big", "arguments": {"bytes": 2_000_000}}
SECRET: Final = "s3cret-of-a-stranger"
"""In every request that no log may quote."""
REQUEST: Final = framed("POST /mcp HTTP/1.1", *modern("tools/call", BIG, "big", SECRET))


class Stranger:
    """Does one hostile thing after the other."""

    def __init__(self, world: World, dice: Random) -> None:
        self.world = world
        self.dice = dice
        self.mutator = Mutator(dice.getrandbits(32))

    async def live(self, until: float) -> None:
        habits = (self.send_mutant, self.send_part, self.read_slowly, self.invent_token, self.invent_state)
        while time.monotonic() < until:
            habit = self.dice.choice(habits)
            with suppress(*BROKEN, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await habit()
            self.world.outcomes[f"stranger: {habit.__name__}"] += 1
            await asyncio.sleep(self.dice.uniform(0, 0.5))

    def somewhere(self) -> str:
        """The host and port of the balancer, or of a replica."""
        c = self.world.c
        return self.dice.choice([c.balancer.address, *(str(replica.config["listen"]) for replica in c.replicas)])

    def client(self, **headers: str) -> Client:
        path = self.dice.choice(list(self.world.servers))
        return self.world.client.on(f"http://{self.somewhere()}{path}", **headers)

    async def send(self, data: bytes) -> None:
        """Send bytes over a new connection, and wait for a reply for a while."""
        host, _, port = self.somewhere().rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        try:
            writer.write(data)
            async with asyncio.timeout(self.dice.uniform(0, 4)):
                await reader.read(4096)
        finally:
            writer.transport.abort()

    async def send_mutant(self) -> None:
        await self.send(self.mutator.mutate(REQUEST))

    async def send_part(self) -> None:
        """Send a part of a head or of a body, and nothing after it."""
        await self.send(REQUEST[: self.dice.randrange(len(REQUEST))])

    async def read_slowly(self) -> None:
        """Ask for megabytes, read some bytes of them now and then, and leave."""
        async with self.client().open("tools/call", BIG) as response:
            for _ in range(self.dice.randrange(5)):
                await response.content.read(100)
                await asyncio.sleep(self.dice.uniform(0, 1))
            response.close()

    async def invent_token(self) -> None:
        token = f"{SECRET}-{self.dice.randbytes(8).hex()}"
        answer = await self.client(Authorization=f"Bearer {token}").call("echo", {"text": "x"})
        self.world.outcomes[f"invented token: {answer.status}"] += 1

    async def invent_state(self) -> None:
        state = self.dice.randbytes(self.dice.choice((1, 60, 5000))).hex()
        answer = await self.client().call("ask_slow", {"question": "x"}, state=state, answers={})
        self.world.outcomes[f"invented state: {answer.status}"] += 1

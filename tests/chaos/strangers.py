"""Hostile clients of the soak, which send what no client should."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Final

from tests.chaos.soak import BROKEN, World
from tests.support.workbench import Client

PATIENCE_SECONDS: Final = 8.0
BIG: Final = {"name": "big", "arguments": {"bytes": 2_000_000}}
SECRET: Final = "s3cret-of-a-stranger"
"""In every request that no log may quote."""
MALFORMED: Final = (
    b"GARBAGE " + SECRET.encode() + b"\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + SECRET.encode() + b"\x01\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: " + SECRET.encode() + b"\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET.encode() + b"\r\n",
    b"POST  /mcp  HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /mcp HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
)
BODIES: Final = (
    b"{",
    b"null",
    b"[" * 50_000,
    b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
    b'{"jsonrpc":"2.0","id":"\\ud800","method":"tools/call","params":{}}',
)


class Stranger:
    """Does one hostile thing after the other."""

    def __init__(self, world: World, dice: Random) -> None:
        self.world = world
        self.dice = dice

    async def live(self, until: float) -> None:
        habits = (
            *(self.send_garbage, self.send_odd_body, self.send_half_body, self.read_slowly),
            *(self.invent_token, self.invent_state, self.hold_a_connection),
        )
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

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, _, port = self.somewhere().rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, length: int) -> bytes:
        headers, _ = self.world.client.build("tools/call", BIG)
        lines = [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Host: x", f"Content-Length: {length}", "", ""]
        return "\r\n".join(["POST /mcp HTTP/1.1", *lines]).encode()

    async def send_garbage(self) -> None:
        async with self.connected() as (reader, writer):
            writer.write(self.dice.choice((*MALFORMED, self.dice.randbytes(200))))
            await reader.read(4096)

    async def send_odd_body(self) -> None:
        client = self.client()
        answer = await client.raw(client.build("tools/call", {"name": "echo"})[0], self.dice.choice(BODIES))
        self.world.outcomes[f"odd body: {answer.status}"] += 1

    async def send_half_body(self) -> None:
        half = b'{"jsonrpc":'
        async with self.connected() as (reader, writer):
            writer.write(self.head(len(half) + 1000) + half)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.dice.uniform(0, 4)):
                    await reader.read(4096)

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

    async def hold_a_connection(self) -> None:
        """Send a part of a head, and nothing after it."""
        async with self.connected() as (reader, writer):
            writer.write(b"POST /mcp HTTP/1.1\r\nHost:")
            with suppress(TimeoutError):
                async with asyncio.timeout(self.dice.uniform(0, 4)):
                    await reader.read(1)

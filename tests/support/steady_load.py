"""New calls through a balancer at a steady rate; two of five ask a question, which a person answers.

Five calls are seven requests, which no number of replicas divides. Where three requests took turns with three
replicas, one of them got nothing but answers.

Like every SDK, the client goes on by itself after a round without questions: a draining replica ends requests so.

load = Load(server, client, think=lambda number: number % 5)
async with load.running():
    ...  # whatever must not lose a call
load.assert_nothing_was_refused_or_lost()
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from tests.chaos.stage import KEY, Call, accept
from tests.parts.launch import OldServer
from tests.support.workbench import Client, Json, Reply

CALLS_PER_SECOND: Final = 20


async def followed(client: Client, tool: str, arguments: Json, **retry: Any) -> Reply:
    """Call a tool, and go on until there is a question or an end."""
    while True:
        answer = await client.call(tool, arguments, **retry)
        if "error" in answer.final or answer.result["resultType"] == "complete" or answer.asks:
            return answer
        retry = {"state": answer.state}


async def serves(client: Client) -> bool:
    """Whether one request after another gets through."""
    try:
        return all([(await client.call("echo", {"text": "x"})).text == "x" for _ in range(6)])
    except (aiohttp.ClientError, AssertionError, ValueError, KeyError):
        return False


class Load:
    """The calls of one test, with what went wrong."""

    def __init__(
        self, server: OldServer, client: Client, think: Callable[[int], float] = lambda _: 0, name: str = "call"
    ) -> None:
        """`think` returns for how many seconds the person of a call thinks, by its number; `name` names the calls."""
        self._name = name
        self.calls: list[Call] = []
        self.problems: list[str] = []
        self.count = 0
        self._server = server
        self._client = client
        self._think = think

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Begin calls in here; afterwards all have ended."""
        async with asyncio.TaskGroup() as group:
            driver = group.create_task(self._drive(group))
            try:
                yield
            finally:
                driver.cancel()

    async def _drive(self, group: asyncio.TaskGroup) -> None:
        while True:
            self.count += 1
            group.create_task(self._one(self.count))
            await asyncio.sleep(1 / CALLS_PER_SECOND)

    async def _one(self, number: int) -> None:
        try:
            if number % 5 not in (1, 3):
                await self._echo(str(number))
            else:
                await self._ask(number)
        except Exception as exc:  # noqa: BLE001 - every way to fail counts
            self.problems.append(f"{number}: {exc!r}"[:600])

    async def _echo(self, text: str) -> None:
        answer = await followed(self._client, "echo", {"text": text})
        assert answer.text == text

    async def _ask(self, number: int) -> None:
        call = Call(self._server, "ask_slow", f"{self._name} {number}")
        self.calls.append(call)
        question = await followed(self._client, call.tool, call.arguments)
        assert question.asks == [KEY], question
        await asyncio.sleep(self._think(number))
        retry = {"state": question.state, "answers": accept(call.name)}
        answer = await followed(self._client, call.tool, call.arguments, **retry)
        assert call.outcome(answer) == "result"

    def assert_nothing_was_refused_or_lost(self, least: int = 100) -> None:
        """Each call began once, got its answer once, and gave its result."""
        assert not self.problems, f"{len(self.problems)} of {self.count} calls: {self.problems[:5]}"
        assert self.count > least
        ran = {entry["arguments"]["question"]: 0 for entry in self._server.ledger("run", "ask_slow")}
        for entry in self._server.ledger("run", "ask_slow"):
            ran[entry["arguments"]["question"]] += 1
        assert {ran[call.name] for call in self.calls} == {1}

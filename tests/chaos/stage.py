"""What the tests of faults share: gates that hold a tool, what the ledger says of one call, what replicas did.

A call is told from the others by its question, and its answer by the name in it: both stand in the ledger.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.parts.launch import OldServer
from tests.support.cluster import Cluster
from tests.support.gateway_process import Gateway
from tests.support.workbench import Client, Json, Reply

CONTINUATIONS: Final = "mcp_gateway_continuations_total"
PROMPT_SECONDS: Final = 2.0
"""The promised time in which a retry for a dead replica's call learns that the call is lost."""
STEPS: Final = ("held", "forwarded", "resumed", "replayed", "lost")
KEY: Final = "Name"
"""The key of the question, from the title of its form."""


def accept(name: str) -> Json:
    """The answers for the one question of `ask` and similar tools."""
    return {KEY: {"action": "accept", "content": {"name": name}}}


@dataclass(frozen=True)
class Gate:
    """A file that a tool waits for."""

    file: Path

    def open(self) -> None:
        self.file.touch()


@dataclass(frozen=True)
class Call:
    """One call of a tool that asks, and what its server recorded about it."""

    server: OldServer
    tool: str
    name: str
    """Appears in its question and its answer, and in no other call of the server."""
    before: Gate | None = None
    after: Gate | None = None

    @property
    def arguments(self) -> Json:
        gates = {"before": self.before, "after": self.after}
        return {"question": self.name, **{key: str(gate.file) for key, gate in gates.items() if gate is not None}}

    async def begin(self, client: Client) -> str:
        """Call until the server asks; return the state."""
        answer = await client.call(self.tool, self.arguments)
        assert answer.asks == [KEY], answer
        return answer.state

    async def retry(self, client: Client, state: str) -> Reply:
        """Give the answer; return the reply."""
        return await client.call(self.tool, self.arguments, state=state, answers=accept(self.name))

    @property
    def result(self) -> str:
        """The tool's result for its answer."""
        return f'accept:{{"name":"{self.name}"}}'

    def outcome(self, answer: Reply) -> str:
        """`result` if the result is right, otherwise the reason of the error."""
        if "error" in answer.final:
            return str(answer.error.get("data", {}).get("reason", answer.error))
        assert answer.text == self.result
        return "result"

    @property
    def runs(self) -> int:
        """How often the tool began."""
        return sum(entry["arguments"]["question"] == self.name for entry in self.server.ledger("run", self.tool))

    @property
    def answers(self) -> int:
        """How often the tool got the answer."""
        contents = [entry["result"].get("content") or {} for entry in self.server.ledger("answered", self.tool)]
        return sum(content.get("name") == self.name for content in contents)

    @property
    def sessions(self) -> list[str]:
        """Where it ran."""
        return [e["session"] for e in self.server.ledger("run", self.tool) if e["arguments"]["question"] == self.name]

    @property
    def ends(self) -> list[str]:
        """How its runs ended; meaningful only if no other call ran in their sessions."""
        sessions = self.sessions
        kinds = {"finished", "failed", "cancelled"}
        return [e["event"] for e in self.server.ledger() if e["event"] in kinds and e["session"] in sessions]

    async def began(self, times: int = 1) -> None:
        await self.server.until(lambda: self.runs >= times, f"{self.name} run {times} times")

    async def answered(self, times: int = 1) -> None:
        await self.server.until(lambda: self.answers >= times, f"{self.name} answered {times} times")

    async def ended(self, how: str, times: int = 1) -> None:
        await self.server.until(lambda: self.ends.count(how) >= times, f"{self.name} {how} {times} times")


async def steps(replicas: Iterable[Gateway]) -> Counter[str]:
    """How these replicas served retries so far."""
    found: Counter[str] = Counter()
    for replica in replicas:
        found.update({step: int(await replica.metric(CONTINUATIONS, step=step)) for step in STEPS})
    return +found  # without zeroes


async def stepped(replicas: Iterable[Gateway], before: Counter[str], step: str, times: int = 1) -> None:
    """Wait until they took that step since then."""
    replicas = list(replicas)

    async def taken() -> bool:
        return (await steps(replicas))[step] - before[step] >= times

    await replicas[0].until(taken, f"{step} {times} times")


def others(c: Cluster, owner: Gateway) -> list[Gateway]:
    return [replica for replica in c.replicas if replica is not owner]


async def prompt(work: Awaitable[Reply], seconds: float = PROMPT_SECONDS) -> Reply:
    """Retry, within the promised time."""
    async with asyncio.timeout(seconds):
        return await work

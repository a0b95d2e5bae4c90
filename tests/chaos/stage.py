"""What the tests of faults share: gates that hold a tool, what the ledger says of one call, what replicas did.

A call is told from the others by its question, and its answer by the name in it: both stand in the ledger.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.parts.launch import OldServer
from tests.support.gateway_process import Gateway
from tests.support.workbench import Client, Json, Reply

CONTINUATIONS: Final = "mcp_gateway_continuations_total"
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

    async def began(self) -> None:
        await self.server.until(lambda: self.runs > 0, f"{self.name} run")

    async def answered(self) -> None:
        await self.server.until(lambda: self.answers > 0, f"{self.name} answered")


async def steps(replicas: Iterable[Gateway]) -> Counter[str]:
    """How these replicas served retries so far."""
    found: Counter[str] = Counter()
    for replica in replicas:
        found.update({step: int(await replica.metric(CONTINUATIONS, step=step)) for step in STEPS})
    return +found  # without zeroes

"""A FAKE legacy server with an event store, whose parked calls may go cold."""

import asyncio
import json
from typing import Any

from gateway.protocol import mcp
from tests.support.fake_upstream import FORM, FakeUpstream, Turn, text
from tests.support.workbench import Reply, Stand, eventually

SOON = {"quiet_seconds": 0.02, "grace_seconds": 0.05, "cold_seconds": 0.05}
"""`hold` of a gateway whose parked calls go cold."""


class FakeCall:
    """One call of the tool: the events on its stream, with what the gateway sent about it."""

    def __init__(self, id_: Any) -> None:
        self.id = id_
        self.events: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.changed = asyncio.Condition()

    async def add(self, message: dict[str, Any]) -> None:
        self.events.append({"jsonrpc": "2.0", **message})
        async with self.changed:
            self.changed.notify_all()


class FakeStore:
    """A FAKE server with an event store, whose tool asks `rounds` times and returns all answers.

    It works on without a stream, as real servers do: a GET with Last-Event-ID gets all events behind that one.
    """

    def __init__(self, upstream: FakeUpstream, rounds: int = 1) -> None:
        self.calls: dict[str | None, FakeCall] = {}
        self.rounds = rounds
        self.question = "Name?"
        self.resumed = 0
        """Streams that were resumed."""
        self.hold = asyncio.Event()
        """Cleared while the server takes no answer."""
        self.hold.set()
        self.ends_when_cancelled = True
        upstream.tool(self._call)
        upstream.on("answer", self._answer)
        upstream.on("resume", self._resume)
        upstream.on(mcp.CANCELLED, self._cancel)

    async def _call(self, turn: Turn) -> None:
        call = self.calls[turn.session] = FakeCall(turn.id)
        await self._ask(call)
        await self._stream(turn, call, 0)

    async def _ask(self, call: FakeCall) -> None:
        number = len(call.answers)
        params = {"message": self.question, "requestedSchema": {**FORM["requestedSchema"], "title": f"q{number}"}}  # type: ignore[dict-item]
        await call.add({"id": number, "method": mcp.ELICIT, "params": params})

    async def _answer(self, turn: Turn) -> None:
        call = self.calls[turn.session]
        await self.hold.wait()
        turn.reply(202)
        call.answers.append(turn.body.get("result", turn.body.get("error")))
        if len(call.answers) < self.rounds:
            await self._ask(call)
        elif len(call.answers) == self.rounds:
            await call.add({"id": call.id, "result": self.outcome(call.answers)})

    def outcome(self, answers: list[Any]) -> Any:
        return text(json.dumps(answers))

    async def _resume(self, turn: Turn) -> None:
        self.resumed += 1
        await self._stream(turn, self.calls[turn.session], int(turn.seen.headers["Last-Event-ID"].removeprefix("e")))

    async def _cancel(self, turn: Turn) -> None:
        call = self.calls[turn.session]
        if self.ends_when_cancelled:
            await call.add({"id": call.id, "error": {"code": 0, "message": "Request cancelled"}})
        turn.reply(202)

    async def _stream(self, turn: Turn, call: FakeCall, sent: int) -> None:
        await turn.raw(b":\n\n")
        while True:
            while sent < len(call.events):
                sent += 1
                await turn.say(call.events[sent - 1], f"e{sent}")
            if "method" not in call.events[-1]:
                return
            async with call.changed:
                if sent == len(call.events):
                    _ = await call.changed.wait()


def cold(stand: Stand) -> int:
    assert stand.metric("mcp_gateway_cold_calls") == len(stand.gateway.lot.cold)
    return len(stand.gateway.lot.cold)


def ended(stand: Stand) -> dict[str, int]:
    endings = ("resumed", "expired", "continued")
    counts = {each: int(stand.metric("mcp_gateway_cold_calls_ended_total", ending=each)) for each in endings}
    return {ending: count for ending, count in counts.items() if count}


async def cool(stand: Stand, upstream: FakeUpstream, **options: Any) -> Reply:
    """Make a call that asks, and wait until it is cold."""
    before = cold(stand)
    asked = await stand.client(**options).call()
    await eventually(lambda: cold(stand) == before + 1, "the call is cold")
    await eventually(upstream.of("tools/call")[-1].cut.is_set, "its stream is closed")
    return asked

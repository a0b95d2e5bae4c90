"""The channel to one child alone: one request after the other on one pipe, and each hears its own answer."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec import Raw

from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallLost
from gateway.upstream import stdio
from gateway.upstream.channel import NO_HEADERS, Hearer, SideListener
from gateway.upstream.stdio import StdioChannel
from tests.support.fake_child import FakeChild, FakeLauncher
from tests.support.workbench import eventually, later

DEADLINE = 2.0


class Bench(SideListener, Hearer):
    """A channel whose child answers `initialize` at its start."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher()
        self.channel = StdioChannel(self.launcher)
        self.child: FakeChild
        self.answers: list[int] = []
        self.aside: list[bytes] = []
        self.after_first: Any = lambda: None

    async def start(self) -> None:
        greeting = later(self.channel.initialize(b"{}", NO_HEADERS))
        await asyncio.sleep(0)
        (self.child,) = self.launcher.children
        self.say(0)
        assert isinstance(await greeting, Raw)
        await self.channel.listen("2025-11-25", NO_HEADERS, self)

    def say(self, id_: int) -> None:
        self.child.say(id=id_, result={"of": id_})

    def hear_side(self, data: bytes) -> None:
        self.aside.append(data)

    def hear(self, line: bytes, /) -> bool:
        found = jsonrpc.message(line).id
        assert isinstance(found, Raw)
        self.answers.append(int(bytes(found)))
        after, self.after_first = self.after_first, lambda: None
        after()
        return True

    def request(self, number: int) -> "asyncio.Task[Any]":
        message = jsonrpc.request(b"%d" % number, "tools/call", {})
        return later(self.channel.request(message, NO_HEADERS, self))


@pytest.mark.parametrize("fails", [False, True], ids=["", "though the listener of the first one fails"])
async def test_a_request_that_follows_at_once_hears_its_own_answer(*, fails: bool) -> None:
    """An answer frees the session, whose next request may be sent before the first one's task has run again."""
    bench, second = Bench(), list[asyncio.Task[Any]]()

    def follow() -> None:
        second.append(bench.request(2))
        if fails:
            raise CallLost("broken")

    bench.after_first = follow
    async with asyncio.timeout(DEADLINE):
        await bench.start()
        first = bench.request(1)
        await asyncio.sleep(0)
        bench.say(1)
        with pytest.raises(CallLost, match="broken") if fails else nullcontext():
            assert await first is None
        assert len(bench.child.lines) == 3
        bench.say(2)
        assert await second[0] is None
    assert bench.answers == [1, 2]
    assert not bench.aside


async def test_a_request_beside_the_one_in_flight_hears_its_own_answer_and_nothing_else() -> None:
    bench = Bench()
    async with asyncio.timeout(DEADLINE):
        await bench.start()
        held = bench.request(1)
        beside = later(bench.channel.beside(jsonrpc.request(b"2", "tasks/get", {}), NO_HEADERS))
        await eventually(lambda: len(bench.child.lines) == 3)
        bench.after_first = lambda: bench.say(2)
        bench.say(1)
        assert await held is None
        assert await beside == Raw(b'{"of": 2}')
    assert bench.answers == [1]


async def test_a_request_beside_the_one_in_flight_is_followed_by_no_ping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "_ANSWERED_SECONDS", 0)
    bench, looks = Bench(), list[object]()
    async with asyncio.timeout(DEADLINE):
        await bench.start()
        held = bench.request(1)
        answers = bench.child.answers

        async def answers_and_counts(*given: Any) -> bool:
            looks.append(given)
            return await answers(*given)

        monkeypatch.setattr(bench.child, "answers", answers_and_counts)
        await eventually(lambda: len(bench.child.lines) == 2)
        beside = later(bench.channel.beside(jsonrpc.request(b"2", "tasks/get", {}), NO_HEADERS))
        await eventually(lambda: len(bench.child.lines) == 3)
        seen = len(looks)
        await eventually(lambda: len(looks) > seen + 2)
        bench.say(2)
        assert await beside == Raw(b'{"of": 2}')
        bench.say(1)
        assert await held is None
    assert len(bench.child.lines) == 3


async def test_a_server_gets_a_ping_some_time_after_an_answer_and_nobody_hears_its_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`mcp` 1.30 may end its session by an answer, and its process by the next message: it must not be the last."""
    monkeypatch.setattr(stdio, "_ANSWERED_SECONDS", 0.01)
    bench = Bench()
    async with asyncio.timeout(DEADLINE):
        await bench.start()
        held = bench.request(1)
        await eventually(lambda: len(bench.child.lines) == 2)
        await bench.channel.send(jsonrpc.answer(Raw(b"7"), Raw(b"{}")), NO_HEADERS)
        await eventually(lambda: len(bench.child.lines) == 4)
        ping = bench.child.sent[-1]
        assert ping["method"] == "ping"
        bench.child.say(id=ping["id"], result={})
        bench.say(1)
        assert await held is None
    assert bench.answers == [1]
    assert not bench.aside
    assert len(bench.child.lines) == 4

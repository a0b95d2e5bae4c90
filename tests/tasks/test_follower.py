import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc
from gateway.sessions import inbound
from gateway.sessions.call import Call
from gateway.tasks import follower
from gateway.tasks.follower import Follower, Past, TaskGone, held_id
from tests.support.workbench import later


class Heard:
    """A listener that remembers."""

    about: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self) -> None:
        self.events: list[on.Event] = []

    def hear(self, event: on.Event) -> None:
        self.events.append(event)


def test_two_processes_name_their_held_requests_differently() -> None:
    processes = ("gw-1", "a"), ("gw-1", "b"), ("gw-2", "a")
    assert len({held_id(each, "task", 0) for each in processes}) == 3


def test_a_response_without_an_id_does_not_answer_a_task() -> None:
    refusal = jsonrpc.message(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}')
    assert inbound.answer(refusal, Call(b"", b"", Heard())) is None


class Exchange:
    """Has an open question for so many looks at it."""

    def __init__(self, last: int) -> None:
        self.looks, self.last = 0, last

    @property
    def questions(self) -> bool:
        self.looks += 1
        return self.looks < self.last


OF_PYTHON, OF_TYPESCRIPT = f"{'0f' * 16}:8e71345a-572e-4a41-95f8-7e5cc4b035d4", "0f" * 16
"""Ids of tasks."""


class Server:
    """Says always the same of a task, and holds its tasks/result until that is left."""

    def __init__(self, exchange: Exchange, status: str) -> None:
        self.exchange, self.status, self.left = exchange, status, asyncio.Event()
        self.is_accepting, self.speaks, self.looks = True, False, 0
        self.held: Call

    async def beside(self, message: bytes, _: object) -> Raw:
        assert self.exchange.looks >= self.exchange.last, message
        self.looks += 1
        if self.speaks and self.looks % 2 == 0:
            self.held.heard += 1
        return Raw(b'{"status":"%b"}' % self.status.encode())

    async def run(self, call: Call, _: object) -> None:
        if b"tasks/result" in call.message and not self.left.is_set():
            self.held, call.is_accepted = call, self.is_accepting
            _ = await self.left.wait()
        elif b"tasks/get" in call.message:
            call.listener.hear(on.Resulted(b'{"status":"%b"}' % self.status.encode()))
        else:
            call.listener.hear(on.Resulted(b'{"content":[]}'))

    def follow(self, monkeypatch: pytest.MonkeyPatch, task: str, *, may_lack: bool = True) -> asyncio.Task[Any]:
        async def looked(_: str | None) -> None:
            pass

        monkeypatch.setattr(follower, "_POLL_SECONDS", 0)
        context = MagicMock(exchange=self.exchange, former=None)
        process = context.live.process
        process.owner, process.epoch, process.tasks.start = "gw-1", "a", lambda work, _: later(work)
        context.live.config.timeouts.handshake_seconds = 5
        session = MagicMock(
            run=self.run, leave=lambda _: self.left.set(), channel=Mock(beside=self.beside), cancel=AsyncMock()
        )
        past = Past(looked, False, lambda: may_lack)
        return later(Follower(session, task, Heard(), context, b"").run(past))


async def test_a_server_is_not_asked_whether_a_task_is_over_that_waits_for_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(Exchange(4), "completed")
    async with asyncio.timeout(5):
        ended = await server.follow(monkeypatch, OF_PYTHON)
    assert isinstance(ended, on.Resulted)
    assert server.exchange.looks == 4


async def test_a_task_is_lost_once_it_needs_input_twice_that_nothing_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Exchange(4), "input_required")
    async with asyncio.timeout(5):
        with pytest.raises(TaskGone, match="that no client has seen"):
            await server.follow(monkeypatch, OF_PYTHON)
    assert server.exchange.looks == 5, "at the first look, the question may be on its way"


@pytest.mark.parametrize("why", ["another server", "nothing is lost", "not accepted", "speaks", "works"])
async def test_a_task_that_may_go_on_is_waited_for(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    server = Server(Exchange(1), "working" if why == "works" else "input_required")
    server.is_accepting, server.speaks = why != "not accepted", why == "speaks"
    task = OF_TYPESCRIPT if why == "another server" else OF_PYTHON
    following = server.follow(monkeypatch, task, may_lack=why != "nothing is lost")
    async with asyncio.timeout(5):
        while server.exchange.looks < 10:
            await asyncio.sleep(0)
    assert not following.done()
    _ = following.cancel()

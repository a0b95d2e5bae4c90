import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc
from gateway.sessions import inbound
from gateway.sessions.call import Call
from gateway.tasks import follower
from gateway.tasks.follower import Follower, held_id
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


async def test_a_server_is_not_asked_whether_a_task_is_over_that_waits_for_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Exchange:
        looks = 0

        @property
        def questions(self) -> bool:
            self.looks += 1
            return self.looks < 4

    exchange, left = Exchange(), asyncio.Event()

    async def beside(message: bytes, _: object) -> Raw:
        assert exchange.looks == 4, message
        return Raw(b'{"status":"completed"}')

    async def answer(call: Call, _: object) -> None:
        if b"tasks/result" in call.message and not left.is_set():
            _ = await left.wait()
        else:
            call.listener.hear(on.Resulted(b'{"status":"completed","content":[]}'))

    monkeypatch.setattr(follower, "_POLL_SECONDS", 0)
    context = MagicMock(exchange=exchange)
    process = context.live.process
    process.owner, process.epoch, process.tasks.start = "gw-1", "a", lambda work, _: later(work)
    context.live.config.timeouts.handshake_seconds = 5
    session = MagicMock(run=answer, leave=lambda _: left.set(), channel=Mock(beside=beside), cancel=AsyncMock())
    async with asyncio.timeout(5):
        ended = await Follower(session, "t", Heard(), context, b"").run()
    assert isinstance(ended, on.Resulted)

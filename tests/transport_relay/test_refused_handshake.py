"""A session whose server refuses `initialize`: the end of it, or the mirror (the server is a fake of either era)."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from msgspec import Raw

from gateway.config import Limits, Timeouts
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import Busy, GatewayError, Refused, Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from gateway.transport_relay.session_relay import SessionRelay
from tests.mirror.test_linked_backend import FakeLink
from tests.support.fake_server import FakeServer, fake_live
from tests.support.workbench import eventually

PARAMS = b'{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{}}'
GREETING = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":%b}' % PARAMS
READY = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
LIST = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
ROOM = 5_000


class Bench:
    """A session before a server of which the test decides what it is."""

    def __init__(self, tasks: Tasks, *, may_be_modern: bool = True) -> None:
        self.link, self.server = FakeLink(), FakeServer()
        self.chosen: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the server turns out to be modern."""
        self.answer: Any = Unreachable("refused `initialize`")
        """The result of the handshake, or why there is none."""
        self.channel = Mock(answers_apart=False, session_id=None, send=AsyncMock(), close=AsyncMock())
        self.channel.open, self.channel.listen = self._open, AsyncMock()
        live = self.live = fake_live(tasks)
        live.process.metrics = MagicMock()
        live.config.limits, live.config.timeouts = Limits(body_bytes=ROOM), Timeouts()
        live.upstream.stdio, live.upstream.era = None, Mock(is_modern=lambda *_, **__: self.chosen)
        live.upstream.pool.connect.return_value = self.channel
        self.relay = SessionRelay(live, self.link, self.server if may_be_modern else None)

    async def _open(self, message: bytes, _headers: object) -> tuple[Any, Raw]:
        assert message == GREETING
        if isinstance(self.answer, GatewayError):
            raise self.answer
        return self.channel, self.answer

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.relay.receive(ClientMessage(message, jsonrpc.message(message), {"Authorization": "x"}))

    async def choose_mirror(self) -> None:
        """The server is modern, and answers the mirror's handshake."""
        self.chosen.set_result(True)
        await eventually(lambda: self.server.of(mcp.DISCOVER))
        self.server.of(mcp.DISCOVER)[0].completes(capabilities={"tools": {}})
        await eventually(lambda: self.link.sent)

    async def is_refused(self, *ids: bytes) -> None:
        """These requests get the error of the handshake, or one of their own."""
        await eventually(lambda: [id_ for id_, _ in self.link.refused] == [*ids], "they are refused")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tasks = Tasks(Metrics("test", []))
    found = Bench(tasks)
    yield found
    await found.relay.close()
    await tasks.close()
    assert tasks.failures == 0


async def test_a_refusal_leads_to_the_mirror_which_gets_everything_from_the_beginning(bench: Bench) -> None:
    bench.say(GREETING, READY, LIST)
    await bench.choose_mirror()
    assert bench.link.sent[0][0]["result"]["protocolVersion"] == "2025-06-18"
    await eventually(lambda: bench.server.of(mcp.TOOLS_LIST) and bench.server.of(mcp.LISTEN))
    bench.server.of(mcp.TOOLS_LIST)[0].completes(tools=[])
    await eventually(lambda: len(bench.link.sent) == 2)
    assert bench.link.sent[1][0]["id"] == 1
    bench.say(LIST.replace(b"1", b"2"))
    await eventually(lambda: len(bench.server.of(mcp.TOOLS_LIST)) == 2)
    assert (bench.link.refused, bench.link.is_closed, bench.channel.send.await_count) == ([], False, 0)
    bench.channel.close.assert_awaited_once_with(end_session=False)
    assert not bench.live.process.metrics.upstream_failures.__getitem__.called, "a modern server is right to refuse"


async def test_the_end_of_the_refusing_server_is_not_that_of_the_mirrored_session(bench: Bench) -> None:
    bench.say(GREETING)
    await bench.choose_mirror()
    bench.relay.side_closed(was_open=True)
    assert not bench.link.is_closed


async def test_a_server_that_is_not_modern_ends_the_session(bench: Bench) -> None:
    bench.chosen.set_result(False)
    bench.say(GREETING)
    await bench.is_refused(b"0")
    assert bench.link.refused == [(b"0", bench.answer)]
    assert bench.link.is_closed


async def test_a_server_that_cannot_be_mirrored_is_not_asked_for_its_era() -> None:
    tasks = Tasks(Metrics("test", []))
    bench = Bench(tasks, may_be_modern=False)
    bench.say(GREETING)
    await bench.is_refused(b"0")
    assert bench.link.is_closed
    await tasks.close()


async def test_after_a_refused_credential_the_client_may_greet_again(bench: Bench) -> None:
    bench.answer = error = Refused("no", status=401)
    bench.say(GREETING, LIST)
    await bench.is_refused(b"0", b"1")
    assert bench.link.refused[0] == (b"0", error)
    assert "must be `initialize`" in bench.link.refused[1][1].message
    assert not bench.link.is_closed
    bench.answer = Raw(b'{"protocolVersion":"2025-06-18"}')
    bench.say(GREETING, LIST)
    await eventually(lambda: bench.channel.send.await_count == 1)
    assert bench.link.sent == [({"jsonrpc": "2.0", "id": 0, "result": json.loads(bytes(bench.answer))}, b"0")]


async def test_what_waits_for_the_choice_has_a_limit_in_bytes(bench: Bench) -> None:
    bench.say(GREETING)
    await eventually(lambda: bench.channel.close.await_count, "the relay asks for the era")
    large = b'{"jsonrpc":"2.0","id":2,"method":"x","params":{"x":"%b"}}' % (b"x" * ROOM)
    bench.say(large)  # one message is taken, whatever its size
    with pytest.raises(Busy):
        bench.say(READY)


async def test_many_small_messages_do_not_wait_without_limit(bench: Bench) -> None:
    bench.say(GREETING)
    with pytest.raises(Busy):
        bench.say(*[READY] * (ROOM // 512 + 1))


async def test_what_was_sent_takes_no_room_any_more(bench: Bench) -> None:
    bench.answer = Raw(b"{}")
    bench.say(GREETING)
    for number in range(1, 4):
        bench.say(*[READY] * (ROOM // 600))
        await eventually(lambda: bench.channel.send.await_count == number * (ROOM // 600))  # noqa: B023


async def test_a_session_that_is_closed_while_the_mirror_is_chosen_ends_with_it(bench: Bench) -> None:
    bench.say(GREETING)
    await eventually(lambda: bench.channel.close.await_count, "the relay asks for the era")
    await bench.relay.close()
    assert bench.chosen.cancelled()
    await eventually(lambda: "relay to upstream" not in [task.get_name() for task in asyncio.all_tasks()])
    assert (bench.server.sent, bench.link.sent, bench.link.refused) == ([], [], [])


async def test_a_mirrored_session_ends_with_its_client(bench: Bench) -> None:
    bench.say(GREETING, READY)
    await bench.choose_mirror()
    await eventually(lambda: bench.server.of(mcp.LISTEN))
    await bench.relay.close()
    await eventually(lambda: bench.server.of(mcp.LISTEN)[0].is_aborted)


async def test_what_the_mirror_refuses_is_answered(bench: Bench) -> None:
    bench.chosen.set_result(True)
    bench.channel.open = AsyncMock(side_effect=bench.answer)
    bench.say(GREETING.replace(PARAMS, b"{}"), LIST)
    await bench.is_refused(b"0", b"1")
    assert "protocolVersion" in bench.link.refused[0][1].message
    assert bench.server.sent == []


async def test_a_mirror_that_cannot_greet_the_server_answers_what_waits(bench: Bench) -> None:
    bench.say(GREETING, LIST)
    bench.chosen.set_result(True)
    await eventually(lambda: bench.server.of(mcp.DISCOVER))
    bench.server.of(mcp.DISCOVER)[0].fails(error := Unreachable("gone"))
    await bench.is_refused(b"0", b"1")
    assert bench.link.refused[0] == (b"0", error)

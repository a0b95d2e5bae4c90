"""The link between a legacy host and the backend of its session."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from msgspec import Raw

from gateway.config import InForce, Limits, Route, Timeouts, Upstream
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc
from gateway.protocol.errors import IdInUse
from gateway.runtime.call_bytes import CallBytes
from gateway.runtime.tasks import Tasks
from gateway.stdio_front.front import StdioFront
from gateway.stdio_front.legacy_host import LegacyHost
from gateway.telemetry import Metrics
from tests.support import host
from tests.support.fake_child import FakeChild, FakeLauncher
from tests.support.fake_server import fake_live
from tests.support.fake_upstream import FakeUpstream
from tests.support.memory import left_by
from tests.support.stand import Start
from tests.support.workbench import eventually, later

GREETING: Final = '{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'
CALL: Final = '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}'


class Bench:
    """A host before a relayed server that takes every message and answers none."""

    def __init__(self, tasks: Tasks) -> None:
        self.heard: list[bytes] = []
        self.channel = Mock(answers_apart=False, session_id=None, send=AsyncMock(), close=AsyncMock())
        self.channel.open = AsyncMock(return_value=(self.channel, Raw(b"{}")))
        self.channel.listen = AsyncMock()
        live = fake_live(tasks)
        live.route.era, live.upstream.stdio, live.upstream.pool.connect.return_value = "bridge", None, self.channel
        live.config.limits, live.config.timeouts = Limits(), Timeouts()
        self.calls = live.process.calls = CallBytes(InForce(Limits(calls_bytes_per_principal=1000)))
        self.over = asyncio.get_running_loop().create_future()
        self.legacy = LegacyHost(Mock(send=self.heard.append), live, self.over)

    async def begin(self) -> None:
        self.host_says(GREETING)
        await eventually(lambda: len(self.heard) == 1)
        self.host_says(CALL)

    def host_says(self, line: str) -> None:
        self.legacy.receive(ClientMessage(line.encode(), jsonrpc.message(line.encode())))

    def server_asks(self, id_: str, about: bytes | None = b"1") -> None:
        self.legacy.send(f'{{"jsonrpc":"2.0","id":{id_},"method":"roots/list"}}'.encode(), about)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tasks = Tasks(Metrics("test", []))
    found = Bench(tasks)
    await found.begin()
    yield found
    await found.legacy.end()
    await tasks.close()
    assert (tasks.failures, found.calls.used) == (0, 0)


async def test_two_open_requests_cannot_have_the_same_id(bench: Bench) -> None:
    for id_ in ('"a"', "2", '"2"'):
        bench.host_says(f'{{"jsonrpc":"2.0","id":{id_},"method":"tools/list"}}')
    with pytest.raises(IdInUse) as refused:
        bench.host_says('{"jsonrpc":"2.0","id":"\\u0061","method":"tools/list"}')
    assert refused.value.request_id is None, "it would end the other request"
    await eventually(lambda: bench.channel.send.await_count == 4, "the call and three lists")


async def test_a_request_that_waits_for_an_answer_of_the_host_is_not_worked_on(bench: Bench) -> None:
    assert bench.legacy.is_busy
    bench.server_asks('"caf\\u00e9"')
    assert not bench.legacy.is_busy
    bench.host_says('{"jsonrpc":"2.0","id":"caf\u00e9","result":{"roots":[]}}')
    assert bench.legacy.is_busy


async def test_the_id_of_a_request_that_gets_no_response_is_free_again(bench: Bench) -> None:
    bench.server_asks("5")
    bench.host_says('{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}')
    bench.legacy.forget(b"1")
    assert bench.calls.used == 0
    bench.host_says(CALL)
    assert bench.legacy.is_busy, "its question is forgotten"
    assert bench.calls.used > 0


async def test_questions_are_remembered_no_longer_than_their_request(bench: Bench) -> None:
    for number in range(300):
        bench.server_asks(str(number), b"2" if number % 2 else None)
    assert bench.legacy.is_busy, "they are about no open request"
    bench.server_asks("300")
    assert not bench.legacy.is_busy, "and need no room"
    bench.heard.clear()
    assert left_by(lambda: [bench.server_asks(str(number)) or bench.heard.clear() for number in range(2000)]) < 100_000
    bench.legacy.send(b'{"jsonrpc":"2.0","id":1,"result":{}}', None)
    assert not bench.legacy.is_busy
    bench.host_says(CALL)
    assert bench.legacy.is_busy, "its questions are forgotten"


class Pipes:
    """A FAKE host whose lines are those of the test."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[host.JSON | None] = asyncio.Queue()
        self.heard: list[host.JSON] = []

    def send(self, message: bytes) -> None:
        self.heard.append(json.loads(message))

    async def lines(self) -> AsyncIterator[bytes]:
        while (message := await self.said.get()) is not None:
            yield json.dumps(message).encode()


@pytest.mark.parametrize("era", ["bridge", "auto"])
async def test_a_server_behind_a_url_gets_the_credential_and_the_headers_of_the_route(
    upstream: FakeUpstream, begin: Start, era: str
) -> None:
    credentials = {"mode": "replace", "token": "t"}
    stand = await begin(route={"era": era, "credentials": credentials, "set_headers": {"X-Key": "k"}})
    pipes = Pipes()
    front = StdioFront(pipes, stand.gateway.downstream, stand.gateway.routes.live["/mcp"])  # type: ignore[arg-type]
    running = later(front.run())
    for number, message in enumerate((host.initialize(0), host.legacy("tools/list", 1))):
        pipes.said.put_nowait(message)
        await eventually(lambda: len(pipes.heard) > number)  # noqa: B023  (it is awaited here)
    sent = [(seen.headers["Authorization"], seen.headers["X-Key"]) for seen in upstream.seen]
    assert sent == [("Bearer t", "k")] * 3, "initialize, the standalone stream, the request"
    pipes.said.put_nowait(None)
    await running
    await front.close()


# -- before a child ---------------------------------------------------------------------------------------------------


class SlowLauncher(FakeLauncher):
    """A FAKE launcher whose child starts when the test says so, and then accepts the handshake if it `accepts`."""

    accepts = True

    def __init__(self) -> None:
        super().__init__()
        self.may_start = asyncio.Event()

    async def take(self) -> FakeChild:
        _ = await self.may_start.wait()
        child = await super().take()
        if self.accepts:
            asyncio.get_running_loop().call_soon(lambda: child.say(id=0, result={}))
        return child

    @property
    def read(self) -> list[bytes]:
        """What its child has read."""
        return self.children[0].lines if self.children else []


class Child:
    """A host that writes these lines as fast as they are read, before a child."""

    def __init__(self, tasks: Tasks, *lines: str) -> None:
        self.launcher, self.lines = SlowLauncher(), [*lines]
        self.heard: list[bytes] = []
        self.live = fake_live(tasks)
        self.live.process.metrics = MagicMock()
        self.live.route = Route(upstream=Upstream(), era="bridge")
        self.live.config.limits, self.live.config.timeouts = Limits(body_bytes=10_000), Timeouts()
        self.live.process.calls = CallBytes(InForce(Limits(calls_bytes_per_principal=1 << 20)))
        self.live.upstream.stdio = Mock(launcher=self.launcher)
        host: Any = Mock(lines=self._lines, send=self.heard.append)
        self.front = StdioFront(host, Mock(**{"continuation.lot": []}), self.live)

    async def _lines(self) -> AsyncIterator[bytes]:
        while self.lines:
            yield self.lines.pop(0).encode()


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    found = Tasks(Metrics("test"))
    yield found
    await found.close()


async def test_a_host_that_writes_faster_than_its_child_reads_has_to_wait(tasks: Tasks) -> None:
    child = Child(tasks, GREETING, *[CALL.replace("1,", f"{number},") for number in range(1, 100)])
    running = tasks.start(child.front.run(), "host")
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(child.lines) > 50, "the gateway reads no further"
    child.launcher.may_start.set()
    await eventually(lambda: len(child.launcher.read) == 100, "everything arrives")
    await running
    await child.front.close()


async def test_what_the_host_sent_before_its_end_reaches_a_child_that_starts_slowly(tasks: Tasks) -> None:
    child = Child(tasks, GREETING, CALL)
    await child.front.run()
    finishing = tasks.start(child.front.finish(3600), "drain")
    await asyncio.sleep(0)
    child.launcher.may_start.set()
    await eventually(lambda: len(child.launcher.read) == 2)
    child.launcher.children[0].say(id=1, result={})
    await finishing
    assert len(child.heard) == 2
    await child.front.close()
    assert child.launcher.children[0].is_closed


async def test_a_host_that_has_closed_its_end_does_not_wait_for_a_child_that_died_before_it_answered(
    tasks: Tasks,
) -> None:
    child = Child(tasks, GREETING, CALL)
    child.launcher.accepts = False
    child.launcher.may_start.set()
    await child.front.run()
    finishing = tasks.start(child.front.finish(3600), "drain")
    await eventually(lambda: child.launcher.read == [GREETING.encode()])
    child.launcher.children[0].over.set_result("exit code 1")
    await asyncio.wait_for(finishing, 5)
    assert child.front.ended.done()
    assert b"exit code 1 before it answered `initialize`" in child.heard[0]
    await child.front.close()

"""A legacy host before one child, which is a fake here."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.config import InForce, Limits, Route, Timeouts, Upstream
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc
from gateway.runtime.call_bytes import CallBytes
from gateway.runtime.tasks import Tasks
from gateway.stdio_front.child_backend import ChildBackend
from gateway.stdio_front.front import StdioFront
from gateway.telemetry import Metrics
from tests.support.turns import gives_way
from tests.support.workbench import eventually

CALL = b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}'
INITIALIZE = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}'


class FakeChild:
    """A FAKE child, which ends when its input does."""

    asked = False
    route = "/mcp"

    def __init__(self) -> None:
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.events: list[bytes] = []

    def hear_with(self, _hear: Any) -> None:
        """Say nothing."""

    async def send(self, message: bytes) -> None:
        self.events.append(message)

    def close_input(self) -> None:
        self.asked = True
        self.events.append(b"end of input")
        self.over.set_result("ended")

    async def close(self) -> None:
        """It has ended."""


class FakeLauncher:
    """A FAKE launcher, which starts its child when the test says so."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(timeouts=Timeouts())
        self.child = FakeChild()
        self.may_start = asyncio.Event()

    async def take(self) -> FakeChild:
        await self.may_start.wait()
        return self.child


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    found = Tasks(Metrics("test"))
    yield found
    await found.close()


async def test_what_the_host_sent_before_its_end_reaches_a_child_that_starts_slowly(tasks: Tasks) -> None:
    launcher = FakeLauncher()
    stdio: Any = SimpleNamespace(launcher=launcher)
    backend = ChildBackend(stdio, Mock(), tasks, 1_000)
    backend.receive(ClientMessage(CALL, jsonrpc.message(CALL)))
    finishing = tasks.start(backend.finish(5), "drain")
    await asyncio.sleep(0)
    launcher.may_start.set()
    await finishing
    assert launcher.child.events == [CALL, b"end of input"]
    await backend.close()


class FakeHost:
    """A FAKE host that writes lines as fast as they are read."""

    def __init__(self, lines: int, line: bytes = CALL) -> None:
        self.left, self._line = lines, line

    def send(self, _message: bytes) -> None:
        """Read it."""

    async def lines(self) -> AsyncIterator[bytes]:
        while self.left:
            self.left -= 1
            yield self._line.replace(b"1,", b"%d," % self.left)


def fake_route(tasks: Tasks, launcher: FakeLauncher, era: str) -> Any:
    return SimpleNamespace(
        process=SimpleNamespace(tasks=tasks, calls=CallBytes(InForce(1 << 20), InForce(1 << 20))),
        config=SimpleNamespace(limits=Limits(body_bytes=10_000)),
        route=Route(upstream=Upstream(), era=era),
        upstream=SimpleNamespace(stdio=SimpleNamespace(launcher=launcher)),
    )


async def test_a_host_that_writes_faster_than_its_child_reads_has_to_wait(tasks: Tasks) -> None:
    launcher, host = FakeLauncher(), FakeHost(100)
    live = fake_route(tasks, launcher, "bridge")
    front, calls = StdioFront(host, Mock(), live, []), live.process.calls  # type: ignore[arg-type]
    running = tasks.start(front.run(), "host")
    for _ in range(10):
        await asyncio.sleep(0)
    assert host.left > 50, "the gateway reads no further"
    launcher.may_start.set()
    assert calls.used > 0
    await eventually(lambda: len(launcher.child.events) == 100, "everything arrives")
    await running
    await eventually(lambda: calls.used == 0, "what the child has read weighs nothing")
    await front.close()


async def test_a_host_that_has_closed_its_end_does_not_wait_for_a_child_that_died_before_it_answered(
    tasks: Tasks,
) -> None:
    launcher = FakeLauncher()
    launcher.may_start.set()
    front = StdioFront(FakeHost(1, INITIALIZE), Mock(), fake_route(tasks, launcher, "auto"), [])  # type: ignore[arg-type]
    await front.run()
    finishing = tasks.start(front.finish(3600), "drain")
    await eventually(lambda: launcher.child.events == [INITIALIZE.replace(b"1,", b"0,")])
    launcher.child.over.set_result("exit code 1")
    await asyncio.wait_for(finishing, 5)
    assert front.ended.done()
    await front.close()


@pytest.mark.usefixtures("busy_clock")
async def test_many_messages_that_waited_for_the_child_let_others_run(tasks: Tasks) -> None:
    launcher = FakeLauncher()
    stdio: Any = SimpleNamespace(launcher=launcher)
    backend = ChildBackend(stdio, Mock(), tasks, 1_000_000)
    for _ in range(100):
        backend.receive(ClientMessage(CALL, jsonrpc.message(CALL)))
    launcher.may_start.set()
    while not launcher.child.events:
        await asyncio.sleep(0)
    assert await gives_way(lambda: len(launcher.child.events) == 100)
    await eventually(lambda: len(launcher.child.events) == 100)
    await backend.close()

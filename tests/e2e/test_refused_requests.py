"""Real legacy clients of which one request is refused, while another one of the same session runs.

The Python SDK ends a session with all its calls on any HTTP status but 2xx and 404, so the other answer is what shows
that the refusal was of one request. The servers are fakes, because they must fail at a moment that the test chooses.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.protocol import mcp
from tests.mirror.conftest import begin as begin_mirror
from tests.mirror.conftest import server
from tests.parts.clients.drive import HERE
from tests.parts.launch import NODE, NODE_MODULES, PARTS
from tests.support.fake_modern import Call, FakeModern
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import eventually

__all__ = ["begin_mirror", "server"]

pytestmark = pytest.mark.real

DEADLINE_SECONDS: Final = 30.0
PYTHON: Final = HERE / "old_py_beside.py"
HTTP: Final[dict[str, tuple[str | Path, ...]]] = {
    "mcp 1.10": (PARTS / "py110" / "bin" / "python", PYTHON),
    "mcp 1.30": (PARTS / "py130" / "bin" / "python", PYTHON),
    "sdk 1.32": (NODE, HERE / "old_ts_beside.mjs"),
}
CLIENTS: Final = pytest.mark.parametrize("client", HTTP)
NEWEST: Final = "2025-06-18"
"""The newest version that mcp 1.10 knows."""
PASSED: Final = "mcp_gateway_passed_through_total"
Json = dict[str, Any]


class Beside:
    """A client in a process of its own, whose requests run side by side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._texts: dict[int, str] = {}
        self._sent = 0

    def send(self, **request: Any) -> int:
        """Send a request; returns its number."""
        self._sent += 1
        self._in.write(json.dumps({"id": self._sent, **request}).encode() + b"\n")
        return self._sent

    def call(self, tool: str, **arguments: Any) -> int:
        return self.send(tool=tool, arguments=arguments)

    async def text(self, number: int) -> str:
        """What a request was answered with."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while number not in self._texts:
                line = await self._out.readline()
                assert line, f"the client has ended, with these answers: {self._texts}"
                answer = json.loads(line)
                self._texts[answer["id"]] = answer["text"]
        return self._texts[number]


@asynccontextmanager
async def beside(client: str, url: str, *flags: str) -> AsyncIterator[Beside]:
    """Start a client; at the end it must exit with 0."""
    process = await asyncio.create_subprocess_exec(
        *(*HTTP[client], *flags, url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
        env=os.environ | {"MRTR_NODE_MODULES": str(NODE_MODULES)},
    )
    try:
        host = Beside(process)
        assert await host.text(0) == "initialized"
        yield host
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Gate:
    """A tool of a fake modern server that answers when the test says so."""

    def __init__(self) -> None:
        self.began, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, call: Call) -> Json:
        self.began.set()
        await self.opened.wait()
        return call.text("done")


# -- the mirror -------------------------------------------------------------------------------------------------------


@CLIENTS
async def test_a_call_over_the_cap_of_its_caller_costs_no_other_call(
    client: str, begin_mirror: Start, server: FakeModern
) -> None:
    stand = await begin_mirror(hold={"max_calls_per_principal": 1})
    gate = server.tools["wait"] = Gate()
    server.tools["echo"] = lambda call: call.text("hi")
    async with beside(client, stand.url) as host:
        first = host.call("wait")
        await gate.began.wait()
        second = host.call("echo")
        assert (await host.text(second)).startswith(f"{mcp.INTERNAL_ERROR} You have as many unanswered calls")
        gate.opened.set()
        assert await host.text(first) == '"done"'
        assert await host.text(host.call("echo")) == '"hi"'


@CLIENTS
async def test_a_subscription_that_the_server_does_not_grant_costs_no_call(
    client: str, begin_mirror: Start, server: FakeModern
) -> None:
    stand = await begin_mirror()
    gate = server.tools["wait"] = Gate()
    server.silent_about.add("a://b")
    async with beside(client, stand.url) as host:
        first = host.call("wait")
        await gate.began.wait()
        second = host.send(subscribe="a://b")
        assert (await host.text(second)).startswith(str(mcp.INVALID_PARAMS))
        gate.opened.set()
        assert await host.text(first) == '"done"'


# -- passed through ---------------------------------------------------------------------------------------------------


class Passed:
    """The tools of a fake legacy server of which one waits for the test, and the others fail."""

    def __init__(self) -> None:
        self.began, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, turn: Turn) -> None:
        match turn.body["params"]["name"]:
            case "wait":
                await turn.notify("notifications/message", {"level": "info", "data": "begun"})
                self.began.set()
                await self.opened.wait()
                await turn.result(text("done"))
            case "ask":
                await turn.say({"id": "q", "method": "ping", "params": {}})
                await self.opened.wait()
                await turn.result(text("done"))
            case "break":
                await turn.reset()
            case "hang":
                await turn.for_ever()
            case _:
                await turn.result(text("hi"))


@CLIENTS
@pytest.mark.parametrize(("tool", "words"), [("break", "broke the connection"), ("hang", "did not begin its answer")])
async def test_a_call_that_fails_on_its_way_through_costs_no_other_call(
    client: str, tool: str, words: str, begin: Start, upstream: FakeUpstream
) -> None:
    stand = await begin(timeouts={"idle_seconds": 1})
    gate = Passed()
    upstream.version = NEWEST
    upstream.tool(gate)
    async with beside(client, stand.url) as host:
        first = host.call("wait")
        await gate.began.wait()
        second = await host.text(host.call(tool))
        assert second.startswith(str(mcp.INTERNAL_ERROR)), second
        assert words in second
        gate.opened.set()
        assert await host.text(first) == "done"
        assert await host.text(host.call("echo")) == "hi"


@CLIENTS
async def test_an_answer_that_is_lost_on_its_way_through_costs_no_call(
    client: str, begin: Start, upstream: FakeUpstream
) -> None:
    stand = await begin()
    gate = Passed()
    upstream.version = NEWEST
    upstream.tool(gate)
    upstream.on("answer", Turn.reset)
    async with beside(client, stand.url) as host:
        first = host.call("ask")
        _ = await upstream.saw("answer")
        await eventually(lambda: stand.metric(PASSED, era="legacy", outcome="unreachable") == 1, "it has failed")
        assert await host.text(host.call("echo")) == "hi"
        gate.opened.set()
        assert await host.text(first) == "done"

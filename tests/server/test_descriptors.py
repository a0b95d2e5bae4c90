"""A process that has used up its file descriptors."""

import asyncio
import json
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway import world
from tests.support.fake_upstream import FakeUpstream, ask, text
from tests.support.gateway_process import Gateway, gateway
from tests.support.workbench import ACCEPT, Client, Reply

MOST = 64
"""More than a gateway without calls has open, and those that it keeps: 24."""
_BEGUN = (
    b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Accept: application/json, text/event-stream\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
)


@asynccontextmanager
async def exhausted(gw: Gateway) -> AsyncIterator[aiohttp.ClientSession]:
    """Open connections until the gateway closes one at once; yield a client without connections."""
    assert gw.process is not None
    resource.prlimit(gw.process.pid, resource.RLIMIT_NOFILE, (MOST, MOST))
    async with gw.http.get(f"{gw.base}/nowhere"), AsyncExitStack() as stack:  # `gw.http` keeps its connection
        for _ in range(MOST):
            reader, writer = await asyncio.open_connection(*gw.config["listen"].split(":"))
            _ = stack.callback(writer.close)
            try:
                writer.write(_BEGUN)  # its connection would end with its reply
                _ = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
        else:
            pytest.fail("no connection was refused")
        yield await stack.enter_async_context(aiohttp.ClientSession())


@pytest.mark.processes
async def test_a_process_without_free_descriptors_still_serves_its_operator(upstream: FakeUpstream) -> None:
    async with gateway(upstream.url) as gw, exhausted(gw) as operator:
        refused = await Client(gw.http, gw.url).call()
        assert refused.outcome == (503, -32603, "busy")
        assert "no file descriptor left" in refused.error["message"]
        assert not gw.log("upstream.failed")
        async with operator.get(f"{gw.admin}/metrics") as response:
            metrics = await response.text()
        assert f"process_max_fds {MOST}" in metrics
        (line,) = [line for line in metrics.splitlines() if line.startswith("process_open_fds ")]
        async with operator.get(f"{gw.admin}/status.json") as response:
            status = await response.json()
        (process,), (route,), (recent,) = status["processes"], status["routes"], status["errors"]
        assert route["health"] == "unknown", "the upstream was not even asked"
        assert recent["fix"].startswith(f"Raise ulimit -n ({MOST} when it happened)")
        assert 'mcp_gateway_upstream_errors_total{kind="upstream_unreachable",route="/mcp"} 0.0' in metrics
        assert float(line.split()[1]) == process["open_files"]
        assert (process["open_files_limit"], response.status) == (MOST - 24, 200)
        async with operator.get(f"{gw.admin}/status") as response:
            assert response.status == 200


@pytest.mark.processes
async def test_a_process_holds_as_many_calls_as_its_caution_says(upstream: FakeUpstream) -> None:
    upstream.tool(ask)
    async with gateway(upstream.url) as gw:
        assert gw.process is not None
        resource.prlimit(gw.process.pid, resource.RLIMIT_NOFILE, (MOST, MOST))
        client, held = Client(gw.http, gw.url), list[Reply]()
        while "error" not in (reply := await client.call()).final:
            held.append(reply)
        assert reply.outcome == (503, -32603, "busy")
        assert (await gw.metric("mcp_gateway_sessions_refused_total", limit="ulimit -n")) == 1
        gw.process.send_signal(signal.SIGHUP)  # a caution is for the log of every reload, too
        await gw.until(lambda: any(f"ulimit -n is {MOST}" in line["note"] for line in gw.log("config.caution")), "it")
        said = re.search(r"refused when (\d+) are held", gw.log("config.caution")[-1]["note"])
        assert said is not None
        assert 0 <= int(said[1]) - len(held) <= 2, "the connections of client and operator take two descriptors"
        answers = await asyncio.gather(*(Client(gw.http, gw.url).answer(asked) for asked in held[:4]))
        answers += [await client.answer(asked) for asked in held[4:]]
        assert {answer.text for answer in answers} == {json.dumps(ACCEPT)}


@pytest.mark.processes
async def test_a_connection_with_one_of_the_last_descriptors_ends_with_its_reply(upstream: FakeUpstream) -> None:
    async with gateway(upstream.url) as gw, AsyncExitStack() as stack:
        assert gw.process is not None
        resource.prlimit(gw.process.pid, resource.RLIMIT_NOFILE, (MOST, MOST))
        heads = list[bytes]()
        for _ in range(MOST):
            reader, writer = await asyncio.open_connection(*gw.config["listen"].split(":"))
            _ = stack.callback(writer.close)
            writer.write(b"GET /nowhere HTTP/1.1\r\nHost: gateway\r\n\r\n")
            heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        assert b"connection: close" not in heads[0]
        assert b"connection: close" in heads[-1]


@pytest.mark.processes
async def test_idle_sessions_give_way_to_new_ones_while_descriptors_are_short(upstream: FakeUpstream) -> None:
    upstream.tool(lambda turn: turn.result(text("x")))
    async with gateway(upstream.url) as gw:
        assert gw.process is not None
        resource.prlimit(gw.process.pid, resource.RLIMIT_NOFILE, (MOST, MOST))
        for number in range(MOST):
            assert (await Client(gw.http, gw.url, f"Bearer {number}").call()).text == "x", number
        upstream.tool(ask)
        client, held = Client(gw.http, gw.url), 0
        while "error" not in (await client.call()).final:
            held += 1
        assert held > 4
        assert await gw.metric("mcp_gateway_sessions", state="idle") == 0


@pytest.mark.processes
async def test_calls_at_once_use_up_the_idle_sessions_before_one_is_refused(upstream: FakeUpstream) -> None:
    most = 256
    upstream.tool(lambda turn: turn.result(text("x")))
    async with gateway(upstream.url) as gw:
        assert gw.process is not None
        resource.prlimit(gw.process.pid, resource.RLIMIT_NOFILE, (most, most))
        for number in range(180):
            assert (await Client(gw.http, gw.url, f"Bearer {number}").call()).text == "x", number
        upstream.tool(ask)
        outcomes = list[object]()

        async def fill() -> None:
            client = Client(gw.http, gw.url)
            while not outcomes:
                reply = await client.call()
                if "error" in reply.final:
                    outcomes.append(reply.outcome)

        _ = await asyncio.gather(*(fill() for _ in range(8)))
        assert set(outcomes) == {(503, -32603, "busy")}
        assert await gw.metric("mcp_gateway_sessions", state="idle") == 0
        assert await gw.metric("mcp_gateway_held_calls") >= 80, "of 96, less 8 connections of clients"


@pytest.mark.parametrize("told", ["of Linux 6.2", "not", "nowhere"])
def test_descriptors_are_counted_whatever_the_system_tells(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "fd"
    if told == "not":
        empty.touch()
    if told != "of Linux 6.2":
        monkeypatch.setattr(world, "OPEN_DESCRIPTORS", empty)
    with socket.socket() as new:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (new.fileno() + 400, -1))
        assert 100 < world.free_descriptors() < 400, "less 16 and an eighth"
        monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
        assert world.free_descriptors() > 1_000_000


def test_a_new_socket_is_spare_if_few_numbers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as new:
        number = new.fileno()
        for limit, is_spare in ((number + 16, True), (number + 17, False), (resource.RLIM_INFINITY, False)):
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
            assert world.is_spare(new) is is_spare, limit

"""A process that has used up its file descriptors."""

import asyncio
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from gateway import world
from tests.support.fake_upstream import FakeUpstream, ask
from tests.support.gateway_process import Gateway, gateway
from tests.support.workbench import Client

MOST = 64
"""More than a gateway without calls has open, and the spare ones."""


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
                writer.write(b"GET /nowhere HTTP/1.1\r\nHost: gateway\r\n\r\n")
                _ = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
        else:
            pytest.fail("no connection was refused")
        yield await stack.enter_async_context(aiohttp.ClientSession())


@pytest.mark.processes
async def test_a_process_without_free_descriptors_still_serves_its_operator(upstream: FakeUpstream) -> None:
    async with gateway(upstream.url) as gw, exhausted(gw) as operator:
        told = f"cannot be reached: the gateway has no file descriptor left (ulimit -n {MOST})"
        error = (await Client(gw.http, gw.url).call()).error
        assert (error["data"]["reason"], error["message"].endswith(told)) == ("upstream_unreachable", True)
        (logged,) = gw.log("upstream.failed")
        assert logged["cause"].endswith(told)
        assert logged["fix"].startswith("raise the hard limit (LimitNOFILE, ")
        async with operator.get(f"{gw.admin}/metrics") as response:
            metrics = await response.text()
        assert f"process_max_fds {MOST}" in metrics
        (line,) = [line for line in metrics.splitlines() if line.startswith("process_open_fds ")]
        async with operator.get(f"{gw.admin}/status.json") as response:
            status = await response.json()
        (process,), (route,), (recent,) = status["processes"], status["routes"], status["errors"]
        assert route["health"] == "unknown", "the upstream was not even asked"
        assert recent["fix"].startswith("Raise the hard limit")
        assert 'mcp_gateway_upstream_errors_total{kind="upstream_unreachable",route="/mcp"} 0.0' in metrics
        assert float(line.split()[1]) == process["open_files"]
        assert (process["open_files_limit"], response.status) == (MOST - 16, 200)
        async with operator.get(f"{gw.admin}/status") as response:
            assert response.status == 200


@pytest.mark.processes
async def test_a_process_holds_as_many_calls_as_its_caution_says(upstream: FakeUpstream) -> None:
    upstream.tool(ask)
    async with gateway(upstream.url) as gw:
        assert gw.process is not None
        resource.prlimit(gw.process.pid, resource.RLIMIT_NOFILE, (MOST, MOST))
        client, held = Client(gw.http, gw.url), 0
        while "error" not in (reply := await client.call()).final:
            held += 1
        assert "no file descriptor left" in reply.error["message"]
        gw.process.send_signal(signal.SIGHUP)  # a caution is for the log of every reload, too
        await gw.until(lambda: any(f"ulimit -n is {MOST}" in line["note"] for line in gw.log("config.caution")), "it")
        said = re.search(r"fail when (\d+) are held", gw.log("config.caution")[-1]["note"])
        assert said is not None
        assert 0 <= int(said[1]) - held <= 2, "the connections of the client and the operator take two descriptors"


def test_a_new_socket_is_spare_if_few_numbers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as new:
        number = new.fileno()
        for limit, is_spare in ((number + 16, True), (number + 17, False), (resource.RLIM_INFINITY, False)):
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
            assert world.is_spare(new) is is_spare, limit

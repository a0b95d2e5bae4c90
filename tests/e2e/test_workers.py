"""Several processes that share `listen`: all serve, one scrape counts all, and none is left behind.

No test knows a pid but from the supervisor's log and /proc. Where no upstream is needed there is none: a body that is
no request is refused, and counted, by the worker that the kernel gave the connection to.
"""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.protocol import mcp
from tests.parts.launch import is_alive
from tests.support.gateway_process import (
    FAILURES,
    START_SECONDS,
    STATE_KEY,
    Gateway,
    gateway,
    merged,
)

NOBODY = "http://127.0.0.1:1/mcp"
REFUSED = "mcp_gateway_downstream_rejected_total"
RESTARTS = "mcp_gateway_worker_restarts_total"
SPREAD = 200
"""So many connections that each of two workers surely had one."""


@pytest.fixture(autouse=True)
def _short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A supervisor that is killed leaves the folder of the sockets behind."""
    with tempfile.TemporaryDirectory(prefix="mrtr-workers-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


def supervisor(gw: Gateway) -> int:
    assert gw.process is not None
    return gw.process.pid


def children(pid: int) -> set[int]:
    """All children: the workers, and multiprocessing's resource tracker."""
    with suppress(FileNotFoundError):
        return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()


def workers(gw: Gateway) -> dict[int, int]:
    """The newest pid by number, as the supervisor's log tells; each must be a child of it."""
    return {line["worker"]: line["pid"] for line in gw.log("worker.started")}


async def gone(gw: Gateway, pids: set[int], seconds: float = START_SECONDS) -> None:
    await gw.until(lambda: not any(map(is_alive, pids)), f"all of {pids} have ended", seconds)


async def refused(gw: Gateway, times: int = 1) -> None:
    """Send requests that are not modern, each over a new connection."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        for _ in range(times):
            async with http.post(gw.url, data=b"{}", headers={mcp.PROTOCOL_VERSION: mcp.MODERN}) as response:
                assert response.status == 400


async def own(gw: Gateway) -> list[float]:
    """The refusals of each worker, from its own listener, whose address is in the log."""
    newest = {line["replica"]: line["admin"] for line in gw.log("server.started")}
    return [await asked(address) for address in newest.values()]


async def asked(address: str) -> float:
    connector = aiohttp.UnixConnector(address.removeprefix("unix:"))
    async with aiohttp.ClientSession(connector=connector) as http, http.get("http://worker/metrics") as response:
        text = await response.text()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(REFUSED))


@asynccontextmanager
async def starting(**overrides: Any) -> AsyncIterator[Gateway]:
    """A program whose supervisor has started, but perhaps not its workers."""
    async with gateway(NOBODY, check=False, **overrides) as gw:
        await gw.end()
        (gw.directory / "stderr").unlink()
        task = asyncio.get_running_loop().create_task(gw.start())
        try:
            await gw.until_logged("worker.started", 2)
            yield gw
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def no_traceback(gw: Gateway) -> None:
    assert not gw.errors(), gw.tail()
    assert "Traceback" not in gw.stderr


# Serving.


async def test_all_workers_serve_and_one_scrape_counts_all_requests() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        pids = workers(gw)
        assert set(pids) == {0, 1}
        assert set(pids.values()) < children(supervisor(gw))
        await refused(gw, SPREAD)
        counts = await own(gw)
        assert all(counts), counts
        assert sum(counts) == await gw.metric(REFUSED) == SPREAD
        assert await gw.metric(RESTARTS) == 0
        assert await gw.metric("mcp_gateway_build_info") == 1
        assert await gw.metric("mcp_gateway_held_calls_limit") == 20_000


async def test_a_single_worker_runs_without_a_child_process() -> None:
    async with gateway(NOBODY) as gw:
        await refused(gw)
        assert not children(supervisor(gw))
        assert not gw.log("worker.started")


async def test_workers_without_keys_share_one_and_log_that_once() -> None:
    async with gateway(NOBODY, workers=2, state={"keys": []}) as gw:
        assert len(gw.log("config.loaded")) == 1
        (one, two) = gw.log("server.started")
        assert one["key_ids"] == two["key_ids"]
    async with gateway(NOBODY, workers=2, state={"keys": [STATE_KEY]}) as gw:
        assert not gw.log("config.loaded")


# One worker dies.


async def test_a_worker_that_is_killed_is_started_again_and_the_others_serve() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        await refused(gw, SPREAD)
        before = workers(gw)
        assert await gw.metric(REFUSED) == SPREAD
        os.kill(before[0], signal.SIGKILL)
        served = lost = 0
        while len(gw.log("worker.started")) < 3 or await gw.ready() != 200:
            lost += 1
            with suppress(aiohttp.ClientError):  # connections that the kernel had already given to the dead worker
                await refused(gw)
                served += 1
                lost = 0
            assert await gw.metric(REFUSED) >= SPREAD + served - 1, "a counter went backwards"
            assert lost < 20, gw.explain("no process listens")
        assert served
        after = workers(gw)
        assert after[1] == before[1]
        assert after[0] != before[0]
        (line,) = gw.log("worker.ended")
        assert (line["worker"], line["exit_code"], line["level"]) == (0, -signal.SIGKILL, "warning")
        assert await gw.metric(RESTARTS) == 1
        await refused(gw, SPREAD)
        assert all(await own(gw))
        assert await gw.metric(FAILURES) == 0


async def test_a_worker_that_keeps_dying_is_restarted_with_backoff() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        for restarts in range(1, 5):
            os.kill(workers(gw)[1], signal.SIGKILL)
            await gw.until_logged("worker.started", 2 + restarts)
        assert [line["again_in_seconds"] for line in gw.log("worker.ended")] == [0.1, 0.2, 0.4, 0.8]
        await gw.until_ready()


async def test_a_worker_that_gets_sigterm_is_started_again() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        os.kill(workers(gw)[1], signal.SIGTERM)
        await gw.until_logged("worker.started", 3)
        await gw.until_ready()
        (line,) = gw.log("worker.ended")
        assert (line["worker"], line["exit_code"]) == (1, 0)


async def test_the_host_is_unready_while_one_worker_is_missing() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        stopped = workers(gw)[0]
        os.kill(stopped, signal.SIGSTOP)
        async with asyncio.timeout(START_SECONDS):  # it does not wait for ever
            assert await gw.ready() == 503
        async with gw.http.get(f"{gw.admin}/readyz") as response:
            assert await response.text() == "not ready: worker 0\n"
        async with gw.http.get(f"{gw.admin}/healthz") as response:
            assert response.status == 200
        os.kill(stopped, signal.SIGCONT)
        await gw.until_ready()


# The end.


async def test_a_stop_ends_all_workers_and_leaves_nothing() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        pids = children(supervisor(gw))
        (directory,) = {Path(line["admin"].removeprefix("unix:")).parent for line in gw.log("server.started")}
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
        gw.terminate()
        assert await gw.exited() == 0
        assert len(gw.log("server.stopped")) == 2
        assert len(gw.log("server.draining")) == 2, "each worker was told once"
        await gone(gw, pids)
        assert not directory.exists()


async def test_a_draining_host_stays_unready_and_a_second_signal_ends_its_workers() -> None:
    async with gateway(NOBODY, workers=2, hold={"drain_delay_seconds": 60}) as gw:
        await gw.drain()
        async with gw.http.get(f"{gw.admin}/readyz") as response:
            assert await response.text() == "draining\n"
        await gw.until_logged("server.draining", 2)
        await refused(gw)
        assert await gw.metric(REFUSED) == 1
        gw.terminate()
        assert await gw.exited(5) == 0
        assert len(gw.log("server.stopped")) == 2


async def test_an_interrupt_reaches_the_workers_as_an_interrupt() -> None:
    """An interrupt does not wait for load balancers: the delay tells which signal the workers got."""
    async with gateway(NOBODY, workers=2, hold={"drain_delay_seconds": 60}) as gw:
        os.kill(supervisor(gw), signal.SIGINT)
        assert await gw.exited(5) == 0
        assert [line["delay_seconds"] for line in gw.log("server.draining")] == [0, 0]


async def test_a_terminal_does_not_reach_the_workers() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        for pid in workers(gw).values():
            assert os.getpgid(pid) == os.getsid(pid) == pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_while_workers_start_does_not_count_as_a_crash(number: signal.Signals) -> None:
    async with starting(workers=2) as gw:
        pids = children(supervisor(gw))
        for pid in (supervisor(gw), *workers(gw).values()):  # as a terminal would, before they have a session
            os.kill(pid, number)
        assert await gw.exited() == 0
        no_traceback(gw)
        await gone(gw, pids)


async def test_a_reload_reaches_all_workers_including_those_that_start() -> None:
    async with starting(workers=2) as gw:
        os.kill(supervisor(gw), signal.SIGHUP)
        await gw.until_logged("server.started", 2)
        both = {line["replica"] for line in gw.log("server.started")}
        await gw.until(lambda: both <= {line.get("replica") for line in gw.log("config.loaded")}, "both read the file")
        await gw.until_ready()
        assert not gw.log("worker.ended")


async def test_a_worker_that_starts_after_a_reload_has_the_new_configuration() -> None:
    """The file may be invalid by then, so the supervisor keeps the configuration in force."""
    limit = "mcp_gateway_held_calls_limit"
    async with gateway(NOBODY, check=False, workers=2, hold={"max_calls": 5}) as gw:
        path = gw.directory / "gateway.yaml"
        path.write_text(json.dumps(merged(gw.config, {"hold": {"max_calls": 7}})))
        os.kill(supervisor(gw), signal.SIGHUP)
        await gw.until_metric(limit, lambda both: both == 14)
        path.write_text("broken: true")
        os.kill(supervisor(gw), signal.SIGHUP)
        await gw.until_logged("config.rejected", 3)  # of the supervisor and both workers
        os.kill(workers(gw)[0], signal.SIGKILL)
        await gw.until_logged("worker.started", 3)
        await gw.until_ready()
        assert await gw.metric(limit) == 14


async def test_no_worker_outlives_its_supervisor() -> None:
    async with gateway(NOBODY, workers=2) as gw:
        pids = children(supervisor(gw))
        # The worker cannot do anything about it.
        os.kill(workers(gw)[1], signal.SIGSTOP)
        await gw.kill()
        await gone(gw, pids)


async def test_a_starting_worker_does_not_outlive_its_supervisor() -> None:
    async with starting(workers=2) as gw:
        pids = children(supervisor(gw))
        await gw.kill()
        await gone(gw, pids)


@pytest.mark.parametrize(("delay_seconds", "signals"), [(0, 1), (60, 2)])
async def test_a_worker_that_does_not_end_is_killed(delay_seconds: float, signals: int) -> None:
    hold = {"drain_seconds": 0, "drain_delay_seconds": delay_seconds}
    async with gateway(NOBODY, check=False, workers=2, hold=hold, timeouts={"cancel_seconds": 0.1}) as gw:
        pids = children(supervisor(gw))
        os.kill(workers(gw)[0], signal.SIGSTOP)
        for number in range(signals):
            gw.terminate()
            # The other worker got it too: two signals at once count as one.
            await gw.until_logged("server.stopped" if number else "server.draining")
        assert await gw.exited() == 1
        await gone(gw, pids)
        (line,) = gw.log("worker.ended")
        assert line["worker"] == 0
        assert "killed" in line["note"]

"""What workers say of themselves, as one; with workers that are this process's own listeners on unix sockets."""

import asyncio
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.probes import Probes
from gateway.admin.reload import Reload
from gateway.config import InForce, Limits, Timeouts, parse
from gateway.http.server.listener import Listener
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, TextResponse
from gateway.http.server.traffic import Traffic
from gateway.plugins.workers import workers_view
from gateway.plugins.workers.workers_view import Overview
from gateway.runtime.tasks import Tasks
from gateway.telemetry import METRICS_TYPE, Metrics
from tests.support.workbench import later

TASKS = "mcp_gateway_task_failures_total"
LIMIT = "mcp_gateway_held_calls_limit"
ANSWER_SECONDS = 0.2
CONFIG = parse("{workers: 2, replica: {id: gw-1}, routes: [{upstream: {url: 'http://127.0.0.1:1/mcp'}}]}", "test", {})


class FakeWorker(Probes):
    """A worker's admin listener, with a switch for each way to be absent."""

    def __init__(self, directory: Path, number: int) -> None:
        super().__init__(InForce(CONFIG))
        self.address = f"unix:{directory}/admin-{number}.sock"
        self.metrics = Metrics("1", ["/mcp"])
        self.metrics.held_calls_limit.set(10)
        self.ready = True
        self.views = 0
        """How often it was asked for the status."""
        self.free = asyncio.Event()
        """Cleared: it takes requests and does not answer."""
        self.free.set()
        self.asked = asyncio.Event()
        self._listener = Listener(
            self.handle, self.address, Traffic(InForce(Limits()), InForce(Timeouts()), Metrics("0"))
        )

    async def unready(self) -> str | None:
        return None if self.ready else "draining"

    async def exposition(self) -> bytes:
        return self.metrics.render()

    async def page(self, http: HttpRequest) -> Response:
        self.views += 1
        return TextResponse(f"{Path(self.address).stem} {http.head.path} {http.head.url.query.get('route')}")

    async def handle(self, http: HttpRequest) -> Response:
        self.asked.set()
        await self.free.wait()
        return await super().handle(http)

    def work(self, times: int) -> None:
        for _ in range(times):
            self.metrics.task_failures.inc()

    async def start(self) -> None:
        assert await self._listener.start() == self.address

    async def end(self) -> None:
        await self._listener.close()


class Host:
    """A supervisor's view of two workers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.own = Metrics("1")
        in_force = InForce(CONFIG)
        self.reload = Reload(None, in_force, Mock(), Tasks(self.own))
        self.overview = Overview(self.own, in_force, self.reload)
        self.workers: list[FakeWorker] = []

    async def start(self, number: int) -> FakeWorker:
        worker = FakeWorker(self.directory, number)
        await worker.start()
        self.workers.append(worker)
        self.overview.began(number, worker.address)
        return worker

    async def die(self, number: int, worker: FakeWorker) -> None:
        await worker.end()
        self.overview.ended(number)

    async def value(self, name: str) -> float:
        text = (await self.overview.exposition()).decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    monkeypatch.setattr(workers_view, "_ANSWER_SECONDS", ANSWER_SECONDS)
    made = Host(tmp_path)
    yield made
    for worker in made.workers:
        worker.free.set()
        await worker.end()


async def test_one_scrape_counts_all_processes(host: Host) -> None:
    for number in range(2):
        (await host.start(number)).work(number + 1)
    host.own.task_failures.inc()
    assert await host.value(TASKS) == 1 + 2 + 1
    assert await host.value(LIMIT) == 20
    assert await host.value("mcp_gateway_build_info") == 1
    one = next(iter(host.workers)).metrics.render().decode()
    files = next(float(line.split()[1]) for line in one.splitlines() if line.startswith("process_max_fds"))
    assert await host.value("process_max_fds") == files, "each has as many, and the fullest one counts"


async def test_counters_of_a_worker_that_died_stay_and_its_gauges_go(host: Host) -> None:
    first, other = await host.start(0), await host.start(1)
    first.work(5)
    other.work(2)
    assert await host.value(TASKS) == 7
    await host.die(0, first)
    assert await host.value(TASKS) == 7
    assert await host.value(LIMIT) == 10
    second = await host.start(0)
    assert await host.value(TASKS) == 7
    second.work(1)
    assert await host.value(TASKS) == 8
    await host.die(0, second)
    _ = await host.start(0)
    assert await host.value(TASKS) == 8


async def test_a_worker_that_does_not_answer_takes_no_counter_back(host: Host) -> None:
    worker = await host.start(0)
    worker.work(3)
    assert await host.value(TASKS) == 3
    worker.free.clear()
    assert await host.value(TASKS) == 3
    assert await host.value(LIMIT) == 0
    worker.free.set()
    worker.work(1)
    assert await host.value(TASKS) == 4
    assert await host.value(LIMIT) == 10


async def test_the_answer_of_a_worker_that_died_meanwhile_does_not_count(host: Host) -> None:
    """It could not be told again."""
    dying, slow = await host.start(0), await host.start(1)
    dying.work(1)
    assert await host.value(TASKS) == 1
    dying.work(1)
    slow.free.clear()
    slow.asked.clear()
    scrape = later(host.value(TASKS))
    await slow.asked.wait()
    host.overview.ended(0)
    slow.free.set()
    assert await scrape == 1
    assert await host.value(TASKS) == 1


async def test_scrapes_wait_for_one_another(host: Host) -> None:
    """Or the older answer could come last."""
    worker = await host.start(0)
    worker.free.clear()
    loop = asyncio.get_running_loop()
    first, second = loop.create_task(host.value(TASKS)), loop.create_task(host.value(TASKS))
    await worker.asked.wait()
    worker.asked.clear()
    assert await first == 0, "nobody answered in time"
    assert not worker.asked.is_set(), "the second one had not asked"
    assert await second == 0
    assert worker.asked.is_set()


async def test_the_supervisor_is_ready_only_if_every_worker_is(host: Host) -> None:
    assert await host.overview.unready() == "not ready: worker 0, 1"
    assert not host.overview.proven
    one, two = await host.start(0), await host.start(1)
    assert await host.overview.unready() is None
    two.ready = False
    assert await host.overview.unready() == "not ready: worker 1"
    assert host.overview.proven == {0, 1}
    two.ready = True
    one.free.clear()
    assert await host.overview.unready() == "not ready: worker 0"
    one.free.set()
    assert await host.overview.unready() is None
    host.reload.close()
    assert await host.overview.unready() == "draining"


@asynccontextmanager
async def served(probes: Probes) -> AsyncIterator[str]:
    listener = Listener(probes.handle, "127.0.0.1:0", Traffic(InForce(Limits()), InForce(Timeouts()), Metrics("0")))
    yield f"http://{await listener.start()}"
    await listener.close()


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with http.get(url) as response:
        return response.status, await response.text()


async def test_the_supervisor_answers_as_one_process_does(host: Host) -> None:
    _ = await host.start(0)
    async with served(host.overview) as url, aiohttp.ClientSession() as http:
        assert await get(http, f"{url}/healthz") == (200, "ok\n")
        assert await get(http, f"{url}/readyz") == (503, "not ready: worker 1\n")
        _ = await host.start(1)
        assert await get(http, f"{url}/readyz") == (200, "ready\n")
        status, text = await get(http, f"{url}/metrics")
        assert (status, text.endswith("\n")) == (200, True)
        assert 'mcp_gateway_held_calls{route="/mcp"} 0.0' in text
        assert (await get(http, f"{url}/other"))[0] == 404
        async with http.get(f"{url}/status", headers={"Host": "evil.example"}) as response:
            assert response.status == 403
        async with http.get(f"{url}/metrics") as response:
            assert response.headers["Content-Type"] == METRICS_TYPE
        async with http.post(f"{url}/readyz") as response:
            assert response.status == 405


async def test_the_worker_that_answers_tells_the_status(host: Host) -> None:
    async with served(host.overview) as url, aiohttp.ClientSession() as http:
        assert (await get(http, f"{url}/status"))[0] == 503
        hung, other = await host.start(0), await host.start(1)
        hung.free.clear()
        assert await get(http, f"{url}/status.json") == (200, "admin-1 /status.json None")
        assert await get(http, f"{url}/status?route=/a%20b%26") == (200, "admin-1 /status /a b&")
        hung.free.set()
        _ = await get(http, f"{url}/status")
        assert hung.views + other.views == 3, "one asks its siblings"


# The listener on a unix socket.


async def test_a_socket_is_for_its_owner_and_goes_with_its_listener(tmp_path: Path) -> None:
    worker = FakeWorker(tmp_path, 0)
    path = tmp_path / "admin-0.sock"
    await worker.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await worker.end()
    assert not path.exists()


async def test_a_socket_that_a_crash_left_is_replaced(tmp_path: Path) -> None:
    address = tmp_path / "admin-0.sock"
    program = f"import socket; socket.socket(socket.AF_UNIX).bind({str(address)!r})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await process.wait() == 0
    assert address.is_socket()
    worker = FakeWorker(tmp_path, 0)
    await worker.start()
    await worker.end()


async def test_a_socket_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    worker, other = FakeWorker(tmp_path, 0), FakeWorker(tmp_path, 0)
    await worker.start()
    with pytest.raises(OSError, match="admin-0"):
        await other.start()
    await other.end()
    assert (tmp_path / "admin-0.sock").is_socket()
    await worker.end()


async def test_a_file_that_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "admin-0.sock").write_text("precious")
    with pytest.raises(OSError, match="admin-0"):
        await FakeWorker(tmp_path, 0).start()
    assert (tmp_path / "admin-0.sock").read_text() == "precious"

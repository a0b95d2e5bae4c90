"""A real Prometheus with the configuration in deploy/.

async with prometheus(["127.0.0.1:20001"]) as server:
    found = await server.query("sum(up)")
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.parts.launch import REPOSITORY, free_port, running
from tests.support.cluster import replaced

DIRECTORY: Final = REPOSITORY / "deploy" / "prometheus"
START_SECONDS: Final = 20.0
INTERVAL: Final = "1s"


def installed() -> bool:
    return all(map(shutil.which, ("prometheus", "promtool")))


def configuration(targets: Sequence[str]) -> str:
    """Only addresses and intervals differ from the file."""
    text = (DIRECTORY / "prometheus.yml").read_text()
    given = "[" + ", ".join(f'"{target}"' for target in targets) + "]"
    text = replaced(text, '["10.0.0.11:9464", "10.0.0.12:9464", "10.0.0.13:9464"]', given)
    for name in ("scrape_interval", "evaluation_interval"):
        text = replaced(text, f"{name}: 15s", f"{name}: {INTERVAL}")
    return text


@dataclass
class Prometheus:
    """One server and its API."""

    http: aiohttp.ClientSession
    base: str
    log: Path

    async def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer; raises AssertionError with Prometheus' own message if there is none."""
        async with self.http.get(f"{self.base}/api/v1/{path}", params=parameters) as response:
            said = await response.json()
        assert said["status"] == "success", f"{parameters}: {said}"
        return said["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Evaluate it now: series with `metric` and `value`."""
        found: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return found

    async def label_values(self, label: str, selector: str) -> list[str]:
        """The values that a dashboard's variable would offer."""
        values: list[str] = await self.get(f"label/{label}/values", **{"match[]": selector})
        return values

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 20.0) -> None:
        """Poll until a condition holds; raise AssertionError, with the log, after a time limit."""
        try:
            async with asyncio.timeout(seconds):
                while not await condition():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not in {seconds} s: {what}; the log:\n{self.log.read_text()}") from None


@asynccontextmanager
async def prometheus(targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes these addresses every second."""
    with tempfile.TemporaryDirectory(prefix="mrtr-prometheus-") as name:
        directory, port = Path(name), free_port()
        shutil.copy(DIRECTORY / "alerts.yml", directory)
        (directory / "prometheus.yml").write_text(configuration(targets))
        command = ("prometheus", f"--config.file={directory / 'prometheus.yml'}")
        options = (f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{port}")
        with (directory / "log").open("wb") as log:
            async with (
                running(*command, *options, cwd=directory, stdout=log, stderr=log),
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
            ):
                server = Prometheus(http, f"http://127.0.0.1:{port}", directory / "log")

                async def ready() -> bool:
                    with suppress(aiohttp.ClientError):
                        async with http.get(f"{server.base}/-/ready") as response:
                            return response.status == 200
                    return False

                await server.until(ready, "Prometheus is ready", START_SECONDS)
                yield server

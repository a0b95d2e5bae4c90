"""Start the real gateway, and check that it ends properly.

    async with gateway(server.url, hold={"ttl_seconds": 1}) as gw:
        ...  # talk to gw.url
        await gw.settled()
        assert await gw.metric("mcp_gateway_held_calls") == 0

Keyword arguments are sections of the configuration; `route` adds keys to the one route there is without `routes`.
Leaving the context sends SIGTERM: the program must then exit with 0, and must have logged no error.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.parts.launch import REPOSITORY, die_with_parent, free_port

START_SECONDS = 60.0
STOP_SECONDS = 30.0
PATIENCE_SECONDS = 30.0
"""For what happens at once on an idle machine."""
SHOWN_LINES = 40

STATE_KEY = "0f" * 32
DEFAULTS: dict[str, Any] = {
    "state": {"keys": [STATE_KEY]},
    "log": {"level": "info", "format": "json"},
    # A drain at the end of a test does not wait.
    "hold": {"drain_delay_seconds": 0, "drain_seconds": 0.2},
}
FAILURES = "mcp_gateway_task_failures_total"
ROUNDS = "mcp_server_operation_duration_seconds_count"
HELD = "mcp_gateway_held_calls"
SESSIONS = "mcp_gateway_sessions"


class GatewayError(AssertionError):
    """The gateway did not start, settle or end properly; the message ends with its log."""


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lay one configuration over another, section by section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def configuration(upstream: str | dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the whole configuration of a test's gateway, on free ports."""
    over = dict(overrides)
    where = {"url": upstream} if isinstance(upstream, str) else upstream
    route = {"path": "/mcp", "upstream": where, **over.pop("route", {})}
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("listen", "admin")}
    return merged({**addresses, "routes": [route], **DEFAULTS}, over)


Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Values by (sample name, labels)."""


def series(scraped: str) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }


def log_lines(log: str, **odd: str) -> list[dict[str, Any]]:
    """A line that is not JSON is an `odd` event of its own."""
    lines = []
    for line in filter(None, log.split("\n")):
        try:
            lines.append(json.loads(line))
        except ValueError:
            lines.append({"event": "(no JSON)", "text": line, **odd})
    return lines


class Front(ABC):
    """What clients connect to and tests inspect: one gateway, or a cluster."""

    config: dict[str, Any]

    @property
    @abstractmethod
    def base(self) -> str: ...

    @property
    def url(self) -> str:
        """The first route."""
        return self.base + str(self.config["routes"][0]["path"])

    @abstractmethod
    async def metric(self, name: str, **labels: str) -> float:
        """Add up the samples of that name that have these labels; 0 when there are none."""

    async def rounds(self, method: str, outcome: str | None = None) -> int:
        """Count the requests of a method that were answered, all of them or those with one outcome."""
        labels = {"method": method} if outcome is None else {"method": method, "outcome": outcome}
        return int(await self.metric(ROUNDS, **labels))

    @abstractmethod
    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """Read the log lines so far, all or of one event."""

    @abstractmethod
    def tail(self) -> str:
        """The end of the logs."""

    def explain(self, what: str) -> GatewayError:
        """Return an error that says `what`, with the end of the log."""
        return GatewayError(f"{what}; the log ends with:\n{self.tail()}")

    async def until(self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Poll until a condition holds, which may be awaitable; raise GatewayError after a time limit."""
        deadline = time.monotonic() + seconds
        while not (await found if isinstance(found := holds(), Awaitable) else found):
            if time.monotonic() > deadline:
                raise self.explain(f"not in {seconds} s: {what}")
            await asyncio.sleep(0.02)

    async def until_metric(
        self, name: str, holds: Callable[[float], bool], *, seconds: float = PATIENCE_SECONDS, **labels: str
    ) -> None:
        """Wait until a metric has such a value."""

        async def has_it() -> bool:
            return holds(await self.metric(name, **labels))

        await self.until(has_it, f"{name} {labels}", seconds)

    async def until_logged(self, event: str, times: int = 1) -> None:
        """Wait until the log has so many lines of an event."""
        await self.until(lambda: len(self.log(event)) >= times, f"{event} {times} times")

    @abstractmethod
    async def settled(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until no call is held and no session busy."""


@dataclass
class Gateway(Front):
    """One gateway in a process of its own, always on the same ports."""

    config: dict[str, Any]
    directory: Path
    http: aiohttp.ClientSession
    process: asyncio.subprocess.Process | None = None
    killed: bool = False
    """Whether a test killed it, which makes its exit code meaningless."""
    stopped: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables besides those of the tests."""
    program: Path | None = None
    """An installed one, which is given no file, but the addresses and the upstream as options."""
    provoked: set[str] = field(default_factory=set)
    """Events that may be errors, because the test caused them."""

    @property
    def alive(self) -> bool:
        """Whether the process runs and answers."""
        return self.process is not None and self.process.returncode is None and not self.stopped

    @property
    def base(self) -> str:
        return f"http://{self.config['listen']}"

    @property
    def admin(self) -> str:
        return f"http://{self.config['admin']}"

    @property
    def stderr(self) -> str:
        path = self.directory / "stderr"
        return path.read_text(errors="replace") if path.exists() else ""

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        return [line for line in log_lines(self.stderr, level="error") if event in (None, line.get("event"))]

    def tail(self) -> str:
        return "\n".join(self.stderr.splitlines()[-SHOWN_LINES:]) or "(nothing)"

    async def start(self) -> None:
        """Start the process, and return when /readyz reports it ready."""
        self.killed = self.stopped = False
        program = (sys.executable, "-m", "gateway") if self.program is None else (str(self.program),)
        with (self.directory / "stderr").open("ab") as err:
            self.process = await asyncio.create_subprocess_exec(
                *(*program, "serve", *self._options()),
                cwd=REPOSITORY if self.program is None else self.directory,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                preexec_fn=die_with_parent,
            )
        await self.until(self.is_ready, "became ready", START_SECONDS)

    def _options(self) -> tuple[str, ...]:
        config = self.config
        if self.program is None:
            return "--config", str(self.write(json.dumps(config)))  # which is YAML too
        upstream = config["routes"][0]["upstream"]["url"]
        return "--listen", config["listen"], "--admin", config["admin"], "--upstream", upstream

    def write(self, text: str) -> Path:
        """Replace the configuration file in one step."""
        path, new = self.directory / "gateway.yaml", self.directory / "gateway.yaml.new"
        new.write_text(text)
        return new.replace(path)

    def hang_up(self) -> None:
        """Send SIGHUP and do not wait."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    async def reload(self, config: dict[str, Any] | str | None = None) -> list[dict[str, Any]]:
        """Write the file, if one is given, and have it read; return the log line of each process."""
        if config is not None:
            _ = self.write(config if isinstance(config, str) else json.dumps(config))
        workers = int(self.config.get("workers", 1))
        processes = workers + 1 if workers > 1 else 1  # the supervisor reads it too
        before = len(self._reloads())
        self.hang_up()
        await self.until(
            lambda: len(self._reloads()) >= before + processes, f"{processes} processes have read the file"
        )
        said = self._reloads()[before:]
        if isinstance(config, dict) and all(line["event"] == "config.loaded" for line in said):
            self.config = config
        return said

    def _reloads(self) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] in {"config.loaded", "config.rejected"}]

    async def ready(self) -> int | None:
        """Return the status of /readyz; None without an answer."""
        try:
            async with self.http.get(f"{self.admin}/readyz") as response:
                return response.status
        except aiohttp.ClientError:
            return None

    async def is_ready(self) -> bool:
        assert self.process is not None
        if self.process.returncode is not None:
            raise self.explain(f"ended with {self.process.returncode}")
        return await self.ready() == 200

    async def until_ready(self, status: int = 200) -> None:
        """Wait until /readyz says so, or 503 for a gateway that drains."""

        async def says_so() -> bool:
            return await self.ready() == status

        await self.until(says_so, f"/readyz says {status}", START_SECONDS)

    async def drain(self) -> None:
        """Send SIGTERM, and wait until /readyz tells of it."""
        self.terminate()
        await self.until_ready(503)

    async def metrics(self) -> Series:
        async with self.http.get(f"{self.admin}/metrics") as response:
            return series(await response.text())

    async def metric(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(v for (found, has), v in (await self.metrics()).items() if found == name and wanted <= has)

    async def settled(self, seconds: float = PATIENCE_SECONDS) -> None:
        async def idle() -> bool:
            values = await self.metrics()
            busy = sum(
                value
                for (name, labels), value in values.items()
                if name == HELD or (name == SESSIONS and ("state", "busy") in labels)
            )
            return busy == 0

        await self.until(idle, "no call held, no session busy", seconds)

    def terminate(self) -> None:
        """Send SIGTERM and do not wait."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP: the kernel still accepts connections, and the process does not answer."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def cont(self) -> None:
        """SIGCONT: continue after `stop`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    async def exited(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for the end; return the exit code."""
        assert self.process is not None
        try:
            async with asyncio.timeout(seconds):
                return await self.process.wait()
        except TimeoutError:
            raise self.explain(f"did not end in {seconds} s") from None

    async def kill(self) -> None:
        """End the process at once, as a crash would."""
        if self.process is not None and self.process.returncode is None:
            self.killed = True
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def errors(self) -> list[dict[str, Any]]:
        """Log lines that no gateway may write in a test."""
        bad = [line for line in self.log() if line.get("level") in {"error", "critical"}]
        return [line for line in bad if line["event"] not in self.provoked]

    async def end(self) -> None:
        """Send SIGTERM, and check what must be true after it."""
        assert self.process is not None
        if self.stopped:
            self.cont()
        if self.process.returncode is None:
            failures = await self.metric(FAILURES)
            self.terminate()
            code = await self.exited()
            if failures:
                raise self.explain(f"{FAILURES} is {failures:g}: {self.log('task.failed')}")
        else:
            code = 0 if self.killed else self.process.returncode
        if code:
            raise self.explain(f"exit code {code}")
        if self.errors():
            raise self.explain(f"logged errors: {self.errors()[:3]}")


@asynccontextmanager
async def gateway(
    upstream: str | dict[str, Any],
    *,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    program: Path | None = None,
    **overrides: Any,
) -> AsyncIterator[Gateway]:
    """Run a gateway in front of a url, or of an `upstream` section; `check` is false if an unclean end is expected."""
    with tempfile.TemporaryDirectory(prefix="mrtr-gateway-") as directory:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            config, where = configuration(upstream, overrides), Path(directory)
            gw = Gateway(config, where, http, environment=environment or {}, program=program)
            try:
                await gw.start()
                yield gw
                if check:
                    await gw.end()
            except BaseException as exc:
                if not isinstance(exc, GatewayError):
                    exc.add_note(f"the gateway's log ends with:\n{gw.tail()}")
                raise
            finally:
                await gw.kill()

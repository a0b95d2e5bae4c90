"""The upstream side of one process without its downstream side: sessions and their pool, over real HTTP."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Raw

from gateway.config import InForce, RouteSettings, parse
from gateway.exchange import events as on
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_url import Endpoint
from gateway.http_client.client import HttpClient
from gateway.protocol import jsonrpc, mcp
from gateway.runtime.tasks import Tasks
from gateway.seal.request_state import Whereabouts
from gateway.sessions.call import Call, PoolKey, Runner
from gateway.sessions.pool.pool import Pool
from gateway.sessions.session import Session
from gateway.telemetry import Metrics, SessionState
from gateway.upstream.channel import NO_HEADERS, Headers
from gateway.upstream.http.http_upstream import HttpUpstream, StreamTimes
from gateway.upstream.http.streamable_http import StreamableChannel
from tests.support.fake_upstream import DEADLINE
from tests.support.workbench import ALL, BACKGROUND, SHORT_TIMES, configuration, eventually

KEY = PoolKey(b"ada", b'{"name":"x","version":"1"}', json.dumps(ALL).encode(), ())
INFO = b'{"name":"fake","version":"1"}'
CALL = b'"gw-dead-1"'


class Ear:
    """The listener of a call."""

    def __init__(self) -> None:
        self.heard: list[on.Event] = []
        self.cursors: list[str | None] = []
        self.cursor: Callable[[], str | None] = lambda: None

    def hear(self, event: on.Event) -> None:
        self.heard.append(event)
        self.cursors.append(self.cursor())

    @property
    def progress(self) -> list[int]:
        return [int(float(bytes(e.params["progress"]))) for e in self.heard if isinstance(e, on.Progressed)]

    @property
    def asked(self) -> list[bytes]:
        return [bytes(e.id) for e in self.heard if isinstance(e, on.Nested)]

    @property
    def text(self) -> str:
        (result,) = [e.result for e in self.heard if isinstance(e, on.Resulted)]
        return str(json.loads(bytes(result))["content"][0]["text"])


class UpstreamSide(Runner):
    """The upstream side of one process: channels, sessions and their pool, over real HTTP."""

    def __init__(
        self,
        url: str,
        *,
        times: StreamTimes = SHORT_TIMES,
        **sections: Any,
    ) -> None:
        self.config = parse(configuration(url, **sections), "test", {})
        self.metrics = Metrics("0", ["/mcp"])
        self.tasks = Tasks(self.metrics)
        self.times = times
        self._calls = HttpClient(self.tasks)
        self.client = Client(InForce(Bounds(self.config.limits, self.config.timeouts)), self._calls)
        self.endpoint = Endpoint("/mcp", url)
        self.pool = Pool(
            InForce(RouteSettings(self.config, self.config.routes[0])), self.connect, self.metrics, self.tasks
        )
        self.is_attached = asyncio.Event()
        self.deadline = DEADLINE
        self.ear = Ear()

    def connect(self) -> StreamableChannel:
        return StreamableChannel(HttpUpstream(self.client, self.endpoint, self.tasks, self.times))

    async def adopt(
        self,
        headers: Headers = NO_HEADERS,
        session_id: str = "s0",
        version: str = "2025-11-25",
        *,
        is_shared: bool = False,
    ) -> Session:
        session = await self.pool.adopt(
            KEY, Whereabouts(session_id, version, CALL, INFO, None), headers, is_shared=is_shared
        )
        self.ear.cursor = lambda: session.channel.cursor
        return session

    async def resume(
        self, session: Session, headers: Headers = NO_HEADERS, cursor: str = "e1", call: bytes = CALL
    ) -> None:
        async with asyncio.timeout(self.deadline):
            await session.resume(Call(call, b"", self.ear, progress_token=call), cursor, headers, self)

    def attached(self) -> None:
        """As the runner of that call."""
        self.is_attached.set()

    async def run(
        self,
        session: Session,
        headers: Headers = NO_HEADERS,
        tool: str = "tool",
        arguments: Any = None,
        call: bytes = CALL,
    ) -> None:
        """A call of this process's own."""
        self.ear.cursor = lambda: session.channel.cursor
        meta = {mcp.META_PROGRESS_TOKEN: Raw(call)}
        params = {"name": tool, "arguments": arguments or {}, "_meta": meta}
        message = jsonrpc.request(call, mcp.TOOLS_CALL, params)
        async with asyncio.timeout(self.deadline):
            await session.run(Call(call, message, self.ear, progress_token=call), headers)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(work)

    async def answer(self, session: Session, headers: Headers = NO_HEADERS, id_: bytes = b"7") -> None:
        await session.answer(Raw(id_), Raw(b'{"action":"accept","content":{"name":"Ada"}}'), headers)

    def metric(self, name: str, **labels: str) -> float:
        _ = self.metrics.render()
        return self.metrics.series.registry.get_sample_value(name, {"route": "/mcp", **labels}) or 0.0

    @property
    def sessions(self) -> list[float]:
        return [self.metric("mcp_gateway_sessions", state=state) for state in SessionState]

    @property
    def connections(self) -> int:
        """The connections in use."""
        return self._calls.open_connections - self._calls.idle_connections

    def busy_tasks(self) -> list[str]:
        names = [task.get_name() for task in self.tasks._running]
        return [name for name in names if not name.startswith(BACKGROUND)]

    async def close(self) -> None:
        self.pool.retire()
        await eventually(lambda: not self.busy_tasks())
        await self.tasks.close()
        self.client.close()
        assert self.metrics.series.registry.get_sample_value("mcp_gateway_task_failures_total") == 0

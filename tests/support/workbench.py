"""A modern client and a gateway under test, both in the test's own event loop."""

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any, TypeVar
from unittest.mock import patch

import aiohttp

from gateway.cluster.worker import Worker
from gateway.config import ConfigFile, parse
from gateway.identity import principal
from gateway.protocol import mcp, sse
from gateway.server.process import Gateway
from gateway.sessions.call import PoolKey
from gateway.sessions.group import Group
from gateway.sessions.session import Session
from gateway.telemetry import Metrics, Traces
from tests.support.fake_upstream import DEADLINE
from tests.support.schema import assert_modern_message

T = TypeVar("T")
Json = dict[str, Any]
ALL: Json = {"elicitation": {"form": {}, "url": {}}, "sampling": {"tools": {}}, "roots": {}}
CLIENT = {"name": "bench", "version": "1"}
ACCEPT = {"action": "accept", "content": {"name": "Ada"}}
DECLINE = {"action": "decline"}
KEY = base64.urlsafe_b64encode(bytes(range(32))).decode()
BACKGROUND = ("side stream", "look for peers")
"""Tasks that run while the gateway is idle."""


async def eventually(holds: Callable[[], Any], what: str = "", seconds: float = DEADLINE) -> None:
    """Poll, within the deadline, until a condition holds for which no event exists; it may be a coroutine's."""
    try:
        async with asyncio.timeout(seconds):
            while not (await found if isawaitable(found := holds()) else found):
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"it never came to be: {what or holds.__code__}") from None


def jwt(**claims: Any) -> str:
    """An unsigned bearer token with these claims."""

    def part(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"Bearer {part({'alg': 'none'})}.{part(claims)}.{part('sig')}"


class Reply:
    """One HTTP reply, read to its end."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        data: bytes,
        method: str | None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Check what is right in reply to this method; nothing is checked if it is None."""
        self.method, self.params = method, params or {}
        self.status = response.status
        self.headers = response.headers
        self.data = data
        self.is_stream = response.content_type == "text/event-stream"
        events = [event.data for event in sse.Parser(1 << 26).feed(data)] if self.is_stream else [data]
        self.messages: list[Json] = [
            assert_modern_message(raw, method) if method else json.loads(raw) for raw in events if raw
        ]

    @property
    def notifications(self) -> list[Json]:
        return self.messages[:-1]

    @property
    def final(self) -> Json:
        assert [message for message in self.messages if "method" not in message] == self.messages[-1:]
        return self.messages[-1]

    @property
    def result(self) -> Json:
        result: Json = self.final["result"]
        return result

    @property
    def error(self) -> Json:
        error: Json = self.final["error"]
        return error

    @property
    def text(self) -> str:
        assert self.result["resultType"] == "complete", self.result
        return str(self.result["content"][0]["text"])

    @property
    def json(self) -> Any:
        """What the text is, which is JSON."""
        return json.loads(self.text)

    @property
    def state(self) -> str:
        assert self.result["resultType"] == "input_required", self.result
        return str(self.result["requestState"])

    @property
    def questions(self) -> Json:
        return dict(self.result.get("inputRequests", {}))

    @property
    def asks(self) -> list[str]:
        """The keys of the questions."""
        assert self.result["resultType"] == "input_required", self.result
        return list(self.questions)

    @property
    def outcome(self) -> tuple[int, int, str | None]:
        """HTTP status, JSON-RPC code and reason of an error."""
        return self.status, self.error["code"], (self.error.get("data") or {}).get("reason")

    @property
    def refusal(self) -> tuple[int, int]:
        """HTTP status and JSON-RPC code of an error."""
        return self.outcome[:2]


def later(work: Awaitable[T]) -> "asyncio.Future[T]":
    """Do something beside the test, which awaits it afterwards."""
    return asyncio.ensure_future(work)


async def leave(task: "asyncio.Task[Reply]") -> None:
    """The client closes its connection."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Client:
    """A modern client of one principal."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        authorization: str | None = None,
        capabilities: Mapping[str, Any] = ALL,
        info: Mapping[str, str] = CLIENT,
        headers: Mapping[str, str] | None = None,
        seconds: float = DEADLINE,
    ) -> None:
        self.http, self.url = http, url
        self.seconds = seconds
        self._authorization = authorization
        self._capabilities = capabilities
        self._info = info
        self._headers = dict(headers or {})
        self._ids = itertools.count(1)

    def on(self, url: str | None = None, **headers: str) -> "Client":
        """Another caller, with that URL and these headers."""
        where, given = url or self.url, {**self._headers, **headers}
        return Client(self.http, where, self._authorization, self._capabilities, self._info, given, self.seconds)

    def build(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        capabilities: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, str], bytes]:
        """Headers and body of one request, valid unless the arguments say otherwise."""
        own = {
            mcp.META_VERSION: mcp.MODERN,
            mcp.META_CLIENT_INFO: self._info,
            mcp.META_CAPABILITIES: self._capabilities if capabilities is None else capabilities,
            **(meta or {}),
        }
        params = {**(params or {}), "_meta": own}
        body = {"jsonrpc": "2.0", "id": f"c{next(self._ids)}", "method": method, "params": params}
        sent = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            mcp.PROTOCOL_VERSION: mcp.MODERN,
            mcp.METHOD_HEADER: method,
            **self._headers,
        }
        if method in mcp.TARGET_FIELD:
            sent[mcp.NAME_HEADER] = str(params.get(mcp.TARGET_FIELD[method], ""))
        if self._authorization is not None:
            sent["Authorization"] = self._authorization
        return sent | dict(headers or {}), json.dumps(body).encode()

    @asynccontextmanager
    async def open(self, method: str, params: Any = None, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request whose reply is read by the test; leaving the context closes it."""
        headers, body = self.build(method, params, **options)
        async with self.http.post(self.url, headers=headers, data=body) as response:
            yield response

    async def post(self, method: str, params: Any = None, **options: Any) -> Reply:
        """Send one request and read its whole reply."""
        async with asyncio.timeout(self.seconds), self.open(method, params, **options) as response:
            return Reply(response, await response.read(), method, params)

    async def raw(self, headers: Mapping[str, str], body: bytes) -> Reply:
        """POST these bytes and read the whole reply, which is not checked."""
        async with asyncio.timeout(self.seconds), self.http.post(self.url, headers=headers, data=body) as response:
            return Reply(response, await response.read(), None)

    async def call(
        self,
        name: str = "tool",
        arguments: Any = None,
        *,
        state: str | None = None,
        answers: Any = None,
        **options: Any,
    ) -> Reply:
        """tools/call, or its retry."""
        params: Json = {"name": name, "arguments": arguments or {}}
        if state is not None:
            params["requestState"] = state
        if answers is not None:
            params["inputResponses"] = answers
        return await self.post("tools/call", params, **options)

    async def answer(self, asked: Reply, answer: Any = None, **options: Any) -> Reply:
        """Send the retry of the request that was asked, which gives every question the same answer."""
        assert asked.method is not None
        answers = dict.fromkeys(asked.questions, ACCEPT if answer is None else answer)
        retry = {**asked.params, "requestState": asked.state, "inputResponses": answers}
        return await self.post(asked.method, retry, **options)


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Add up the samples of that name that have these labels; 0 if there are none yet."""
    _ = metrics.render()  # some gauges are set when they are read
    samples = (each for family in metrics.series.registry.collect() for each in family.samples)
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


class Stand:
    """One running gateway, and access to its state."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.http = http
        self.planted_bugs = 0
        """Exceptions that a test raised on purpose in place of a bug."""

    @property
    def url(self) -> str:
        return f"http://{self.gateway.listen}/mcp"

    def client(self, authorization: str | None = None, **options: Any) -> Client:
        return Client(self.http, self.url, authorization, **options)

    def reload(self, upstream_url: str, **sections: Any) -> None:
        """Apply another configuration."""
        self.gateway.apply(parse(configuration(upstream_url, **sections), "test", {}))

    def metric(self, name: str, **labels: str) -> float:
        return total(self.gateway.metrics, name, **labels)

    def nested(self, method: str, outcome: str) -> float:
        return self.metric("mcp_gateway_nested_requests_total", method=method, outcome=outcome)

    def sessions(self, state: str) -> int:
        return int(self.metric("mcp_gateway_sessions", state=state))

    @property
    def held(self) -> int:
        return int(self.metric("mcp_gateway_held_calls"))

    def group(self, authorization: str | None = None) -> Group[Session]:
        """The sessions of the usual client with this credential."""
        who = principal.of_authorization(authorization)
        key = PoolKey(who, _compact(CLIENT), _compact(ALL), ())
        return self.gateway.routes.live["/mcp"].upstream.pool.group(key)

    def tasks(self) -> list[str]:
        """The names of all running tasks."""
        return [task.get_name() for task in self.gateway.tasks._running if not task.done()]

    def busy_tasks(self) -> list[str]:
        return [name for name in self.tasks() if not name.startswith(BACKGROUND)]


def configuration(upstream_url: str, **sections: Any) -> str:
    """A configuration as JSON, and so as YAML: one route, free ports, short times."""
    route = {"upstream": {"url": upstream_url}, **sections.pop("route", {})}
    tree: Json = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "state": {"keys": [KEY]},
        "replica": {"id": "gw-1"},
        "routes": [route],
    }
    short: dict[str, Json] = {
        # As many calls as fit in 20,000 descriptors: fewer are a caution.
        "hold": {"quiet_seconds": 0.02, "grace_seconds": 0.05, "max_calls": 9000},
        "timeouts": {"cancel_seconds": 1},
        "sessions": {"quarantine_seconds": 0.3},
    }
    for name, values in (short | sections).items():
        tree[name] = {**short.get(name, {}), **values} if isinstance(values, dict) else values
    return json.dumps(tree)


async def start(
    upstream_url: str,
    http: aiohttp.ClientSession,
    *,
    worker: Worker | None = None,
    file: ConfigFile | None = None,
    traces: Traces | None = None,
    **sections: Any,
) -> Stand:
    config = parse(configuration(upstream_url, traces=traces is not None, **sections), "test", {})
    with patch("gateway.server.process.open_traces", return_value=traces):
        gateway = Gateway(config, worker, file)
    await gateway.start()
    return Stand(gateway, http)

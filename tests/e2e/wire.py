"""A modern client on plain HTTP that can choose every byte of a request and sees every byte of the reply.

    answer = await wire.call("ask", {"question": "Who?"})
    assert answer.asks == ["Name"]
    final = await wire.call("ask", {"question": "Who?"}, state=answer.state, answers={"Name": ACCEPT})

Every reply is checked against the schema of 2026-07-28, and to have exactly one final message with the request's id.
"""

import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Final

import aiohttp

from tests.support.schema import assert_modern_message

VERSION: Final = "2026-07-28"
META: Final = "io.modelcontextprotocol/"
ALL: Final[Mapping[str, Any]] = {
    "elicitation": {"form": {}, "url": {}},
    "sampling": {"tools": {}},
    "roots": {},
}
TARGETS: Final = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
ACCEPT: Final = {"action": "accept", "content": {"name": "Ann"}}
NAMED: Final = 'accept:{"name":"Ann"}'

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One HTTP reply, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    messages: list[Json]

    @property
    def is_stream(self) -> bool:
        return self.headers["Content-Type"].startswith("text/event-stream")

    @property
    def final(self) -> Json:
        """The last message, without the id of the HTTP request that each error of the gateway has."""
        found = copy.deepcopy(self.messages[-1])
        data = found.get("error", {}).get("data")
        if isinstance(data, dict) and "requestId" in data:
            assert data.pop("requestId") == self.headers["X-Request-Id"], self
            if not data:
                del found["error"]["data"]
        return found

    @property
    def nameless(self) -> bytes:
        """The body without the id of the HTTP request."""
        return self.body.replace(self.headers["X-Request-Id"].encode(), b"ID")

    @property
    def result(self) -> Json:
        assert "result" in self.final, self
        result: Json = self.final["result"]
        return result

    @property
    def error(self) -> Json:
        assert "error" in self.final, self
        error: Json = self.final["error"]
        return error

    @property
    def refusal(self) -> tuple[int, int]:
        """HTTP status and JSON-RPC code."""
        return self.status, self.error["code"]

    @property
    def text(self) -> str:
        assert self.result["resultType"] == "complete", self
        text: str = self.result["content"][0]["text"]
        return text

    @property
    def asks(self) -> list[str]:
        """The keys of the questions."""
        assert self.result["resultType"] == "input_required", self
        return list(self.result.get("inputRequests", {}))

    @property
    def state(self) -> str:
        assert self.result["resultType"] == "input_required", self
        state: str = self.result["requestState"]
        return state


def meta(capabilities: Mapping[str, Any] = ALL, **extra: Any) -> Json:
    """Give the `_meta` that every modern request has."""
    return {
        META + "protocolVersion": VERSION,
        META + "clientInfo": {"name": "wire", "version": "1"},
        META + "clientCapabilities": dict(capabilities),
        **extra,
    }


def headers_of(message: Json) -> dict[str, str]:
    """Repeat parts of a request in headers, as the transport requires."""
    method, params = message["method"], message.get("params", {})
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": VERSION,
        "Mcp-Method": method,
    }
    if method in TARGETS and TARGETS[method] in params:
        headers["Mcp-Name"] = params[TARGETS[method]]
    return headers


def request(
    method: str,
    params: Json | None = None,
    *,
    id: object = 1,  # noqa: A002 - the wire's word
    capabilities: Mapping[str, Any] = ALL,
    state: object = None,
    answers: object = None,
    progress: object = None,
    log_level: str | None = None,
) -> Json:
    """Build a request."""
    extra: Json = {}
    if progress is not None:
        extra["progressToken"] = progress
    if log_level is not None:
        extra[META + "logLevel"] = log_level
    more = {"requestState": state, "inputResponses": answers}
    given = {key: value for key, value in more.items() if value is not None}
    return {
        "jsonrpc": "2.0",
        "id": id,
        "method": method,
        "params": {"_meta": meta(capabilities, **extra), **(params or {}), **given},
    }


def events(body: bytes) -> list[Json]:
    """Decode an SSE body; comments are keep-alives, and only the fields `data` and `event` are allowed."""
    messages = []
    for block in body.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        assert all(line.startswith(("data: ", "event: message")) for line in lines), block
        if data := "\n".join(line.removeprefix("data: ") for line in lines if line.startswith("data: ")):
            messages.append(json.loads(data))
    return messages


@dataclass
class Wire:
    """Requests to one URL, each over its own connection, as behind a load balancer."""

    http: aiohttp.ClientSession
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def on(self, url: str | None = None, **headers: str) -> "Wire":
        """Another caller, with that URL and these headers."""
        return Wire(self.http, url or self.url, {**self.headers, **headers})

    async def raw(self, body: bytes | IO[bytes], headers: Any = ()) -> Answer:
        """POST bytes and read the whole reply."""
        pairs = [*self.headers.items(), *(headers.items() if isinstance(headers, Mapping) else headers)]
        async with self.http.post(self.url, data=body, headers=pairs) as response:
            got = await response.read()
            stream = response.content_type == "text/event-stream"
            messages = events(got) if stream else [json.loads(got)] if got else []
            return Answer(response.status, response.headers, got, messages)

    async def send(self, method: str, params: Json | None = None, **options: Any) -> Answer:
        """Send a modern request; its reply is checked."""
        headers = options.pop("headers", {})
        message = request(method, params, **options)
        answer = await self.raw(json.dumps(message).encode(), {**headers_of(message), **headers})
        check(answer, message)
        return answer

    async def call(self, tool: str, arguments: Json | None = None, **options: Any) -> Answer:
        return await self.send("tools/call", {"name": tool, "arguments": arguments or {}}, **options)

    @asynccontextmanager
    async def open(
        self, tool: str, arguments: Json | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call a tool and keep the reply open after its head; leaving closes the connection."""
        message = request("tools/call", {"name": tool, "arguments": arguments or {}}, **options)
        headers = {**self.headers, **headers_of(message)}
        async with self.http.post(self.url, json=message, headers=headers) as response:
            try:
                yield response
            finally:
                response.close()


def check(answer: Answer, message: Json) -> None:
    """Assert that 2026-07-28 allows the reply."""
    assert answer.messages, answer
    for said in answer.messages:
        assert_modern_message(json.dumps(said).encode(), message["method"])
    *before, final = answer.messages
    assert all("id" not in said for said in before), "only the last message is a response"
    assert final["id"] == message["id"]
    assert type(final["id"]) is type(message["id"])


@asynccontextmanager
async def wire(url: str, **headers: str) -> AsyncIterator[Wire]:
    """Open a client."""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield Wire(http, url, headers)

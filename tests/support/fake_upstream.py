"""A FAKE legacy server that misbehaves on command and records every request.

It proves nothing about real servers (tests/parts and tests/e2e run those). Each request is answered by a script: one
coroutine per JSON-RPC method, per HTTP method, for "answer" (a POST with a JSON-RPC response), or for "resume" (a GET
with Last-Event-ID). What has no script is answered as a plain server with sessions and without an event store would.
Scripts wait on events that the test sets, never on time.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from gateway.protocol import mcp
from tests.support.served import Served

DEADLINE = 5.0
FORM = {"message": "Name?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}}
SAMPLE = {"messages": [{"role": "user", "content": {"type": "text", "text": "Hi"}}], "maxTokens": 9}
URL = {"mode": "url", "message": "Visit", "url": "https://example.com/pay", "elicitationId": "e1"}
READ_ONLY = {"name": "tool", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}
"""A tool that may run twice."""
SSE = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


def text(value: str) -> dict[str, Any]:
    """A tool's result."""
    return {"content": [{"type": "text", "text": value}]}


def event(message: dict[str, Any], id_: str | None = None) -> bytes:
    """One message as an SSE event."""
    head = b"" if id_ is None else b"id: %b\n" % id_.encode()
    return head + b"event: message\ndata: " + json.dumps(message).encode() + b"\n\n"


def _integer(digits: str) -> int | str:
    """Python refuses integers of more than 4300 digits."""
    return int(digits) if len(digits) < 4300 else digits


def _body(data: bytes) -> Any:
    try:
        return json.loads(data, parse_int=_integer)
    except ValueError:
        return None


class Seen:
    """One recorded request."""

    def __init__(self, http: web.BaseRequest, body: Any, data: bytes) -> None:
        self.peer = http.transport and http.transport.get_extra_info("peername")
        """The connection that it came on."""
        self.http_method = http.method
        self.path = http.path
        self.query = http.query_string
        self.data = data
        self.headers = http.headers.copy()
        self.body = body
        self.cut = asyncio.Event()
        """Set when the gateway closed the connection before the reply was complete."""

    @property
    def word(self) -> str:
        """The kind of the request: its JSON-RPC method, "answer", "resume", or its HTTP method ("raw": not JSON)."""
        if self.http_method != "POST":
            return "resume" if "Last-Event-ID" in self.headers else self.http_method
        if not isinstance(self.body, dict):
            return "raw"
        return str(self.body.get("method", "answer"))

    @property
    def session(self) -> str | None:
        return self.headers.get("Mcp-Session-Id")


class Reset(Exception):
    """Ends a script by breaking the connection."""


class Turn:
    """One request at work, with the actions of its script."""

    def __init__(self, upstream: "FakeUpstream", http: web.BaseRequest, seen: Seen) -> None:
        self.upstream = upstream
        self.seen = seen
        self.body = seen.body
        self.session = seen.session
        self._http = http
        self._stream: web.StreamResponse | None = None
        self.response: web.StreamResponse | None = None

    @property
    def id(self) -> Any:
        return self.body["id"]

    def reply(self, status: int = 200, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Answer with a whole body: JSON, or unchanged bytes."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.response = web.Response(
            status=status, body=data, headers={"Content-Type": "application/json", **(headers or {})}
        )

    async def begin(self, status: int = 202, *, is_stream: bool = False) -> None:
        """Send the head of a reply whose body is still to come."""
        self._stream = self.response = web.StreamResponse(status=status, headers=SSE if is_stream else None)
        await self._stream.prepare(self._http)

    async def raw(self, data: bytes) -> None:
        """Write bytes on the reply's event stream."""
        if self._stream is None:
            self._stream = self.response = web.StreamResponse(headers=SSE)
            await self._stream.prepare(self._http)
        if data:
            await self._stream.write(data)

    async def say(self, message: dict[str, Any], event_id: str | None = None, *, side: bool = False) -> None:
        """Send one message on the reply's stream, or on the session's standalone GET stream."""
        message = {"jsonrpc": "2.0", **message}
        if side:
            self.upstream.side(self.session).put_nowait(event(message, event_id))
        else:
            await self.raw(event(message, event_id))

    async def notify(self, method: str, params: dict[str, Any], *, side: bool = False) -> None:
        await self.say({"method": method, "params": params}, side=side)

    async def progress(self, number: int, **more: Any) -> None:
        """Report progress, with the token of the request, if it has one."""
        token = self.body["params"].get("_meta", {}).get("progressToken")
        await self.notify(mcp.PROGRESS, {"progressToken": token, "progress": number, **more})

    async def ask(self, method: str, params: Any = None, *, id_: Any = None, side: bool = False) -> Any:
        """Send one nested request; return its answer (a whole JSON-RPC response)."""
        id_ = next(self.upstream.ids) if id_ is None else id_
        message = {"id": id_, "method": method} | ({} if params is None else {"params": params})
        waiter = self.upstream.expect(self.session, id_)
        await self.say(message, side=side)
        return await waiter

    async def elicit(self, title: str | None = None, *, side: bool = False, id_: Any = None) -> Any:
        """Send one form elicitation; return the answer's result."""
        schema = FORM["requestedSchema"] | ({} if title is None else {"title": title})  # type: ignore[operator]
        answer = await self.ask("elicitation/create", {**FORM, "requestedSchema": schema}, side=side, id_=id_)
        return answer.get("result")

    async def result(self, result: Any = None, *, side: bool = False) -> None:
        """Send the result of this request, on the open stream."""
        message = {"id": self.id, "result": {} if result is None else result}
        if side or self._stream is not None:
            await self.say(message, side=side)
        else:
            self.reply(body={"jsonrpc": "2.0", **message})

    async def error(self, code: int, message: str, data: Any = None) -> None:
        error = {"code": code, "message": message} | ({} if data is None else {"data": data})
        self.reply(body={"jsonrpc": "2.0", "id": self.id, "error": error})

    async def reset(self) -> None:
        """Break the connection."""
        assert self._http.transport is not None
        self._http.transport.abort()
        raise Reset

    async def for_ever(self) -> None:
        """Stay silent until the gateway closes the connection."""
        await asyncio.get_running_loop().create_future()


Script = Callable[[Turn], Awaitable[None] | None]


async def play(script: Script, turn: Turn) -> None:
    """Have a script reply."""
    replied = script(turn)
    if replied is not None:
        await replied


def lacks_session(turn: Turn) -> None:
    """The reply to a request in a session that the server does not know."""
    turn.reply(404, {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "Session not found"}})


def waits(go: asyncio.Event, value: str) -> Script:
    """A tool that gives its result when the test says so."""

    async def tool(turn: Turn) -> None:
        await go.wait()
        await turn.result(text(value))

    return tool


def asks(value: str, *titles: str) -> Script:
    """A tool that asks once, or under each of these titles, and whose result is the same whatever the answers are."""

    async def tool(turn: Turn) -> None:
        for title in titles or (None,):
            await turn.elicit(title)
        await turn.result(text(value))

    return tool


def gives_up(go: asyncio.Event, ends: Script) -> Script:
    """A tool that asks, and ends in this way while its question is open, when the test says so."""

    async def tool(turn: Turn) -> None:
        asking = asyncio.ensure_future(turn.elicit("q"))
        await go.wait()
        asking.cancel()
        await play(ends, turn)

    return tool


async def breaks_when_answered(turn: Turn) -> None:
    """A tool that asks once, and breaks its connection when it is answered."""
    await turn.elicit("q")
    await turn.reset()


async def ask_action(turn: Turn) -> None:
    """A tool that asks once, and whose result is the action of the answer."""
    answer = await turn.elicit("q")
    await turn.result(text(answer["action"]))


async def ask(turn: Turn) -> None:
    """A tool that asks once, and whose result is the answer as text."""
    answer = await turn.elicit("q")
    await turn.result(text(json.dumps(answer)))


class FakeUpstream(Served):
    """The server."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.probes: list[Seen] = []
        """Requests that probe for the era; they are not in `seen`."""
        self.capabilities: dict[str, Any] = {"tools": {}}
        self.version = "2025-11-25"
        self.instructions: str | None = None
        self.has_sessions = True
        self.known: set[str] = set()
        self.ids = itertools.count()
        self.tools: list[dict[str, Any]] = []
        self.scripts: dict[str, Script] = {}
        self._sides: dict[str | None, asyncio.Queue[bytes | None]] = {}
        self._answers: dict[tuple[str | None, str], asyncio.Future[Any]] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._opened = itertools.count(1)

    # -- scripts of the tests ---------------------------------------------------------------------------------------

    def on(self, word: str, script: Script) -> None:
        """Answer requests of that kind with this script."""
        self.scripts[word] = script

    def tool(self, script: Script) -> Script:
        """Answer tools/call with this script; also a decorator."""
        self.on("tools/call", script)
        return script

    def holding(self, word: str, script: Script | None = None, *, once: bool = False) -> asyncio.Event:
        """Answer requests of that kind, or the next one, when the event is set: with this script, or as before."""
        go, answer = asyncio.Event(), script or self.scripts.get(word, self.plain)

        async def held(turn: Turn) -> None:
            await go.wait()
            await play(answer, turn)

        (self.once if once else self.on)(word, held)
        return go

    def waiting_tool(self, value: str = "done") -> asyncio.Event:
        """Have tools/call wait until the event is set, and then give this result."""
        return self.holding("tools/call", lambda turn: turn.result(text(value)))

    def once(self, word: str, script: Script) -> None:
        """Answer the next request of that kind with this script, and later ones as before."""
        before = self.scripts.get(word)

        async def first(turn: Turn) -> None:
            if before is None:
                del self.scripts[word]
            else:
                self.scripts[word] = before
            await play(script, turn)

        self.scripts[word] = first

    def each(self, word: str, *scripts: Script) -> None:
        """Answer requests of that kind with these scripts in turn, and all later ones with the last."""
        left = list(scripts)

        async def script(turn: Turn) -> None:
            await play(left.pop(0) if len(left) > 1 else left[0], turn)

        self.on(word, script)

    def forget(self) -> None:
        """Forget every session, as a restarted server has."""
        self.known.clear()

    def side(self, session: str | None) -> "asyncio.Queue[bytes | None]":
        """Send a message on the session's standalone GET stream; None ends the stream."""
        return self._sides.setdefault(session, asyncio.Queue())

    def expect(self, session: str | None, id_: Any) -> "asyncio.Future[Any]":
        """Wait for the answer to a nested request."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[session, json.dumps(id_)] = future
        return future

    @property
    def words(self) -> list[str]:
        """The kinds of all requests, in order."""
        return [seen.word for seen in self.seen]

    def of(self, word: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.word == word]

    async def saw(self, word: str, count: int = 1) -> list[Seen]:
        """Wait until that many requests of the kind have arrived."""
        async with asyncio.timeout(DEADLINE):
            while len(self.of(word)) < count:
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await waiter
        return self.of(word)

    # -- the server ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def refusing_connections(self) -> AsyncIterator[None]:
        """Refuse new connections; those that are open stay open."""
        assert self._runner is not None
        port = self._runner.addresses[0][1]
        await self._site.stop()
        yield
        await self._accept(self._runner, port)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        data = await http.read()
        seen = Seen(http, _body(data) if http.method == "POST" else None, data)
        # Every gateway probes once, and most tests are not about that.
        (self.probes if seen.word == "server/discover" else self.seen).append(seen)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        turn = Turn(self, http, seen)
        try:
            await play(self.scripts.get(seen.word, self.plain), turn)
        except Reset:
            return web.Response()
        except (asyncio.CancelledError, ConnectionError):
            seen.cut.set()
            raise
        assert turn.response is not None, f"the script of {seen.word} said nothing"
        return turn.response

    async def plain(self, turn: Turn) -> None:
        """Serve as a plain server with sessions."""
        seen = turn.seen
        if seen.word == "initialize":
            await self.initialize(turn)
        elif seen.word == "server/discover":
            message = "Bad Request: Unsupported protocol version: 2026-07-28"
            turn.reply(400, {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": message}})
        elif self.has_sessions and seen.session not in self.known:
            lacks_session(turn)
        elif seen.word == "GET":
            await self.keep_side(turn)
        elif seen.word == "resume":
            turn.reply(500)
        elif seen.word == "DELETE":
            self.known.discard(seen.session or "")
            self.side(seen.session).put_nowait(None)
            turn.reply(200)
        elif seen.word == "answer":
            self.accept(turn)
        elif "id" not in seen.body:
            turn.reply(202)
        elif seen.word == "tools/list":
            await turn.result({"tools": self.tools})
        else:
            await turn.result(text("done") if seen.word == "tools/call" else {})

    async def initialize(self, turn: Turn) -> None:
        headers = {}
        if self.has_sessions:
            session = f"s{next(self._opened)}"
            self.known.add(session)
            headers["Mcp-Session-Id"] = session
        result: dict[str, Any] = {
            "protocolVersion": self.version,
            "capabilities": self.capabilities,
            "serverInfo": {"name": "fake", "version": "1"},
        }
        if self.instructions is not None:
            result["instructions"] = self.instructions
        turn.reply(body={"jsonrpc": "2.0", "id": turn.id, "result": result}, headers=headers)

    async def keep_side(self, turn: Turn) -> None:
        await turn.raw(b"")
        side = self.side(turn.session)
        while (data := await side.get()) is not None:
            await turn.raw(data)

    def accept(self, turn: Turn) -> None:
        future = self._answers.pop((turn.session, json.dumps(turn.id)), None)
        if future is not None and not future.done():
            future.set_result(turn.body)
        turn.reply(202)

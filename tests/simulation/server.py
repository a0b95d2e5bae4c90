"""A SIMULATED legacy server (streamable HTTP, 2025-11-25), and the ledger of what its tools did.

Its tools are told by their arguments what to do (`Script`). Each run of a tool writes into the ledger: that is the
truth which the oracle compares the words of the gateway with.
"""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from gateway.protocol import mcp
from tests.simulation import plain_http as http
from tests.simulation.kernel import Process
from tests.simulation.listening import CHANGES, Change
from tests.simulation.plain_http import Request
from tests.simulation.task_server import CHORE, WITHDRAWN, TaskServer, text_of

VERSION: Final = "2025-11-25"
_CONNECTIONS_DIFFER_SECONDS: Final = 0.001
_TOOLS: Final = ("pay", "search")
"""`pay` has effects that must not be repeated; `search` may run again."""


@dataclass
class Run:
    """One run of a tool."""

    tag: str
    number: int
    tool: str
    session: str
    began: float
    asked: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    effects: list[tuple[float, str]] = field(default_factory=list)
    cancelled: float | None = None
    ended: float | None = None
    result: str | None = None
    results: list[str] = field(default_factory=list)
    """All that it gave, if a modern client had its last round run again."""
    was_referred: bool = False
    """It ended with -32042: its user has to visit a URL first."""
    died: bool = False
    """It ended with its server."""
    is_unheard: bool = False
    """It asked on the side stream of its session while nobody read that."""
    asked_aside: float | None = None
    """When it last asked on the side stream."""
    is_harmed: bool = False
    """Its task was cancelled though its server ends another session then."""


class Ledger:
    """What the server has done, over all its restarts."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.deleted: list[tuple[float, str]] = []
        """When a session was deleted while this call ran in it."""
        self.ended: dict[str, float] = {}
        """When each session was deleted."""

    def of(self, tag: str) -> list[Run]:
        return [run for run in self.runs if run.tag == tag]


@dataclass(frozen=True)
class Kind:
    """What a server is like."""

    has_events: bool = True
    """It has an event store: a stream can be resumed."""
    idle_seconds: float = 60.0
    """After this time it closes a connection without a request."""
    says_keep_alive: bool = False
    answers_late: bool = False
    """It accepts an answer a while after it came."""
    has_tasks: bool = False
    """It has a tool that runs as a task only. Of such calls, each ends before there is a task."""
    has_changes: bool = False
    """It announces changes."""
    has_lasting_tasks: bool = False
    """It has a tool whose calls become tasks."""

    @property
    def takes_tasks(self) -> bool:
        return self.has_tasks or self.has_lasting_tasks


class Stream:
    """One stream of messages, which may be resumed if the server keeps events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[tuple[str, Any]] = []
        self.reader: Request | None = None
        self.is_over = False


class Asked(NamedTuple):
    """A question that waits for its answer."""

    message: dict[str, Any]
    answer: "asyncio.Future[Any]"

    @property
    def withdrawal(self) -> dict[str, Any]:
        params = {"requestId": self.message["id"], "reason": "too slow"}
        return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}


def question(name: str, script: Any, number: int, **form: str) -> dict[str, Any]:
    """The method and the params of a question; `form` is further params of a form."""
    kinds = script.get("kinds", ["elicit"])
    if kinds[number % len(kinds)] == "sample":
        said = [{"role": "user", "content": {"type": "text", "text": name}}]
        return {"method": "sampling/createMessage", "params": {"messages": said, "maxTokens": 9}}
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    return {"method": "elicitation/create", "params": {**form, "message": name, "requestedSchema": schema}}


def said_in(result: Any) -> Any:
    """What a tool makes of the result that answers its question."""
    if "role" in result:
        return result["content"]["text"]
    if result.get("action") != "accept":
        return {"action": result.get("action")}
    return (result.get("content") or {}).get("name")


class Session:
    """One session."""

    def __init__(self, name: str, opening: Request) -> None:
        self.name = name
        self.own_requests = [opening]
        """Those that the gateway makes on its own account: a session in which one is not answered is never ended."""
        self.caller = opening.headers.get("authorization", "")
        self.subscribed: set[str] = set()
        self.streams: dict[str, Stream] = {}
        self.side = Stream(f"{name}-side")
        self.streams[self.side.name] = self.side
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.running: dict[Any, tuple[Run, asyncio.Task[None], bool]] = {}
        """The last is whether it goes on when it is cancelled."""
        self.refuses: dict[int, str] = {}
        """Questions whose first answer is not taken, and how."""
        self.was_given_up = False
        """A call of it was cancelled, perhaps after it had ended."""
        self.has_forgotten = False
        """It asked in a call, and ended that without an answer: another replica may have answered, so none ends it."""
        self.withdrew_aside = -math.inf
        """When it last withdrew a question on its side stream."""
        self.next_id = 0
        self.next_stream = 0

    def ask(self, run: Run, number: int, script: Any) -> Asked:
        """A question of a run, to be sent."""
        self.next_id += 1
        name, waiting = f"{run.tag}/{number}", asyncio.get_running_loop().create_future()
        self.waiting[self.next_id] = waiting
        run.asked.append(name)
        if "refuses" in script:
            self.refuses[self.next_id] = script["refuses"]
        return Asked({"jsonrpc": "2.0", "id": self.next_id, **question(name, script, number)}, waiting)

    async def answer_to(self, asked: Asked, patience: float | None) -> Any:
        """Wait for an answer; WITHDRAWN if it takes too long."""
        _ = await asyncio.wait((asked.answer,), timeout=patience)
        self.waiting.pop(asked.message["id"], None)
        if not asked.answer.done():
            return WITHDRAWN
        message = asked.answer.result()
        return {"error": message["error"].get("code")} if "error" in message else said_in(message["result"])


class Store:
    """What a server has on its disk."""

    def __init__(self, name: str = "s", runs: int = 0) -> None:
        self.name = name
        """With this begin the names of its sessions."""
        self.sessions: dict[str, Session] = {}
        self.opened = 0
        self.runs = runs
        """How many there were so far: each run has a number of its own."""


class LegacyServer:
    """The server's process; `main` is its program."""

    def __init__(self, process: Process, kind: Kind, ledger: Ledger, store: Store, port: int) -> None:
        self._process, self._kind, self._ledger, self._store, self._port = process, kind, ledger, store, port
        self._tasks = TaskServer(self)

    async def main(self) -> None:
        _ = await http.serve(self._process.host, self._port, self.serve, self._kind.idle_seconds)
        await asyncio.get_running_loop().create_future()

    def held(self) -> dict[str, int]:
        """What the server holds for its clients."""
        # No gateway ends a session whose call it has given up, for that may still run.
        given_up = {run.session for run in self._ledger.runs if run.result is None}
        sessions = self._store.sessions.values()
        return {
            "sessions": sum(
                each.name not in given_up
                and not (each.was_given_up or each.has_forgotten)
                and not any(request.is_reply_lost for request in each.own_requests)
                for each in sessions
            ),
            "streams": sum(_is_read(stream) for each in sessions for stream in each.streams.values()),
            "runs": sum(len(each.running) for each in sessions),
        }

    def now(self) -> float:
        return self._process.kernel.now

    # -- requests -----------------------------------------------------------------------------------------------

    async def serve(self, request: Request) -> None:
        if request.method == "GET":
            self._get(request)
            return
        session = self._store.sessions.get(request.headers.get("mcp-session-id", ""))
        if request.method == "DELETE":
            self._delete(request, session)
            return
        message = msgspec.json.decode(request.body)
        method = message.get("method")
        if method == "initialize":
            self._initialize(request, message)
        elif session is None:
            where = {"code": -32001, "message": "Session not found"}
            if "mcp-session-id" in request.headers:
                request.reply(404, msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": where}))
            else:  # such as server/discover
                error = {"code": -32000, "message": "Bad Request: Unsupported protocol version: 2026-07-28"}
                request.reply(400, msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error}))
        elif method is None:
            await self._answer(request, session, message)
        elif "id" not in message:
            self._notification(session, method, message.get("params") or {})
            request.reply(202)
        elif method == "tools/call":
            self._begin(request, session, message)
        elif method == "tools/list":
            session.own_requests.append(request)
            tools: list[Any] = [{"name": name, "inputSchema": {"type": "object"}} for name in _TOOLS]
            for name, has in (("job", self._kind.has_tasks), (CHORE, self._kind.has_lasting_tasks)):
                if has:
                    tools.append(
                        {"name": name, "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}}
                    )
            request.reply_json({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools}})
        elif method in (mcp.TASKS_GET, mcp.TASKS_RESULT, mcp.TASKS_CANCEL):
            self._tasks.serve(request, session, message)
        elif method in (mcp.SUBSCRIBE, mcp.UNSUBSCRIBE):
            change = session.subscribed.add if method == mcp.SUBSCRIBE else session.subscribed.discard
            change(message["params"]["uri"])
            request.reply_json({"jsonrpc": "2.0", "id": message["id"], "result": {}})
        elif method in ("ping", "logging/setLevel"):
            session.own_requests.append(request)
            request.reply_json({"jsonrpc": "2.0", "id": message["id"], "result": {}})
        else:
            error = {"code": -32601, "message": f"Method not found: {method}"}
            request.reply_json({"jsonrpc": "2.0", "id": message["id"], "error": error})

    def _initialize(self, request: Request, message: Any) -> None:
        self._store.opened += 1
        session = Session(f"{self._store.name}{self._store.opened}", request)
        self._store.sessions[session.name] = session
        tasks = {"tasks": {"requests": {"tools": {"call": {}}}, "cancel": {}}} if self._kind.takes_tasks else {}
        result = {
            "protocolVersion": VERSION,
            "capabilities": {"tools": {}, "logging": {}, **tasks, **(CHANGES if self._kind.has_changes else {})},
            "serverInfo": {"name": "simulated", "version": "1"},
        }
        headers = {"Mcp-Session-Id": session.name}
        request.reply_json({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers)

    def announce(self, number: int, change: Change) -> None:
        """Tell the sessions of a caller of a change, if they are to know."""
        for session in self._store.sessions.values():
            if session.caller == f"Bearer {change.caller}" and (not change.uri or change.uri in session.subscribed):
                self.send(session.side, change.announcement(number))

    def _delete(self, request: Request, session: Session | None) -> None:
        if session is None:
            request.reply(404)
            return
        del self._store.sessions[session.name]
        self._ledger.ended[session.name] = self.now()
        for run, task, _ in list(session.running.values()):
            self._ledger.deleted.append((self.now(), run.tag))
            task.cancel()
        for stream in session.streams.values():
            if stream.reader is not None:
                stream.reader.end()
        request.reply(200)

    def _get(self, request: Request) -> None:
        session = self._store.sessions.get(request.headers.get("mcp-session-id", ""))
        last = request.headers.get("last-event-id")
        if session is None:
            request.reply(404)
            return
        stream: Stream | None = session.side
        after = 0
        if last is not None:
            name, _, number = last.rpartition("_")
            stream, after = session.streams.get(name), int(number) if number.isdigit() else 0
            if not self._kind.has_events or stream is None:
                request.reply(400, b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"No such event"}}')
                return
        assert stream is not None
        if stream.reader is not None and not stream.reader.gone.done() and not stream.reader.is_done:
            if last is None:
                request.reply(409)
                return
            stream.reader.cut()
        request.stream()
        stream.reader = request
        for number, (id_, event) in enumerate(stream.events, 1):
            if number > after and last is not None:
                request.event(event, id_)
        if stream.is_over:
            request.end()
            stream.reader = None

    def _notification(self, session: Session, method: str, params: Any) -> None:
        if method == "notifications/cancelled" and not self._tasks.withdraw(session, params.get("requestId")):
            session.was_given_up = True
            found = session.running.get(params.get("requestId"))
            if found is not None:
                run, task, is_deaf = found
                run.cancelled = self.now()
                if not is_deaf:
                    task.cancel()

    async def _answer(self, request: Request, session: Session, message: Any) -> None:
        how = session.refuses.pop(message["id"], None) if isinstance(message["id"], int) else None
        if how is not None and how.startswith("late "):
            await asyncio.sleep(3.0)
            how = how.removeprefix("late ")
        if how in ("cut", "cut again"):
            if how == "cut":  # what breaks off without a reply is sent once more
                session.refuses[message["id"]] = "cut again"
            request.cut()
            return
        if how == "503":
            request.reply(503)
            return
        waiting = session.waiting.pop(message["id"], None) if isinstance(message["id"], int) else None
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        if self._kind.answers_late:
            await asyncio.sleep(0.3)
        request.reply(202)

    # -- tools --------------------------------------------------------------------------------------------------

    def send(self, stream: Stream, message: Any) -> None:
        id_ = None
        if self._kind.has_events:
            id_ = f"{stream.name}_{len(stream.events) + 1}"
            stream.events.append((id_, message))
        if stream.reader is not None and not stream.reader.event(message, id_):
            stream.reader = None

    def new_stream(self, session: Session, request: Request) -> Stream:
        """Begin the stream with which a request is answered."""
        session.next_stream += 1
        stream = Stream(f"{session.name}-{session.next_stream}")
        session.streams[stream.name] = stream
        request.stream()
        stream.reader = request
        if self._kind.has_events:
            self.send(stream, None)  # a cursor before anything happens, as the SDKs send it
        return stream

    def end_stream(self, session: Session, stream: Stream) -> None:
        """End the stream with which a request was answered."""
        stream.is_over = True
        if stream.reader is not None:
            stream.reader.end()
            stream.reader = None
        if not self._kind.has_events:
            session.streams.pop(stream.name, None)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def _begin(self, request: Request, session: Session, message: Any) -> None:
        params = message["params"]
        arguments = params.get("arguments", {})
        self._store.runs += 1
        run = Run(arguments["tag"], self._store.runs, params["name"], session.name, self.now())
        self._ledger.runs.append(run)
        stream = self.new_stream(session, request)
        if run.tool == CHORE:
            self._tasks.begin(session, stream, run, message["id"], arguments)
            return
        token = (params.get("_meta") or {}).get("progressToken")
        task = self._process.loop.create_task(self._run(session, stream, run, message["id"], arguments, token))
        self._process.keep(task)
        session.running[message["id"]] = run, task, bool(arguments.get("deaf"))

    async def _run(self, session: Session, stream: Stream, run: Run, id_: Any, script: Any, token: Any) -> None:
        try:
            await asyncio.sleep(script.get("before", 0.0))
            refers = bool(script.get("urls")) and not any(each.was_referred for each in self._ledger.of(run.tag))
            if refers and script["urls"] != "later":
                self._refer(stream, run, id_)
                if script.get("babbles") and run.tool == "job":  # which has a session of its own
                    self._process.keep(asyncio.get_running_loop().create_task(self._babble(session, run)))
                return
            count = script.get("questions", 0)
            at_once: list[Any] = []
            if script.get("at once"):
                asked = [self._ask(session, stream, run, number, script) for number in range(count)]
                at_once = list(await asyncio.gather(*asked))
            for number in range(count):
                answer = at_once[number] if at_once else await self._ask(session, stream, run, number, script)
                run.answers.append(answer)
                run.effects.append((self.now(), f"answer {number}"))
                if script.get("logs"):
                    params = {"level": "info", "logger": run.tag, "data": f"answer {number}"}
                    self.send(stream, {"jsonrpc": "2.0", "method": "notifications/message", "params": params})
                if token is not None and script.get("reports"):
                    params = {"progressToken": token, "progress": number + 1}
                    note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
                    self.send(stream, note)
                if refers:
                    self._refer(stream, run, id_)
                    return
                await asyncio.sleep(script.get("between", 0.0))
            await asyncio.sleep(script.get("hangs", 0.0))
            run.effects.append((self.now(), "done"))
            # The two come over two connections, and the end may be there before the withdrawal.
            session.has_forgotten |= self.now() - session.withdrew_aside < _CONNECTIONS_DIFFER_SECONDS
            if script.get("fails"):
                run.result = f"{run.tag}/{run.number} failed"
                error = {"code": -32000, "message": run.result}
                self.send(stream, {"jsonrpc": "2.0", "id": id_, "error": error})
                return
            text = text_of(run)
            result = {"content": [{"type": "text", "text": text}]}
            run.result = text
            run.results.append(text)
            self.send(stream, {"jsonrpc": "2.0", "id": id_, "result": result})
            if script.get("asks late"):
                session.next_id += 1
                said = {"message": "too late", "requestedSchema": {"type": "object", "properties": {}}}
                late = {"jsonrpc": "2.0", "id": session.next_id, "method": "elicitation/create", "params": said}
                self.send(stream, late)
        finally:
            run.ended = self.now()
            session.running.pop(id_, None)
            self.end_stream(session, stream)

    def _refer(self, stream: Stream, run: Run, id_: Any) -> None:
        """End a call with -32042: its user has to visit a URL first."""
        run.was_referred = True
        self.send(stream, {"jsonrpc": "2.0", "id": id_, "error": _url_required(run)})

    async def _babble(self, session: Session, run: Run) -> None:
        """Say what belongs to no call, unless the next one is very quick."""
        await asyncio.sleep(0.003)
        session.next_id += 1
        run.asked.append("too late")
        said = {"message": "too late", "requestedSchema": {"type": "object", "properties": {}}}
        for message in (
            {"id": session.next_id, "method": "elicitation/create", "params": said},
            {"method": "notifications/message", "params": {"level": "info", "data": "babble"}},
            {"method": "notifications/cancelled", "params": {"requestId": session.next_id}},
        ):
            self.send(session.side, {"jsonrpc": "2.0", **message})

    async def _ask(self, session: Session, stream: Stream, run: Run, number: int, script: Any) -> Any:
        where = session.side if script.get("aside") else stream
        asked = session.ask(run, number, script)
        self.send(where, asked.message)
        if where is session.side:
            run.asked_aside = self.now()
            run.is_unheard |= where.reader is None
        answer = await session.answer_to(asked, script.get("hasty", script.get("patience")))
        if answer is WITHDRAWN and "hasty" in script:  # it does not withdraw its question
            session.has_forgotten = True
        elif answer is WITHDRAWN:
            self.send(where, asked.withdrawal)
            if where is session.side:
                session.withdrew_aside = self.now()
        return answer


def _url_required(run: Run) -> dict[str, Any]:
    name = f"{run.tag}/url"
    run.asked.append(name)
    url = {"mode": "url", "message": name, "url": "https://example.com/", "elicitationId": name}
    return {"code": -32042, "message": "Visit a URL first", "data": {"elicitations": [url]}}


def _is_read(stream: Stream) -> bool:
    return stream.reader is not None and not stream.reader.gone.done() and not stream.reader.is_done

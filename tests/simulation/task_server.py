"""The tasks of the SIMULATED legacy server (2025-11-25): calls of its tool `chore` become tasks that outlive them."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gateway.parking import orphans
from gateway.protocol import mcp
from tests.simulation.plain_http import Request

if TYPE_CHECKING:
    from tests.simulation.server import Asked, LegacyServer, Run, Session, Stream

CHORE: Final = "chore"
WITHDRAWN: Final = {"action": "withdrawn"}
"""The answer to a question that the server withdrew."""
_WHEN: Final = "2027-01-15T08:00:00Z"
_CANCELLED: Final = {"code": -32603, "message": "The task was cancelled"}


@dataclass
class Task:
    """One task, in the session that made it."""

    id: str
    run: "Run"
    status: str = "working"
    final: dict[str, Any] | None = None
    """What `tasks/result` brings: a result or an error."""
    unread: list[Any] = field(default_factory=list)
    """Questions that no reader of `tasks/result` has got."""
    readers: "dict[Any, Stream]" = field(default_factory=dict)
    """The streams of `tasks/result`, by the ids of these requests."""
    work: asyncio.Task[None] | None = None

    def described(self) -> dict[str, Any]:
        times = {"createdAt": _WHEN, "lastUpdatedAt": _WHEN, "ttl": 600_000, "pollInterval": 100}
        return {"taskId": self.id, "status": self.status, "statusMessage": self.run.result or "", **times}


class TaskServer:
    """Runs tasks, and tells of them."""

    def __init__(self, server: "LegacyServer") -> None:
        self._server = server
        self._tasks: dict[str, Task] = {}

    def begin(self, session: "Session", stream: "Stream", run: "Run", id_: Any, script: Any) -> None:
        """Make a task of a call, whose stream ends with that."""
        name = _fragile_id(run.number) if script.get("fragile") else f"task-{run.number}"
        task = self._tasks[name] = Task(name, run)
        if "made" not in script:
            self._made(session, stream, task, id_, script)
            return
        making = self._make(session, stream, task, id_, script)
        task.work = asyncio.get_running_loop().create_task(making)
        session.running[id_] = run, task.work, False

    async def _make(self, session: "Session", stream: "Stream", task: Task, id_: Any, script: Any) -> None:
        """Make a task after a while, in which its client may be asked already."""
        first: Asked | None = None
        is_made = False
        try:
            if script["asks_first"]:
                first = self._question(session, task, 0, script)
                self._server.send(stream, first.message)
            await asyncio.sleep(script["made"])
            is_made = self._server.is_alive
        finally:
            session.running.pop(id_, None)
            if not is_made:
                task.run.ended = self._server.now()
                self._server.end_stream(session, stream)
        if is_made:
            self._made(session, stream, task, id_, script, first)

    def _made(
        self, session: "Session", stream: "Stream", task: Task, id_: Any, script: Any, first: Any = None
    ) -> None:
        """Run a task from now on; `first` waits for the answer to its first question, if that was asked before."""
        task.work = asyncio.get_running_loop().create_task(self._run(session, task, script, first))
        session.running[task.id] = task.run, task.work, False
        self._server.send(stream, {"jsonrpc": "2.0", "id": id_, "result": {"task": task.described()}})
        self._server.end_stream(session, stream)

    def serve(self, request: Request, session: "Session", message: Any) -> None:
        """Answer a request about a task."""
        id_, method = message["id"], message["method"]
        task = self._tasks.get(message["params"]["taskId"])
        if task is None or task.run.session != session.name:
            error = {"code": -32602, "message": "Task not found"}
            request.reply_json({"jsonrpc": "2.0", "id": id_, "error": error})
        elif method == mcp.TASKS_RESULT:
            stream = self._server.new_stream(session, request)
            task.readers[id_] = stream
            if task.final is not None:
                self._finish(session, task)
            else:
                self._flush(task)
        else:
            if method == mcp.TASKS_CANCEL and orphans.must_not_be_cancelled(task.id):
                task.run.is_harmed = True
            elif method == mcp.TASKS_CANCEL and task.final is None:
                task.run.cancelled = self._server.now()
                assert task.work is not None
                task.work.cancel()
                task.status = "cancelled"
            request.reply_json({"jsonrpc": "2.0", "id": id_, "result": task.described()})

    def withdraw(self, session: "Session", request_id: Any) -> bool:
        """Give a `tasks/result` up; returns whether it is one."""
        for task in self._tasks.values():
            if task.run.session == session.name and request_id in task.readers:
                self._server.end_stream(session, task.readers.pop(request_id))
                return True
        return isinstance(request_id, str) and request_id.startswith("gw-task-")

    async def _run(self, session: "Session", task: Task, script: Any, first: Any) -> None:
        run = task.run
        try:
            await asyncio.sleep(script.get("before", 0.0))
            for number in range(script.get("questions", 0)):
                asked = first if first is not None and number == 0 else self._ask(session, task, number, script)
                answer = await session.answer_to(asked, script["patience"])
                task.status = "working"
                if answer is WITHDRAWN:
                    task.unread = [each for each in task.unread if each["id"] != asked.message["id"]]
                    self._tell(task, asked.withdrawal)
                run.answers.append(answer)
                run.effects.append((self._server.now(), f"answer {number}"))
                await asyncio.sleep(script.get("between", 0.0))
            run.effects.append((self._server.now(), "done"))
            if script.get("fails"):
                task.status, run.result = "failed", f"{run.tag}/{run.number} failed"
                task.final = {"error": {"code": -32603, "message": run.result}}
            else:
                task.status, run.result = "completed", text_of(run)
                run.results.append(run.result)
                task.final = {"result": {"content": [{"type": "text", "text": run.result}]}}
        finally:
            run.ended = self._server.now()
            session.running.pop(task.id, None)
            if task.final is None:
                task.final = {"error": _CANCELLED}
            if script.get("forgets"):
                task.readers.clear()  # as `mcp` 1.30 does if two changes of the task coincide
            if self._server.is_alive:
                self._finish(session, task)

    def _ask(self, session: "Session", task: Task, number: int, script: Any) -> "Asked":
        """Ask a question through the task."""
        task.status = "input_required"
        asked = self._question(session, task, number, script)
        task.unread.append(asked.message)
        self._flush(task)
        return asked

    def _question(self, session: "Session", task: Task, number: int, script: Any) -> "Asked":
        asked = session.ask(task.run, number, script)
        asked.message["params"]["_meta"] = {mcp.META_RELATED_TASK: {"taskId": task.id}}
        return asked

    def _flush(self, task: Task) -> None:
        """Send what was asked to whoever reads."""
        while task.unread and self._tell(task, task.unread[0]):
            task.unread.pop(0)

    def _tell(self, task: Task, message: Any) -> bool:
        """Send a message to the newest reader; whether there is one."""
        for stream in reversed(task.readers.values()):
            self._server.send(stream, message)
            if stream.reader is not None:
                return True
        return False

    def _finish(self, session: "Session", task: Task) -> None:
        """Answer everybody who waits for the result."""
        assert task.final is not None
        for id_, stream in list(task.readers.items()):
            self._server.send(stream, {"jsonrpc": "2.0", "id": id_, **task.final})
            self._server.end_stream(session, stream)
        task.readers.clear()


def text_of(run: "Run") -> str:
    """What a run gives, if it does not fail."""
    return json.dumps({"tag": run.tag, "run": run.number, "answers": run.answers})


def _fragile_id(number: int) -> str:
    """The id of a task of `mcp` 1.30, where tasks/cancel stops nothing, and ends another session."""
    return f"{number:032x}:00000000-0000-4000-8000-{number:012x}"

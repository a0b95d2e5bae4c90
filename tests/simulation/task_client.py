"""SIMULATED modern clients that declare tasks: each begins one, asks how it is, answers, and reads its result."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.protocol import mcp
from tests.simulation import plain_http as http
from tests.simulation.client import PATIENCE_SECONDS, Client, Record, Told, meta_of, name_of, pause_of

_REQUEST_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
_CAPABILITIES: Final = {"elicitation": {"form": {}}, "extensions": {mcp.TASKS: {}}}
_LEAVES_SECONDS: Final = 0.1
_AWAY_SECONDS: Final = 1.2
_FINAL: Final = ("completed", "failed", "cancelled")
_UNKNOWN: Final = -32602


@dataclass
class TaskRecord(Record):
    """What one client has seen of its task; the outcome may also be cancelled or unknown."""

    task: str | None = None
    views: list[tuple[float, str]] = field(default_factory=list)
    """The statuses that it was told."""
    wanted_cancelled: float | None = None
    """When it began to cancel the task."""
    came_back: float | None = None
    """When a task that was over was not over any more."""
    ended_twice: str = ""
    """How a task that was over ended at another replica, if it did otherwise."""
    asked_again: list[str] = field(default_factory=list)
    """Questions that were open again after their answer had been accepted."""
    refusals: list[str] = field(default_factory=list)
    """Errors after which it asked again."""
    was_cancelled: float | None = None
    """When that was acknowledged."""
    is_driven: bool = False
    """It got a result without a task."""
    requests: set[str] = field(default_factory=set)
    """The ids that its requests have in the log."""


class TaskClient(Client):
    """Plays one task."""

    record: TaskRecord

    async def _play(self) -> None:
        record, habit = self.record, self._call.habit
        arguments = {"tag": self._call.tag, **self._call.script}
        params: dict[str, Any] = {"name": self._call.tool, "arguments": arguments}
        begun = await self._until_accepted(mcp.TOOLS_CALL, self._call.tool, **params)
        while begun is not None and begun.result.get("resultType") == "input_required":
            again = {**params, "requestState": begun.result["requestState"]}
            if questions := begun.result.get("inputRequests"):
                record.asked += [name_of(question) for question in questions.values()]
                await asyncio.sleep(self._call.think)
                again["inputResponses"] = {key: self._answer(question) for key, question in questions.items()}
            begun = await self._retry(again)
        if begun is None:
            return
        if begun.error is not None:
            record.outcome, record.final = "refused", begun
            return
        if begun.result.get("resultType") == "complete":
            record.is_driven = True
            record.told.append(begun)
            record.outcome, record.final = "result", begun
            return
        record.task = begun.result.get("taskId")
        if begun.result.get("resultType") != "task" or not record.task:
            record.strange.append(f"got no task: {begun.message}")
            return
        if habit == "abandons":
            record.outcome = "abandoned"
            return
        if habit == "cancels":
            await asyncio.sleep(self._call.think)
            await self._cancel()
        await self._follow()

    async def _retry(self, params: dict[str, Any]) -> Told | None:
        """Come back with a state; who leaves sends the same again in a moment."""
        if self._call.habit == "leaves":
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVES_SECONDS):
                    return await self._until_accepted(mcp.TOOLS_CALL, self._call.tool, **params)
            await asyncio.sleep(_AWAY_SECONDS)
        return await self._until_accepted(mcp.TOOLS_CALL, self._call.tool, **params)

    async def _follow(self) -> None:
        """Ask how the task is until it is over; then once more at each of some replicas."""
        record, answered = self.record, set[str]()
        while True:
            told = await self._about(mcp.TASKS_GET)
            if told is None or self._is_unknown(told):
                return
            view = told.result
            if view.get("taskId") != record.task:
                record.strange.append(f"got another task: {told.message}")
            record.views.append((told.at, str(view.get("status"))))
            if view.get("status") in _FINAL:
                break
            questions = dict(view.get("inputRequests") or {})
            if seen := answered & questions.keys():
                record.asked_again += [name_of(questions[each]) for each in sorted(seen)]
            await (self._reply(questions, answered) if questions else asyncio.sleep(_POLL_SECONDS))
        self._end(told)
        for _ in range(2):
            again = await self._about(mcp.TASKS_GET)
            if again is None or again.error is not None:
                return
            record.views.append((again.at, str(again.result["status"])))
            if again.result["status"] not in _FINAL:
                record.came_back = again.at
                continue
            same = ("status", "result", "error", "createdAt", "ttlMs")
            if [again.result.get(name) for name in same] != [view.get(name) for name in same]:
                record.ended_twice = f"{view}, {again.result}"

    async def _reply(self, questions: dict[str, Any], answered: set[str]) -> None:
        self.record.asked += [name_of(question) for question in questions.values()]
        await asyncio.sleep(self._call.think)
        answers = {key: self._answer(question) for key, question in questions.items()}
        told = await self._about(mcp.TASKS_UPDATE, inputResponses=answers)
        if told is not None and told.error is None:
            answered.update(questions)

    async def _cancel(self) -> None:
        self.record.wanted_cancelled = self._now()
        told = await self._about(mcp.TASKS_CANCEL)
        if told is not None and told.error is None:
            self.record.was_cancelled = told.at

    def _is_unknown(self, told: Told) -> bool:
        if told.error is None:
            return False
        self.record.outcome, self.record.final = "unknown", told
        return True

    def _end(self, told: Told) -> None:
        """Keep how the task ended, as the call would have ended without it."""
        record, view = self.record, told.result
        status = view["status"]
        message = {name: view[name] for name in ("result", "error") if name in view}
        final = Told(told.at, told.replica, told.status, message, is_first=False)
        record.told.append(final)
        record.final, record.outcome = final, {"completed": "result", "failed": "error"}.get(status, status)

    async def _about(self, method: str, **params: Any) -> Told | None:
        """Send a request about the task; None if there is no answer for long."""
        assert self.record.task is not None
        return await self._until_accepted(method, self.record.task, taskId=self.record.task, **params)

    async def _until_accepted(self, method: str, target: str, **params: Any) -> Told | None:
        """Send a request until it is answered, except that no task is begun twice."""
        record, until = self.record, self._now() + PATIENCE_SECONDS
        while self._now() < until:
            try:
                told = await self._send(method, target, params)
            except (OSError, TimeoutError):
                await asyncio.sleep(_POLL_SECONDS)
                continue
            except http.Broken:
                if method == mcp.TOOLS_CALL and "requestState" not in params:
                    record.outcome = "broken"
                    return None
                await asyncio.sleep(_POLL_SECONDS)
                continue
            if (pause := pause_of(told)) is not None:
                await asyncio.sleep(pause)
            elif method == mcp.TOOLS_CALL or told.error is None or told.error["code"] == _UNKNOWN:
                return told
            else:
                record.refusals.append(f"{told.at:.2f} {told.status} {told.reason} {told.error['message'][:80]}")
                await asyncio.sleep(_POLL_SECONDS)
        record.outcome = "gave up"
        return None

    async def _send(self, method: str, target: str, params: dict[str, Any]) -> Told:
        self._ids += 1
        id_ = f"{self._call.tag}-{self._ids}"
        self.record.requests.add(id_)
        params, named = {**params, "_meta": meta_of("tasks", _CAPABILITIES)}, {"X-Request-Id": id_}
        return await self._ask(self._replica(), method, target, params, seconds=_REQUEST_SECONDS, **named)

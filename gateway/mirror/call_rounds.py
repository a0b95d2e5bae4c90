"""The rounds of one mirrored call: what is sent in each one, and what the server's response means.

A modern server keeps nothing between rounds: `inputResponses` and `requestState` bring everything back. So a call can
be continued by whoever knows its request and the round that it is in. It has at most one request in flight upstream,
and none while the client has questions.

A tool that can only run as a task is called again with the extension io.modelcontextprotocol/tasks declared. The
gateway then asks about the task until it ends, and its legacy client sees an ordinary call. The task ends with the
call, or is cancelled.

Sources: specification 2026-07-28 basic/patterns/mrtr; modelcontextprotocol/ext-tasks,
specification/2026-07-28/tasks.
"""

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway import world
from gateway.exchange import events as on
from gateway.exchange import input_requests
from gateway.exchange.input_requests import KINDS, MAX_QUESTIONS, MalformedQuestion, Question
from gateway.mirror.client_requests import LegacyRequest, Profile
from gateway.mirror.server_client import ModernRequest
from gateway.mirror.translation import failed, legacy_error, legacy_notification, legacy_result
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, InvalidParams
from gateway.routes.live_route import LiveRoute
from gateway.telemetry import with_context
from gateway.upstream.channel import NO_HEADERS, Headers

MAX_ROUNDS: Final = 32
"""Modern clients stop after ten; a server that goes on like this would never end."""
_MAX_KEY_BYTES: Final = 1_000
"""The id of a nested request carries the key of its question."""
AT_ONCE: Final = 0.0
_POLL_SECONDS: Final = 1.0
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 60.0
"""The bounds of the pause that a server may ask for between two polls."""
_NOT_MODERN: Final = frozenset({"task", "inputResponses", "requestState"})
"""A client's own answers or state would pass for those of a round of the gateway."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The place of a call: the number of its round, with the upstream's state (JSON) that the round began with.

    `task` is the upstream's id of the task that the call has become, until the server says that it is over.
    """

    round: int = 0
    state: bytes | None = None
    task: str | None = None


Ending = on.Resulted | on.Failed


class _Unserved(Exception):
    """The server asked for what the gateway cannot do for a legacy client."""


class Rounds:
    """The rounds of one request; they are sent by `MirroredCall`."""

    def __init__(  # noqa: PLR0913  (what the requests of a call consist of)
        self,
        live: LiveRoute,
        exchange: str,
        request: LegacyRequest,
        profile: Profile,
        headers: Headers,
        log_level: str | None = None,
        progress: Progress = Progress(),  # noqa: B008  (frozen)
    ) -> None:
        """`exchange` names the call; `headers` are those of the client that go upstream."""
        self.live, self.exchange = live, exchange
        self.request, self.profile, self.progress = request, profile, progress
        self.headers, self.log_level = headers, log_level
        """The client's newest headers, and what it wants to hear from the next round on."""
        self.answers: dict[str, bytes] = {}
        """What the client has answered in this round."""
        self.began = world.monotonic()
        """When this process heard of the task."""
        self._is_relisted = self._needs_tasks = False
        """What the server refused the call for: the headers, or missing tasks."""
        self._taken: set[str] = set()
        """The keys of the task's questions whose answers the server has taken."""

    @property
    def aim(self) -> tuple[str, str]:
        """The method and the target of the request that is to be sent."""
        task = self.progress.task
        if task is None:
            return self.request.method, self.request.target
        return (mcp.TASKS_UPDATE if self.answers else mcp.TASKS_GET), task

    @property
    def kept_bytes(self) -> int:
        """What is kept of the call besides its questions: its params, the answers, and the state of the server."""
        return len(self.request.params) + len(self.progress.state or b"") + sum(map(len, self.answers.values()))

    # -- to the upstream ----------------------------------------------------------------------------------------

    def outgoing(self, trace: Headers = NO_HEADERS) -> ModernRequest:
        """The request of the present round, with a trace context in place of the client's; raises InvalidParams."""
        (method, target), is_task, headers = self.aim, self.progress.task is not None, self.headers
        # Declared always, each optional tool would become a task, and lose its progress (decision 40).
        profile = self.profile.with_tasks if is_task or self._needs_tasks else self.profile
        added: dict[str, bytes | Raw] = {"taskId": jsonrpc.encode(target)} if is_task else {}
        if self.answers:
            added["inputResponses"] = jsonrpc.merge(self.answers)
        if is_task:
            return ModernRequest.new(method, added, profile, headers, target=target)
        if self.progress.state is not None:
            added["requestState"] = self.progress.state
        try:
            params = jsonrpc.fields(self.request.params)
            if trace:
                headers = with_context(headers, trace)
                written = {name: Raw(jsonrpc.encode(value)) for name, value in trace.items()}
                meta = with_context(jsonrpc.fields(params.get("_meta", jsonrpc.EMPTY)), written)
                params["_meta"] = Raw(jsonrpc.merge(meta))
            sent = {key: raw for key, raw in params.items() if key not in _NOT_MODERN} | added
            return ModernRequest.new(method, sent, profile, headers, target=target, log_level=self.log_level)
        except ValueError as exc:
            raise InvalidParams(f'"params._meta" cannot be read: {exc}') from exc

    def take(self, answers: Iterable[tuple[Question, Raw | jsonrpc.Error]]) -> Ending | None:
        """Keep the client's answers; returns how the call ends if the server cannot go on without one of them."""
        for question, answer in answers:
            if isinstance(answer, jsonrpc.Error):
                words = f"The client refused {question.method}: {answer.message or answer.code}"
            elif not bytes(answer).startswith(b"{"):
                words = f"The client answered {question.method} with a result that is not an object"
            else:
                self.answers[question.key] = bytes(answer)
                continue
            return failed(self.request.method, words)
        return None

    def cancellation(self) -> ModernRequest | None:
        """The request that ends the task, for which nobody waits any more; None if it is over, or was cancelled."""
        task, self.progress = self.progress.task, replace(self.progress, task=None)
        if task is None:
            return None
        params = {"taskId": jsonrpc.encode(task)}
        return ModernRequest.new(mcp.TASKS_CANCEL, params, self.profile.with_tasks, self.headers, target=task)

    # -- from the upstream --------------------------------------------------------------------------------------

    def received(self, data: bytes) -> on.Event | bytes | float | None:
        """Take a message of the upstream; None if it concerns nobody.

        Bytes are a notification as the client reads it. A number says that the next request follows without the
        client, after so many seconds. Raises ValueError for a message that is malformed, and CallLost if it says
        nothing of a task that may still work.
        """
        message = jsonrpc.message(data)
        if message.method is not None:
            return legacy_notification(message, data)
        try:
            if (error := message.failure) is not None:
                return self._refused(error)
            return self._resulted(message.result) if isinstance(message.result, Raw) else None
        except _Unserved as exc:
            return failed(self.request.method, str(exc))

    def _resulted(self, result: Raw) -> on.Event | float:
        opened = jsonrpc.fields(result)
        if self.progress.task is not None:
            if not self.answers:
                return self._updated(opened)
            self._taken |= self.answers.keys()  # the server has them
            self.answers = {}
            return AT_ONCE
        match jsonrpc.text(opened.get("resultType")):
            case "input_required":
                state = opened.get("requestState")
                if state is not None and jsonrpc.text(state) is None:
                    raise ValueError("`requestState` must be a string")
                asked = jsonrpc.fields(opened.get("inputRequests", jsonrpc.EMPTY))
                progress = Progress(self.progress.round + 1, None if state is None else bytes(state))
                return self._asked(asked, progress)
            case "task":
                task_id = jsonrpc.text(opened.get("taskId"))
                if not task_id:
                    raise ValueError("a CreateTaskResult needs `taskId`")
                self.progress = Progress(self.progress.round, task=task_id)
                # The keys of a task's questions begin anew, so the answers of the rounds before must not go to it.
                self.answers, self.began = {}, world.monotonic()
                return _pause(opened)
            case _:
                return on.Resulted(legacy_result(self.request.method, result))

    def _refused(self, error: jsonrpc.Error) -> Ending | float:
        if self.progress.task is not None:
            said = error.message[:200]
            if error.code == mcp.INTERNAL_ERROR:  # another try may succeed
                raise CallLost(f"The server answered with an error when asked about the task of this call: {said}")
            if error.code == mcp.INVALID_PARAMS and not self.answers:  # else an answer may be what is invalid
                self.progress = replace(self.progress, task=None)
                raise _Unserved(
                    f"The server does not know the task of this call any more ({said}): its time was over, or the "
                    "server was restarted. The task may have had effects"
                )
            raise _Unserved(f"The server refused {self.aim[0]} for the task of this call: {said}")
        if self.request.method == mcp.TOOLS_CALL:
            # The server has not run the call.
            if error.code == mcp.HEADER_MISMATCH and not self._is_relisted:
                self._is_relisted = True
                return AT_ONCE
            required = jsonrpc.members(jsonrpc.members(error.data).get("requiredCapabilities"))
            needs = error.code == mcp.MISSING_CAPABILITY and mcp.TASKS in jsonrpc.members(required.get("extensions"))
            if needs and not self._needs_tasks and self.live.route.tasks.undeclared == "drive":
                self._needs_tasks = True
                return AT_ONCE
        return legacy_error(self.request.method, error)

    def _asked(self, asked: jsonrpc.Fields, progress: Progress) -> on.Asked | float:
        """Begin the round of these questions."""
        if progress.round >= MAX_ROUNDS:
            raise _Unserved(f"The server asked in {MAX_ROUNDS} rounds and gave no result; the gateway ended the call")
        if len(asked) > MAX_QUESTIONS:
            raise _Unserved(f"The server asked {len(asked)} questions at once, more than {MAX_QUESTIONS}")
        if any(len(key.encode("utf-8", "surrogatepass")) > _MAX_KEY_BYTES for key in asked):
            raise _Unserved(f"The server asked a question whose key has more than {_MAX_KEY_BYTES} bytes")
        self.progress = progress
        self.answers = {}
        questions = tuple([self._question(key, raw) for key, raw in asked.items()])
        return on.Asked(questions) if questions else AT_ONCE

    def _updated(self, found: jsonrpc.Fields) -> on.Event | float:
        """Take what `tasks/get` says."""
        match jsonrpc.text(found.get("status")):
            case "working":
                return _pause(found)
            case "input_required":
                # The server may take a while to note an answer, and name its question until then.
                named = jsonrpc.fields(found.get("inputRequests", jsonrpc.EMPTY))
                asked = {key: raw for key, raw in named.items() if key not in self._taken}
                progress = replace(self.progress, round=self.progress.round + 1)
                return self._asked(asked, progress) if asked else _pause(found)
            case "completed" if "result" in found:
                self.progress = replace(self.progress, task=None)
                return on.Resulted(legacy_result(self.request.method, found["result"]))
            case "failed" if "error" in found:
                ended = legacy_error(self.request.method, jsonrpc.error(found["error"]))
                self.progress = replace(self.progress, task=None)
                return ended
            case "cancelled":
                self.progress = replace(self.progress, task=None)
                raise _Unserved("The server cancelled the task of this call, which may have had effects")
            case "completed" | "failed" as status:
                raise ValueError(f"a task with the status {status} needs its result or error")
            case status:
                raise ValueError(f"a task cannot have the status {(status or '')[:80]!r}")

    def _question(self, key: str, raw: Raw) -> Question:
        opened = jsonrpc.fields(raw)
        method = jsonrpc.text(opened.get("method")) or ""
        if method not in KINDS:
            raise _Unserved(f"The server asked {method[:80]!r}, which the gateway cannot put to a legacy client")
        try:
            read = input_requests.read(method, opened.get("params", msgspec.UNSET), self.profile.declared)
        except MalformedQuestion as exc:
            raise _Unserved(f"The server asked a malformed question: {exc}") from exc
        if not read.allowed:
            needed = ", ".join(read.required)
            raise _Unserved(f"The server asked {method}, and this client did not declare the capability {needed}")
        params = jsonrpc.fields(read.params)
        mode = jsonrpc.text(params.get("mode"))
        if mode == "url":
            # 2026-07-28 has no such id. A replica that runs the round again asks under the same one.
            named = f"{self.exchange}\n{self.progress.round}\n{key}".encode("utf-8", "surrogatepass")
            params["elicitationId"] = Raw(jsonrpc.encode(hashlib.sha256(named).hexdigest()[:32]))
        elif mode == "form" and not self.profile.resumes:  # `mode` came with 2025-11-25, as coming back did
            del params["mode"]
        return Question(key, method, None, params=jsonrpc.merge(params))


def _pause(task: jsonrpc.Fields) -> float:
    """The seconds that the server wants between two polls."""
    milliseconds = jsonrpc.number(task.get("pollIntervalMs"))
    return _POLL_SECONDS if milliseconds is None else min(max(milliseconds / 1000, _LEAST_SECONDS), _MOST_SECONDS)

"""The rounds of a modern call for one request of a legacy client, as events of its exchange; pure.

The upstream keeps nothing between rounds: `inputResponses` and `requestState` bring everything back. So a call can be
continued by whoever knows its request and the round that it is in.

Source: specification 2026-07-28 basic/patterns/mrtr.
"""

import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange import events as on
from gateway.exchange import input_requests
from gateway.exchange.input_requests import KINDS, MAX_QUESTIONS, Malformed, Question
from gateway.mirror import server_task as tasks
from gateway.mirror.client_profile import Profile
from gateway.mirror.translation import failed, legacy_error, legacy_notification, legacy_result, modern_request
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost

MAX_ROUNDS: Final = 32
"""Modern clients stop after ten; a server that goes on like this would never end."""
_MAX_KEY_BYTES: Final = 1_000
"""The id of a nested request carries the key of its question."""


T = TypeVar("T")
NO_TRACE: Final[Mapping[str, str]] = {}
TRACE_CONTEXT: Final = ("traceparent", "tracestate")


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request of a legacy client; `id` and `params` are JSON."""

    id: bytes
    method: str
    params: bytes

    @property
    def target(self) -> str:
        """The tool, prompt or URI; empty for other methods."""
        field = mcp.TARGET_FIELD.get(self.method)
        return (jsonrpc.text(jsonrpc.fields(self.params).get(field)) or "") if field is not None else ""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """The place of a call: the number of its round, with the upstream's state (JSON) that the round began with.

    `task` is the upstream's id of the task that the call has become.
    """

    round: int = 0
    state: bytes | None = None
    task: str | None = None


class Again(NamedTuple):
    """The next round goes upstream."""


class Poll(NamedTuple):
    """The server works on the task; it is asked again after some seconds."""

    seconds: float
    is_new: bool = False
    """Whether the call has become a task just now."""


Ending = on.Resulted | on.Failed
Step = Again | Poll
"""What the link does next by itself."""


class Rounds:
    """The rounds of one request."""

    def __init__(  # noqa: PLR0913  (what one call consists of)
        self,
        request: Request,
        profile: Profile,
        exchange: str,
        progress: Progress = Progress(),  # noqa: B008  (frozen)
        log_level: str | None = None,
        *,
        drives_tasks: bool = True,
    ) -> None:
        """`drives_tasks`: a server that needs tasks is called again with the extension declared."""
        self.log_level = log_level
        self.request = request
        self.profile = profile
        self.progress = progress
        self._exchange = exchange
        self.answers: dict[str, bytes] = {}
        """What the client has answered in this round."""
        self._drives_tasks = drives_tasks
        self._declares_tasks = progress.task is not None
        self._taken: set[str] = set()
        """The keys of the task's questions whose answers the server has taken."""
        self.live_task = progress.task
        """The upstream's id of the task, until the server says that it is over."""

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

    def sent(self, id_: bytes, trace: Mapping[str, str] = NO_TRACE) -> bytes:
        """The request of the present round; raises ValueError if the client's `_meta` is malformed.

        `trace` is its trace context, in place of the client's.
        """
        added: dict[str, bytes | Raw] = {}
        profile = self.profile.with_tasks if self._declares_tasks else self.profile
        if self.answers:
            added["inputResponses"] = jsonrpc.merge(self.answers.items())
        method, target = self.aim
        if self.progress.task is not None:
            return modern_request(id_, method, {"taskId": Raw(jsonrpc.encode(target))}, profile, added=added)
        if self.progress.state is not None:
            added["requestState"] = self.progress.state
        params = jsonrpc.fields(self.request.params)
        if trace:
            written = {name: Raw(jsonrpc.encode(value)) for name, value in trace.items()}
            meta = with_trace(jsonrpc.fields(params.get("_meta", jsonrpc.EMPTY)), written)
            params = jsonrpc.with_meta(params, meta)
        return modern_request(id_, method, params, profile, log_level=self.log_level, added=added)

    def abandoned_task(self) -> str | None:
        """The task that nobody waits for from now on, if there is one."""
        task, self.live_task = self.live_task, None
        return task

    def cancelling(self, task_id: str, id_: bytes) -> bytes:
        """The request that cancels the task."""
        params = {"taskId": Raw(jsonrpc.encode(task_id))}
        return modern_request(id_, mcp.TASKS_CANCEL, params, self.profile.with_tasks)

    # -- from the upstream --------------------------------------------------------------------------------------

    def received(self, data: bytes) -> on.Event | Step | None:
        """Take a message of the upstream; None if it concerns nobody.

        Raises ValueError for one that is malformed, and CallLost if it says nothing of a task that may still work.
        """
        message = jsonrpc.message(data)
        if message.method is not None:
            notification = legacy_notification(message, data)
            return None if notification is None else on.Notified(notification)
        if isinstance(message.error, Raw):
            return self._refused(jsonrpc.error(message.error))
        return self._resulted(message.result) if isinstance(message.result, Raw) else None

    def _resulted(self, result: Raw) -> on.Event | Step:
        opened = jsonrpc.fields(result)
        if self.progress.task is not None:
            return self._updated(tasks.read(opened)) if not self.answers else self._taken_over()
        match jsonrpc.text(opened.get("resultType")):
            case "input_required":
                return self._input_required(opened)
            case "task":
                self.progress = Progress(self.progress.round, task=tasks.created(opened))
                self.live_task, self._declares_tasks, self.answers = self.progress.task, True, {}
                return Poll(tasks.pause(opened), is_new=True)
            case _:
                return self._ended(result)

    def _ended(self, result: Raw) -> Ending:
        return on.Resulted(legacy_result(self.request.method, result))

    def _refused(self, error: jsonrpc.Error) -> Ending | Step:
        if self.progress.task is not None:
            return self._task_refused(error)
        may_declare = self._drives_tasks and not self._declares_tasks and self.request.method == mcp.TOOLS_CALL
        if may_declare and tasks.is_wanted(error):
            self._declares_tasks = True
            return Again()
        return legacy_error(self.request.method, error)

    def _input_required(self, result: jsonrpc.Fields) -> on.Event | Step:
        state = result.get("requestState")
        if state is not None and jsonrpc.text(state) is None:
            raise ValueError("`requestState` must be a string")
        asked = jsonrpc.fields(result.get("inputRequests", jsonrpc.EMPTY))
        return self._asked(asked, Progress(self.progress.round + 1, None if state is None else bytes(state)))

    def _asked(self, asked: jsonrpc.Fields, progress: Progress) -> on.Event | Step:
        """Begin the round of these questions."""
        if progress.round >= MAX_ROUNDS:
            return self.failed(
                f"The server asked in {MAX_ROUNDS} rounds and gave no result; the gateway ended the call"
            )
        if len(asked) > MAX_QUESTIONS:
            return self.failed(f"The server asked {len(asked)} questions at once, more than {MAX_QUESTIONS}")
        if any(len(key.encode("utf-8", "surrogatepass")) > _MAX_KEY_BYTES for key in asked):
            return self.failed(f"The server asked a question whose key has more than {_MAX_KEY_BYTES} bytes")
        self.progress = progress
        self.answers = {}
        questions = []
        for key, raw in asked.items():
            question = self._question(key, raw)
            if not isinstance(question, Question):
                return question
            questions.append(question)
        return on.Asked(tuple(questions)) if questions else Again()

    def _updated(self, found: tasks.State) -> on.Event | Step:
        """Take what `tasks/get` says."""
        if found.status in ("completed", "failed", "cancelled"):
            self.live_task = None
        if found.result is not None:
            return self._ended(found.result)
        if found.error is not None:
            return legacy_error(self.request.method, found.error)
        if found.status == "cancelled":
            return self.failed("The server cancelled the task of this call, which may have had effects")
        # The server may take a while to note an answer, and name its question until then.
        asked = {key: raw for key, raw in found.asked.items() if key not in self._taken}
        return (
            self._asked(asked, replace(self.progress, round=self.progress.round + 1)) if asked else Poll(found.pause)
        )

    def _taken_over(self) -> Poll:
        """The server has the answers to the task's questions."""
        self._taken |= self.answers.keys()
        self.answers = {}
        return Poll(0)

    def _task_refused(self, error: jsonrpc.Error) -> Ending:
        """Take an error about the task; it ends the call unless another try may succeed."""
        if error.code == mcp.INTERNAL_ERROR:
            raise CallLost(
                f"The server answered with an error when asked about the task of this call: {error.message[:200]}"
            )
        if error.code == mcp.INVALID_PARAMS and not self.answers:
            self.live_task = None
            return self.failed(
                f"The server does not know the task of this call any more ({error.message[:200]}): its time was over, "
                "or the server was restarted. The task may have had effects"
            )
        return self.failed(f"The server refused {self.aim[0]} for the task of this call: {error.message[:200]}")

    def _question(self, key: str, raw: Raw) -> Question | Ending:
        opened = jsonrpc.fields(raw)
        method = jsonrpc.text(opened.get("method")) or ""
        if method not in KINDS:
            return self.failed(f"The server asked {method[:80]!r}, which the gateway cannot put to a legacy client")
        try:
            read = input_requests.read(method, opened.get("params", msgspec.UNSET), self.profile.declared)
        except Malformed as exc:
            return self.failed(f"The server asked a malformed question: {exc}")
        if not read.allowed:
            needed = ", ".join(read.required)
            return self.failed(f"The server asked {method}, and this client did not declare the capability {needed}")
        return Question(key, method, Raw(self._legacy_params(key, read.params)), None)

    def _legacy_params(self, key: str, params: Raw) -> bytes:
        opened = jsonrpc.fields(params)
        mode = jsonrpc.text(opened.get("mode"))
        if mode == "url":
            named = f"{self._exchange}\n{self.progress.round}\n{key}".encode("utf-8", "surrogatepass")
            elicitation = jsonrpc.encode(hashlib.sha256(named).hexdigest()[:32])
            return jsonrpc.merge([*opened.items(), ("elicitationId", elicitation)])
        if mode == "form" and not self.profile.resumes:
            return jsonrpc.merge((name, raw) for name, raw in opened.items() if name != "mode")
        return bytes(params)

    # -- from the client ----------------------------------------------------------------------------------------

    def answered(self, question: Question, answer: Raw | jsonrpc.Error) -> Ending | None:
        """Take the client's answer to a question; one without which the server cannot go on ends the call."""
        if isinstance(answer, jsonrpc.Error):
            return self.failed(f"The client refused {question.method}: {answer.message or answer.code}")
        if not bytes(answer).startswith(b"{"):
            return self.failed(f"The client answered {question.method} with a result that is not an object")
        self.answers[question.key] = bytes(answer)
        return None

    def failed(self, words: str) -> Ending:
        """How the call ends that fails at the gateway."""
        return failed(self.request.method, words)


def with_trace(given: Mapping[str, T], trace: Mapping[str, T]) -> dict[str, T]:
    """Headers, or a `_meta`, with a trace context in place of their own."""
    return {**{name: value for name, value in given.items() if name.lower() not in TRACE_CONTEXT}, **trace}

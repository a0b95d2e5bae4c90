"""The questions of one task: those that are open, with the ids of those that no answer may reach any more.

Rule: an id of the server is answered once. A question may have several keys, because each replica that hears it seals
its own.
"""

from collections.abc import Iterable, Mapping

from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange import input_requests as inputs
from gateway.exchange.input_requests import Question
from gateway.exchange.nested_requests import NestedRequests, Refusal
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams, InvalidState
from gateway.protocol.request_meta import Capabilities
from gateway.seal.task_handle import QuestionKey, TaskSealer
from gateway.telemetry import NestedOutcome


class OpenQuestions:
    """The questions of one task; the ids are the server's."""

    def __init__(self, task: str, sealer: TaskSealer, declared: Capabilities) -> None:
        """`declared` are the capabilities of the client."""
        self.is_adopted = False
        """Whether another replica followed the task before, and may have asked."""
        self._task = task
        self._sealer = sealer
        self._asked = NestedRequests(declared, None)
        self._closed: set[bytes] = set()
        """The ids of questions that were answered or withdrawn."""

    @property
    def open(self) -> Mapping[str, Question]:
        """The open questions by key."""
        return self._asked.open

    def take_over(self, questions: Iterable[Question]) -> None:
        """Open the questions of the call that made the task."""
        for question in questions:
            if question.upstream_id is not None:
                self._add(question, question.upstream_id)
        self._asked.restore(self._asked.open.copy(), ())

    def hear(self, event: on.Nested, *, is_over: bool) -> tuple[NestedOutcome, jsonrpc.Error | None]:
        """Open a question of the server; returns what becomes of it, with the error that refuses it."""
        if self._asked.has_heard(event.id) or bytes(event.id) in self._closed:
            return NestedOutcome.DUPLICATE, None
        if is_over:
            error = jsonrpc.Error(mcp.INVALID_PARAMS, "The task is over, so no call is in flight (SEP-2260)")
            return NestedOutcome.UNSOLICITED, error
        try:
            self._add(self._asked.read(event, may_ask=True), event.id)
        except Refusal as exc:
            return NestedOutcome(exc.outcome), exc.error
        return NestedOutcome.ASKED, None

    def _add(self, question: Question, id_: Raw) -> None:
        """Open a question under a key of its own. The parts are copied, because they keep the whole message."""
        if question.params is not None:
            key = self._sealer.questions.seal(QuestionKey(self._task, question.method, bytes(id_)))
            copied = Raw(bytes(question.params))
            self._asked.open[key] = Question(key, question.method, copied, Raw(bytes(id_)))

    def withdraw(self, id_: bytes) -> Question | None:
        """Close the question that its server has given up; returns it if it was open."""
        found = self._asked.withdraw(Raw(id_))
        if found is not None:
            self._closed.add(id_)
        return found

    def take(self, responses: jsonrpc.Fields) -> list[tuple[Question, Raw]]:
        """Close the questions that these answers are for, and return both; what is not open is ignored.

        Raises InvalidParams for an answer of the wrong kind, and then closes nothing.
        """
        taken: dict[bytes, tuple[Question, Raw]] = {}
        for key, answer in responses.items():
            question = self._find(key)
            if question is not None:
                taken.setdefault(_id(question), (question, _checked(question, answer)))
        for id_ in taken:
            self._closed.add(id_)
            _ = self._asked.withdraw(Raw(id_))
        return list(taken.values())

    def put_back(self, questions: Iterable[Question]) -> None:
        """Open questions again whose answers were not delivered."""
        for question in questions:
            self._closed.discard(_id(question))
            if question.params is not None:
                self._asked.open[question.key] = question

    def clear(self) -> list[tuple[Raw, Raw | jsonrpc.Error]]:
        """Close everything; returns the ids with the answers of a client that gives none."""
        left = [(Raw(_id(question)), *inputs.withdrawn(question)) for question in self._asked.open.values()]
        self._asked.open.clear()
        return [(id_, error or result or Raw(b"{}")) for id_, result, error in left]

    def _find(self, key: str) -> Question | None:
        """The question of a key, unless it is closed; another replica may have asked it."""
        found = self._asked.open.get(key)
        if found is not None or not self.is_adopted:
            return found
        try:
            opened = self._sealer.questions.open(key)
        except InvalidState:
            return None
        id_ = opened.upstream_id
        if opened.exchange != self._task or id_ in self._closed or opened.method not in inputs.KINDS:
            return None
        same = (question for question in self._asked.open.values() if _id(question) == id_)
        return next(same, None) or Question(key, opened.method, None, Raw(id_))


def _id(question: Question) -> bytes:
    assert question.upstream_id is not None, "every question of a task waits for its answer"
    return bytes(question.upstream_id)


def _checked(question: Question, answer: Raw) -> Raw:
    try:
        return inputs.check_answer(question, answer)
    except InvalidParams as exc:
        why = exc.message.partition("; the call still waits")[0]
        raise InvalidParams(f"{why}; the task still waits: send tasks/update again") from exc

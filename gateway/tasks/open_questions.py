"""The questions of one task: those that are open, with the ids of those that no answer may reach any more.

Rule: an id of the server is answered once. A question may have several keys, because each replica that hears it seals
its own.
"""

from collections.abc import Iterable, Mapping

from msgspec import Raw

from gateway.exchange import input_requests as inputs
from gateway.exchange.input_requests import MAX_QUESTIONS, Question
from gateway.exchange.nested_requests import MAX_NESTED, MAX_NESTED_ID_BYTES
from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidParams, InvalidState
from gateway.seal.task_handle import QuestionKey, TaskSealer


class OpenQuestions:
    """The questions of one task; the ids are the server's."""

    def __init__(self, task: str, sealer: TaskSealer) -> None:
        self.is_adopted = False
        """Whether another replica followed the task before, and may have asked."""
        self._task = task
        self._sealer = sealer
        self._open: dict[str, Question] = {}
        self._heard: set[bytes] = set()
        self._closed: set[bytes] = set()
        """The ids of questions that were answered or withdrawn."""

    @property
    def open(self) -> Mapping[str, Question]:
        """The open questions by key."""
        return self._open

    def has_heard(self, id_: bytes) -> bool:
        """Whether this question came before, or was answered here before it came."""
        return id_ in self._heard or id_ in self._closed

    def has_room(self, id_: bytes) -> bool:
        """Whether the task may ask one more question."""
        is_full = len(self._heard) >= MAX_NESTED or len(self._open) >= MAX_QUESTIONS
        return not is_full and len(id_) <= MAX_NESTED_ID_BYTES

    def note(self, id_: bytes) -> None:
        """Note that a question came, whatever becomes of it."""
        self._heard.add(id_)

    def add(self, method: str, params: Raw, id_: bytes) -> None:
        """Open a question under a key of its own. The parts are copied, because they keep the whole message."""
        self.note(id_)
        key = self._sealer.seal_key(QuestionKey(self._task, method, id_))
        self._open[key] = Question(key, method, Raw(bytes(params)), Raw(id_))

    def withdraw(self, id_: bytes) -> Question | None:
        """Close the question that its server has given up; returns it if it was open."""
        found = self._remove(id_)
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
            _ = self._remove(id_)
        return list(taken.values())

    def put_back(self, questions: Iterable[Question]) -> None:
        """Open questions again whose answers were not delivered."""
        for question in questions:
            self._closed.discard(_id(question))
            if question.params is not None:
                self._open[question.key] = question

    def clear(self) -> list[tuple[Raw, Raw | jsonrpc.Error]]:
        """Close everything; returns the ids with the answers of a client that gives none."""
        left = [(Raw(_id(question)), *inputs.withdrawn(question)) for question in self._open.values()]
        self._open.clear()
        return [(id_, error or result or Raw(b"{}")) for id_, result, error in left]

    def _find(self, key: str) -> Question | None:
        """The question of a key, unless it is closed; another replica may have asked it."""
        found = self._open.get(key)
        if found is not None or not self.is_adopted:
            return found
        try:
            opened = self._sealer.open_key(key)
        except InvalidState:
            return None
        id_ = opened.upstream_id
        if opened.exchange != self._task or id_ in self._closed or opened.method not in inputs.KINDS:
            return None
        return self._with_id(id_) or Question(key, opened.method, None, Raw(id_))

    def _with_id(self, id_: bytes) -> Question | None:
        return next((question for question in self._open.values() if _id(question) == id_), None)

    def _remove(self, id_: bytes) -> Question | None:
        found = self._with_id(id_)
        return self._open.pop(found.key) if found is not None else None


def _id(question: Question) -> bytes:
    assert question.upstream_id is not None, "every question of a task waits for its answer"
    return bytes(question.upstream_id)


def _checked(question: Question, answer: Raw) -> Raw:
    try:
        return inputs.check_answer(question, answer)
    except InvalidParams as exc:
        why = exc.message.partition("; the call still waits")[0]
        raise InvalidParams(f"{why}; the task still waits: send tasks/update again") from exc

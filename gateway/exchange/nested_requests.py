"""The nested requests of one run of a call: those that came, those that are open, those that the client was shown.

Most calls have none or one, so nothing here is a set or a dictionary of its own before it has to be.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from msgspec import Raw

from gateway.exchange import input_requests as inputs
from gateway.exchange.events import Nested
from gateway.exchange.input_requests import MAX_QUESTIONS, Question
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import GatewayError, InvalidParams
from gateway.protocol.request_meta import Capabilities

MAX_NESTED: Final = 4_096
"""Nested requests of one run; their ids are remembered."""
MAX_NESTED_ID_BYTES: Final = 1024
"""Requests with longer ids are refused and not remembered, to bound memory."""

T = TypeVar("T")
Few = tuple[T, ...] | set[T]
_FEW: Final = 8
_METHODS: Final = {method: method for method in inputs.KINDS}
"""One string for all questions of a kind."""
_NONE: Final[dict[Any, Any]] = {}
"""No answers given in advance, or no questions of another replica, as in nearly every call: it is never changed."""


class Refusal(Exception):
    """A nested request that is answered with an error; `outcome` is counted."""

    def __init__(self, outcome: str, code: int, message: str, lacks: dict[str, Any] | None = None) -> None:
        """`lacks` are the capabilities that the client would have had to declare."""
        super().__init__(message)
        self.outcome = outcome
        self.error = jsonrpc.Error(code, message)
        self.lacks = lacks


class NestedRequests:
    """The nested requests of one exchange; its questions are those that its client may answer."""

    __slots__ = ("_declared", "_given", "_heard", "_theirs", "keys", "open", "shown")

    def __init__(self, declared: Capabilities, given: Mapping[str, Raw] | None) -> None:
        """`given` are answers that came without a requestState; each is used when its question is asked."""
        self.open: Final[dict[str, Question]] = {}
        """Open questions by key: those that the client has, and those that came since."""
        self.shown: tuple[str, ...] = ()
        """The keys of the last round; an answer under another key is ignored."""
        self._declared = declared
        self._given: dict[str, Raw] = dict(given) if given else _NONE
        self.keys: Few[str] = ()
        """Every key that was given in this run."""
        self._heard: Few[bytes] = ()
        self._theirs: dict[bytes, bytes | None] = _NONE
        """Digests, if known, of questions that another replica heard, by id: its stream may bring them again."""

    def restore(self, questions: Mapping[str, Question], recorded: Iterable[str]) -> None:
        """Continue with the questions of a requestState, whose client has answered others under the recorded keys."""
        self.open.update(questions)
        self.shown = tuple(questions)
        self.keys = {*questions, *recorded}
        asked = [(each.upstream_id, each) for each in questions.values() if each.upstream_id is not None]
        self._theirs = {id_: inputs.question_digest(each) for id_, each in asked}
        self._heard = set(self._theirs)
        self._given = _NONE  # a retry's answers are for its round only

    # -- what comes from the upstream -----------------------------------------------------------------------------

    def has_heard(self, id_: bytes | None) -> bool:
        """Whether a request with this id came in this run."""
        return id_ in self._heard

    def is_repeated(self, event: Nested) -> bool:
        """Whether this very request came before.

        The id alone does not tell: `mcp` 1.30 may give the id of a question of a task to a later one.
        """
        id_ = bytes(event.id)
        if id_ not in self._heard:  # nearly always, and the rest is dear
            return False
        question = self.asked(id_)
        if question is not None:
            known: bytes | None = inputs.question_digest(question)
        elif id_ in self._theirs:
            known = self._theirs[id_]
        else:
            return False
        if known is None:
            return True
        try:
            params = inputs.read(event.method, event.params, self._declared).params
        except inputs.MalformedQuestion:
            return False
        return known == inputs.question_digest(Question("", event.method, None, params=params))

    def asked(self, id_: bytes | None) -> Question | None:
        """The open question with this id; there is one at most."""
        for each in self.open.values() if id_ is not None else ():
            if each.upstream_id == id_:
                return each
        return None

    def read(self, event: Nested, *, may_ask: bool) -> Question:
        """Read a request that is not repeated, and give it a key; raises Refusal if no client can answer it."""
        id_ = bytes(event.id)
        refusal = self._refusal(event.method, id_, may_ask=may_ask)
        if len(self._heard) < MAX_NESTED and len(id_) <= MAX_NESTED_ID_BYTES:
            self._heard = _with(self._heard, id_)
        if refusal is not None:
            raise refusal
        try:
            asked = inputs.read(event.method, event.params, self._declared)
        except inputs.MalformedQuestion as exc:
            raise Refusal("malformed", mcp.INVALID_PARAMS, str(exc)) from exc
        if not asked.allowed:
            names = " and ".join(sorted(asked.required))
            text = f"The client did not declare {names} for {event.method}"
            raise Refusal("refused_undeclared", mcp.INVALID_PARAMS, text, asked.required)
        key = inputs.assign_key(event.method, asked.hint, self.keys)
        self.keys = _with(self.keys, key)
        return Question(key, _METHODS[event.method], id_, params=asked.params)

    def _refusal(self, method: str, id_: bytes, *, may_ask: bool) -> Refusal | None:
        if method not in inputs.KINDS:
            return Refusal("refused", mcp.METHOD_NOT_FOUND, f"Method not found: {method[:80]}")
        if not may_ask:
            text = "The client cannot be asked during this request"
        elif self.asked(id_) is not None:  # the server could not tell the answers apart
            text = "An open question has the id of this one"
        elif len(self._heard) >= MAX_NESTED or len(self.keys) >= MAX_NESTED:
            text = f"This call has already sent {MAX_NESTED} nested requests"
        elif len(id_) > MAX_NESTED_ID_BYTES:
            text = f"The request's id is longer than {MAX_NESTED_ID_BYTES} bytes"
        elif len(self.open) >= MAX_QUESTIONS:
            text = f"More than {MAX_QUESTIONS} questions are open"
        else:
            return None
        return Refusal("refused", mcp.INVALID_REQUEST, text)

    def given_answer(self, question: Question) -> Raw | None:
        """The answer that the client gave to this question in advance."""
        answer = self._given.pop(question.key, None)
        if answer is None:
            return None
        try:
            return inputs.check_answer(question, answer)
        except GatewayError:
            return None  # given for another kind of question, so the client is asked

    def withdraw(self, id_: bytes) -> Question | None:
        """Close the question that its server has given up; returns it if it was open."""
        question = self.asked(id_)
        return None if question is None else self.open.pop(question.key)

    def refer(self, urls: dict[str, Question]) -> None:
        """The call has ended with these urls; after them another call follows, perhaps in another session."""
        self._heard = self.shown = ()
        self._theirs = _NONE
        self.keys = {*self.keys, *urls}
        self.open.clear()
        self.open.update(urls)

    def start_run(self) -> None:
        """The call is sent again, and asks anew."""
        self.keys = self._heard = self.shown = ()
        self._theirs = _NONE
        self.open.clear()

    # -- what the client has --------------------------------------------------------------------------------------

    def show(self) -> None:
        """The client gets all open questions: nearly always one, the only one of its run, whose tuple is shared."""
        shown = tuple(self.open)
        self.shown = self.keys if isinstance(self.keys, tuple) and self.keys == shown else shown

    def answered(self, answers: Mapping[str, Raw]) -> tuple[tuple[Question, Raw], ...]:
        """The open questions that the client answered, with checked answers; unknown keys are ignored.

        Questions without params cannot be shown again; the client knows them from an earlier round.
        """
        return tuple(
            [
                (question, inputs.check_answer(question, answers[key]))
                for key, question in self.open.items()
                if key in answers and (key in self.shown or question.params is None)
            ]
        )

    def take(self, answers: Iterable[tuple[Question, Raw]]) -> tuple[tuple[Question, Raw], ...]:
        """Close questions of a task with their answers, which are all checked first; closed ones stay as they are.

        A question that another replica heard may never come here; if it does, it is not asked again.
        """
        taken: dict[bytes, tuple[Question, Raw]] = {}
        for question, answer in answers:
            id_ = question.upstream_id or b""
            if id_ not in taken and (question.key in self.open or id_ not in self._heard):
                taken[id_] = question, inputs.check_answer(question, answer)
        theirs = {id_: question.digest for id_, (question, _) in taken.items() if question.key not in self.open}
        if theirs:
            self._theirs, self._heard = self._theirs | theirs, {*self._heard, *theirs}
        for question, _ in taken.values():
            _ = self.open.pop(question.key, None)
        return tuple(taken.values())

    def put_back_taken(self, questions: Mapping[str, Question]) -> None:
        """Open questions of a task again whose answers were not delivered, or let another replica's be answered."""
        self.put_back({key: question for key, question in questions.items() if question.params is not None})
        closed = [each for each in questions.values() if self.asked(each.upstream_id) is None]
        theirs = {each.upstream_id for each in closed if each.params is None}
        if theirs:
            self._heard = {*self._heard} - theirs
            self._theirs = {id_: digest for id_, digest in self._theirs.items() if id_ not in theirs}

    def put_back(self, questions: dict[str, Question]) -> None:
        """Open questions again whose answers were not delivered, before those that came since.

        One whose id its server has given to another question since stays closed.
        """
        since = self.open.copy()
        again = {key: question for key, question in questions.items() if self.asked(question.upstream_id) is None}
        self.open.clear()  # in place, because the exchange shares the dictionary
        self.open.update(again | since)

    def check_askable(self, answers: Mapping[str, Raw]) -> None:
        """Unanswered questions must be asked again; raises InvalidParams if this process lacks the params of one."""
        missing = [key for key, question in self.open.items() if key not in answers and question.params is None]
        if missing:
            raise InvalidParams(
                f"inputResponses must answer every question of the round, {', '.join(missing)} too: another replica "
                "asked it, and this one cannot repeat it; the call still waits: call again with the same requestState"
            )


def _with(known: Few[T], one: T) -> Few[T]:
    """Add to what is nearly always one or two: a set takes the memory of twenty."""
    if isinstance(known, tuple):
        return (*known, one) if len(known) < _FEW else {*known, one}
    known.add(one)
    return known

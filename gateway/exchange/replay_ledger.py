"""The replay ledger: answers of the client on record, from which a lost call can be run again.

A run is one sending of the call. The record holds the answers that the current run received, in their order. If the
call is lost and may run twice, another run starts: the ledger answers each question that the earlier run asked, and
only a new question goes to the client. The ledger also remembers questions that the upstream withdrew while the client
had them: an answer that still comes is for the next run.

The record travels in the requestState, so that another process can run the call again.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange.input_requests import Question, check_answer, question_digest

MAX_RECORD_BYTES: Final = 65_536
"""Answers an exchange remembers for another run of its call; with more, the call cannot be run again."""
MAX_RUNS: Final = 3
"""How often a call is run again; without a limit, a call that crashes its server would crash it forever."""

_NONE: Final[dict[Any, Any]] = {}
"""Nothing withdrawn, as in nearly every exchange: it is replaced, never changed."""

Answers = tuple[tuple[Question, Raw], ...]


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """One answer as it went upstream: the question it answers (`question_digest`), its round, and its JSON.

    The same question of a later run gets the same answer. Ids differ from run to run, params do not. An answer is due
    if the run under way has not asked for it yet: whoever goes on with that run from a requestState still gives it.
    """

    key: str
    digest: bytes
    round: int
    answer: bytes
    is_due: bool = False


class ReplayLedger:
    """The answers of one exchange, run by run."""

    __slots__ = ("_runs", "_unsent", "_withdrawn", "_withdrawn_ids", "record")

    def __init__(self, record: tuple[Recorded, ...] | None = ()) -> None:
        self.record = record
        """The answers that another run would get: those of the current run, then the due ones of the earlier run.

        None once they are too large to keep, or were lost between processes.
        """
        self._runs = 0
        self._withdrawn: dict[str, Question] = _NONE
        """Questions that the upstream withdrew while the client had them, by key; their call may be run again."""
        self._withdrawn_ids: dict[bytes, bool] = _NONE
        """Upstream ids withdrawn after their answers were sent, and whether the call may be run again."""
        self._unsent: tuple[str, ...] = ()
        """Keys on record whose answers the current run does not get, because it withdrew their questions."""

    @property
    def can_run_again(self) -> bool:
        """Whether every answer is on record and the call has runs left."""
        return self.record is not None and self._runs < MAX_RUNS

    @property
    def owes_run(self) -> bool:
        """Whether the client answered a withdrawn question, so that the call's end is not the last word."""
        return bool(self._unsent) and self.can_run_again

    # -- answers ------------------------------------------------------------------------------------------------

    def note(self, answers: Answers, round_: int, *, sent: bool = True) -> None:
        """Put answers on record; a later answer to a question replaces the earlier one."""
        if not answers:
            return
        if self.record or self._unsent:  # a first round has nothing to strike
            self.strike([question for question, _ in answers])
        if not sent:
            self._unsent = (*self._unsent, *(question.key for question, _ in answers))
        noted = [
            Recorded(question.key, question_digest(question), round_, bytes(answer)) for question, answer in answers
        ]
        self._append(noted, self._due)

    def strike(self, questions: Iterable[Question]) -> None:
        """Take the answers to these questions off the record."""
        keys = {question.key for question in questions}
        self._unsent = tuple(key for key in self._unsent if key not in keys)
        if self.record is not None:
            # Due ones stay: each run gives keys anew, so a key of the earlier run may be another question's by now.
            self.record = tuple([each for each in self.record if each.is_due or each.key not in keys])

    @property
    def _due(self) -> list[Recorded]:
        """The answers of the earlier run that the current run has not asked for yet."""
        return [each for each in self.record or () if each.is_due]

    def _append(self, answers: Iterable[Recorded], due: Iterable[Recorded]) -> None:
        """Add answers of the current run; after them, these are due."""
        if self.record is None:
            return
        self.record = (*(each for each in self.record if not each.is_due), *answers, *due)
        if sum([len(recorded.answer) for recorded in self.record]) > MAX_RECORD_BYTES:
            self.record = None

    def next_answer(self, question: Question) -> Raw | None:
        """The earlier run's answer to this question; None if the question is new.

        A new question parts the two runs: no later answer of the earlier run is used. Questions of one round were
        asked together, so they may come in any order.
        """
        due = self._due
        if not due:
            return None
        digest = question_digest(question)
        for recorded in due:
            if recorded.round != due[0].round:
                break
            if recorded.digest == digest:
                due.remove(recorded)
                self._append((replace(recorded, key=question.key, is_due=False),), due)
                return Raw(recorded.answer)
        self._append((), ())
        return None

    def drop_record(self) -> None:
        """The call is never run again."""
        self.record = None
        self.forget_withdrawn()

    # -- withdrawn questions ------------------------------------------------------------------------------------

    def withdraw(self, question: Question) -> None:
        """The upstream withdrew a question that the client has; an answer can serve another run."""
        self._withdrawn = self._withdrawn or {}
        self._withdrawn[question.key] = question

    def withdraw_sent(self, upstream_id: bytes, *, replayable: bool) -> None:
        """The upstream withdrew a question after its answer was sent."""
        self._withdrawn_ids = self._withdrawn_ids or {}
        self._withdrawn_ids[upstream_id] = replayable

    def ask(self, upstream_id: bytes) -> None:
        """The upstream asks under this id, which it may have used for a question that it withdrew."""
        _ = self._withdrawn_ids.pop(upstream_id, None)

    def awaits(self, questions: Iterable[Question]) -> bool:
        """Whether the upstream still waits for one of these answers, which were sent."""
        return any(question.upstream_id not in self._withdrawn_ids for question in questions)

    def still_open(self, questions: Iterable[Question], shown: Collection[str]) -> dict[str, Question]:
        """Of questions whose answers were not delivered, those that the upstream did not withdraw meanwhile."""
        still = {}
        for question in questions:
            replayable = self._withdrawn_ids.get(question.upstream_id or b"")
            if replayable is None:
                still[question.key] = question
            elif replayable and question.key in shown:
                self.withdraw(question)
        return still

    def match(self, answers: Mapping[str, Raw]) -> Answers:
        """The answers to withdrawn questions, checked; none if the call cannot be run again with them."""
        if not self._withdrawn or not self.can_run_again:
            return ()
        return tuple(
            (question, check_answer(question, answers[key]))
            for key, question in self._withdrawn.items()
            if key in answers
        )

    def forget_withdrawn(self) -> None:
        """A new round begins, or the exchange ends: late answers to withdrawn questions no longer count."""
        self._withdrawn = _NONE

    # -- runs ---------------------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """The call is sent again: the answers on record, and those not asked for yet, are of the earlier run now."""
        due = tuple([replace(each, is_due=True) for each in self.record or ()])
        self.start_call()
        self.record = due
        self._runs += 1

    def start_call(self) -> None:
        """Another call of the exchange follows, which has nothing to do with the answers so far."""
        self.record = ()
        self._withdrawn = self._withdrawn_ids = _NONE
        self._unsent = ()

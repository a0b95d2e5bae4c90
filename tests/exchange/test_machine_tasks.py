"""Stories of an exchange whose client holds the handle of a task: what it asks, and what becomes of it, are events."""

from unittest.mock import ANY

import pytest
from msgspec import Raw

from gateway.exchange import commands as do
from gateway.exchange import events as on
from gateway.exchange.commands import Timer
from gateway.exchange.input_requests import Question, question_digest
from gateway.exchange.machine import Snapshot, State
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidState, Stopping, TaskCancelled
from gateway.protocol.request_meta import Capabilities
from tests.support.playbook import (
    ACCEPT,
    CANCEL,
    DECLINE,
    LOST,
    RESULT,
    Playbook,
    answered,
    asked,
    detached,
    error,
    owned,
    parked,
    raw,
    resumed,
    url,
    url_required,
    waiting,
)

FIRST, SECOND, THIRD = on.Leg(), on.Leg(), on.Leg()
CALL_CANCELLED = do.CancelCall("the client cancelled its task")
RELEASED = do.ReleaseSession(clean=False)


def question(play: Playbook, number: int) -> Question:
    """The open question with this id of the server."""
    (found,) = [each for each in play.questions.values() if each.upstream_id == bytes(raw(number))]
    return found


def theirs(number: int, digest: bytes | None = None) -> Question:
    """A question that another replica asked; without a digest, one of an earlier version."""
    return Question(f"sealed-{number}", mcp.ELICIT, bytes(raw(number)), digest)


def updated(*answers: tuple[Question, Raw]) -> on.Updated:
    return on.Updated(answers)


def settled() -> Playbook:
    return owned(FIRST) >> on.Resulted(RESULT) << do.Keep(do.Reply((), RESULT)) << do.ReleaseSession(clean=True)


def adopted() -> Playbook:
    """Another replica followed the task before."""
    play = Playbook()
    play.exchange.restore(Snapshot(State.OWNED, 0, {}, None, sheds=0))
    return play


# -- the handle -------------------------------------------------------------------------------------------------


def test_the_legs_that_wait_get_the_handle() -> None:
    play = waiting(FIRST) >> on.Became("t") << do.Give((FIRST,))
    assert play.state is State.OWNED
    assert play.exchange.timers == (Timer.TTL,)
    assert play.exchange.calling
    joined = resumed(FIRST, SECOND) >> answered(THIRD, 1, **{"elicitation-1": ACCEPT})
    assert joined >> on.Became("t") << do.Give((SECOND, THIRD))


def test_what_was_asked_before_there_was_a_task_is_a_question_of_the_task() -> None:
    play = waiting(FIRST) >> asked(0) << ANY >> on.Became("t") << do.Give((FIRST,))
    assert play >> updated((question(play, 0), ACCEPT)) << do.SendAnswers(((ANY, ACCEPT),))
    assert not play.questions


@pytest.mark.parametrize("is_parked", [True, False], ids=["parked", "detached"])
def test_a_client_that_was_away_gets_the_handle_when_it_comes_back(*, is_parked: bool) -> None:
    play = parked(FIRST) if is_parked else detached(FIRST, SECOND)
    answers = {} if is_parked else {"elicitation-1": ACCEPT}
    again = answered(THIRD, 1, **answers)
    assert play >> on.Became("t") >> again << do.Give((THIRD,)) >> again << do.Give((THIRD,))
    assert play.refuses(answered(FIRST, 1, **{"elicitation-1": DECLINE}), InvalidState)
    assert play.refuses(answered(FIRST, 7), InvalidState)
    play >> on.Resulted(RESULT) << ANY << ANY
    assert play >> again << do.Give((THIRD,)), "it may not know the handle yet"


# -- questions --------------------------------------------------------------------------------------------------


def test_an_id_of_another_replicas_question_is_free_for_a_different_one() -> None:
    was = asked(2, title="Was")
    shown = owned(SECOND) >> was
    digest = question_digest(question(shown, 2))
    play = adopted() >> updated((theirs(2, digest), ACCEPT)) << ANY >> was
    assert play.counts == ["answered", "duplicate"]
    assert play >> asked(2, title="Is")
    assert list(play.questions) == ["Is"]


def test_two_open_questions_with_one_id_are_refused() -> None:
    """The server could not tell their answers apart. `mcp` 1.30 waits for the answer to the later one only."""
    play = owned(FIRST) >> asked(1, title="first")
    first = question(play, 1)
    assert play >> asked(1, title="second") << do.Respond(raw(1), error(mcp.INVALID_REQUEST))
    assert play.counts == ["asked", "withdrawn", "refused"]
    assert play >> updated((first, ACCEPT)), "it is not sent"
    assert not play.questions


def test_a_refused_request_with_the_id_of_a_withdrawn_question_does_not_open_that_again() -> None:
    play = owned(FIRST) >> asked(1)
    first = question(play, 1)
    play >> updated((first, ACCEPT)) << ANY >> on.Withdrawn(raw(1))
    play >> on.Nested(raw(1), "x/y", raw({})) << do.Respond(raw(1), error(mcp.METHOD_NOT_FOUND))
    assert play >> on.Undelivered((first,), LOST, retryable=True)
    assert not play.questions


def test_a_question_with_the_id_of_a_withdrawn_one_is_open_again_if_its_answer_was_not_delivered() -> None:
    play = owned(FIRST) >> asked(1) >> on.Withdrawn(raw(1)) >> on.Withdrawn(raw(1)) >> asked(1)
    again = question(play, 1)
    play >> updated((again, ACCEPT)) << ANY
    assert play >> on.Undelivered((again,), LOST, retryable=True)
    assert list(play.questions.values()) == [again]


def test_what_its_client_cannot_answer_is_refused_and_the_task_goes_on() -> None:
    play = Playbook(Capabilities(form=True)) >> on.Called(FIRST) << ANY >> on.Became("t") << ANY
    assert play >> on.Nested(raw(1), "x/y", raw({})) << do.Respond(raw(1), error(mcp.METHOD_NOT_FOUND))
    assert play >> on.Nested(raw(2), mcp.ROOTS, raw({})) << do.Respond(raw(2), error(mcp.INVALID_PARAMS))
    assert play.counts == ["refused", "refused_undeclared"]
    assert play.state is State.OWNED


def test_the_questions_that_another_replica_asked_are_answered_once() -> None:
    play = adopted() >> asked(1)
    own = question(play, 1)
    both = updated((own, ACCEPT), (theirs(2), ACCEPT), (theirs(2), DECLINE))
    assert play >> both << do.SendAnswers(((own, ACCEPT), (theirs(2), ACCEPT)))
    assert play >> updated((theirs(1), DECLINE), (theirs(2), DECLINE)) >> asked(2)
    assert play.counts[-1] == "duplicate"
    assert not play.questions
    play >> on.Undelivered((own, theirs(2)), LOST, retryable=True)
    assert list(play.questions.values()) == [own], "nobody here can show the other one"
    assert play >> updated((theirs(2), DECLINE)) << do.SendAnswers(((theirs(2), DECLINE),))


# -- the end ----------------------------------------------------------------------------------------------------


def test_a_result_and_an_error_are_kept_for_whoever_holds_the_handle() -> None:
    assert settled().exchange.timers == (Timer.TTL,)
    failed = jsonrpc.Error(1, "no")
    assert owned(FIRST) >> on.Failed(failed) << do.Keep(do.Fail((), failed)) << do.ReleaseSession(clean=True)
    asking = owned(FIRST) >> asked(1) >> on.Resulted(RESULT) << ANY << RELEASED
    assert not asking.questions


def test_a_task_that_ends_with_urls_has_failed() -> None:
    play = owned(FIRST) >> url_required(url()) << do.Keep(do.Fail((), ANY)) << do.ReleaseSession(clean=True)
    assert play.state is State.SETTLED
    assert not play.questions


@pytest.mark.parametrize("replayable", [True, False])
def test_a_task_that_breaks_is_neither_run_again_nor_cancelled(*, replayable: bool) -> None:
    play = resumed(FIRST, SECOND) >> on.Became("t") << ANY
    assert play >> on.Broke(LOST, replayable) << do.Keep(do.Fail((), LOST)) << RELEASED
    assert play.state is State.SETTLED


def test_a_task_that_its_client_cancels_is_over_at_once() -> None:
    play = owned(FIRST) >> asked(1)
    kept = do.Keep(do.Fail((), TaskCancelled()))
    assert play >> on.Cancelled() << CALL_CANCELLED << do.Respond(raw(1), CANCEL) << kept << RELEASED
    assert play >> on.Cancelled() >> updated()
    assert play >> asked(2) << do.Respond(raw(2), error(mcp.INVALID_PARAMS))
    assert play.counts == ["asked", "refused_unsolicited"]


def test_a_task_that_is_not_followed_any_more_is_not_cancelled() -> None:
    stopped = on.Stopped(Stopping("the time of its handle is over"))
    for play in (owned(FIRST) >> asked(1), settled()):
        assert play >> stopped << RELEASED
        assert play.state is State.ENDED
        assert not play.questions
        assert play.exchange.timers == ()


def test_a_task_keeps_what_is_open_and_nothing_of_its_call() -> None:
    play = resumed(FIRST, SECOND) >> on.Became("t") << ANY
    assert play.exchange.kept_bytes == 0
    play >> asked(1)
    assert play.exchange.kept_bytes == len(bytes(question(play, 1).params or b""))
    assert play >> on.Resulted(RESULT) << ANY << ANY
    assert play.exchange.kept_bytes == 0

"""The questions of one task as several replicas hear them."""

import pytest
from msgspec import Raw

from gateway.config import InForce
from gateway.exchange import events as on
from gateway.exchange.input_requests import MAX_QUESTIONS, Question
from gateway.exchange.nested_requests import MAX_NESTED, MAX_NESTED_ID_BYTES
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities
from gateway.seal.keyring import Keys
from gateway.seal.task_handle import QuestionKey, TaskSealer
from gateway.tasks.open_questions import OpenQuestions
from gateway.telemetry import NestedOutcome

SEALER = TaskSealer(InForce(Keys((bytes(range(32)),))))
FORM = Raw(b'{"message":"Who?","requestedSchema":{"type":"object","properties":{}}}')
ACCEPT = Raw(b'{"action":"accept","content":{}}')
DECLINE = Raw(b'{"action":"decline"}')


def questions(*ids: bytes, adopted: bool = False) -> OpenQuestions:
    found = OpenQuestions("task", SEALER, Capabilities(form=True, roots=True))
    found.is_adopted = adopted
    for id_ in ids:
        assert heard(found, id_) is NestedOutcome.ASKED
    return found


def heard(found: OpenQuestions, id_: bytes, method: str = mcp.ELICIT, params: Raw = FORM) -> NestedOutcome:
    outcome, error = found.hear(on.Nested(Raw(id_), method, params), is_over=False)
    assert (error is None) is (outcome in (NestedOutcome.ASKED, NestedOutcome.DUPLICATE))
    return outcome


def taken(found: OpenQuestions, **responses: Raw) -> list[tuple[bytes, Raw]]:
    return [(bytes(question.upstream_id or b""), answer) for question, answer in found.take(responses)]


def test_an_answer_closes_its_question() -> None:
    asked = questions(b"1", b"2")
    first, second = asked.open
    assert taken(asked, **{first: ACCEPT, "unknown": ACCEPT}) == [(b"1", ACCEPT)]
    assert list(asked.open) == [second]
    assert taken(asked, **{first: DECLINE}) == []


def test_a_question_with_two_keys_is_answered_once() -> None:
    """The replica that followed the task before had sealed a key of its own."""
    (former,) = questions(b"1").open
    asked = questions(b"1", adopted=True)
    (own,) = asked.open
    assert taken(asked, **{former: ACCEPT, own: DECLINE}) == [(b"1", ACCEPT)]
    assert not asked.open
    assert taken(asked, **{own: DECLINE}) == taken(asked, **{former: DECLINE}) == []


def test_a_question_that_comes_after_its_answer_is_not_asked_again() -> None:
    (former,) = questions(b"1").open
    asked = questions(adopted=True)
    assert taken(asked, **{former: ACCEPT}) == [(b"1", ACCEPT)]
    assert heard(asked, b"1") is NestedOutcome.DUPLICATE
    assert not asked.open


def test_the_questions_of_the_call_that_made_the_task_are_asked_once() -> None:
    asked = questions()
    without_id = Question("url", mcp.ELICIT, FORM, None)
    asked.take_over([Question("a", mcp.ELICIT, FORM, Raw(b"1")), without_id])
    assert [question.upstream_id for question in asked.open.values()] == [Raw(b"1")]
    assert heard(asked, b"1") is NestedOutcome.DUPLICATE


def test_what_the_client_cannot_answer_is_refused() -> None:
    asked = questions()
    assert heard(asked, b"1", "x/y") is NestedOutcome.REFUSED
    assert heard(asked, b"2", mcp.ELICIT, Raw(b"{}")) is NestedOutcome.MALFORMED
    assert heard(asked, b"3", mcp.SAMPLE, Raw(b'{"messages":[],"maxTokens":1}')) is NestedOutcome.UNDECLARED
    assert not asked.open


def test_an_answer_that_was_not_delivered_may_be_given_again() -> None:
    (former,) = questions(b"2").open
    asked = questions(b"1", adopted=True)
    (own,) = asked.open
    delivered = asked.take({own: ACCEPT, former: ACCEPT})
    asked.put_back(question for question, _ in delivered)
    assert list(asked.open) == [own]
    assert taken(asked, **{own: DECLINE, former: DECLINE}) == [(b"1", DECLINE), (b"2", DECLINE)]


def test_an_answer_of_the_wrong_kind_closes_nothing() -> None:
    asked = questions(b"1", b"2")
    first, second = asked.open
    with pytest.raises(InvalidParams, match="the task still waits: send tasks/update again"):
        asked.take({first: ACCEPT, second: Raw(b'{"roots":[]}')})
    assert list(asked.open) == [first, second]


def test_a_withdrawn_question_takes_no_answer() -> None:
    asked = questions(b"1", adopted=True)
    (key,) = asked.open
    assert asked.withdraw(b"7") is None
    withdrawn = asked.withdraw(b"1")
    assert withdrawn is not None
    assert withdrawn.key == key
    assert taken(asked, **{key: ACCEPT}) == []


def test_keys_of_other_tasks_and_of_the_owner_alone_are_ignored() -> None:
    other = SEALER.questions.seal(QuestionKey("another", mcp.ELICIT, b"1"))
    odd = SEALER.questions.seal(QuestionKey("task", "x/y", b"1"))
    own = SEALER.questions.seal(QuestionKey("task", mcp.ELICIT, b"1"))
    assert taken(questions(adopted=True), **dict.fromkeys([other, odd, "forged"], ACCEPT)) == []
    assert taken(questions(), **{own: ACCEPT}) == [], "nobody else can have asked"


def test_what_is_left_is_answered_for_a_client_that_gives_no_answer() -> None:
    asked = questions(b"1")
    assert heard(asked, b"2", mcp.ROOTS, Raw(b"{}")) is NestedOutcome.ASKED
    (id_, cancelled), (other, refused) = asked.clear()
    assert (id_, cancelled, other) == (Raw(b"1"), Raw(b'{"action":"cancel"}'), Raw(b"2"))
    assert not isinstance(refused, Raw)
    assert refused.code == mcp.INTERNAL_ERROR
    assert not asked.open


def test_a_task_has_room_for_so_many_questions() -> None:
    asked = questions(*(b"%d" % number for number in range(MAX_QUESTIONS - 1)))
    assert heard(asked, b"1" * (MAX_NESTED_ID_BYTES + 1)) is NestedOutcome.REFUSED
    assert heard(asked, b"700") is NestedOutcome.ASKED
    assert heard(asked, b"701") is NestedOutcome.REFUSED
    _ = asked.clear()
    assert heard(asked, b"702") is NestedOutcome.ASKED
    for number in range(MAX_NESTED):
        _ = heard(asked, b"%d" % (1000 + number), "x/y")
    assert heard(asked, b"9000") is NestedOutcome.REFUSED

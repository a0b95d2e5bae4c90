"""The nested requests of one run: which of them become questions, and which answers are for them."""

from typing import Any

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange.input_requests import MAX_QUESTIONS, Question
from gateway.exchange.nested_requests import MAX_NESTED, MAX_NESTED_ID_BYTES, NestedRequests, Refusal
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities
from tests.support.playbook import ACCEPT, ALL, FORM, SAMPLED, asked, raw


def nested(given: dict[str, Raw] | None = None) -> NestedRequests:
    return NestedRequests(ALL, given)


def opened(requests: NestedRequests, id_: Any = 0) -> Question:
    """One open question."""
    question = requests.read(asked(id_), may_ask=True)
    requests.open[question.key] = question
    return question


def refused(requests: NestedRequests, event: on.Nested, *, may_ask: bool = True) -> Refusal:
    with pytest.raises(Refusal) as caught:
        _ = requests.read(event, may_ask=may_ask)
    return caught.value


def test_a_request_is_heard_once_and_gets_a_key_of_its_own() -> None:
    requests = nested()
    assert not requests.has_heard(b"0")
    assert [opened(requests, number).key for number in (0, 1)] == ["elicitation-1", "elicitation-2"]
    assert requests.has_heard(b"0")
    assert not requests.has_heard(b"2")
    assert not requests.has_heard(None), "a url of -32042 has no id"


def test_many_requests_are_remembered_as_few_are() -> None:
    requests = nested()
    for number in range(20):
        _ = opened(requests, number)
    assert all(requests.has_heard(bytes(raw(number))) for number in range(20))
    assert len(requests.open) == 20


def test_the_client_has_only_the_questions_that_its_round_showed() -> None:
    requests = nested()
    first = opened(requests, 0)
    requests.show()
    assert requests.shown == (first.key,)
    del requests.open[first.key]
    second = opened(requests, 1)
    requests.show()
    assert requests.shown == (second.key,)
    requests.put_back({first.key: first})
    answers = dict.fromkeys((first.key, second.key), ACCEPT)
    assert [question for question, _ in requests.answered(answers)] == [second], "the round did not show the first"


@pytest.mark.parametrize(
    ("event", "outcome", "code"),
    [
        (on.Nested(raw(0), "ping", raw({})), "refused", mcp.METHOD_NOT_FOUND),
        (on.Nested(raw("x" * MAX_NESTED_ID_BYTES), mcp.ELICIT, raw(FORM)), "refused", mcp.INVALID_REQUEST),
        (on.Nested(raw(0), mcp.ELICIT, raw({"message": 7})), "malformed", mcp.INVALID_PARAMS),
    ],
)
def test_what_no_client_can_answer_is_refused(event: on.Nested, outcome: str, code: int) -> None:
    refusal = refused(nested(), event)
    assert (refusal.outcome, refusal.error.code, refusal.lacks) == (outcome, code, None)


def test_a_request_whose_id_is_too_long_is_not_remembered() -> None:
    requests, long = nested(), asked("x" * MAX_NESTED_ID_BYTES)
    _ = refused(requests, long)
    assert not requests.has_heard(long.id)


def test_a_client_that_cannot_be_asked_now_is_not_asked() -> None:
    assert refused(nested(), asked(0), may_ask=False).error.code == mcp.INVALID_REQUEST


def test_a_request_that_needs_an_undeclared_capability_says_which() -> None:
    refusal = refused(NestedRequests(Capabilities(), None), asked(0))
    assert (refusal.outcome, refusal.lacks) == ("undeclared", {"elicitation": {"form": {}}})


def test_only_so_many_questions_are_open_and_only_so_many_requests_come() -> None:
    requests = nested()
    for number in range(MAX_QUESTIONS):
        _ = opened(requests, number)
    assert f"More than {MAX_QUESTIONS} questions" in refused(requests, asked(-1)).error.message
    for number in range(MAX_QUESTIONS, MAX_NESTED):
        _ = refused(requests, asked(number))
    assert f"already sent {MAX_NESTED}" in refused(requests, asked(MAX_NESTED)).error.message
    assert not requests.has_heard(bytes(raw(MAX_NESTED))), "they are counted no further"


def test_requests_under_one_id_are_counted_too() -> None:
    requests = nested()
    for _ in range(MAX_NESTED):
        _ = opened(requests)
        assert requests.withdraw(b"0")
    refusal = refused(requests, asked(0))
    assert (refusal.error.code, len(requests.keys)) == (mcp.INVALID_REQUEST, MAX_NESTED)


def test_a_question_whose_id_its_server_gave_to_another_one_is_not_asked_again() -> None:
    requests = nested()
    first = opened(requests)
    del requests.open[first.key]
    second = opened(requests)
    requests.put_back({first.key: first})
    assert requests.asked(b"0") is second
    requests.put_back_taken({"theirs": Question("theirs", mcp.ELICIT, b"0")})
    assert list(requests.open.values()) == [second]
    assert requests.has_heard(b"0")


def test_an_answer_given_in_advance_serves_its_own_question_once() -> None:
    requests = nested({"elicitation-1": ACCEPT, "elicitation-2": SAMPLED})
    first = requests.read(asked(0), may_ask=True)
    assert requests.given_answer(first) == ACCEPT
    assert requests.given_answer(first) is None
    assert requests.given_answer(requests.read(asked(1), may_ask=True)) is None, "it is for another kind of question"


def test_a_withdrawn_question_is_closed() -> None:
    requests = nested()
    question = opened(requests)
    requests.open["url"] = Question("url", mcp.ELICIT, None, params=b"{}")
    assert requests.withdraw(b"7") is None
    assert requests.withdraw(b"0") is question
    assert list(requests.open) == ["url"]


def test_only_answers_to_questions_that_the_client_has_count() -> None:
    requests = nested()
    first = opened(requests)
    requests.show()
    second = opened(requests, 1)
    assert requests.answered({first.key: ACCEPT, second.key: ACCEPT, "other": ACCEPT}) == ((first, ACCEPT),)
    with pytest.raises(InvalidParams):
        _ = requests.answered({first.key: SAMPLED})


def test_a_question_of_another_replica_without_its_params_must_be_answered_at_once() -> None:
    requests = nested()
    wordless = Question("name", mcp.ELICIT, b"0", b"digest")
    requests.restore({"name": wordless}, ["before"])
    assert requests.has_heard(b"0")
    assert requests.shown == ("name",)
    with pytest.raises(InvalidParams, match="name too"):
        requests.check_askable({})
    requests.check_askable({"name": ACCEPT})
    assert requests.answered({"name": ACCEPT}) == ((wordless, ACCEPT),)
    assert requests.read(asked(1, title="before"), may_ask=True).key == "before-2"


def test_a_restored_call_takes_no_answers_given_in_advance() -> None:
    requests = nested({"elicitation-1": ACCEPT})
    requests.restore({}, [])
    assert requests.given_answer(requests.read(asked(0), may_ask=True)) is None


def test_a_question_whose_answer_did_not_arrive_is_asked_before_those_that_came_since() -> None:
    requests = nested()
    first = opened(requests)
    del requests.open[first.key]
    _ = opened(requests, 1)
    requests.put_back({first.key: first})
    assert list(requests.open) == ["elicitation-1", "elicitation-2"]


def test_after_urls_the_ids_of_the_next_call_are_new_and_the_keys_are_not() -> None:
    requests = nested()
    _ = opened(requests)
    requests.refer({"url": Question("url", mcp.ELICIT, None, params=b"{}")})
    assert list(requests.open) == ["url"]
    assert not requests.has_heard(b"0")
    assert opened(requests).key == "elicitation-2"


def test_another_run_asks_anew() -> None:
    requests = nested()
    _ = opened(requests)
    requests.show()
    requests.start_run()
    assert (requests.open, requests.shown) == ({}, ())
    assert opened(requests).key == "elicitation-1"

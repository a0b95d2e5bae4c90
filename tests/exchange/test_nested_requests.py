"""The nested requests of one run, beyond what the stories of an exchange show of them."""

from typing import Any

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange.input_requests import MAX_QUESTIONS, Question
from gateway.exchange.nested_requests import MAX_NESTED, NestedRequests, Refusal
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidParams
from tests.support.playbook import ACCEPT, ALL, asked, raw


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

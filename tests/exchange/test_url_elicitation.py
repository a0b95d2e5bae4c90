"""The error -32042, which asks for visits to URLs, as questions."""

from typing import Any

import pytest
from msgspec import UNSET, Raw

from gateway.exchange import input_requests as inputs
from gateway.exchange.input_requests import MAX_QUESTIONS, MalformedQuestion
from gateway.exchange.url_elicitation import questions_of
from gateway.protocol import mcp
from tests.support.playbook import FORM, raw, url
from tests.support.schema import assert_modern_result


def test_the_urls_of_an_error_become_questions_without_an_upstream_id() -> None:
    bare = {"message": "Visit", "url": "https://example.com/b", "elicitationId": "b"}
    questions = questions_of(raw({"elicitations": [url(), bare]}), {"elicitation-1"})
    assert list(questions) == ["elicitation-2", "elicitation-3"]
    assert all(question.upstream_id is None for question in questions.values())
    result = b'{"resultType":"input_required","inputRequests":%b}' % inputs.input_requests(questions)
    found = assert_modern_result(mcp.TOOLS_CALL, result)["inputRequests"]
    assert found["elicitation-3"]["params"] == {"mode": "url", "message": "Visit", "url": "https://example.com/b"}


@pytest.mark.parametrize(
    "data",
    [
        UNSET,
        raw(None),
        raw({}),
        raw({"elicitations": []}),
        raw({"elicitations": [1]}),
        raw({"elicitations": [{"mode": "url", "message": "x"}]}),
        raw({"elicitations": [url(), FORM | {"mode": "form"}]}),
        Raw(b'{"elicitations":' + b"[" * 100_000),
    ],
    ids=range(8),
)
def test_an_error_without_proper_urls_is_malformed(data: Any) -> None:
    with pytest.raises(MalformedQuestion, match="-32042"):
        questions_of(data, set())


def test_an_error_with_more_urls_than_a_user_can_visit_is_refused() -> None:
    data = raw({"elicitations": [url() for _ in range(MAX_QUESTIONS)]})
    assert len(questions_of(data, ())) == MAX_QUESTIONS
    with pytest.raises(MalformedQuestion, match="65 elicitations, more than 64"):
        questions_of(raw({"elicitations": [url() for _ in range(MAX_QUESTIONS + 1)]}), ())

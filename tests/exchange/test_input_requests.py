"""Nested requests as a modern client sees them, and its answers as the old server gets them."""

import json
from typing import Any

import pytest
from msgspec import UNSET, Raw

from gateway.exchange import input_requests as inputs
from gateway.exchange.input_requests import MAX_QUESTIONS, MalformedQuestion, Question
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities
from tests.support.playbook import ALL, FORM, SAMPLING, raw, url
from tests.support.schema import assert_legacy_message, assert_modern_result

OBJECT = FORM["requestedSchema"]


def reread(method: str, params: Any) -> dict[str, Any]:
    """The params of a question, validated as part of an InputRequiredResult."""
    asked = inputs.read(method, raw(params), ALL)
    requests = inputs.input_requests({"k": Question("k", method, b"0", params=asked.params)})
    result = b'{"resultType":"input_required","inputRequests":%b}' % requests
    found = assert_modern_result(mcp.TOOLS_CALL, result)["inputRequests"]["k"]
    assert found["method"] == method
    return dict(found["params"])


# -- questions ------------------------------------------------------------------------------------------------------

KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "form": (mcp.ELICIT, FORM),
    "form with a mode": (mcp.ELICIT, {**FORM, "mode": "form"}),
    "sampling": (mcp.SAMPLE, {**SAMPLING, "temperature": 0.5, "metadata": {"a": None}, "stopSequences": ["x"]}),
    "sampling with tools": (
        mcp.SAMPLE,
        {**SAMPLING, "tools": [{"name": "t", "inputSchema": {"type": "object"}}], "toolChoice": {"mode": "auto"}},
    ),
    "roots": (mcp.ROOTS, {}),
    "meta of others": (mcp.ELICIT, {**FORM, "_meta": {"com.example/a": 1}}),
}


@pytest.mark.parametrize(("method", "params"), KEPT.values(), ids=KEPT)
def test_params_go_through_untouched(method: str, params: dict[str, Any]) -> None:
    assert reread(method, params) == params


def test_what_the_new_revision_does_not_know_is_taken_out() -> None:
    meta = {"progressToken": 1, mcp.META_RELATED_TASK: {"taskId": "t"}, mcp.META_INPUT_KEY: "k", "a": 1}
    assert reread(mcp.ELICIT, {**url(), "task": {"ttl": 1}, "_meta": meta}) == {
        "mode": "url",
        "message": "Visit a",
        "url": "https://example.com/a",
        "_meta": {"a": 1},
    }
    assert reread(mcp.ELICIT, {**FORM, "_meta": {"progressToken": 1}}) == FORM
    assert reread(mcp.ROOTS, {"_meta": None}) == {}


@pytest.mark.parametrize("params", [UNSET, Raw(b"null"), Raw(b"{}")], ids=["absent", "null", "empty"])
def test_roots_need_no_params(params: Any) -> None:
    asked = inputs.read(mcp.ROOTS, params, ALL)
    assert bytes(asked.params) == b"{}"


NEEDS: list[tuple[str, dict[str, Any], Capabilities, dict[str, Any]]] = [
    (mcp.ELICIT, FORM, Capabilities(form=True), {"elicitation": {"form": {}}}),
    (mcp.ELICIT, url(), Capabilities(url=True), {"elicitation": {"url": {}}}),
    (mcp.SAMPLE, SAMPLING, Capabilities(sampling=True), {"sampling": {}}),
    (mcp.SAMPLE, {**SAMPLING, "tools": []}, Capabilities(sampling_tools=True), {"sampling": {"tools": {}}}),
    (mcp.SAMPLE, {**SAMPLING, "toolChoice": {}}, Capabilities(sampling_tools=True), {"sampling": {"tools": {}}}),
    (mcp.SAMPLE, {**SAMPLING, "tools": None, "toolChoice": None}, Capabilities(sampling=True), {"sampling": {}}),
    (mcp.ROOTS, {}, Capabilities(roots=True), {"roots": {}}),
]


@pytest.mark.parametrize(("method", "params", "enough", "needed"), NEEDS, ids=range(len(NEEDS)))
def test_each_question_needs_its_capability_and_no_other(
    method: str, params: dict[str, Any], enough: Capabilities, needed: dict[str, Any]
) -> None:
    flags = {name: getattr(enough, name) for name in enough.__struct_fields__}
    others = Capabilities(**{name: not flag for name, flag in flags.items()})
    assert inputs.read(method, raw(params), enough).allowed
    refused = inputs.read(method, raw(params), others)
    assert not refused.allowed
    assert refused.required == needed


MALFORMED: list[tuple[str, Any]] = [
    (mcp.ELICIT, UNSET),
    (mcp.ELICIT, None),
    (mcp.ELICIT, []),
    (mcp.ELICIT, {"message": "x"}),
    (mcp.ELICIT, {"message": 1, "requestedSchema": OBJECT}),
    (mcp.ELICIT, {**FORM, "mode": "voice"}),
    (mcp.ELICIT, {"message": "x", "requestedSchema": {"type": "string", "properties": {}}}),
    (mcp.ELICIT, {"message": "x", "requestedSchema": {"type": "object"}}),
    (mcp.ELICIT, {"mode": "url", "message": "x"}),
    (mcp.ELICIT, {**FORM, "_meta": []}),
    (mcp.SAMPLE, UNSET),
    (mcp.SAMPLE, {"messages": []}),
    (mcp.SAMPLE, {"messages": {}, "maxTokens": 1}),
    (mcp.SAMPLE, {"messages": [], "maxTokens": "1"}),
    (mcp.ROOTS, []),
    (mcp.ROOTS, {"_meta": 1}),
]


@pytest.mark.parametrize(("method", "params"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_no_client_could_render_is_malformed(method: str, params: Any) -> None:
    with pytest.raises(MalformedQuestion, match=f"^{method}: (?!{method})"):
        inputs.read(method, params if params is UNSET else raw(params), ALL)


def test_nesting_that_exhausts_the_decoder_is_malformed() -> None:
    with pytest.raises(MalformedQuestion):
        inputs.read(mcp.ROOTS, Raw(b'{"a":' + b"[" * 100_000), ALL)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "hint", "used", "key"),
    [
        (mcp.ELICIT, None, [], "elicitation-1"),
        (mcp.SAMPLE, None, [], "sampling-1"),
        (mcp.ROOTS, "", [], "roots-1"),
        (mcp.ELICIT, None, ["elicitation-1", "elicitation-2"], "elicitation-3"),
        (mcp.ELICIT, "name", [], "name"),
        (mcp.ELICIT, "name", ["name"], "name-2"),
        (mcp.ELICIT, "name", ["name", "name-2"], "name-3"),
        (mcp.ELICIT, "x" * 999, [], "x" * 128),
    ],
)
def test_keys_are_unique(method: str, hint: str | None, used: list[str], key: str) -> None:
    assert inputs.assign_key(method, hint, used) == key


def test_the_servers_own_hint_comes_before_the_title() -> None:
    titled = {**FORM, "requestedSchema": {**OBJECT, "title": "Title"}}  # type: ignore[dict-item]
    assert inputs.read(mcp.ELICIT, raw(titled), ALL).hint == "Title"
    assert inputs.read(mcp.ELICIT, raw({**titled, "_meta": {mcp.META_INPUT_KEY: "mine"}}), ALL).hint == "mine"
    assert inputs.read(mcp.ELICIT, raw({**titled, "_meta": {mcp.META_INPUT_KEY: 7}}), ALL).hint == "Title"
    assert inputs.read(mcp.SAMPLE, raw({**SAMPLING, "_meta": {mcp.META_INPUT_KEY: "s"}}), ALL).hint == "s"


# -- answers ----------------------------------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "Hi"}
TOOL = {"type": "tool_use", "id": "1", "name": "t", "input": {"a": None}}
SAMPLED = {"role": "assistant", "model": "m", "content": TEXT}

GOOD: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (mcp.ELICIT, {"action": "accept", "content": {"a": "x", "b": 1, "c": 0.5, "d": True, "e": ["x"]}}, {}),
    (mcp.ELICIT, {"action": "accept"}, {}),
    (mcp.ELICIT, {"action": "decline"}, {}),
    (mcp.ELICIT, {"action": "cancel", "_meta": {"a": 1}}, {}),
    (mcp.ELICIT, {"action": "cancel", "content": None}, {"content": None}),
    (mcp.SAMPLE, {**SAMPLED, "stopReason": "endTurn"}, {}),
    (mcp.SAMPLE, {**SAMPLED, "stopReason": None}, {"stopReason": None}),
    (mcp.SAMPLE, {**SAMPLED, "content": [TEXT]}, {"content": TEXT}),
    (mcp.SAMPLE, {**SAMPLED, "content": [TEXT, TOOL]}, {}),
    (mcp.ROOTS, {"roots": []}, {}),
    (mcp.ROOTS, {"roots": [{"uri": "file:///a", "name": "a"}]}, {}),
]


@pytest.mark.parametrize(("method", "answer", "changed"), GOOD, ids=range(len(GOOD)))
def test_a_good_answer_goes_upstream_as_it_is(method: str, answer: dict[str, Any], changed: dict[str, Any]) -> None:
    sent = inputs.check_answer(Question("k", method, b"0", params=b"{}"), raw(answer))
    wanted = {key: value for key, value in {**answer, **changed}.items() if value is not None}
    assert json.loads(bytes(sent)) == wanted
    assert_legacy_message(jsonrpc.result(b"0", sent), method)


BAD: list[tuple[str, Any]] = [
    (mcp.ELICIT, {}),
    (mcp.ELICIT, {"action": "Accept"}),
    (mcp.ELICIT, {"action": "accept", "content": []}),
    (mcp.ELICIT, {"action": "accept", "content": {"a": {}}}),
    (mcp.ELICIT, {"action": "accept", "content": {"a": [1]}}),
    (mcp.ELICIT, []),
    (mcp.ELICIT, SAMPLED),
    (mcp.SAMPLE, {"action": "accept"}),
    (mcp.SAMPLE, {**SAMPLED, "role": "system"}),
    (mcp.SAMPLE, {**SAMPLED, "model": None}),
    (mcp.SAMPLE, {**SAMPLED, "content": "Hi"}),
    (mcp.SAMPLE, {**SAMPLED, "content": [{}]}),
    (mcp.ROOTS, {"roots": {}}),
    (mcp.ROOTS, {"roots": [{"name": "a"}]}),
    (mcp.ROOTS, None),
]


@pytest.mark.parametrize(("method", "answer"), BAD, ids=range(len(BAD)))
def test_an_answer_of_the_wrong_kind_is_refused(method: str, answer: Any) -> None:
    with pytest.raises(InvalidParams, match=r"inputResponses\['k'\] is not a valid .*Result"):
        inputs.check_answer(Question("k", method, b"0", params=b"{}"), raw(answer))


def test_an_accepted_url_is_told_from_a_declined_one() -> None:
    assert inputs.accepted(raw({"action": "accept"}))
    assert not inputs.accepted(raw({"action": "decline"}))
    assert not inputs.accepted(raw({"action": "cancel"}))


@pytest.mark.parametrize("method", sorted(inputs.KINDS))
def test_a_question_without_an_answer_is_settled_with_a_valid_result_or_error(method: str) -> None:
    answer = inputs.withdrawn(method)
    assert isinstance(answer, jsonrpc.Error) is (method != mcp.ELICIT)
    assert_legacy_message(jsonrpc.answer(raw(0), answer), method)


# -- what is the same question ----------------------------------------------------------------------------------------


def digest(method: str, params: bytes) -> bytes:
    return inputs.question_digest(Question("k", method, b"0", params=params))


def test_a_question_is_named_by_method_and_params_and_by_nothing_else() -> None:
    one = digest(mcp.ELICIT, b'{"message":"x","a":{"b":1,"c":[1,2]}}')
    assert len(one) == 16
    assert digest(mcp.ELICIT, b'{ "a": {"c":[1, 2],"b":1}, "message":"\\u0078" }') == one
    other = Question("other key", mcp.ELICIT, b'"other id"', params=b'{"message":"x","a":{"b":1,"c":[1,2]}}')
    assert inputs.question_digest(other) == one
    assert digest(mcp.SAMPLE, b'{"message":"x","a":{"b":1,"c":[1,2]}}') != one
    assert digest(mcp.ELICIT, b'{"message":"x","a":{"b":1,"c":[2,1]}}') != one
    assert digest(mcp.ELICIT, b'{"message":"X","a":{"b":1,"c":[1,2]}}') != one


@pytest.mark.parametrize("params", [b'{"a":1e999}', b'{"a":' + b"[" * 100_000], ids=["number", "depth"])
def test_a_question_that_cannot_be_read_is_named_by_its_bytes(params: bytes) -> None:
    one = digest(mcp.ELICIT, params)
    assert len(one) == 16
    assert digest(mcp.ELICIT, params) == one
    assert digest(mcp.ELICIT, params + b" ") != one
    assert digest(mcp.SAMPLE, params) != one


def test_a_digest_that_travelled_is_taken_as_it_is() -> None:
    assert inputs.question_digest(Question("k", mcp.ELICIT, b"0", b"travelled")) == b"travelled"
    assert inputs.question_digest(Question("k", mcp.ELICIT, b"0", b"travelled", params=b"{}")) == b"travelled"


# -- the error -32042 ------------------------------------------------------------------------------------------------


def test_the_urls_of_an_error_become_questions_without_an_upstream_id() -> None:
    bare = {"message": "Visit", "url": "https://example.com/b", "elicitationId": "b"}
    questions = inputs.url_questions(raw({"elicitations": [url(), bare]}), {"elicitation-1"})
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
        inputs.url_questions(data, set())


def test_an_error_with_more_urls_than_a_user_can_visit_is_refused() -> None:
    data = raw({"elicitations": [url() for _ in range(MAX_QUESTIONS)]})
    assert len(inputs.url_questions(data, ())) == MAX_QUESTIONS
    with pytest.raises(MalformedQuestion, match="65 elicitations, more than 64"):
        inputs.url_questions(raw({"elicitations": [url() for _ in range(MAX_QUESTIONS + 1)]}), ())

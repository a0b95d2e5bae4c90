"""One request of a legacy client on its way through the rounds of a modern call."""

import json
from typing import Any

import pytest

from gateway.exchange import events as on
from gateway.mirror.call_rounds import MAX_ROUNDS, Rounds
from gateway.mirror.client_requests import LegacyRequest, Profile, answer_of
from gateway.protocol import jsonrpc, mcp
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.fake_modern import FORM, PAGE, SAMPLE
from tests.support.fake_server import fake_live

ALL = b'{"elicitation":{"form":{},"url":{}},"sampling":{},"roots":{}}'
ACCEPT = {"action": "accept", "content": {}}
PARAMS = {"name": "t", "uri": "a:b", "arguments": {"x": 1}}


def call(method: str = "tools/call", *, declared: bytes = ALL, exchange: str = "exchange", **own: Any) -> Rounds:
    request = LegacyRequest(b"7", method, json.dumps({**PARAMS, **own}).encode())
    profile = Profile(mcp.LEGACY, b'{"name":"c","version":"1"}', declared)
    return Rounds(fake_live(Tasks(Metrics("0"))), exchange, request, profile, {})


def encoded(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, **members}).encode()


def required(state: Any = "s", **requests: Any) -> bytes:
    result = {"resultType": "input_required", "inputRequests": requests}
    return encoded(result=result if state is None else {**result, "requestState": state})


def answer(**members: Any) -> jsonrpc.Message:
    return jsonrpc.message(encoded(**members))


def sent(it: Rounds) -> dict[str, Any]:
    params: dict[str, Any] = json.loads(it.outgoing().body)["params"]
    return params


def ended(step: object) -> dict[str, Any]:
    assert isinstance(step, on.Resulted | on.Failed)
    if isinstance(step, on.Resulted):
        return {"result": json.loads(step.result)}
    return {"error": json.loads(jsonrpc.encode(step.error))}


def answered(it: Rounds, step: object, key: str, **members: Any) -> on.Event | None:
    """The client answers the question with this key, of those that a step has put to it; returns how the call ends."""
    assert isinstance(step, on.Asked)
    (question,) = [each for each in step.questions if each.key == key]
    return it.take([(question, answer_of(answer(**members)))])


@pytest.mark.parametrize(("size", "asked"), [(1_000, True), (1_001, False)])
def test_the_key_of_a_question_has_a_limit(size: int, *, asked: bool) -> None:
    assert isinstance(call().received(required("s", **{"k" * size: FORM})), on.Asked if asked else on.Resulted)


def test_a_round_without_questions_goes_on_at_once_and_brings_no_answers_of_the_one_before() -> None:
    it = call()
    assert answered(it, it.received(required("s1", a=FORM)), "a", result=ACCEPT) is None
    assert sent(it)["inputResponses"] == {"a": ACCEPT}
    assert it.received(required("s2")) == 0.0
    assert (sent(it)["requestState"], "inputResponses" in sent(it)) == ("s2", False)


def test_answers_state_and_tasks_of_the_clients_own_go_no_further() -> None:
    it = call(task={}, inputResponses={"a": ACCEPT}, requestState="s")
    assert sent(it).keys() == {*PARAMS, "_meta"}


@pytest.mark.parametrize("refusal", [{"error": {"code": -1, "message": "not now"}}, {"result": [1]}, {}])
@pytest.mark.parametrize("method", ["tools/call", "prompts/get"])
def test_a_refused_question_ends_the_call(method: str, refusal: dict[str, Any]) -> None:
    it = call(method)
    message = ended(answered(it, it.received(required(a=FORM, b=FORM)), "a", **refusal))
    assert ("error" in message) == (method == "prompts/get")


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "tasks/get"},
        {"params": {}},
        {"method": "elicitation/create"},
        {"method": "elicitation/create", "params": {"message": "m", "mode": "url"}},
        {**SAMPLE, "params": {**SAMPLE["params"], "tools": []}},
    ],
)
def test_what_the_client_cannot_answer_ends_the_call(asked: Any) -> None:
    assert ended(call().received(required(a=FORM, b=asked)))["result"]["isError"] is True


def test_a_question_needs_the_capability_that_the_client_declared() -> None:
    words = ended(call(declared=b"{}").received(required(a=FORM)))["result"]["content"][0]["text"]
    assert "elicitation" in words


def test_a_url_question_gets_an_id_of_its_own() -> None:
    ids = set()
    for exchange in ("one", "two"):
        it = call(exchange=exchange)
        for _ in range(2):
            step = it.received(required(a=PAGE, b=PAGE))
            assert isinstance(step, on.Asked)
            ids |= {json.loads(bytes(each.params or b""))["elicitationId"] for each in step.questions}
    assert len(ids) == 8


def test_a_server_that_asks_for_ever_is_stopped() -> None:
    it = call()
    for _ in range(MAX_ROUNDS - 1):
        assert it.received(required()) == 0.0
    assert ended(it.received(required()))["result"]["isError"] is True


def test_too_many_questions_end_the_call() -> None:
    assert ended(call().received(required(**{f"k{n}": FORM for n in range(65)})))["result"]["isError"] is True


def test_messages_that_are_no_step() -> None:
    it = call()
    note = encoded(method=mcp.PROGRESS, params={"progress": 1}).replace(b'"id": 1, ', b"")
    assert it.received(note) == note
    assert it.received(encoded(method="roots/list")) is None, "a modern server sends no requests"
    assert it.received(encoded()) is None
    unmapped = {"resultType": "input_required", "inputRequests": 7}
    for odd in (b"{", required(7, a=FORM), encoded(result=7), encoded(result=unmapped)):
        with pytest.raises(ValueError):  # noqa: PT011
            _ = it.received(odd)

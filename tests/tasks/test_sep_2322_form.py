import json
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams, UnknownTask
from gateway.protocol.request import Request
from gateway.protocol.request_meta import Capabilities, Declarations
from gateway.tasks import sep_2322_form
from tests.tasks.test_modern_tasks import QUESTION, VIEW

TASK = {
    "taskId": "id",
    "status": "working",
    "ttl": 60000,
    "createdAt": "2026-01-01T00:00:00Z",
    "lastUpdatedAt": "2026-01-01T00:00:01Z",
    "pollInterval": 500,
}


def request(params: dict[str, Any], meta: dict[str, Any] | None = None, task: Any = None) -> Request:
    def raw(value: Any) -> Raw:
        return Raw(jsonrpc.encode(value))

    user_meta = {key: raw(value) for key, value in (meta or {}).items()}
    return Request(
        id=Raw(b"1"),
        method=mcp.TASKS_INPUT,
        params={key: raw(value) for key, value in params.items()},
        target="",
        said=Declarations(mcp.MODERN, Raw(b"{}"), Capabilities(), None, None, Raw(b"{}"), user_meta),
        input_responses=None,
        request_state=None,
        task=raw(task) if task is not None else None,
    )


@pytest.mark.parametrize(
    "asked",
    [
        request({"taskId": "a"}),
        request({}, task={"taskId": "a"}),
        request({}, {mcp.META_RELATED_TASK: {"taskId": "a"}}),
        request({"taskId": "a"}, {mcp.META_RELATED_TASK: {"taskId": "b"}}, task={"taskId": "c"}),
        request({}, {mcp.META_RELATED_TASK: {"taskId": "a"}}, task=5),
    ],
)
def test_the_task_is_named_in_any_place_that_the_paper_allows(asked: Request) -> None:
    assert sep_2322_form.task_id(asked) == "a"


def test_a_request_must_name_its_task() -> None:
    with pytest.raises(InvalidParams):
        sep_2322_form.task_id(request({}))
    with pytest.raises(UnknownTask):
        sep_2322_form.task_id(request({"taskId": 5}))


def test_a_new_task_and_a_task_have_the_form_of_2025_11_25() -> None:
    made = json.loads(sep_2322_form.create_result(VIEW))
    assert (made["resultType"], made["task"]) == ("complete", TASK)
    shown = json.loads(sep_2322_form.task(replace(VIEW, error=jsonrpc.Error(1, "busy"))))
    assert {**TASK, "statusMessage": "busy"}.items() <= shown.items()
    assert shown["_meta"][mcp.META_RELATED_TASK] == {"taskId": "id"}


def test_the_payload_is_the_result_or_the_questions_or_an_invitation_to_ask_again() -> None:
    assert sep_2322_form.payload(replace(VIEW, status="completed", result=b'{"content":[]}')) == b'{"content":[]}'
    asked = json.loads(sep_2322_form.payload(replace(VIEW, status="input_required", questions={"k": QUESTION})))
    assert (asked["resultType"], list(asked["inputRequests"]), "requestState" in asked) == (
        "input_required",
        ["k"],
        False,
    )
    waiting = json.loads(sep_2322_form.payload(VIEW))
    assert (waiting["resultType"], waiting["requestState"]) == ("input_required", "id")


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (replace(VIEW, status="cancelled"), "it was cancelled"),
        (replace(VIEW, status="failed", error=jsonrpc.Error(-32603, "broke")), "broke"),
    ],
)
def test_a_task_without_a_result_has_no_payload(view: Any, said: str) -> None:
    with pytest.raises(InvalidParams, match=said):
        sep_2322_form.payload(view)

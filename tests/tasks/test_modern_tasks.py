import json
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.exchange.input_requests import Question
from gateway.protocol import jsonrpc
from gateway.tasks import modern_tasks
from gateway.tasks.modern_tasks import View

QUESTION = Question("k", "elicitation/create", b"1", params=b'{"message":"Who?"}')
VIEW = View(
    "id", "working", "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", 60000, {}, Raw(b'{"name":"s","version":"1"}')
)
COMMON = {
    "taskId": "id",
    "createdAt": "2026-01-01T00:00:00Z",
    "lastUpdatedAt": "2026-01-01T00:00:01Z",
    "ttlMs": 60000,
    "pollIntervalMs": 500,
    "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "s", "version": "1"}},
}


def test_a_new_task_is_flat_and_works_whatever_it_does_by_now() -> None:
    view = replace(VIEW, status="input_required", questions={"k": QUESTION})
    assert json.loads(modern_tasks.create_result(view)) == {**COMMON, "resultType": "task", "status": "working"}


@pytest.mark.parametrize(
    ("view", "more"),
    [
        (VIEW, {}),
        (
            replace(VIEW, status="input_required", questions={"k": QUESTION}),
            {"inputRequests": {"k": {"method": "elicitation/create", "params": {"message": "Who?"}}}},
        ),
        (replace(VIEW, status="completed", result=b'{"content":[]}'), {"result": {"content": []}}),
        (
            replace(VIEW, status="failed", error=jsonrpc.Error(-32603, "broke")),
            {"error": {"code": -32603, "message": "broke"}, "statusMessage": "broke"},
        ),
        (replace(VIEW, status="cancelled", result=b"{}", error=jsonrpc.Error(1, "x")), {"statusMessage": "x"}),
    ],
)
def test_tasks_get_has_the_members_of_the_status_and_no_others(view: View, more: dict[str, Any]) -> None:
    assert json.loads(modern_tasks.get_result(view)) == {
        **COMMON,
        "resultType": "complete",
        "status": view.status,
        **more,
    }

"""What real servers say of their tasks: the answers below were measured."""

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.protocol import jsonrpc
from gateway.protocol.errors import TaskCancelled
from gateway.tasks import legacy_tasks
from gateway.tasks.legacy_tasks import FINAL, Ended
from tests.support.playbook import same

RELATED = '"_meta":{"io.modelcontextprotocol/related-task":{"taskId":"t"}}'
NOT_COMPLETED = jsonrpc.Error(-32602, "Task not completed yet (current state: working)")
NO_RESULT = jsonrpc.Error(-32603, "Task t has no result stored")
CONTENT = '"content":[{"type":"text","text":"done"}]'


@pytest.mark.parametrize(
    ("result", "made"),
    [
        ('{"task":{"taskId":"t","status":"working","ttl":60000}}', ("t", 60)),
        ('{"task":{"taskId":"t","status":"input_required"}}', ("t", None)),
        ('{"task":{"taskId":"t","ttl":null}}', ("t", None)),
        ('{"task":{"taskId":"t","ttl":true}}', ("t", None)),
        ('{"task":{"taskId":"t","ttl":-1}}', ("t", None)),
        ('{"task":{"taskId":"t","ttl":"long"}}', ("t", None)),
        (f'{{"task":{{"taskId":"t","ttl":{10**400}}}}}', ("t", None)),
        ('{"task":{"taskId":""}}', None),
        ('{"task":5}', None),
        ('{"content":[]}', None),
        ("[]", None),
    ],
)
def test_a_task_is_read_from_the_result_that_made_it(result: str, made: tuple[str, float | None] | None) -> None:
    found = legacy_tasks.created(Raw(result.encode()))
    assert (found and (found.task_id, found.ttl_seconds)) == made


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Raw(b'{"taskId":"t","status":"working"}'), "working"),
        (Raw(b'{"taskId":"t","status":"failed","statusMessage":"broke"}'), "failed"),
        (Raw(b'{"taskId":"t"}'), None),
        (Raw(b"[]"), None),
        (NOT_COMPLETED, None),
    ],
)
def test_a_status_is_read_from_the_answer_to_tasks_get(answer: Raw | jsonrpc.Error, status: str | None) -> None:
    assert legacy_tasks.status(answer) == status


def test_only_three_states_are_final() -> None:
    states = ("working", "input_required", "completed", "failed", "cancelled", "odd")
    assert [state for state in states if state in FINAL] == ["completed", "failed", "cancelled"]


@pytest.mark.parametrize(
    ("answer", "is_result"),
    [
        (Raw(f"{{{CONTENT},{RELATED}}}".encode()), True),
        (Raw(b'{"structuredContent":{"a":1}}'), True),
        (Raw(f"{{{RELATED}}}".encode()), False),  # mcp 1.30, after an exception or a cancellation
        (Raw(b"5"), False),
        (NO_RESULT, False),
    ],
)
def test_a_result_is_what_the_tool_returned(answer: Raw | jsonrpc.Error, is_result: bool) -> None:  # noqa: FBT001
    assert (legacy_tasks.returned(answer) is not None) is is_result


@pytest.mark.parametrize(
    ("result", "left"),
    [
        (f"{{{CONTENT}}}", f"{{{CONTENT}}}"),
        (f"{{{CONTENT},{RELATED}}}", f"{{{CONTENT}}}"),
        (
            '{"_meta":{"a":1,"io.modelcontextprotocol/related-task":{"taskId":"t"}},"content":[]}',
            '{"content":[],"_meta":{"a":1}}',
        ),
        (
            '{"content":["io.modelcontextprotocol/related-task"]}',
            '{"content":["io.modelcontextprotocol/related-task"]}',
        ),
    ],
)
def test_a_result_says_nothing_of_its_task(result: str, left: str) -> None:
    assert bytes(legacy_tasks.without_task(Raw(result.encode()))) == left.encode()


@pytest.mark.parametrize(
    ("got", "answer", "ended"),
    [
        (b'{"status":"failed"}', Raw(f"{{{CONTENT}}}".encode()), on.Resulted(Raw(f"{{{CONTENT}}}".encode()))),
        (b'{"status":"completed"}', Raw(b"{}"), on.Resulted(Raw(b"{}"))),
        (b'{"status":"cancelled"}', NO_RESULT, on.Broke(TaskCancelled())),
        (b'{"status":"failed","statusMessage":"broke"}', NO_RESULT, on.Failed(jsonrpc.Error(-32603, "broke"))),
        (b'{"status":"failed"}', NO_RESULT, on.Failed(jsonrpc.Error(-32603, NO_RESULT.message))),
        (b'{"status":"failed"}', Raw(b"{}"), on.Failed(jsonrpc.Error(-32603, "The task failed"))),
        (b'{"status":"completed"}', NO_RESULT, on.Failed(jsonrpc.Error(-32603, NO_RESULT.message))),
    ],
)
def test_a_task_ended_as_its_result_says_and_not_as_its_status_says(
    got: bytes, answer: Raw | jsonrpc.Error, ended: Ended
) -> None:
    assert same(legacy_tasks.ended(Raw(got), answer), ended)

"""The link of one mirrored call, once the call has become a task."""

from typing import Any

import pytest

from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, GatewayError, Refused, Unreachable
from tests.mirror.test_linked_backend import ACCEPT, Host, Json, host
from tests.mirror.test_task_call import NEEDS_TASKS
from tests.support.fake_modern import FORM
from tests.support.fake_server import Sent
from tests.support.workbench import eventually

__all__ = ["host"]
CREATED: Json = {"resultType": "task", "taskId": "t1", "status": "working", "pollIntervalMs": 1}


async def polled(host: Host, count: int = 1) -> Sent:
    """The poll with that number, once it is at the server."""
    return await host.at_server(mcp.TASKS_GET, count)


async def task(host: Host) -> Sent:
    """The first poll of a call that has become a task."""
    (await host.call()).says(error={"code": mcp.MISSING_CAPABILITY, "message": "no", "data": NEEDS_TASKS})
    (await host.at_server(mcp.TOOLS_CALL, 2)).says(result=CREATED)
    return await polled(host)


def says(sent: Sent, status: str, **more: Any) -> None:
    sent.completes(taskId="t1", status=status, pollIntervalMs=1, **more)


async def asked(host: Host) -> None:
    """The task asks its question."""
    says(await task(host), "input_required", inputRequests={"a": FORM})
    assert [message["method"] for message, _ in host.link.sent] == [mcp.ELICIT]


def answer(host: Host, **members: Any) -> None:
    host.says(id=host.link.sent.pop()[0]["id"], **members)


def ended(host: Host) -> list[Json]:
    """The results that the client has got, and no error."""
    assert host.link.refused == []
    return [message["result"] for message, _ in host.link.sent]


async def failed(host: Host) -> GatewayError:
    """The error with which the call has failed."""
    await eventually(lambda: host.link.refused, "the call fails")
    ((_, error),) = host.link.refused
    return error


async def cancelled(host: Host) -> Sent:
    """The request that cancels the task."""
    sent = await host.at_server(mcp.TASKS_CANCEL)
    sent.completes()
    return sent


async def test_a_server_that_reads_no_headers_is_not_asked_for_its_tools(host: Host) -> None:
    host.server.reads_headers = False
    _ = await host.call()
    assert host.server.of(mcp.TOOLS_LIST) == []


async def test_a_task_is_polled_with_its_id_in_mcp_name(host: Host) -> None:
    first = await task(host)
    assert (first.request.target, first.request.headers, first.request.param_headers) == ("t1", host.headers, {})
    says(first, "working")
    says(await polled(host, 2), "completed", result={"content": []})
    assert ended(host) == [{"content": []}]
    assert len(host.server.of(mcp.TOOLS_CALL)) == 2
    assert not host.server.of(mcp.TASKS_CANCEL)


async def test_the_answers_of_the_client_go_to_the_task_with_its_newest_headers(host: Host) -> None:
    await asked(host)
    host.headers = {"Authorization": "newer"}
    answer(host, result=ACCEPT)
    update = await host.at_server(mcp.TASKS_UPDATE)
    assert (update.request.target, update.request.headers) == ("t1", {"Authorization": "newer"})
    update.completes()
    says(await polled(host, 2), "completed", result={"content": []})
    assert ended(host) == [{"content": []}]


async def test_only_the_first_round_of_a_call_that_cannot_be_sent_has_had_no_effects(host: Host) -> None:
    (await host.call()).fails(Unreachable("no connection"))
    assert isinstance(await failed(host), Unreachable)
    host.link.refused.clear()
    (await host.call(2)).asks(a=FORM)
    answer(host, result=ACCEPT)
    (await host.at_server(mcp.TOOLS_CALL, 3)).fails(Unreachable("no connection"))
    error = await failed(host)
    assert isinstance(error, CallLost)
    assert "may have had effects" in error.message


@pytest.mark.parametrize("when", ["before a poll", "in a poll", "while it asks"])
async def test_a_task_is_cancelled_with_its_call(host: Host, when: str) -> None:
    if when == "while it asks":
        await asked(host)
    else:
        poll = await task(host)
        if when == "before a poll":
            says(poll, "working")
    for _ in range(2):
        host.says(method=mcp.CANCELLED, params={"requestId": 1})
    sent = await cancelled(host)
    assert (sent.params["taskId"], sent.request.target, sent.request.headers) == ("t1", "t1", host.headers)
    await eventually(lambda: host.server.of(mcp.TASKS_GET)[0].is_aborted == (when == "in a poll"))
    assert (len(host.server.of(mcp.TASKS_CANCEL)), len(host.server.of(mcp.TASKS_GET))) == (1, 1)
    assert host.link.refused == []


async def test_a_call_that_ends_without_its_task_cancels_it(host: Host) -> None:
    await asked(host)
    answer(host, error={"code": -1, "message": "User rejected"})
    _ = await cancelled(host)
    assert "User rejected" in str(ended(host))


async def test_a_poll_that_failed_is_repeated(host: Host) -> None:
    (await task(host)).fails(Unreachable("no connection"))
    (await polled(host, 2)).says(error={"code": mcp.INTERNAL_ERROR, "message": "busy"})
    says(await polled(host, 3), "completed", result={"content": []})
    assert ended(host) == [{"content": []}]


async def test_a_task_is_lost_after_too_many_failures(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.mirror.call_rounds._PAUSES", (0.0, 0.0))
    (await task(host)).fails(CallLost("one"))
    for number, word in ((2, "two"), (3, "three")):
        (await polled(host, number)).fails(CallLost(word))
    assert (await failed(host)).message == "three"
    _ = await cancelled(host)


async def test_a_refused_credential_ends_the_call(host: Host) -> None:
    (await task(host)).fails(Refused("no", status=401, challenge=None, is_clients=True))
    assert isinstance(await failed(host), Refused)
    _ = await cancelled(host)


async def test_a_task_has_a_time_limit(host: Host) -> None:
    host.live.config.tasks.ttl_seconds = 0.0
    (await host.call()).says(result=CREATED)
    assert "tasks.ttl_seconds" in (await failed(host)).message
    _ = await cancelled(host)
    assert not host.server.of(mcp.TASKS_GET)


async def test_a_failed_call_that_is_no_task_yet_is_not_repeated(host: Host) -> None:
    (await host.call()).fails(CallLost("gone"))
    assert isinstance(await failed(host), CallLost)
    assert len(host.server.of(mcp.TOOLS_CALL)) == 1

"""What the log says of a task of a client."""

from collections.abc import AsyncIterator

import pytest

from tests.e2e.wire import ACCEPT, wire
from tests.support.gateway_process import Gateway, gateway
from tests.support.host import fake
from tests.support.task_client import TaskClient

pytestmark = pytest.mark.processes

Stage = tuple[Gateway, TaskClient]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with gateway({"command": fake("fake_task_stdio.py"), "warm": 0}) as gw, wire(gw.url) as client:
        yield gw, TaskClient(client)


async def test_the_log_says_when_a_task_begins_and_how_it_ends(stage: Stage) -> None:
    gw, client = stage
    done, cancelled = await client.task("hasty"), await client.task("hasty")
    _ = await done.answer(await done.until("input_required"), ACCEPT)
    _ = await done.until("completed")
    _ = await cancelled.cancel()
    begun, ended = gw.log("tool_task.begun"), gw.log("tool_task.ended")
    assert [line["target"] for line in begun] == ["hasty", "hasty"]
    assert all(line["request_id"] for line in begun)
    assert all(line["exchange_id"] == line["task"] for line in (*begun, *ended))
    assert [(line["task"], line["outcome"]) for line in ended] == [
        (begun[0]["task"], "completed"),
        (begun[1]["task"], "cancelled"),
    ]
    assert all(line["seconds"] >= 0 for line in ended)
    assert not any(task.id in gw.stderr for task in (done, cancelled))


async def test_a_request_about_a_task_is_logged_with_its_exchange() -> None:
    stdio = {"command": fake("fake_task_stdio.py"), "warm": 0}
    async with gateway(stdio, log={"access": True}) as gw, wire(gw.url) as client:
        task = await TaskClient(client).task("hasty")
        _ = await task.cancel()
        (begun,) = gw.log("tool_task.begun")
        named = {line["method"] for line in gw.log("request.finished") if line.get("exchange_id") == begun["task"]}
    assert named == {"tools/call", "tasks/cancel"}


async def test_the_log_says_that_a_task_is_lost() -> None:
    async with gateway({"command": fake("fake_task_stdio.py"), "warm": 0}, tasks={"ttl_seconds": 0.5}) as gw:
        async with wire(gw.url) as client:
            _ = await TaskClient(client).task("hasty")
            await gw.until_logged("tool_task.lost")
        (line,) = gw.log("tool_task.lost")
        assert (line["outcome"], "tasks.ttl_seconds" in line["cause"]) == ("expired", True)
        assert line["level"] == "warning"

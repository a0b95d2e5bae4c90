"""A task of a client: what it may ask, and what the log says of it."""

from collections.abc import AsyncIterator

import pytest

from gateway.protocol import mcp
from tests.e2e.task_client import TaskClient
from tests.e2e.wire import ACCEPT, wire
from tests.support.gateway_process import Gateway, gateway
from tests.support.host import fake

pytestmark = pytest.mark.processes

Stage = tuple[Gateway, TaskClient]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with gateway({"command": fake("fake_task_stdio.py"), "warm": 0}) as gw, wire(gw.url) as client:
        yield gw, TaskClient(client)


async def test_a_task_that_is_over_asks_nothing(stage: Stage) -> None:
    gw, client = stage
    task = await client.task("hasty")
    _ = await task.until("input_required")
    _ = await task.cancel()

    async def is_refused() -> bool:
        outcome = {"method": mcp.ROOTS, "outcome": "refused_unsolicited"}
        return await gw.metric("mcp_gateway_nested_requests_total", **outcome) == 1

    await gw.until(is_refused, "the question is refused", 30)
    assert "inputRequests" not in await task.get()


async def test_the_log_says_when_a_task_begins_and_how_it_ends(stage: Stage) -> None:
    gw, client = stage
    done, cancelled = await client.task("hasty"), await client.task("hasty")
    _ = await done.answer(await done.until("input_required"), ACCEPT)
    _ = await done.until("completed")
    _ = await cancelled.cancel()
    begun, ended = gw.log("tool_task.begun"), gw.log("tool_task.ended")
    assert [line["target"] for line in begun] == ["hasty", "hasty"]
    assert all(line["request_id"] for line in begun)
    assert [(line["task"], line["outcome"]) for line in ended] == [
        (begun[0]["task"], "completed"),
        (begun[1]["task"], "cancelled"),
    ]
    assert all(line["seconds"] >= 0 for line in ended)
    assert not any(task.id in gw.stderr for task in (done, cancelled))


async def test_the_log_says_that_a_task_is_lost() -> None:
    async with gateway({"command": fake("fake_task_stdio.py"), "warm": 0}, tasks={"ttl_seconds": 0.5}) as gw:
        async with wire(gw.url) as client:
            _ = await TaskClient(client).task("hasty")

            async def is_lost() -> bool:
                return bool(gw.log("tool_task.lost"))

            await gw.until(is_lost, "the time of the task is over", 30)
        (line,) = gw.log("tool_task.lost")
        assert (line["outcome"], "tasks.ttl_seconds" in line["cause"]) == ("expired", True)
        assert line["level"] == "warning"

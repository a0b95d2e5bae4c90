"""A call that is a task, before a FAKE server that asks in the moment in which the task is made."""

import sys
from typing import Any

import pytest

from tests.e2e.task_client import TaskClient
from tests.e2e.wire import ACCEPT, wire
from tests.parts.launch import REPOSITORY
from tests.support.gateway_process import gateway

pytestmark = pytest.mark.processes

FAKE: dict[str, Any] = {
    "command": [sys.executable, "-I", "-S", str(REPOSITORY / "tests" / "support" / "fake_task_stdio.py")],
    "warm": 0,
}


@pytest.mark.parametrize("given", [{}, {"impatient": True}, {"first": True}], ids=str)
async def test_a_driven_task_may_ask_as_soon_as_it_is_made(given: dict[str, bool]) -> None:
    async with gateway(FAKE) as gw, wire(gw.url) as client:
        asked = await client.call("hasty", given)
        done = await client.call("hasty", given, state=asked.state, answers={"Name": ACCEPT})
        assert done.text == "Ann"
        await gw.settled()


@pytest.mark.parametrize("given", [{}, {"impatient": True}, {"first": True}], ids=str)
async def test_a_task_of_a_client_may_ask_as_soon_as_it_is_made(given: dict[str, bool]) -> None:
    async with gateway(FAKE) as gw, wire(gw.url) as client:
        task = await TaskClient(client).task("hasty", given)
        asked = await task.until("input_required")
        _ = await task.answer(asked, ACCEPT)
        assert (await task.until("completed"))["result"]["content"][0]["text"] == "Ann"

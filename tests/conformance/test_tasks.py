"""The official suite's scenarios of the tasks extension, strictly, against legacy servers behind the gateway.

The suite names ten scenarios, of which tasks-status-notifications always counts as skipped.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.conformance.test_conformance import ANY_FRONT, passes, run_suite
from tests.parts.launch import old_server
from tests.support.gateway_process import Front, gateway

pytestmark = [pytest.mark.real, pytest.mark.conformance, pytest.mark.timeout(240)]

REFUSE: dict[str, Any] = {"route": {"tasks": {"undeclared": "refuse"}}}
"""tasks-required-task-error wants -32021 where the default drives the task."""
UNPLAYED = {
    "tasks-lifecycle": "fastmcp 3 makes the same result with isError of every exception",
    "tasks-mrtr-input": "a task of fastmcp 3 hangs after two questions at once, so its server lacks multi_input",
    "tasks-mrtr-composition": "a tool of fastmcp 3 cannot ask before its task begins",
}


@pytest.mark.parametrize("name", ["tasks-ts", "tasks-py"])
@ANY_FRONT
async def test_tasks_of_a_legacy_server_conform_to_the_extension(
    name: str, front: Callable[..., AbstractAsyncContextManager[Front]]
) -> None:
    async with old_server(name) as server, front(server.url, **REFUSE) as gw:
        await passes(10, gw.url, "--spec", "tasks")


async def test_only_tools_that_require_a_task_tell_driving_from_refusing() -> None:
    async with old_server("tasks-ts") as server, gateway(server.url) as gw:
        _, lines = await run_suite(gw.url, "--spec", "tasks")
    assert lines[-1] == "9 of 10 scenarios passed"
    assert [line.split(":")[0] for line in lines if line.startswith("FAIL")] == ["FAIL tasks-required-task-error"]


async def test_fastmcp_3_fails_only_what_it_cannot_do() -> None:
    async with old_server("tasks-fm3") as server, gateway(server.url, **REFUSE) as gw:
        _, lines = await run_suite(gw.url, "--spec", "tasks")
    failed = {line.split()[1].rstrip(":") for line in lines if line.startswith("FAIL")}
    assert failed == set(UNPLAYED), lines

"""The pages on the protocol name every message of both eras, of the tasks extension, and of its first form."""

import pytest
from mcp_types import methods

from gateway.protocol import mcp
from tests.parts.launch import REPOSITORY

PAGES = "".join((REPOSITORY / "docs" / name).read_text() for name in ("protocol.md", "clients-and-servers.md"))
TABLES = (
    methods.CLIENT_REQUESTS,
    methods.CLIENT_NOTIFICATIONS,
    methods.SERVER_REQUESTS,
    methods.SERVER_NOTIFICATIONS,
)
ERAS = {mcp.LEGACY, mcp.MODERN}
SPECIFIED = {method for table in TABLES for method, version in table if version in ERAS}
OF_TASKS = (
    mcp.TASK_METHODS | mcp.FIRST_FORM_METHODS | {"tasks/list", "notifications/tasks", "notifications/tasks/status"}
)


@pytest.mark.parametrize("method", sorted(SPECIFIED | OF_TASKS | {"notifications/elicitation/complete"}))
def test_every_message_is_named(method: str) -> None:
    assert f"`{method}`" in PAGES

"""`mrtr-gateway wrap` with real servers: the one child, its memory, its changes (the table has all the rest)."""

from pathlib import Path

import pytest

from tests.parts.launch import old_server, stdio_server
from tests.support.host import META, call, host, initialize, legacy, modern

pytestmark = pytest.mark.real


def reapers(pid: int) -> int:
    """How many children the gateway has: each has one reaper."""
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@pytest.mark.parametrize("name", ["py130", "ts132"])
async def test_one_child_counts_on_after_a_cancelled_call_and_beside_a_subscription(name: str) -> None:
    with stdio_server(name) as (server, upstream):
        async with host(config={"routes": [{"upstream": upstream}]}) as running:
            assert await running.text(call("counter", 1)) == "1"
            running.write(modern("subscriptions/listen", 2, notifications={"toolsListChanged": True}))
            _ = await running.until(method="notifications/subscriptions/acknowledged")
            running.write(call("hang", 3))
            await server.wait_for("run", "hang")
            running.write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}})
            await server.wait_for("cancelled", "hang")
            assert await running.text(call("counter", 4)) == "2"
            assert reapers(running.process.pid) == 1


async def test_an_updated_resource_reaches_the_subscription_of_the_host() -> None:
    uri = "note://static"
    with stdio_server("py130") as (_, upstream):
        async with host(config={"routes": [{"upstream": upstream}]}) as running:
            running.write(modern("subscriptions/listen", 1, notifications={"resourceSubscriptions": [uri]}))
            acknowledged = await running.until(method="notifications/subscriptions/acknowledged")
            assert acknowledged["params"]["notifications"] == {"resourceSubscriptions": [uri]}
            running.write(call("touch", 2, uri=uri))
            updated = await running.until(method="notifications/resources/updated")
            assert updated["params"] == {"uri": uri, "_meta": {META + "subscriptionId": 1}}


async def test_the_tools_change_once_for_each_subscription() -> None:
    with stdio_server("py130") as (_, upstream):
        async with host(config={"routes": [{"upstream": upstream}]}) as running:
            for number in (1, 2):
                running.write(modern("subscriptions/listen", number, notifications={"toolsListChanged": True}))
                _ = await running.until(method="notifications/subscriptions/acknowledged")
            _ = await running.text(call("change_tools", 3))
            told = [await running.until(method="notifications/tools/list_changed") for _ in range(2)]
            assert {each["params"]["_meta"][META + "subscriptionId"] for each in told} == {1, 2}
            assert await running.text(call("echo", 4, text="hi")) == "hi"
            assert not [each for each in running.unread if "list_changed" in each.get("method", "")]


async def test_a_legacy_host_of_a_server_behind_a_url_ends_its_session_with_it() -> None:
    async with old_server("py130") as server, host((), "--upstream", server.url) as running:
        _ = await running.ask(initialize())
        running.write({"jsonrpc": "2.0", "method": "notifications/initialized"})
        running.write(legacy("tools/call", 1, name="hang", arguments={}))
        await server.wait_for("run", "hang")
        running.write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
        await server.wait_for("cancelled", "hang")

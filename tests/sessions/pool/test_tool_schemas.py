"""What is known of a server's tools: to whom they were shown, and until when."""

from typing import Any

import pytest

from gateway.protocol import mcp
from gateway.sessions.known_tools import UNKNOWN_TOOL
from tests.support.fake_upstream import FakeUpstream, Turn, event
from tests.support.stand import Start
from tests.support.workbench import Stand, eventually, jwt

BROAD, NARROW = (jwt(iss="https://issuer", sub="alice", client_id="c", scope=scope) for scope in ("admin", "read"))
ONE = {"name": "one", "inputSchema": {"type": "object"}}
ADMIN = {
    "name": "admin",
    "inputSchema": {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}},
}


def by_scope(turn: Turn) -> Any:
    """Only the broad token is shown the admin tool."""
    return turn.result({"tools": [ONE, ADMIN] if turn.seen.headers["Authorization"] == BROAD else [ONE]})


@pytest.mark.parametrize("listed_first", [BROAD, NARROW])
async def test_a_list_of_a_narrower_scope_switches_no_check_off(
    upstream: FakeUpstream, stand: Stand, listed_first: str
) -> None:
    upstream.on(mcp.TOOLS_LIST, by_scope)
    for token in (listed_first, NARROW):
        await stand.client(token).post(mcp.TOOLS_LIST)
    wrong = await stand.client(BROAD).call("admin", {"region": "eu"}, headers={"Mcp-Param-Region": "us"})
    assert wrong.outcome == (400, -32020, None)
    assert not upstream.of("tools/call")
    asked = len(upstream.of(mcp.TOOLS_LIST))
    for _ in range(2):
        assert (await stand.client(NARROW).call("unlisted")).text == "done"
    assert len(upstream.of(mcp.TOOLS_LIST)) == asked, "it was listed with this token, and is not there"


async def test_a_list_that_broke_off_does_not_hide_the_tools_behind_it(upstream: FakeUpstream, stand: Stand) -> None:
    second_page = iter((None, {"tools": [ADMIN]}))

    def in_pages(turn: Turn) -> Any:
        if "cursor" not in turn.body["params"]:
            return turn.result({"tools": [ONE], "nextCursor": "2"})
        page = next(second_page)
        return turn.error(-32603, "busy") if page is None else turn.result(page)

    upstream.on(mcp.TOOLS_LIST, in_pages)
    for _ in range(2):
        assert (await stand.client().call("one")).text == "done"
    assert len(upstream.of(mcp.TOOLS_LIST)) == 2, "what was read is known"
    wrong = await stand.client().call("admin", {"region": "eu"}, headers={"Mcp-Param-Region": "us"})
    assert wrong.outcome == (400, -32020, None)
    for _ in range(2):
        assert (await stand.client().call("unlisted")).text == "done"
    assert len(upstream.of(mcp.TOOLS_LIST)) == 4, "the list is whole now"


async def test_a_client_that_the_upstream_refuses_does_not_learn_the_header_of_a_tool(
    upstream: FakeUpstream, stand: Stand
) -> None:
    upstream.on(mcp.TOOLS_LIST, by_scope)
    await stand.client(BROAD).post(mcp.TOOLS_LIST)

    upstream.on(mcp.PING, lambda turn: turn.reply(401))
    forged = await stand.client(BROAD[:-3] + "AAA").call("admin", {"region": "eu"})
    assert forged.status == 401
    assert "region" not in forged.data.decode().lower()


@pytest.mark.parametrize("how", ["list_changed", "gap", "restart"])
async def test_tools_are_forgotten_after_a_change_that_is_or_may_be_heard(
    upstream: FakeUpstream, stand: Stand, how: str
) -> None:
    upstream.capabilities, upstream.tools = {"tools": {"listChanged": True}}, [ONE]
    await stand.client().post(mcp.TOOLS_LIST)
    group = stand.group()
    assert group.tools.by_name is not None
    if how == "restart":
        upstream.forget()
    changed = event({"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED})
    upstream.side("s1").put_nowait(changed if how == "list_changed" else None)
    await eventually(lambda: group.tools.by_name is None)
    is_unknown = group.tools.latest("one") is UNKNOWN_TOOL
    assert is_unknown is (how == "list_changed"), "what may still be true judges the calls that began then"


async def test_a_server_without_a_side_stream_keeps_its_tools_until_it_forgets_a_session(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.on("GET", lambda turn: turn.reply(405))
    upstream.tools = [ONE]
    client = (await begin()).client()
    for _ in range(2):
        assert (await client.call("one")).text == "done"
    assert len(upstream.of(mcp.TOOLS_LIST)) == 1
    upstream.forget()
    for _ in range(3):
        assert (await client.call("one")).text == "done"
    assert len(upstream.of(mcp.TOOLS_LIST)) == 2

"""Freshness by method, and lists that are answered from memory."""

import asyncio
import time
from typing import Any

import pytest
from msgspec import Raw

from gateway.protocol import mcp
from gateway.sessions import group as groups
from gateway.sessions import list_cache
from gateway.sessions.call import PoolKey
from gateway.sessions.list_cache import CacheKey, ListCache, seconds_kept
from tests.support.fake_upstream import FakeUpstream, Turn, event, text
from tests.support.stand import Start
from tests.support.workbench import CLIENT, Client, eventually, jwt

OFFERED = {"tools": {"listChanged": True}, "prompts": {}, "resources": {}}
KEPT: dict[str, Any] = {"cache": {"lists_seconds": 60}}
SECTIONS = {
    mcp.TOOLS_LIST: "tools",
    mcp.PROMPTS_LIST: "prompts",
    mcp.RESOURCES_LIST: "resources",
    mcp.TEMPLATES_LIST: "resourceTemplates",
}


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"}}


@pytest.fixture
def upstream(upstream: FakeUpstream) -> FakeUpstream:
    upstream.capabilities = OFFERED
    upstream.tools = [tool("one")]
    for method, section in SECTIONS.items():
        if method != mcp.TOOLS_LIST:

            async def answer(turn: Turn, section: str = section) -> None:
                await turn.result({section: []})

            upstream.on(method, answer)
    return upstream


async def names(client: Client, **params: Any) -> list[str]:
    return [listed["name"] for listed in (await client.post(mcp.TOOLS_LIST, params)).result["tools"]]


def lists_asked(upstream: FakeUpstream) -> int:
    return len(upstream.of(mcp.TOOLS_LIST))


def changed(method: str) -> bytes:
    return event({"jsonrpc": "2.0", "method": f"notifications/{method}"})


async def test_each_method_has_its_own_freshness(upstream: FakeUpstream, begin: Start) -> None:
    async def read(turn: Turn) -> None:
        await turn.result({"contents": [{"uri": "a:b", "text": "x"}]})

    upstream.on(mcp.RESOURCES_READ, read)
    methods = {
        "tools/list": {"ttl_ms": 60_000, "scope": "public"},
        "server/discover": {"ttl_ms": 1},
        "resources/read": {"scope": "public"},
    }
    stand = await begin(route={"cache": {"ttl_ms": 5, "methods": methods}})
    client = stand.client()
    found = {}
    for method in (*SECTIONS, mcp.DISCOVER, mcp.RESOURCES_READ):
        result = (await client.post(method, {"uri": "a:b"} if method == mcp.RESOURCES_READ else {})).result
        found[method] = result["ttlMs"], result["cacheScope"]
    assert found == dict.fromkeys(SECTIONS, (5, "private")) | {
        mcp.TOOLS_LIST: (60_000, "public"),
        mcp.DISCOVER: (1, "private"),
        mcp.RESOURCES_READ: (5, "public"),
    }


async def test_lists_are_kept_only_where_the_route_says_so(upstream: FakeUpstream, client: Client) -> None:
    assert [await names(client), await names(client)] == [["one"], ["one"]]
    assert lists_asked(upstream) == 2


async def test_every_list_is_answered_from_memory_page_by_page(upstream: FakeUpstream, begin: Start) -> None:
    async def page(turn: Turn) -> None:
        cursor = turn.body["params"].get("cursor")
        await turn.result({"tools": [tool(cursor or "first")]} | ({} if cursor else {"nextCursor": "second"}))

    upstream.on(mcp.TOOLS_LIST, page)
    stand = await begin(route=KEPT)
    client = stand.client()
    replies = [await client.post(method) for method in SECTIONS for _ in range(2)]
    assert [reply.final["id"] for reply in replies] == [f"c{number}" for number in range(1, 9)]
    assert all(reply.result == replies[place & ~1].result for place, reply in enumerate(replies))
    assert [await names(client, cursor="second") for _ in range(2)] == [["second"]] * 2
    assert [upstream.words.count(method) for method in SECTIONS] == [2, 1, 1, 1], "two pages of tools"
    assert stand.metric("mcp_gateway_lists_answered_total", source="memory") == 5
    assert stand.metric("mcp_gateway_lists_answered_total", source="upstream") == 5


async def test_what_else_may_shape_an_answer_is_not_answered_from_memory(upstream: FakeUpstream, begin: Start) -> None:
    client = (await begin(route=KEPT)).client()
    await names(client)
    await names(client, unknown=1)
    await client.post(mcp.TOOLS_LIST, meta={"com.example/tenant": "b"})
    await names(client, cursor=5)
    assert lists_asked(upstream) == 4
    await client.post(mcp.TOOLS_LIST, meta={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    assert lists_asked(upstream) == 4


async def test_a_client_never_gets_the_list_of_another_principal(upstream: FakeUpstream, begin: Start) -> None:
    async def own(turn: Turn) -> None:
        who = turn.seen.headers.get("Authorization", "nobody"), turn.seen.headers.get("X-Tenant", "none")
        await turn.result({"tools": [tool(" ".join(who)), tool(turn.session or "")]})

    upstream.on(mcp.TOOLS_LIST, own)
    stand = await begin(route={**KEPT, "forward_headers": ["X-Tenant"]})
    clients = [
        stand.client(),
        stand.client("Bearer a"),
        stand.client("Bearer b"),
        stand.client("Bearer b", headers={"X-Tenant": "t"}),
        stand.client("Bearer b", capabilities={}),
        stand.client("Bearer b", info={**CLIENT, "version": "2"}),
    ]
    first = [await names(client) for client in clients]
    assert len({tuple(listed) for listed in first}) == len(clients)
    assert [await names(client) for client in clients] == first
    assert lists_asked(upstream) == len(clients)


def by_scope(turn: Turn) -> Any:
    """Only the broad token is shown the admin tool."""
    shown = [tool("one"), ADMIN] if turn.seen.headers["Authorization"] == BROAD else [tool("one")]
    return turn.result({"tools": shown})


BROAD, NARROW = (jwt(iss="https://issuer", sub="alice", client_id="c", scope=scope) for scope in ("admin", "read"))
ADMIN = {
    "name": "admin",
    "inputSchema": {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}},
}


async def test_a_token_is_not_shown_the_list_of_another_scope(upstream: FakeUpstream, begin: Start) -> None:
    upstream.on(mcp.TOOLS_LIST, by_scope)
    stand = await begin(route=KEPT)
    for _ in range(2):
        assert await names(stand.client(BROAD)) == ["one", "admin"]
        assert await names(stand.client(NARROW)) == ["one"]
    assert lists_asked(upstream) == 2, "each is kept"


@pytest.mark.parametrize("listed_first", [BROAD, NARROW])
async def test_a_list_of_a_narrower_scope_switches_no_check_off(
    upstream: FakeUpstream, begin: Start, listed_first: str
) -> None:
    upstream.on(mcp.TOOLS_LIST, by_scope)
    stand = await begin()
    for token in (listed_first, NARROW):
        await names(stand.client(token))
    wrong = await stand.client(BROAD).call("admin", {"region": "eu"}, headers={"Mcp-Param-Region": "us"})
    assert wrong.outcome == (400, -32020, None)
    assert not upstream.of("tools/call")
    asked = lists_asked(upstream)
    for _ in range(2):
        assert (await stand.client(NARROW).call("unlisted")).text == "done"
    assert lists_asked(upstream) == asked, "it was listed with this token, and is not there"


async def test_a_client_that_the_upstream_refuses_does_not_learn_the_header_of_a_tool(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.on(mcp.TOOLS_LIST, by_scope)
    stand = await begin()
    await names(stand.client(BROAD))
    upstream.on(mcp.PING, _refused)
    forged = await stand.client(BROAD[:-3] + "AAA").call("admin", {"region": "eu"})
    assert forged.status == 401
    assert "region" not in forged.data.decode().lower()


async def _refused(turn: Turn) -> None:
    turn.reply(401)


async def test_an_error_is_not_kept(upstream: FakeUpstream, begin: Start) -> None:
    async def fail(turn: Turn) -> None:
        await turn.error(-32603, "not now")

    async def say_nothing(turn: Turn) -> None:
        await turn.result({})

    async def answer(turn: Turn) -> None:
        await turn.result({"tools": [tool("one")]})

    upstream.each(mcp.TOOLS_LIST, fail, say_nothing, answer)
    stand = await begin(route=KEPT)
    headers, body = stand.client().build(mcp.TOOLS_LIST)
    for _ in range(2):
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            assert b'"one"' not in await response.read()
    assert await names(stand.client()) == ["one"]


@pytest.mark.parametrize("how", ["list_changed", "gap", "restart"])
async def test_a_change_that_is_or_may_be_heard_ends_it(upstream: FakeUpstream, begin: Start, how: str) -> None:
    stand = await begin(route=KEPT)
    client = stand.client()
    assert await names(client) == ["one"]
    group = stand.group()
    before = group.generation
    upstream.tools = [tool("two")]
    if how == "restart":
        upstream.forget()
    upstream.side("s1").put_nowait(changed("tools/list_changed") if how == "list_changed" else None)
    await eventually(lambda: group.generation != before)
    assert await names(client) == ["two"]
    assert await names(client) == ["two"]
    assert lists_asked(upstream) == 2


async def test_a_server_without_a_side_stream_keeps_its_lists_until_it_forgets_a_session(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def refuse(turn: Turn) -> None:
        turn.reply(405)

    upstream.on("GET", refuse)
    stand = await begin(route=KEPT)
    client = stand.client()
    assert await names(client) == ["one"]
    upstream.tools = [tool("two")]

    async def both(turn: Turn) -> None:
        await upstream.saw("tools/call", 2)
        await turn.result(text("done"))

    upstream.each("tools/call", both, both, upstream.plain)
    await asyncio.gather(client.call(), client.call())
    assert upstream.words.count("initialize") == 2, "a further session is no change"
    assert await names(client) == ["one"]
    upstream.forget()
    await client.call()
    assert await names(client) == ["two"]


async def test_a_list_that_changed_on_its_way_is_not_kept(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route=KEPT)
    client = stand.client()

    async def change_meanwhile(turn: Turn) -> None:
        before = stand.group().generation
        upstream.side(turn.session).put_nowait(changed("tools/list_changed"))
        await eventually(lambda: stand.group().generation != before)
        await turn.result({"tools": [tool("old")]})

    upstream.once(mcp.TOOLS_LIST, change_meanwhile)
    assert [await names(client), await names(client)] == [["old"], ["one"]]


async def test_a_change_while_the_credential_is_checked_ends_it_too(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_ACCEPTED_SECONDS", 0.0)
    stand = await begin(route=KEPT)
    client = stand.client("Bearer a")
    assert await names(client) == ["one"]
    upstream.tools = [tool("two")]

    async def ping(turn: Turn) -> None:
        group = stand.group("Bearer a")
        before = group.generation
        upstream.side(turn.session).put_nowait(changed("tools/list_changed"))
        await eventually(lambda: group.generation != before)
        await turn.result()

    upstream.on(mcp.PING, ping)
    assert await names(client) == ["two"]


async def test_age_and_a_reload_end_it(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route={"cache": {"lists_seconds": 0.001}})
    client = stand.client()
    await names(client)
    kept, asked = stand.gateway.routes.live["/mcp"].upstream.pool.lists, time.monotonic()
    await eventually(lambda: time.monotonic() > asked + 0.001)
    await names(client)
    assert lists_asked(upstream) == 2
    stand.gateway.apply(stand.gateway.config)
    assert not len(kept)


def test_a_server_that_names_a_shorter_time_is_believed() -> None:
    assert seconds_kept(Raw(b'{"ttlMs":0}'), 60) == 0
    assert seconds_kept(Raw(b'{"ttlMs":1500}'), 60) == 1.5
    assert [
        seconds_kept(Raw(raw), 60) for raw in (b"{}", b'{"ttlMs":-5}', b'{"ttlMs":"5"}', b'{"ttlMs":99999999}')
    ] == [60] * 4


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_cache, "_MAX_BYTES", 5_000)
    kept = ListCache()
    key = PoolKey(b"p", b"", b"", ())
    cache_keys = [CacheKey(0, key, b"", mcp.TOOLS_LIST, f"{number}") for number in range(5)]
    for cache_key in cache_keys:
        kept.keep(cache_key, b'{"tools":[]}', 60)
        assert kept.find(cache_keys[0]) is not None, "asked for again and again"
    assert [kept.find(cache_key) is not None for cache_key in cache_keys] == [True, False, True, True, True]
    monkeypatch.setattr(list_cache, "_MAX_PAGE_BYTES", 1_050)
    kept.keep(cache_keys[0], b'{"tools":[%b]}' % (b" " * 100), 60)
    assert kept.find(cache_keys[0]) is None
    kept.keep(cache_keys[1], b'{"tools":[]}', 60)
    assert all(kept.find(cache_key) for cache_key in cache_keys[1:]), "what was dropped makes room"

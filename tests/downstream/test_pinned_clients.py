"""SEP-1655 on the bridge, by a client that follows the paper line by line, before one replica and before several."""

import base64
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from msgspec.structs import replace

from gateway.config.parsing.state_keys import decode_key
from gateway.downstream.round import SESSION_ITEM as NAME
from gateway.protocol import mcp
from gateway.seal.keyring import Keyring
from gateway.seal.sep_1655_items import PURPOSE, Item
from tests.cluster.conftest import cluster
from tests.cluster.test_new_calls import draining, echo
from tests.cluster.test_worker import workers
from tests.support.fake_upstream import FakeUpstream, Turn, ask_action, text
from tests.support.replicas import Cluster, asked_peers, dies_after_the_body, facing
from tests.support.stand import Start
from tests.support.state_keeper import SERVER, SESSION, KeepingClient, StateKeeper
from tests.support.workbench import ACCEPT, ALL, KEY, Reply, Stand, later

__all__ = ["cluster"]

ROUTE: Final[dict[str, Any]] = {"dialects": ["sep-1655"]}


class PaperClient(KeepingClient):
    """A client whose requests may go to any replica."""

    def __init__(self, stand: Stand, authorization: str | None = "Bearer ada", **options: Any) -> None:
        super().__init__(stand.http, stand.url, authorization, **options)

    @property
    def item(self) -> Any:
        return self.state.kept[SESSION].get(NAME)

    async def at(self, stand: Stand, name: str = "tool") -> Reply:
        self.url = stand.url
        return await self.call(name)


@pytest.fixture
async def client(begin: Start) -> PaperClient:
    """Such a client, before one replica."""
    return PaperClient(await begin(route=ROUTE))


def sessions(upstream: FakeUpstream) -> list[str | None]:
    return [seen.session for seen in upstream.of("tools/call")]


def items_of(reply: Reply) -> Any:
    """What a result sets of the session's state."""
    return reply.result.get("_meta", {}).get(SESSION)


def meta_of(upstream: FakeUpstream) -> Any:
    """The `_meta` of the last call as the server got it."""
    return upstream.of("tools/call")[-1].body["params"].get("_meta")


# -- the pin ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
async def test_all_requests_of_a_client_reach_one_session(
    upstream: FakeUpstream, cluster: Cluster, count: int
) -> None:
    stands = await cluster.begin(*(f"gw-{number}" for number in range(count)), route=ROUTE)
    client = PaperClient(stands[0])
    for stand in stands * 2:
        assert (await client.at(stand)).text == "done"
        for method in (mcp.TOOLS_LIST, mcp.DISCOVER):
            assert "result" in (await client.post(method)).final
    assert set(sessions(upstream)) == {"s1"}
    assert len(upstream.of("initialize")) == 1
    assert [stand.sessions("idle") for stand in stands] == [1] + [0] * (count - 1)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_call_asks_in_the_session_of_its_client(upstream: FakeUpstream, cluster: Cluster, count: int) -> None:
    stands = await cluster.begin(*(f"gw-{number}" for number in range(count)), route=ROUTE)
    client = PaperClient(stands[0])
    _ = await client.call()

    upstream.tool(ask_action)
    asked = await client.at(stands[-1])
    client.url = stands[len(stands) // 2].url
    assert (await client.answer(asked)).text == ACCEPT["action"]
    assert sessions(upstream) == ["s1", "s1"]
    assert upstream.of("answer")[0].session == "s1"
    assert NAME not in str(upstream.of("tools/call")[-1].data)


async def test_an_answer_without_state_continues_its_call(upstream: FakeUpstream, client: PaperClient) -> None:
    upstream.tool(echo)
    asked = await client.call()
    before, client.state = client.item, StateKeeper()
    answered = await client.answer(asked)
    assert answered.text == "tool"
    assert items_of(answered) is None, "the client has a state, which this one would replace"
    client.state.kept[SESSION][NAME] = before
    assert (await client.call("plain")).text == "plain"
    assert set(sessions(upstream)) == {"s1"}


async def test_tasks_and_subscriptions_are_left_where_they_are(upstream: FakeUpstream, client: PaperClient) -> None:
    upstream.capabilities = {"tools": {"listChanged": True}}
    async with client.open(mcp.LISTEN, {"notifications": {"toolsListChanged": True}}) as response:
        assert response.status == 200
        _ = await upstream.saw("initialize")
    assert "state" not in upstream.of("initialize")[0].body["params"]["capabilities"]


async def test_clients_of_one_principal_have_sessions_of_their_own(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route=ROUTE)
    one, two, other = PaperClient(stand), PaperClient(stand), stand.client("Bearer ada")
    for client in (one, two, other, two, one):
        _ = await client.call()
    assert sessions(upstream) == ["s1", "s2", "s3", "s2", "s1"]


async def test_a_new_session_of_a_client_has_a_session_upstream_of_its_own(
    upstream: FakeUpstream, client: PaperClient
) -> None:
    _ = await client.call()
    client.state.begin_session()
    _ = await client.call()
    assert sessions(upstream) == ["s1", "s2"]


async def test_the_calls_of_a_client_take_turns(upstream: FakeUpstream, begin: Start) -> None:
    client = PaperClient(await begin(route=ROUTE, timeouts={"session_wait_seconds": 0.1}))
    _ = await client.call()
    go = upstream.waiting_tool("late")
    first = later(client.call())
    _ = await upstream.saw("tools/call", 2)
    busy = await client.call()
    assert busy.outcome == (503, -32603, "busy")
    assert "dialects: [sep-1655]" in busy.error["message"]
    go.set()
    assert (await first).text == (await client.call()).text == "late"
    assert set(sessions(upstream)) == {"s1"}


async def test_a_session_that_the_server_lost_is_replaced_under_the_same_state(
    upstream: FakeUpstream, client: PaperClient
) -> None:
    _ = await client.call()
    item = client.item
    upstream.forget()
    assert (await client.call()).text == "done"
    assert client.item == item
    assert sessions(upstream)[-1] == "s2"


# -- the state --------------------------------------------------------------------------------------------------------


async def test_every_result_may_set_the_state(upstream: FakeUpstream, begin: Start) -> None:
    upstream.capabilities = {"tools": {}, "resources": {}, "prompts": {}}
    upstream.tool(ask_action)
    stand = await begin(route={**ROUTE, "cache": {"scope": "public"}})
    requests = {
        mcp.DISCOVER: {},
        mcp.TOOLS_LIST: {},
        mcp.TOOLS_CALL: {"name": "tool", "arguments": {}},
    }
    for method, params in requests.items():
        client = PaperClient(stand)
        reply = await client.post(method, params)
        assert items_of(reply) == {NAME: client.item}
        assert isinstance(client.item, str)
        assert reply.result.get("cacheScope", "private") == "private"
        again = await client.post(mcp.TOOLS_LIST)
        assert items_of(again) is None, "a state that the client has is not set again"
        assert again.result["cacheScope"] == "public"
        if method == mcp.TOOLS_CALL:
            client.state.hear((await client.answer(reply)).final)


async def test_a_result_on_a_stream_sets_the_state(upstream: FakeUpstream, client: PaperClient) -> None:
    async def progress(turn: Turn) -> None:
        await turn.progress(1)
        await turn.result(text("done"))

    upstream.tool(progress)
    reply = await client.call(meta={mcp.META_PROGRESS_TOKEN: "t"})
    assert reply.is_stream
    assert items_of(reply) == {NAME: client.item}


DECLARED: Final = [{}, {"state": None}, {"state": 1}, {"state": {"scopes": ["request"]}}, {"state": {"scopes": 1}}]


@pytest.mark.parametrize("declared", DECLARED)
async def test_a_client_that_declares_no_session_state_gets_none(
    upstream: FakeUpstream, begin: Start, declared: Any
) -> None:
    client = PaperClient(await begin(route=ROUTE), capabilities={**ALL, **declared})
    for _ in range(2):
        assert items_of(await client.call(meta={SESSION: {NAME: "x", "a": 1}})) is None
    assert set(sessions(upstream)) == {"s1"}
    assert meta_of(upstream) == {SESSION: {NAME: "x", "a": 1}}
    assert "state" not in upstream.of("initialize")[0].body["params"]["capabilities"]


async def test_a_route_without_the_dialect_sets_no_state(upstream: FakeUpstream, begin: Start) -> None:
    client = PaperClient(await begin())
    assert items_of(await client.call(meta={SESSION: {NAME: "x"}})) is None
    assert meta_of(upstream) == {SESSION: {NAME: "x"}}
    assert "state" not in upstream.of("initialize")[0].body["params"]["capabilities"]


@pytest.mark.parametrize("declared", [{}, {"scopes": ["session", "server"]}])
async def test_the_server_learns_that_the_client_keeps_state(
    upstream: FakeUpstream, begin: Start, declared: Any
) -> None:
    client = PaperClient(await begin(route=ROUTE), capabilities={"state": declared})
    _ = await client.call()
    assert upstream.of("initialize")[0].body["params"]["capabilities"] == {"state": declared}


async def test_the_servers_own_state_passes_untouched(upstream: FakeUpstream, client: PaperClient) -> None:
    cart: Any = {"items": ["cucumber", None], "price": 1e2}
    sets = [
        {SESSION: {"Cart": cart, "Coupon": "XYZZY"}, SERVER: {"seen": 1}},
        {SESSION: {"Coupon": {"of": [1]}}},
        {SESSION: {"Cart": None}},
        {SESSION: {"Coupon": None}},
        {},
    ]
    got: list[Any] = []

    async def shop(turn: Turn) -> None:
        got.append(turn.body["params"].get("_meta", {}))
        await turn.result({**text("ok"), "_meta": sets[len(got) - 1]})

    upstream.tool(shop)
    for given in sets:
        reply = await client.call()
        heard = {key: dict(state) for key, state in reply.result["_meta"].items() if key in (SESSION, SERVER)}
        if given is sets[0]:
            assert heard[SESSION].pop(NAME) == client.item
        assert heard == given
    assert got == [
        {},
        {SESSION: {"Cart": cart, "Coupon": "XYZZY"}, SERVER: {"seen": 1}},
        {SESSION: {"Cart": cart, "Coupon": {"of": [1]}}, SERVER: {"seen": 1}},
        {SESSION: {"Coupon": {"of": [1]}}, SERVER: {"seen": 1}},
        {SERVER: {"seen": 1}},
    ]


async def test_a_client_that_lost_its_state_gets_a_new_one(client: PaperClient) -> None:
    _ = await client.call()
    before = client.item
    client.state = StateKeeper()
    _ = await client.call()
    assert client.item not in (None, before)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_a_client_that_may_keep_nothing_is_served(
    upstream: FakeUpstream, client: PaperClient, host: str
) -> None:
    client.state = StateKeeper(host)
    for _ in range(2):
        assert (await client.call()).text == "done"
    assert sessions(upstream) == ["s1", "s2"]


# -- bad states -------------------------------------------------------------------------------------------------------


async def test_a_bad_state_is_ignored(upstream: FakeUpstream, client: PaperClient) -> None:
    _ = await client.call()
    good = client.item
    reply = await client.call(meta={SESSION: {NAME: good[:-4], "a": 1}})
    assert reply.text == "done"
    assert items_of(reply) == {NAME: client.item}
    assert client.item != good
    assert meta_of(upstream) == {SESSION: {"a": 1}}
    assert sessions(upstream) == ["s1", "s2"]


async def test_the_state_of_another_caller_or_route_is_ignored(upstream: FakeUpstream, begin: Start) -> None:
    second = {"path": "/two", "upstream": {"url": upstream.url}, **ROUTE}
    first = {"path": "/mcp", "upstream": {"url": upstream.url}, **ROUTE}
    stand = await begin(routes=[first, second])
    ada, bob, there = PaperClient(stand), PaperClient(stand, "Bearer bob"), PaperClient(stand)
    there.url = stand.url.replace("/mcp", "/two")
    _ = await ada.call()
    for client, reason in ((bob, "other_principal"), (there, "other_route")):
        client.state.kept[SESSION][NAME] = ada.item
        assert (await client.call()).text == "done"
        assert client.item != ada.item
        assert stand.metric("mcp_gateway_state_rejected_total", reason=reason) == 1
    assert sessions(upstream) == ["s1", "s2", "s3"]


def resealed(stand: Stand, item: str, **changes: Any) -> str:
    """The item as a replica could have sealed it with these changes."""
    ring = Keyring((decode_key(KEY),), PURPOSE)
    content = msgspec.msgpack.decode(ring.open(item), type=Item)
    return ring.seal(msgspec.msgpack.encode(replace(content, **changes)))


async def test_a_key_that_was_removed_costs_the_pin(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route=ROUTE)
    client, config = PaperClient(stand), stand.gateway.config
    _ = await client.call()
    new = base64.urlsafe_b64encode(bytes(32)).decode()
    stand.gateway.apply(replace(config, state=replace(config.state, keys=(new, *config.state.keys))))
    _ = await client.call()
    stand.gateway.apply(replace(config, state=replace(config.state, keys=(new,))))
    _ = await client.call()
    assert sessions(upstream) == ["s1", "s1", "s2"]


# -- the owner --------------------------------------------------------------------------------------------------------


async def test_the_state_of_a_dead_replica_is_ignored(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", route=ROUTE)
    client = PaperClient(one)
    _ = await client.call()
    before = client.item
    await cluster.crash(one)
    assert (await client.at(two)).text == "done"
    assert client.item != before
    assert (await client.at(three)).text == "done"
    assert sessions(upstream) == ["s1", "s2", "s2"]
    assert [each.sessions("idle") for each in (two, three)] == [1, 0]


async def test_a_replica_that_does_not_react_costs_the_pin(cluster: Cluster) -> None:
    one, _ = await facing(cluster, lambda asked: asked.refuse(403), route=ROUTE)
    client = PaperClient(one)
    _ = await client.call()
    bad = client.state.kept[SESSION][NAME] = resealed(one, client.item, place="gw-2")
    assert (await client.call()).text == "done"
    assert client.item != bad
    assert asked_peers(one) == {"refused": 1}


async def test_a_call_that_the_owner_took_is_never_sent_again(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, _ = await facing(cluster, dies_after_the_body, route=ROUTE)
    client = PaperClient(one)
    _ = await client.call()
    client.state.kept[SESSION][NAME] = resealed(one, client.item, place="gw-2")
    lost = await client.call()
    assert lost.outcome == (503, -32603, "call_lost")
    assert "may have had effects" in lost.error["message"]
    assert len(sessions(upstream)) == 1


@pytest.mark.parametrize("asks", ["gw-1", "gw-2"])
async def test_the_calls_of_a_client_whose_owner_drains_go_to_another_replica(
    upstream: FakeUpstream, cluster: Cluster, asks: str
) -> None:
    stands = await cluster.begin("gw-1", "gw-2", route=ROUTE)
    client = PaperClient(stands[0])
    upstream.tool(echo)
    assert (await client.call("plain")).text == "plain"
    before = client.item
    async with draining(stands[0]):
        assert (await client.at(cluster.stands[asks], "plain")).text == "plain"
        assert client.item != before
        assert (await client.at(cluster.stands[asks], "plain")).text == "plain"
    named = [each.session for each in upstream.of("tools/call") if each.body["params"]["name"] == "plain"]
    assert named[0] not in named[1:]
    assert len(set(named[1:])) == 1


async def test_a_replica_that_drains_pins_no_client_to_itself(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2", route=ROUTE)
    upstream.tool(echo)
    async with draining(one):
        client = PaperClient(one)
        for _ in range(2):
            assert (await client.call("plain")).text == "plain"
        named = [each.session for each in upstream.of("tools/call") if each.body["params"]["name"] == "plain"]
        assert len(set(named)) == 1


async def test_workers_of_other_hosts_are_reached(upstream: FakeUpstream, cluster: Cluster, tmp_path: Path) -> None:
    *own, other = await workers(cluster, tmp_path, 2, route=ROUTE)
    for owner in (*own, other):
        client = PaperClient(owner)
        for asker in (owner, *own, other):
            for _ in range(3):  # each on a connection of its own: the kernel chooses the worker
                assert (await client.at(asker)).text == "done"
    assert len(upstream.of("initialize")) == len(set(sessions(upstream))) == 3

"""SEP-1655 in the mirror, by a client that follows the paper line by line, before one replica and before several."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from msgspec.structs import replace

from gateway.config.parsing.state_keys import decode_key
from gateway.mirror.streamable.sep_1655_item import NAME
from gateway.protocol import mcp
from gateway.seal.keyring import Keyring
from gateway.seal.sep_1655_items import PURPOSE, Item
from tests.mirror.conftest import Begin
from tests.support.fake_modern import FakeModern, Json
from tests.support.mirrored_client import CAPABILITIES, LegacyClient
from tests.support.replicas import Cluster
from tests.support.state_keeper import CAPABILITY, SERVER, SESSION, StateKeeper
from tests.support.workbench import KEY, Stand, jwt

PAPER: Final = {
    "Clients that support state MUST declare the `state` capability": (
        "test_the_server_learns_that_the_client_keeps_state",
        "test_a_client_that_declares_no_session_state_gets_none",
    ),
    "State can be set in any Result message": (
        "test_the_servers_own_state_passes_untouched",
        "test_a_replica_that_starts_later_learns_the_log_level_from_the_state",
    ),
    "State can be deleted by setting it to null": ("test_the_servers_own_state_passes_untouched",),
    "State is additive, and the same name overwrites the entire value": (
        "test_the_servers_own_state_passes_untouched",
        "test_the_newest_level_counts",
    ),
    "State MUST be sent in all requests": (
        "test_the_servers_own_state_passes_untouched",
        "test_a_replica_that_starts_later_learns_the_log_level_from_the_state",
    ),
    "The session's state ends with the session, the server's does not": (
        "test_the_state_of_another_session_is_ignored",
    ),
    "State may be cleared unexpectedly": ("test_a_bad_state_is_ignored",),
    "Clients MUST only send state to the server that set it": ("test_the_state_of_another_session_is_ignored",),
    "No errors are added: a bad state is ignored": (
        "test_a_bad_state_is_ignored",
        "test_the_state_of_another_session_is_ignored",
    ),
}
"""Each rule of the paper that concerns the mirror, with the tests that show it."""

ROUTE: Final = {"era": "mirror", "dialects": ["sep-1655"]}
DECLARED: Final = {**CAPABILITIES, **CAPABILITY}


def test_each_rule_of_the_paper_has_its_tests() -> None:
    names = re.findall(r"def (test_\w+)", Path(__file__).read_text())
    assert {name for tests in PAPER.values() for name in tests} <= set(names)


class PaperClient(LegacyClient):
    """A client that keeps state, and sends it with every request to any replica."""

    def __init__(self, stand: Stand, **options: Any) -> None:
        super().__init__(stand.http, stand.url, **{"capabilities": DECLARED, **options})
        self.state = StateKeeper()

    async def begun(self) -> "PaperClient":
        _ = await self.initialize()
        return self

    async def ask(self, method: str, params: Json | None = None) -> Json:
        message = await super().ask(method, {**(params or {}), "_meta": self.state.meta})
        self.state.hear(message)
        return message

    async def call_tool(self) -> Json:
        result: Json = (await self.ask(mcp.TOOLS_CALL, {"name": "tool", "arguments": {}}))["result"]
        return result

    async def set_level(self, level: str) -> Json:
        result: Json = (await self.ask(mcp.SET_LEVEL, {"level": level}))["result"]
        return result

    @property
    def item(self) -> Any:
        return self.state.kept[SESSION].get(NAME)


def meta_of(server: FakeModern) -> Json:
    """The `_meta` of the last call as the server got it."""
    meta: Json = server.of(mcp.TOOLS_CALL)[-1]["params"]["_meta"]
    return meta


@pytest.fixture
def _tool(server: FakeModern) -> None:
    server.tools["tool"] = lambda call: call.text("done")


pytestmark = pytest.mark.usefixtures("_tool")


@pytest.mark.parametrize("count", [1, 3])
async def test_a_replica_that_starts_later_learns_the_log_level_from_the_state(
    server: FakeModern, cluster: Cluster, count: int
) -> None:
    names = [f"gw-{number}" for number in range(count)]
    stands = await cluster.begin(*names, route=ROUTE)
    client = await PaperClient(stands[0]).begun()
    for level in ("error", "debug"):
        assert (await client.set_level(level))["_meta"] == {SESSION: {NAME: client.item}}
    for stand in stands:
        await cluster.crash(stand)
    for stand in await cluster.begin(*names, route=ROUTE):
        client.url = stand.url
        assert "_meta" not in await client.call_tool()
        assert meta_of(server)[mcp.META_LOG_LEVEL] == "debug"
        assert SESSION not in meta_of(server), "the server does not see the gateway's item"


async def test_without_state_a_replica_that_starts_later_knows_no_level(server: FakeModern, cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", route=ROUTE)
    client = await PaperClient(one, capabilities=CAPABILITIES).begun()
    assert await client.set_level("debug") == {}
    await cluster.crash(one)
    (two,) = await cluster.begin("gw-1", route=ROUTE)
    client.url = two.url
    _ = await client.call_tool()
    assert meta_of(server)[mcp.META_LOG_LEVEL] == "info"


async def test_the_newest_level_counts(begin: Begin, server: FakeModern) -> None:
    client = await PaperClient(await begin(route=ROUTE)).begun()
    _ = await client.set_level("debug")
    before = client.item
    _ = await client.set_level("error")
    assert client.item != before
    client.state.kept[SESSION][NAME] = before  # as of a request that was sent before the answer
    _ = await client.call_tool()
    assert meta_of(server)[mcp.META_LOG_LEVEL] == "error"


NOT_DECLARED: Final = [{}, {"state": 1}, {"state": {"scopes": ["request"]}}]


@pytest.mark.parametrize("declared", NOT_DECLARED)
async def test_a_client_that_declares_no_session_state_gets_none(
    begin: Begin, server: FakeModern, declared: Json
) -> None:
    client = await PaperClient(await begin(route=ROUTE), capabilities={**CAPABILITIES, **declared}).begun()
    client.state.kept[SESSION][NAME] = "own"
    assert await client.set_level("debug") == {}
    _ = await client.call_tool()
    assert meta_of(server)[SESSION] == {NAME: "own"}
    assert "state" not in meta_of(server)[mcp.META_CAPABILITIES]


async def test_a_route_without_the_dialect_sets_no_state(begin: Begin, server: FakeModern) -> None:
    client = await PaperClient(await begin()).begun()
    client.state.kept[SESSION][NAME] = "own"
    assert await client.set_level("debug") == {}
    _ = await client.call_tool()
    assert meta_of(server)[SESSION] == {NAME: "own"}
    assert "state" not in meta_of(server)[mcp.META_CAPABILITIES]


@pytest.mark.parametrize("declared", [{}, {"scopes": ["session", "server"]}])
async def test_the_server_learns_that_the_client_keeps_state(begin: Begin, server: FakeModern, declared: Json) -> None:
    client = await PaperClient(await begin(route=ROUTE), capabilities={**CAPABILITIES, "state": declared}).begun()
    _ = await client.call_tool()
    assert meta_of(server)[mcp.META_CAPABILITIES]["state"] == declared


async def test_the_servers_own_state_passes_untouched(begin: Begin, server: FakeModern) -> None:
    sets: list[Json] = [
        {SESSION: {"Cart": {"items": ["cucumber"], "of": None}, "Coupon": "XYZZY"}, SERVER: {"seen": 1}},
        {SESSION: {"Coupon": {"of": [1]}}},
        {SESSION: {"Cart": None}},
        {SESSION: {"Coupon": None}},
        {},
    ]
    left = list(sets)

    def shop(call: Any) -> Json:
        given: Json = call.text("ok")
        given["result"]["_meta"] = {**given["result"]["_meta"], **left.pop(0)}
        return given

    server.tools["tool"] = shop
    client = await PaperClient(await begin(route=ROUTE)).begun()
    _ = await client.set_level("debug")
    for given in sets:
        assert (await client.call_tool()).get("_meta", {}) == given
    got = [
        {key: call["params"]["_meta"][key] for key in (SESSION, SERVER) if key in call["params"]["_meta"]}
        for call in server.of(mcp.TOOLS_CALL)
    ]
    assert got == [
        {},
        sets[0],
        {SESSION: {**sets[0][SESSION], "Coupon": {"of": [1]}}, SERVER: {"seen": 1}},
        {SESSION: {"Coupon": {"of": [1]}}, SERVER: {"seen": 1}},
        {SERVER: {"seen": 1}},
    ]
    assert client.item is not None


BAD: Final = {
    "changed": lambda item: item[:40] + ("A" if item[40] != "A" else "B") + item[41:],
    "long": lambda item: item + "A" * 4_096,
    "no_string": lambda item: [item],
    "own": lambda _: "mine",
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
async def test_a_bad_state_is_ignored(server: FakeModern, cluster: Cluster, change: Any) -> None:
    (one,) = await cluster.begin("gw-1", route=ROUTE)
    client = await PaperClient(one).begun()
    _ = await client.set_level("debug")
    await cluster.crash(one)
    (two,) = await cluster.begin("gw-1", route=ROUTE)
    client.url = two.url
    client.state.kept[SESSION] |= {NAME: change(client.item), "a": 1}
    _ = await client.call_tool()
    assert meta_of(server)[mcp.META_LOG_LEVEL] == "info"
    assert meta_of(server)[SESSION] == {"a": 1}
    _ = await client.set_level("error")
    assert isinstance(client.item, str)


async def test_the_state_of_another_session_is_ignored(begin: Begin, server: FakeModern) -> None:
    stand = await begin(route=ROUTE)
    ada, same, eve = [
        await PaperClient(stand, headers={"Authorization": jwt(iss="i", sub=sub)}).begun()
        for sub in ("ada", "ada", "eve")
    ]
    _ = await ada.set_level("debug")
    ring = Keyring((decode_key(KEY),), PURPOSE)
    content = msgspec.msgpack.decode(ring.open(ada.item), type=Item)
    old = ring.seal(msgspec.msgpack.encode(replace(content, issued=0.0)))
    for client, item in ((same, ada.item), (eve, ada.item), (ada, old)):
        client.state.kept[SESSION][NAME] = item
        _ = await client.call_tool()
        assert meta_of(server)[mcp.META_LOG_LEVEL] == ("debug" if client is ada else "info")
    for reason in ("other_principal", "expired"):
        assert stand.metric("mcp_gateway_state_rejected_total", reason=reason) == 1


@pytest.mark.parametrize("meta", ["x", [1], {SESSION: "x"}, {SESSION: [1]}])
async def test_a_malformed_state_is_the_servers_to_judge(begin: Begin, server: FakeModern, meta: Any) -> None:
    client = await PaperClient(await begin(route=ROUTE)).begun()
    asked = {"name": "tool", "arguments": {}, "_meta": meta}
    message = await LegacyClient.ask(client, mcp.TOOLS_CALL, asked)
    if isinstance(meta, dict):
        assert meta_of(server)[SESSION] == meta[SESSION]
    else:
        assert message["error"]["code"] == mcp.INVALID_PARAMS

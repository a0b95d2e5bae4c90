"""SEP-1655 in the mirror, by a client that follows the paper line by line, before one replica and before several."""

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
from tests.support.legacy_client import CAPABILITIES, LegacyClient, Served
from tests.support.replicas import Cluster
from tests.support.state_keeper import CAPABILITY, SESSION, StateKeeper
from tests.support.workbench import KEY, jwt

ROUTE: Final = {"era": "mirror", "dialects": ["sep-1655"]}
DECLARED: Final = {**CAPABILITIES, **CAPABILITY}


class PaperClient(LegacyClient):
    """A client that keeps state, and sends it with every request to any replica."""

    def __init__(self, stand: Served, **options: Any) -> None:
        super().__init__(stand, **{"capabilities": DECLARED, **options})
        self.state = StateKeeper()

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
    client = await PaperClient(stands[0]).initialize()
    for level in ("error", "debug"):
        assert (await client.set_level(level))["_meta"] == {SESSION: {NAME: client.item}}
    for stand in stands:
        await cluster.crash(stand)
    for stand in await cluster.begin(*names, route=ROUTE):
        client.url = stand.url
        assert "_meta" not in await client.call_tool()
        assert meta_of(server)[mcp.META_LOG_LEVEL] == "debug"
        assert SESSION not in meta_of(server), "the server does not see the gateway's item"


async def test_the_newest_level_counts(begin: Begin, server: FakeModern) -> None:
    client = await PaperClient(await begin(route=ROUTE)).initialize()
    _ = await client.set_level("debug")
    before = client.item
    _ = await client.set_level("error")
    assert client.item != before
    client.state.kept[SESSION][NAME] = before  # as of a request that was sent before the answer
    _ = await client.call_tool()
    assert meta_of(server)[mcp.META_LOG_LEVEL] == "error"


@pytest.mark.parametrize(("route", "declared"), [(ROUTE, CAPABILITIES), ({}, DECLARED)])
async def test_state_is_for_those_who_speak_of_it(
    begin: Begin, server: FakeModern, route: Json, declared: Json
) -> None:
    client = await PaperClient(await begin(route=route), capabilities=declared).initialize()
    client.state.kept[SESSION][NAME] = "own"
    assert await client.set_level("debug") == {}
    _ = await client.call_tool()
    assert meta_of(server)[SESSION] == {NAME: "own"}
    assert "state" not in meta_of(server)[mcp.META_CAPABILITIES]


async def test_the_state_of_another_session_is_ignored(begin: Begin, server: FakeModern) -> None:
    stand = await begin(route=ROUTE)
    ada, same, eve = [
        await PaperClient(stand, headers={"Authorization": jwt(iss="i", sub=sub)}).initialize()
        for sub in ("ada", "ada", "eve")
    ]
    _ = await ada.set_level("debug")
    ring = Keyring((decode_key(KEY),), PURPOSE)
    content = msgspec.msgpack.decode(ring.open(ada.item), type=Item)
    old = ring.seal(msgspec.msgpack.encode(replace(content, issued=0.0)))
    for client, item in ((same, ada.item), (eve, ada.item), (ada, old)):
        client.state.kept[SESSION] |= {NAME: item, "a": 1}
        _ = await client.call_tool()
        assert meta_of(server)[SESSION] == {"a": 1}, "the rest is the server's"
        assert meta_of(server)[mcp.META_LOG_LEVEL] == ("debug" if client is ada else "info")
    for reason in ("other_principal", "expired"):
        assert stand.metric("mcp_gateway_state_rejected_total", reason=reason) == 1


@pytest.mark.parametrize("meta", ["x", [1], {SESSION: "x"}, {SESSION: [1]}])
async def test_a_malformed_state_is_the_servers_to_judge(begin: Begin, server: FakeModern, meta: Any) -> None:
    client = await PaperClient(await begin(route=ROUTE)).initialize()
    asked = {"name": "tool", "arguments": {}, "_meta": meta}
    message = await LegacyClient.ask(client, mcp.TOOLS_CALL, asked)
    if isinstance(meta, dict):
        assert meta_of(server)[SESSION] == meta[SESSION]
    else:
        assert message["error"]["code"] == mcp.INVALID_PARAMS

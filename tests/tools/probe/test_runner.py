"""The probe tells of a server that speaks both protocols which side of it a route may need."""

import pytest

from gateway.config import parse
from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, Turn
from tests.support.probing import answers, check, everything_in, look, states


async def discovered(turn: Turn) -> None:
    await turn.result({"resultType": "complete", "supportedVersions": [mcp.MODERN], "capabilities": {"tools": {}}})


async def refuse(turn: Turn) -> None:
    turn.reply(400, {"jsonrpc": "2.0", "id": turn.id, "error": {"code": -32022, "message": "Unsupported version"}})


async def no_stream(turn: Turn) -> None:
    turn.reply(405)


@pytest.fixture
def dual(upstream: FakeUpstream) -> FakeUpstream:
    upstream.on("server/discover", discovered)
    return upstream


async def test_a_dual_era_server_is_told_with_the_symptom_and_the_key(dual: FakeUpstream) -> None:
    found = await look(dual.url)
    era = check(found, "era")
    assert (era.state, era.found) == ("ok", "modern, and it serves legacy clients too")
    assert "no back-channel for server-initiated requests" in era.why
    assert "unavailable on 2026-07-28 connections" in era.why
    assert "set era: bridge" in era.fix
    assert found.server is not None
    assert (found.server.era, found.server.legacy_sessions) == ("both", True)
    assert era.why.startswith("Modern clients need no gateway")
    assert parse(found.configuration or "", "here", {}).routes[0].era == "auto"


async def test_the_bridge_is_not_advised_where_the_legacy_side_has_no_sessions(dual: FakeUpstream) -> None:
    dual.has_sessions = False
    found = await look(dual.url)
    assert "era: bridge would not help" in check(found, "era").why
    assert check(found, "era").fix.startswith("Set era: mirror on the route if its tools ask")
    assert found.server is not None
    assert (found.server.era, found.server.legacy_sessions) == ("both", False)


async def test_a_server_that_is_modern_only_needs_no_gateway_and_no_bridge(dual: FakeUpstream) -> None:
    dual.on("initialize", refuse)
    dual.on("GET", no_stream)
    found = await look(dual.url)
    assert check(found, "era").found == "modern"
    assert check(found, "era").why.startswith("Modern clients need no gateway to use this server.")
    assert found.server is not None
    assert (found.server.era, found.server.legacy_sessions) == ("modern", None)
    assert "bridge" not in everything_in(found)


async def test_a_route_with_a_bridge_is_examined_on_the_legacy_side(dual: FakeUpstream) -> None:
    found = await look(dual.url, era="bridge")
    assert check(found, "era").found == "modern and legacy: with era: bridge, the gateway uses the legacy side"
    assert found.server is not None
    assert (found.server.era, found.server.legacy_sessions, found.server.sessions) == ("both", True, True)
    assert found.server.versions[0] == mcp.MODERN
    assert mcp.LEGACY in found.server.versions
    assert states(found)["session"] == "ok"
    assert answers(found)["replica_death"] == "partly", "the features are those of the legacy side"


async def test_a_bridge_before_a_legacy_server_changes_nothing(upstream: FakeUpstream) -> None:
    found = await look(upstream.url, era="bridge")
    assert check(found, "era").found.startswith("legacy:")
    without = await look(upstream.url)
    assert states(found) == states(without)
    assert found.features == without.features


async def test_a_bridge_before_a_modern_server_is_a_failure_that_names_the_key(dual: FakeUpstream) -> None:
    dual.on("initialize", refuse)
    dual.on("GET", no_stream)
    found = await look(dual.url, era="bridge")
    assert (found.state, check(found, "era").state) == ("failed", "failed")
    assert "initialize" in check(found, "era").found
    assert "era: bridge" in check(found, "era").why
    assert "Set era: auto" in check(found, "era").fix

"""What a server comes to, where no real server at hand is so; tests/e2e/test_probe.py has the real ones."""

import pytest
from msgspec import structs

from gateway.config import for_upstream
from gateway.tools.probe.report.features import features, unknown
from gateway.tools.probe.report.findings import Feature, Server

CONFIG = for_upstream("http://127.0.0.1:9/mcp")
ROUTE = CONFIG.routes[0]
GOOD = Server(sessions=True, side_stream=True, tools=4, ephemeral_tools=1, capabilities=("tools", "tools.listChanged"))


def feature(name: str, *, by_route: bool = False, **differs: object) -> Feature:
    route = structs.replace(ROUTE, continuation="replay" if by_route else "hold")
    (one,) = [each for each in features(structs.replace(GOOD, **differs), route, CONFIG) if each.name == name]
    return one


@pytest.mark.parametrize(
    ("name", "differs", "answer", "short"),
    [
        ("questions", {"side_stream": False}, "partly", "only those on the call's own stream"),
        ("questions", {"side_stream": False, "json_replies": True}, "no", "no, the server replies with JSON"),
        ("questions", {"sessions": False, "json_replies": True}, "no", "no, the server is stateless"),
        ("replica_death", {"event_store": True}, "yes", "yes, resumed from the event store"),
        ("replica_death", {"event_store": True, "replays": False}, "partly", "does not replay"),
        ("replica_death", {"transport": "stdio"}, "partly", "a child process ends with its gateway"),
        ("subscriptions", {"side_stream": False}, "no", "no, there is no GET stream"),
        ("subscriptions", {"capabilities": ("tools",)}, "not offered", "announces no changes"),
        ("old_clients", {"transport": "stdio"}, "yes", "yes, relayed"),
        ("calls", {"task_tools": 1, "left_out_tools": ("x",)}, "partly", "all but 1"),
        ("long_calls", {"json_replies": True}, "partly", "up to 300 s"),
    ],
)
def test_a_feature_is_judged_by_what_it_needs(name: str, differs: dict[str, object], answer: str, short: str) -> None:
    found = feature(name, **differs)
    assert (found.answer, short in found.short) == (answer, True), found


def test_a_route_that_replays_survives_without_a_store() -> None:
    assert feature("replica_death", by_route=True).answer == "yes"
    assert "nothing is held" in feature("questions", by_route=True).why


def test_what_is_not_known_depends_on_what_there_is() -> None:
    assert any("idle streams" in sentence for sentence in unknown(GOOD))
    child = structs.replace(GOOD, transport="stdio")
    assert not any("URL" in sentence or "idle streams" in sentence for sentence in unknown(child))
    stateless = structs.replace(GOOD, sessions=False)
    assert len(unknown(stateless)) == 2
    store = structs.replace(GOOD, event_store=True)
    assert any("event store" in sentence for sentence in unknown(store))


@pytest.mark.parametrize(("era", "short"), [("modern", "yes, mirrored"), ("both", "as the server serves them")])
def test_a_modern_server_provides_every_feature_itself(era: str, short: str) -> None:
    found = features(structs.replace(GOOD, era=era), ROUTE, CONFIG)
    assert {each.answer for each in found} == {"yes"}
    assert (found[-1].name, found[-1].short) == ("old_clients", short)


def test_a_bridged_route_has_the_features_of_the_legacy_side() -> None:
    bridged = structs.replace(ROUTE, era="bridge")
    assert features(structs.replace(GOOD, era="both"), bridged, CONFIG) == features(GOOD, ROUTE, CONFIG)

"""The keyrings of a process, at start and after reloads."""

import json

import pytest
from msgspec.structs import replace

from gateway.config import Config, InForce, parse
from gateway.protocol.errors import InvalidState
from gateway.server.key_purposes import Keyrings

FIRST, SECOND = "11" * 32, "22" * 32
WORKER_KEY = b"w" * 32


def config(*keys: str, **limits: int) -> Config:
    routes = [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]
    return parse(json.dumps({"state": {"keys": keys}, "limits": limits, "routes": routes}), "test", {})


def opens(ring: Keyrings, token: str) -> bool:
    return ring.state.value.open(token) == b"state"


def test_the_first_key_seals_and_all_open() -> None:
    old = Keyrings(InForce(config(FIRST)), None)
    both = Keyrings(InForce(config(SECOND, FIRST)), None)
    assert both.ids[1:] == old.ids
    assert opens(both, old.state.value.seal(b"state"))
    assert both.state.value.seal(b"state").split(".")[1] == both.ids[0]


def test_a_reload_replaces_every_ring() -> None:
    in_force = InForce(config(FIRST))
    rings = Keyrings(in_force, None)
    in_force.replace(config(SECOND))
    (new,) = rings.ids
    assert new == Keyrings(InForce(config(SECOND)), None).ids[0]
    assert rings.peer.value.key_ids == rings.endpoint.value.key_ids == (new,)


def test_a_reload_that_leaves_the_keys_alone_keeps_the_rings() -> None:
    in_force = InForce(config(FIRST))
    rings = Keyrings(in_force, None)
    before = rings.state.value
    in_force.replace(config(FIRST, body_bytes=70_000))
    assert rings.state.value is before


def test_a_key_made_at_start_stays_the_last_one() -> None:
    in_force = InForce(config())
    rings = Keyrings(in_force, None)
    token, own = rings.state.value.seal(b"state"), rings.ids
    for keys in ((FIRST,), (SECOND, FIRST), ()):
        in_force.replace(config(*keys))
        assert rings.ids[len(keys) :] == own
        assert opens(rings, token)


def test_workers_without_configured_keys_share_the_key_of_their_supervisor() -> None:
    one, other = (Keyrings(InForce(config()), WORKER_KEY) for _ in range(2))
    assert opens(other, one.state.value.seal(b"state"))
    assert Keyrings(InForce(config()), None).ids != one.ids


def test_a_former_key_opens_session_ids_of_mirrored_clients_and_nothing_else() -> None:
    old = Keyrings(InForce(config(FIRST)), None)
    in_force = InForce(config(SECOND))
    rings = Keyrings(in_force, None)
    state = in_force.value.state
    in_force.replace(replace(in_force.value, state=replace(state, session_keys=(FIRST,))))
    sealed = [ring.seal(b"x") for ring in (*old.mirror.value, old.state.value, old.endpoint.value)]
    opening = (*rings.mirror.value, rings.state.value, rings.endpoint.value)
    opened = []
    for ring, token in zip(opening, sealed, strict=True):
        try:
            opened.append(ring.open(token))
        except InvalidState:
            opened.append(b"")
    assert opened == [b"x", b"", b"", b"", b"", b""]
    assert rings.ids == Keyrings(InForce(config(SECOND)), None).ids


def test_the_tokens_of_the_stateless_draft_are_not_those_of_the_mirror() -> None:
    in_force = InForce(config(FIRST))
    rings = Keyrings(in_force, None)
    for own, other in zip(rings.sep_1442.value, rings.mirror.value, strict=True):
        assert own.open(own.seal(b"x")) == b"x"
        with pytest.raises(InvalidState):
            _ = other.open(own.seal(b"x"))
    old = rings.sep_1442.value.nested.seal(b"x")
    in_force.replace(config(SECOND))
    with pytest.raises(InvalidState):
        _ = rings.sep_1442.value.nested.open(old)

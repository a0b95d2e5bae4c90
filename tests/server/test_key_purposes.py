"""The keys of a process, at start and after reloads."""

import json

from msgspec.structs import replace

from gateway.config import Config, InForce, parse
from gateway.seal.keyring import Keyring
from gateway.server.key_purposes import StateKeys

FIRST, SECOND = "11" * 32, "22" * 32
WORKER_KEY = b"w" * 32


def config(*keys: str, **limits: int) -> Config:
    routes = [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]
    return parse(json.dumps({"state": {"keys": keys}, "limits": limits, "routes": routes}), "test", {})


def ring(of: StateKeys) -> Keyring:
    return Keyring(of.keys.value.present, "state")


def test_the_first_key_seals_and_all_open() -> None:
    old = StateKeys(InForce(config(FIRST)), None)
    both = StateKeys(InForce(config(SECOND, FIRST)), None)
    assert both.ids[1:] == old.ids
    assert ring(both).open(ring(old).seal(b"state")) == b"state"
    assert ring(both).seal(b"state").split(".")[1] == both.ids[0]


def test_a_reload_replaces_the_keys() -> None:
    in_force = InForce(config(FIRST))
    of = StateKeys(in_force, None)
    in_force.replace(config(SECOND))
    assert of.ids == StateKeys(InForce(config(SECOND)), None).ids


def test_a_reload_that_leaves_the_keys_alone_replaces_nothing() -> None:
    in_force = InForce(config(FIRST))
    of = StateKeys(in_force, None)
    of.keys.after_replace(lambda _: 1 / 0)
    in_force.replace(config(FIRST, body_bytes=70_000))


def test_a_key_made_at_start_stays_the_last_one() -> None:
    in_force = InForce(config())
    of = StateKeys(in_force, None)
    token, own = ring(of).seal(b"state"), of.ids
    for keys in ((FIRST,), (SECOND, FIRST), ()):
        in_force.replace(config(*keys))
        assert of.ids[len(keys) :] == own
        assert ring(of).open(token) == b"state"


def test_workers_without_configured_keys_share_the_key_of_their_supervisor() -> None:
    one, other = (StateKeys(InForce(config()), WORKER_KEY) for _ in range(2))
    assert one.ids == other.ids
    assert StateKeys(InForce(config()), None).ids != one.ids


def test_a_former_key_is_none_of_the_present_ones() -> None:
    in_force = InForce(config(SECOND))
    of = StateKeys(in_force, None)
    state = in_force.value.state
    in_force.replace(replace(in_force.value, state=replace(state, session_keys=(FIRST, SECOND))))
    assert of.keys.value.former == StateKeys(InForce(config(FIRST)), None).keys.value.present
    assert of.ids == StateKeys(InForce(config(SECOND)), None).ids

"""The keys of a process, at start and after reloads."""

import json

from msgspec.structs import replace

from gateway.config import Config, InForce, parse
from gateway.seal.keyring import Keys
from gateway.server.key_purposes import state_keys

FIRST, SECOND = "11" * 32, "22" * 32


def config(*keys: str, **limits: int) -> Config:
    routes = [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]
    return parse(json.dumps({"state": {"keys": keys}, "limits": limits, "routes": routes}), "test", {})


def test_a_reload_that_leaves_the_keys_alone_replaces_nothing() -> None:
    in_force = InForce(config(FIRST))
    state_keys(in_force, None).after_replace(lambda _: 1 / 0)
    in_force.replace(config(FIRST, body_bytes=70_000))


def test_a_key_made_at_start_stays_the_last_one() -> None:
    in_force = InForce(config())
    keys = state_keys(in_force, None)
    own = keys.value.present
    for configured in ((FIRST,), (SECOND, FIRST), ()):
        in_force.replace(config(*configured))
        assert keys.value.present == (*map(bytes.fromhex, configured), *own)


def test_a_former_key_is_none_of_the_present_ones() -> None:
    in_force = InForce(config(SECOND))
    keys = state_keys(in_force, None)
    state = in_force.value.state
    in_force.replace(replace(in_force.value, state=replace(state, session_keys=(FIRST, SECOND))))
    assert keys.value == Keys((bytes.fromhex(SECOND),), (bytes.fromhex(FIRST),))

"""The keys of a process, at start and after reloads."""

import itertools
import json

import pytest
from msgspec.structs import replace

from gateway import world
from gateway.config import Config, InForce, parse
from gateway.seal.keyring import Keys, key_id
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
    assert keys.value[:2] == Keys((bytes.fromhex(SECOND),), (bytes.fromhex(FIRST),))[:2]


# The rings of a process, begun with the first; the key that it then knows to be the newest, and whether a reload has
# changed the one that seals.
ROTATIONS: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("old",), "", False),
    (("old new",), "", False),
    (("old", "old new"), "new", False),
    (("old", "old new", "new old"), "new", True),
    (("old", "old new", "new old", "new"), "new", True),
    (("old new", "new old"), "new", True),
    (("old new", "new old", "new", "new old"), "new", True),
    (("old", "old new", "old", "old new"), "new", False),
    (("old new", "new old", "old new"), "old", True),
    (("old", "new old"), "new", True),
    (("new old", "new"), "", False),
    (("new old", "new old"), "", False),
)


@pytest.mark.parametrize(("rings", "newest", "is_moved"), ROTATIONS)
def test_a_process_knows_what_its_reloads_did_to_its_keys(
    rings: tuple[str, ...], newest: str, *, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count(1.0)
    monkeypatch.setattr(world, "monotonic", lambda: next(moments))
    named = {"old": FIRST, "new": SECOND, "": ""}
    begun, *loaded = (config(*map(named.__getitem__, ring.split())) for ring in rings)
    in_force = InForce(begun)
    keys = state_keys(in_force, None)
    for each in loaded:
        in_force.replace(each)
    assert keys.value.newest == (key_id(bytes.fromhex(named[newest])) if newest else "")
    assert (keys.value.sealing_since > 1.0) == is_moved
    since = keys.value.sealing_since
    in_force.replace(replace(in_force.value, errors="brief"))
    assert keys.value.sealing_since == since

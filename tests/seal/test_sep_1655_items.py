"""State that clients keep in `_meta`, with the gateway's sealed item in it."""

import json
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import Bearer
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.sep_1655_items import KEY, PURPOSE, Item, declares, items, opened, taken, with_item

NOW = 1_000_000.0
RING = Keyring([bytes(range(32))], PURPOSE)
ITEMS = items(InForce(Keys((bytes(range(32)),))))
ITEM = Item("a", "/mcp", b"p" * 32, NOW, "gw-1#0", "pin")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"state": {}}, True),
        ({"state": {"scopes": ["session"]}}, True),
        ({"state": {"scopes": ["request", "session", "server"], "more": 1}}, True),
        ({}, False),
        ({"state": None}, False),
        ({"state": True}, False),
        ({"state": {"scopes": []}}, False),
        ({"state": {"scopes": ["server"]}}, False),
        ({"state": {"scopes": "session"}}, False),
        ([], False),
    ],
)
def test_a_client_keeps_session_state_if_it_says_so(capabilities: Any, *, expected: bool) -> None:
    assert declares(json.dumps(capabilities).encode()) is expected


def raw(value: Any) -> Raw:
    return Raw(json.dumps(value).encode())


def read(meta: dict[str, Raw]) -> Any:
    return {key: json.loads(bytes(value)) for key, value in meta.items()}


@pytest.mark.parametrize(
    ("meta", "left", "item"),
    [
        ({}, {}, None),
        ({"x": 1}, {"x": 1}, None),
        ({KEY: "x"}, {KEY: "x"}, None),
        ({KEY: {"b": 1}}, {KEY: {"b": 1}}, None),
        ({KEY: {}}, {KEY: {}}, None),
        ({KEY: {"a": 1}, "x": 1}, {"x": 1}, 1),
        ({KEY: {"b": None, "a": "s", "c": [1.0]}, "x": 1}, {KEY: {"b": None, "c": [1.0]}, "x": 1}, "s"),
    ],
)
def test_the_server_does_not_see_the_item(meta: dict[str, Any], left: dict[str, Any], item: Any) -> None:
    given = {key: raw(value) for key, value in meta.items()}
    kept, found = taken(given, "a")
    assert read(kept) == left
    assert (None if found is None else json.loads(bytes(found))) == item
    assert read(given) == meta, "`_meta` is shared by the requests of a client"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({}, {"_meta": {KEY: {"a": "s"}}}),
        ({"x": [1], "_meta": {"y": 1}}, {"x": [1], "_meta": {"y": 1, KEY: {"a": "s"}}}),
        ({"_meta": {KEY: {"b": None, "a": 1}}}, {"_meta": {KEY: {"b": None, "a": "s"}}}),
        ({"cacheScope": "public"}, {"cacheScope": "private", "_meta": {KEY: {"a": "s"}}}),
        ({"_meta": {KEY: [1]}}, {"_meta": {KEY: [1]}}),
        ({"_meta": 1}, {"_meta": 1}),
        ([1], [1]),
    ],
)
def test_an_item_is_added_to_the_state_of_a_result(result: Any, expected: Any) -> None:
    response = json.dumps({"jsonrpc": "2.0", "id": "c1", "result": result}).encode()
    assert json.loads(with_item(response, "a", "s")) == {"jsonrpc": "2.0", "id": "c1", "result": expected}


def test_an_error_has_no_state() -> None:
    response = b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}'
    assert with_item(response, "a", "s") == response


def read_back(sealed: Any, **changes: Any) -> Item:
    given = {"name": "a", "route": "/mcp", "principal": b"p" * 32, "now": NOW, "ttl_seconds": 60.0, **changes}
    bearer = Bearer(given["route"], given["principal"], given["now"], lambda _: b"")
    return opened(ITEMS, raw(sealed), given["name"], bearer, given["ttl_seconds"])


def test_an_item_opens_for_its_caller_on_its_route() -> None:
    sealed = ITEMS.seal(ITEM)
    assert read_back(sealed) == read_back(sealed, now=NOW + 60) == read_back(sealed, now=NOW - 60) == ITEM


@pytest.mark.parametrize(
    ("sealed", "given", "reason"),
    [
        (ITEMS.seal(ITEM), {"name": "b"}, "other_target"),
        (ITEMS.seal(ITEM), {"principal": b"q" * 32}, "other_principal"),
        (ITEMS.seal(ITEM), {"now": NOW + 61}, "expired"),
        (ITEMS.seal(replace(ITEM, value="x" * 2_048)), {}, "too_large"),
        (RING.seal(b"\x93"), {}, "version"),
        (Keyring([bytes(range(32))], "state").seal(b""), {}, "forged"),
        ("mine", {}, "malformed"),
        ([1], {}, "malformed"),
        (None, {}, "malformed"),
    ],
    ids=range(9),
)
def test_any_other_item_does_not_open(sealed: Any, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidState) as caught:
        _ = read_back(sealed, **given)
    assert caught.value.reason == reason

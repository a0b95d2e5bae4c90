"""The differences of two configurations, and for each key whether a reload applies it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect
from msgspec.structs import replace

from gateway.config import Config, Route, State, Upstream, changes, digest
from gateway.config.load import config_shape
from gateway.config.reloadable import RESTART

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reload.md"
ROUTE = Route(upstream=Upstream(url="http://127.0.0.1:1/mcp"))
CONFIG = Config(state=State(keys=("0f" * 32,)), routes=(ROUTE,))


def leaves(kind: inspect.Type, above: str = "") -> Iterator[str]:
    """Every key of the shape; those of a list of sections as `routes[].path`."""
    if isinstance(kind, inspect.Metadata):
        yield from leaves(kind.type, above)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from leaves(field.type, f"{above}.{field.name}" if above else field.name)
    elif isinstance(kind, inspect.VarTupleType) and isinstance(bare(kind.item_type), inspect.StructType):
        yield from leaves(kind.item_type, f"{above}[]")
    else:
        yield above


def bare(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


KEYS = sorted(leaves(config_shape()))


def with_other(struct: Any, path: list[str]) -> Any:
    """The struct with another value at that place; a comparison does not look at its type."""
    name, *rest = path
    if name == "routes[]":
        return replace(struct, routes=(with_other(struct.routes[0], rest),))
    return replace(struct, **{name: with_other(getattr(struct, name), rest) if rest else "another"})


def test_the_walk_finds_keys_of_every_kind() -> None:
    assert set(KEYS) >= RESTART
    assert {"listen", "state.keys", "replica.peers", "routes[].cache.scope", "hold.ttl_seconds"} <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_exactly_the_key_that_differs_is_found(key: str) -> None:
    other = with_other(CONFIG, key.split("."))
    found = changes(CONFIG, other)
    if key == "routes[].path":
        assert found == ("routes[another] added", "routes[/mcp] removed")
        return
    assert found == (key.replace("routes[]", "routes[/mcp]"),)


def test_equal_configurations_do_not_differ() -> None:
    same = Config(state=State(keys=("0f" * 32,)), routes=(Route(upstream=Upstream(url="http://127.0.0.1:1/mcp")),))
    assert changes(CONFIG, same) == ()
    assert digest(CONFIG) == digest(same)


def test_routes_are_matched_by_their_paths() -> None:
    def route(path: str, url: str = "http://127.0.0.1:1/mcp") -> Route:
        return Route(path=path, upstream=Upstream(url=url))

    old = replace(CONFIG, routes=(route("/a"), route("/b"), route("/c")))
    new = replace(CONFIG, routes=(route("/c"), route("/d"), route("/b", "http://127.0.0.1:2/mcp")))
    found = changes(old, new)
    assert found == ("routes[/d] added", "routes[/b].upstream.url", "routes[/a] removed")
    assert RESTART.isdisjoint(found)
    turned = replace(old, routes=old.routes[::-1])
    assert changes(old, turned) == (), "the order of routes means nothing"


def test_every_change_that_needs_a_restart_is_named() -> None:
    new = replace(CONFIG, listen="127.0.0.1:1", workers=3, hold=replace(CONFIG.hold, ttl_seconds=1.0))
    assert RESTART.intersection(changes(CONFIG, new)) == {"listen", "workers"}


def test_a_change_names_no_value() -> None:
    new = replace(
        CONFIG,
        state=State(keys=("1e" * 32, "0f" * 32)),
        routes=(replace(ROUTE, upstream=Upstream(url="http://secret/mcp")),),
    )
    told = repr(changes(CONFIG, new))
    assert "1e1e" not in told
    assert "secret" not in told


def test_the_document_names_every_key() -> None:
    text = DOCUMENT.read_text()
    (restart,) = (line for line in text.splitlines() if "restart to change these keys" in line)
    assert {key for key in KEYS if f"`{key}`" in restart or f"`{key.split('.')[0]}.*`" in restart} == RESTART
    for key in KEYS:
        section = key.split(".")[0]
        name = key.removeprefix("routes[].").split(".")[0]
        assert any(f"`{word}`" in text for word in (key, f"{section}.*", name)), (
            f"docs/reload.md says nothing of {key}"
        )

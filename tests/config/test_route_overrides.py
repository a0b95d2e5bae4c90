"""The sections of a route over the shared ones."""

import pytest
from msgspec import inspect

from gateway.config import (
    on_route,
)
from gateway.config.route_overrides import OWN_SECTIONS
from tests.support.configurations import (
    with_route,
)


def bare(kind: inspect.Type) -> list[inspect.Type]:
    """What a key may be, without None and without words."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    found = [each.type if isinstance(each, inspect.Metadata) else each for each in types]
    return [each for each in found if not isinstance(each, inspect.NoneType)]


ROUTE_ONLY = {"affinity"}


@pytest.mark.parametrize("section", OWN_SECTIONS)
def test_a_key_of_a_route_takes_the_same_values_as_the_shared_key(section: str) -> None:
    common = {field.name: field for field in inspect.type_info(type(getattr(with_route(), section))).fields}  # type: ignore[attr-defined]
    own = [field for field in inspect.type_info(OWN_SECTIONS[section]).fields if field.name not in ROUTE_ONLY]  # type: ignore[attr-defined]
    assert own
    for field in own:
        assert bare(field.type) == bare(common[field.name].type), field.name
        assert field.default is None


def test_a_route_overrides_some_keys_and_shares_the_others() -> None:
    config = with_route({"hold": {"ttl_seconds": 5, "quiet_seconds": 1}}, hold={"ttl_seconds": 7}, sessions={"max": 3})
    there = on_route(config, config.routes[0])
    assert (there.hold.ttl_seconds, there.hold.quiet_seconds, there.sessions.max) == (7, 1, 3)
    assert there.limits == config.limits
    assert (config.hold.ttl_seconds, config.sessions.max) == (5, 11_000)
    plain = with_route()
    assert on_route(plain, plain.routes[0]) is plain

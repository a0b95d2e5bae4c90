"""Compares two configurations to tell which changes a running process can apply."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import fields

from gateway.config.model.config import Config

RESTART: Final = frozenset(
    {"listen", "admin", "workers", "replica.id", "replica.listen", "log.level", "log.format", "traces"}
)
"""The keys that are read only at start (decision 56). All others are read through an `InForce`."""


def changes(old: Config, new: Config) -> tuple[str, ...]:
    """Return every key that differs, without values. Routes are matched by path; their order does not matter."""
    found = [*_differences(old, new, "")]
    before = {route.path: route for route in old.routes}
    after = {route.path: route for route in new.routes}
    for path, route in after.items():
        found += _differences(before[path], route, f"routes[{path}].") if path in before else [f"routes[{path}] added"]
    return (*found, *(f"routes[{path}] removed" for path in before if path not in after))


def _differences(old: Struct, new: Struct, above: str) -> Iterator[str]:
    for field in fields(new):
        one, other = getattr(old, field.name), getattr(new, field.name)
        if field.name == "routes":
            continue  # they are matched by path
        if isinstance(other, Struct):
            yield from _differences(one, other, f"{above}{field.name}.")
        elif one != other:
            yield f"{above}{field.name}"

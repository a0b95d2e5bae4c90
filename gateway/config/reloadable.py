"""Compares two configurations to tell which changes a running process can apply."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from gateway.config.model.config import Config

RESTART: Final = frozenset(
    {"listen", "admin", "workers", "replica.id", "replica.listen", "log.level", "log.format", "traces"}
)
"""The keys that are read only at start (decision 56). All others are read through an `InForce`."""


class KeyChange(NamedTuple):
    """One changed key, `routes[]` being any route, and a text for the log, without values."""

    key: str
    text: str


def changes(old: Config, new: Config) -> tuple[KeyChange, ...]:
    """Return every key that differs. Routes are matched by path; their order does not matter."""
    return (*_differences(old, new, "", ""), *_routes(old, new))


def refused(found: tuple[KeyChange, ...]) -> tuple[str, ...]:
    """Return the texts of the changes that need a restart."""
    return tuple(change.text for change in found if change.key in RESTART)


def _routes(old: Config, new: Config) -> Iterator[KeyChange]:
    before = {route.path: route for route in old.routes}
    after = {route.path: route for route in new.routes}
    for path in (*after, *(path for path in before if path not in after)):
        if path in before and path in after:
            yield from _differences(before[path], after[path], "routes[].", f"routes[{path}].")
        else:
            yield KeyChange("routes[].path", f"routes[{path}] {'added' if path in after else 'removed'}")


def _differences(old: Struct, new: Struct, key: str, text: str) -> Iterator[KeyChange]:
    for field in fields(new):
        one, other = getattr(old, field.name), getattr(new, field.name)
        if field.name == "routes":
            continue  # `_routes` matches them by path
        if isinstance(other, Struct):
            yield from _differences(one, other, f"{key}{field.name}.", f"{text}{field.name}.")
        elif one != other:
            yield KeyChange(f"{key}{field.name}", f"{text}{field.name}")

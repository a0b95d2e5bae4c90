"""Compares two configurations to tell which changes a running process can apply.

A reload applies whole sections: everything reads them through an `InForce`, so their new keys are applied too. A key
of another section needs a restart unless it is listed (decision 56).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from gateway.config.model.config import Config
from gateway.config.route_overrides import OWN_SECTIONS

_SECTIONS: Final = frozenset(
    {
        *("tls", "state", "limits", "legs", "tasks", *OWN_SECTIONS, "principal", "debug", "security"),
        *("routes[]", *(f"routes[].{section}" for section in OWN_SECTIONS), "routes[].tasks"),
        *("routes[].upstream", "routes[].upstream.tls", "routes[].credentials", "routes[].cache"),
    }
)
_KEYS: Final = frozenset({"public_url", "replica.peers", "replica.peers_dns"})


class KeyChange(NamedTuple):
    """One changed key, `routes[]` being any route, and a text for the log, without values."""

    key: str
    text: str


def changes(old: Config, new: Config) -> tuple[KeyChange, ...]:
    """Return every key that differs. Routes are matched by path; their order does not matter."""
    return (*_differences(old, new, "", ""), *_routes(old, new))


def refused(found: tuple[KeyChange, ...]) -> tuple[str, ...]:
    """Return the texts of the changes that need a restart."""
    return tuple(change.text for change in found if not is_applied(change.key))


def is_applied(key: str) -> bool:
    """Return whether a reload applies a key."""
    return key in _KEYS or key.rpartition(".")[0] in _SECTIONS


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

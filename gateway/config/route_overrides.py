"""What holds on one route: the sections in common with what the route has for itself laid over them; pure."""

from typing import Final, NamedTuple

from msgspec import Struct, structs

from gateway.config.model import Config, Route, RouteHold, RouteLegs, RouteLimits, RouteSessions, RouteTimeouts

OWN_SECTIONS: Final[dict[str, type[Struct]]] = {
    "hold": RouteHold,
    "limits": RouteLimits,
    "timeouts": RouteTimeouts,
    "sessions": RouteSessions,
    "legs": RouteLegs,
}
"""The sections that a route may have for itself, and what may stand in them.

What is not in them belongs to the process, the listener or the replicas: it has no route yet, or all of them.
"""


class RouteSettings(NamedTuple):
    """A route, and the configuration as it holds on it."""

    config: Config
    route: Route


def on_route(config: Config, route: Route) -> Config:
    """Return the configuration as it holds on this route, key by key."""
    over = {}
    for section in OWN_SECTIONS:
        common, own = getattr(config, section), getattr(route, section)
        names = set(common.__struct_fields__).intersection(own.__struct_fields__)
        given = {name: value for name in names if (value := getattr(own, name)) is not None}
        if given:
            over[section] = structs.replace(common, **given)
    return structs.replace(config, **over) if over else config

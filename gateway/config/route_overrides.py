"""Applies the sections of a route over the shared ones."""

from typing import Final

from msgspec import Struct, structs

from gateway.config.model.config import Config
from gateway.config.model.route import Route, RouteHold, RouteSessions, RouteTimeouts

OWN_SECTIONS: Final[dict[str, type[Struct]]] = {
    "hold": RouteHold,
    "timeouts": RouteTimeouts,
    "sessions": RouteSessions,
}
"""The sections that a route may override, and the keys it may set in them: those in which servers differ.

All other keys concern the process, the clients or the replicas, not one server.
"""


class RouteSettings(Struct, frozen=True):
    """A route, and the configuration as it holds on it."""

    config: Config
    route: Route


def on_route(config: Config, route: Route) -> Config:
    """Return the configuration that is in effect on this route."""
    over = {}
    for section in OWN_SECTIONS:
        common, own = getattr(config, section), getattr(route, section)
        names = set(common.__struct_fields__).intersection(own.__struct_fields__)
        given = {name: value for name in names if (value := getattr(own, name)) is not None}
        if given:
            over[section] = structs.replace(common, **given)
    return structs.replace(config, **over) if over else config

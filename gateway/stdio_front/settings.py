"""The configuration of `mrtr-gateway wrap`: one route, for the one host that started the process."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from msgspec import structs

from gateway import world
from gateway.config import Config, Replica, Route, State, unusable

_OWN: Final = ("GATEWAY_", "MRTR_STATE_KEY")
"""How the names of the gateway's own variables begin."""
_SHORTEST_PART: Final = 8
"""A shorter value may be in a secret by chance."""
_ALWAYS_SECONDS: Final = 86_400.0
_SETTLE_SECONDS: Final = 1.5
_START_SECONDS: Final = 55.0
"""A command may have to be downloaded before it starts (npx, uvx), and hosts wait for about a minute."""
_SESSIONS: Final = 64
"""A subscription is a session too; all of them share one child."""


def for_host(config: Config, path: str | None, environment: Mapping[str, str], era: str | None = None) -> Config:
    """Return the configuration with the only route that the host uses; raises ConfigError.

    The host's own child keeps its memory: it serves one call at a time, and lives as long as the host. States never
    leave the process, so their key is made here.
    """
    route = next((route for route in config.routes if path in (None, route.path)), None)
    if route is None:
        known = ", ".join(route.path for route in config.routes)
        raise unusable(f"--route {path}", f"the configuration has no such route; it has {known}")
    if route.upstream.command is not None:
        route = structs.replace(
            route,
            upstream=structs.replace(
                route.upstream,
                warm=0,
                max_children=_SESSIONS,
                new_children_per_second=float(_SESSIONS),
                inherit_env=_passed_on(config, route, environment),
            ),
            sessions=structs.replace(route.sessions, affinity="principal", idle_seconds=_ALWAYS_SECONDS),
        )
        config = structs.replace(
            config,
            sessions=structs.replace(config.sessions, quarantine_seconds=_SETTLE_SECONDS),
            timeouts=structs.replace(
                config.timeouts, handshake_seconds=max(config.timeouts.handshake_seconds, _START_SECONDS)
            ),
        )
    if era is not None:
        route = structs.replace(route, era=era)
    key = world.token_hex(32)
    state = State(keys=(key,), ttl_seconds=config.state.ttl_seconds)
    return structs.replace(config, routes=(route,), state=state, replica=Replica(), workers=1, admin=None)


def _passed_on(config: Config, served: Route, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that the child gets: all but those of the gateway, and those with a secret of its file.

    What the environment of the served route holds is meant for its child.
    """
    found: set[str | None] = {*config.state.keys, *config.state.session_keys}
    for route in config.routes:
        url = urlsplit(route.upstream.url or "")
        found.update(route.set_headers.values(), (route.credentials.token, url.username, url.password, url.query))
        if route is not served:
            found.update(route.upstream.env.values())
    secrets = {each for each in found if each}

    def is_secret(value: str) -> bool:
        # A value may be a part of one: the file may say `Bearer ${TOKEN}`.
        return value in secrets or (len(value) >= _SHORTEST_PART and any(value in secret for secret in secrets))

    return tuple(name for name, value in environment.items() if not (name.startswith(_OWN) or is_secret(value)))

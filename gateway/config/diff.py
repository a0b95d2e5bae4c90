"""Compares two configurations to tell which changes a running process can apply.

A key that is not in `RELOADED` needs a restart, so a new key is safe by default. `tests/config/test_diff.py` fails
until somebody decides about it.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from gateway.config.model import Config
from gateway.config.route_overrides import OWN_SECTIONS

_SHARED: Final = frozenset(
    {
        "public_url",
        "tls.cert_file",
        "tls.key_file",
        "tls.client_ca_file",
        "state.keys",
        "state.keys_file",
        "state.ttl_seconds",
        "replica.peers",
        "replica.peers_dns",
        "hold.ttl_seconds",
        "hold.max_calls",
        "hold.max_calls_per_principal",
        "hold.quiet_seconds",
        "hold.grace_seconds",
        "hold.linger_seconds",
        "hold.drain_delay_seconds",
        "hold.drain_seconds",
        "limits.body_bytes",
        "limits.event_bytes",
        "limits.behind_bytes",
        "limits.json_depth",
        "limits.state_bytes",
        "limits.receive_seconds",
        "limits.connections",
        "timeouts.connect_seconds",
        "timeouts.handshake_seconds",
        "timeouts.answer_seconds",
        "timeouts.idle_seconds",
        "timeouts.session_wait_seconds",
        "timeouts.keepalive_seconds",
        "timeouts.cancel_seconds",
        "timeouts.send_seconds",
        "timeouts.peer_connect_seconds",
        "timeouts.peer_accept_seconds",
        "sessions.max",
        "sessions.max_per_principal",
        "sessions.idle_seconds",
        "sessions.quarantine_seconds",
        "legs.limit_seconds",
        "legs.rounds",
        "principal.source",
        "principal.header",
        "principal.trusted_proxies",
        "principal.issuer",
        "principal.jwks_url",
        "principal.jwks_file",
        "principal.jwks_ca_file",
        "principal.jwks_stale_seconds",
        "principal.audience",
        "principal.algorithms",
        "debug.bodies",
        "security.allowed_hosts",
        "security.allowed_origins",
        "routes[].path",
        "routes[].upstream.url",
        "routes[].upstream.command",
        "routes[].upstream.env",
        "routes[].upstream.cwd",
        "routes[].upstream.max_children",
        "routes[].upstream.warm",
        "routes[].upstream.transport",
        "routes[].upstream.tls.ca_file",
        "routes[].upstream.tls.cert_file",
        "routes[].upstream.tls.key_file",
        "routes[].upstream.tls.server_name",
        "routes[].upstream.tls.verify",
        "routes[].continuation",
        "routes[].ephemeral",
        "routes[].undeclared",
        "routes[].credentials.mode",
        "routes[].credentials.token",
        "routes[].credentials.token_file",
        "routes[].credentials.header",
        "routes[].forward_headers",
        "routes[].bind_headers",
        "routes[].sessions.affinity",
        "routes[].drop_headers",
        "routes[].set_headers",
        "routes[].cache.ttl_ms",
        "routes[].cache.scope",
        "routes[].cache.methods",
        "routes[].cache.lists_seconds",
    }
)
RELOADED: Final = _SHARED | {
    f"routes[].{section}.{field.name}"
    for section, own in OWN_SECTIONS.items()
    for field in fields(own)
    if f"{section}.{field.name}" in _SHARED
}
"""Keys that a reload applies; `routes[]` is any route. A route's own value is treated as the shared key is."""


class Change(NamedTuple):
    """One changed key as `RELOADED` names it, and a text for the log, without values."""

    key: str
    text: str


def changes(old: Config, new: Config) -> tuple[Change, ...]:
    """Return every key that differs. Routes are matched by path; their order does not matter."""
    return (*_differences(old, new, "", ""), *_routes(old, new))


def refused(found: tuple[Change, ...]) -> tuple[str, ...]:
    """Return the texts of the changes that need a restart."""
    return tuple(change.text for change in found if change.key not in RELOADED)


def _routes(old: Config, new: Config) -> Iterator[Change]:
    before = {route.path: route for route in old.routes}
    after = {route.path: route for route in new.routes}
    for path in (*after, *(path for path in before if path not in after)):
        if path in before and path in after:
            yield from _differences(before[path], after[path], "routes[].", f"routes[{path}].")
        else:
            yield Change("routes[].path", f"routes[{path}] {'added' if path in after else 'removed'}")


def _differences(old: Struct, new: Struct, key: str, text: str) -> Iterator[Change]:
    for field in fields(new):
        one, other = getattr(old, field.name), getattr(new, field.name)
        if field.name == "routes":
            continue  # `_routes` matches them by path
        if isinstance(other, Struct):
            yield from _differences(one, other, f"{key}{field.name}.", f"{text}{field.name}.")
        elif one != other:
            yield Change(f"{key}{field.name}", f"{text}{field.name}")

"""Compares two configurations to tell which changes a running process can apply.

A key that is not in `RELOADED` needs a restart, so a new key is safe by default. `tests/config/test_reloadable.py`
fails until its author decides about it.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from gateway.config.model import Config
from gateway.config.route_overrides import OWN_SECTIONS

_APPLIED: Final[dict[str, tuple[str, ...]]] = {
    "": ("public_url",),
    "tls": ("cert_file", "key_file", "client_ca_file"),
    "state": ("keys", "keys_file", "ttl_seconds", "session_ttl_seconds", "session_keys"),
    "replica": ("peers", "peers_dns"),
    "hold": (
        "ttl_seconds",
        "max_calls",
        "max_calls_per_principal",
        "max_calls_per_address",
        "quiet_seconds",
        "grace_seconds",
        "linger_seconds",
        "drain_delay_seconds",
        "drain_seconds",
        "cold_seconds",
        "max_cold_calls",
    ),
    "limits": (
        "body_bytes",
        "event_bytes",
        "behind_bytes",
        "receiving_bytes",
        "receiving_bytes_per_address",
        "sending_bytes",
        "arriving_bytes",
        "results_bytes",
        "replay_bytes",
        "cold_bytes",
        "json_depth",
        "state_bytes",
        "receive_seconds",
        "connections",
    ),
    "timeouts": (
        "connect_seconds",
        "handshake_seconds",
        "answer_seconds",
        "idle_seconds",
        "session_wait_seconds",
        "keepalive_seconds",
        "cancel_seconds",
        "send_seconds",
        "peer_connect_seconds",
        "peer_accept_seconds",
    ),
    "sessions": (
        "max",
        "max_per_principal",
        "max_per_address",
        "max_newcomers",
        "new_per_second_per_principal",
        "new_per_second",
        "idle_seconds",
        "quarantine_seconds",
        "client_idle_seconds",
    ),
    "legs": ("limit_seconds", "rounds"),
    "tasks": ("max", "max_per_principal", "ttl_seconds"),
    "principal": (
        "source",
        "header",
        "trusted_proxies",
        "issuer",
        "jwks_url",
        "jwks_file",
        "jwks_ca_file",
        "jwks_stale_seconds",
        "audience",
        "algorithms",
    ),
    "debug": ("bodies",),
    "security": ("allowed_hosts", "allowed_origins"),
    "routes[]": (
        "path",
        "era",
        "continuation",
        "ephemeral",
        "undeclared",
        "forward_headers",
        "bind_headers",
        "drop_headers",
        "set_headers",
        "dialects",
    ),
    "routes[].upstream": (
        "url",
        "command",
        "env",
        "cwd",
        "inherit_env",
        "max_children",
        "new_children_per_second",
        "warm",
        "transport",
    ),
    "routes[].upstream.tls": ("ca_file", "cert_file", "key_file", "server_name", "verify"),
    "routes[].credentials": ("mode", "token", "token_file", "header"),
    "routes[].sessions": ("affinity",),
    "routes[].tasks": ("undeclared", "optional"),
    "routes[].cache": ("ttl_ms", "scope", "methods", "lists_seconds"),
}
"""By section, `routes[]` being any route."""
RELOADED: Final = {f"{section}.{key}".removeprefix(".") for section, keys in _APPLIED.items() for key in keys} | {
    f"routes[].{section}.{key}"
    for section, own in OWN_SECTIONS.items()
    for key in _APPLIED[section]
    if key in own.__struct_fields__
}
"""The keys that a reload applies. A route's own value is treated as the shared key is."""


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

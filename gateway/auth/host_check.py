"""Checks the Host or Origin of a request against DNS rebinding.

Source: specification 2026-07-28 basic/transports/streamable-http, Security & Endpoint.
"""

import re
from functools import lru_cache
from typing import Final

from multidict import MultiMapping
from yarl import URL

from gateway.config import Config, Security, split_address
from gateway.config.rules import LOOPBACK
from gateway.http.upstream_headers import joined
from gateway.identity.principal import parsed_address
from gateway.protocol.errors import Forbidden

_INNER: Final = re.compile(r"[a-z0-9_-]+|[a-z0-9_.-]+\.(?:svc|local|internal)")
"""The names of services inside a cluster or a network, which the public name service does not have."""


class HostCheck:
    """Checks Host and Origin of every request of one listener."""

    def __init__(self, security: Security, listen: str) -> None:
        host, _ = split_address(listen)
        local = host in LOOPBACK
        self._hosts = frozenset(name.lower() for name in security.allowed_hosts) or (LOOPBACK if local else None)
        self._origins = frozenset(security.allowed_origins)
        self._local = local

    def check(self, headers: MultiMapping[str]) -> str | None:
        """Return Origin; raise Forbidden if it is a foreign site, or Host is not a name of this gateway."""
        # Joined, so that a second Origin does not hide behind an allowed one.
        host, origin = headers.get("Host"), joined(headers, "Origin") if "Origin" in headers else None
        name = _name(host)
        # An entry of security.allowed_hosts that has a port is good for that port alone.
        if self._hosts is not None and name not in self._hosts and (host or "").lower() not in self._hosts:
            raise Forbidden(f"Host {(host or '')[:80]!r} is not served here; list it in security.allowed_hosts")
        if origin is None or origin in self._origins:
            return origin
        origin_name = _origin_name(origin)
        # A configured list is complete: it replaces the rules for the own origin and for loopback.
        same = origin_name is not None and origin_name == name and not self._origins
        if not (same or (self._local and not self._origins and origin_name in LOOPBACK)):
            raise Forbidden(f"Origin {origin[:80]!r} is not allowed; list it in security.allowed_origins")
        return origin


def check_admin(host: str | None, config: Config) -> None:
    """Raise Forbidden if a foreign name may have been rebound to the admin listener.

    An attacker cannot rebind an IP address, nor a name that the public name service does not have: one without a
    dot, or one that ends as the names of services do.
    """
    name, names = _name(host), {*config.security.allowed_hosts}
    if config.admin is not None:
        names.add(split_address(config.admin)[0].lower())
    if name is None or not (
        name in names or (host or "").lower() in names or parsed_address(name) or _INNER.fullmatch(name)
    ):
        raise Forbidden(
            f"Host {(host or '')[:80]!r} is not served here; use an IP address, localhost, a name without a dot or "
            "one that ends in .svc, .local or .internal, or list the name in security.allowed_hosts"
        )


@lru_cache(maxsize=256)
def _name(host: str | None) -> str | None:
    """The host without its port."""
    return _origin_name(f"http://{host}") if host else None


@lru_cache(maxsize=256)
def _origin_name(origin: str) -> str | None:
    try:
        return URL(origin).host
    except (ValueError, IndexError):  # yarl raises IndexError for "http://[]@"
        return None

"""Host and Origin: who a browser may be made to talk to (DNS rebinding); pure.

Source: specification 2026-07-28 basic/transports/streamable-http, Security & Endpoint.
"""

import ipaddress
from functools import lru_cache
from typing import Final

from yarl import URL

from gateway.config import Config, Security, split_address
from gateway.protocol.errors import Forbidden

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class HostCheck:
    """Checks Host and Origin of every request of one listener."""

    def __init__(self, security: Security, listen: str) -> None:
        host, _ = split_address(listen)
        local = host in _LOOPBACK
        self._hosts = frozenset(name.lower() for name in security.allowed_hosts) or (_LOOPBACK if local else None)
        self._origins = frozenset(security.allowed_origins)
        self._local = local

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise Forbidden when either names somebody else."""
        name = _name(host)
        if self._hosts is not None and name not in self._hosts and (host or "").lower() not in self._hosts:
            raise Forbidden(
                f"Host {(host or '')[:80]!r} is not served here; reach the gateway by a name in security.allowed_hosts"
            )
        if origin is None or origin in self._origins:
            return
        origin_name = _origin_name(origin)
        same = origin_name is not None and origin_name == name and not self._origins
        if not (same or (self._local and not self._origins and origin_name in _LOOPBACK)):
            raise Forbidden(f"Origin {origin[:80]!r} is not allowed; list it in security.allowed_origins")


def admin_names(config: Config) -> frozenset[str]:
    """By which names the admin listener may be asked for what a foreign page must not read, beside any address."""
    host, _ = split_address(config.admin or "")
    return _LOOPBACK | {host.lower(), *(name.lower() for name in config.security.allowed_hosts)}


def check_admin(host: str | None, names: frozenset[str]) -> None:
    """Raise Forbidden where a name was rebound to this listener.

    Nobody can rebind an address: so who comes to one means it. Scrapers and probes are not asked, only the status is
    told to people's browsers.
    """
    name = _name(host)
    if name is None or not (name in names or (host or "").lower() in names or _is_address(name)):
        raise Forbidden(
            f"Host {(host or '')[:80]!r} is not served here; reach /status by an address or by localhost, or list the "
            "name in security.allowed_hosts"
        )


def _is_address(name: str) -> bool:
    try:
        _ = ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=256)
def _name(host: str | None) -> str | None:
    """The host without its port."""
    if not host:
        return None
    try:
        return URL(f"http://{host}").host
    except ValueError:
        return None


@lru_cache(maxsize=256)
def _origin_name(origin: str) -> str | None:
    try:
        return URL(origin).host
    except ValueError:
        return None

"""The address of an upstream with all that its connections have in common."""

import ssl
from functools import cache
from typing import NamedTuple

from yarl import URL


class Origin(NamedTuple):
    """What two requests must share to use the same connection."""

    host: str
    """With a slash at its beginning, the path of a unix socket; the port means nothing then."""
    port: int
    tls: ssl.SSLContext | None = None
    """None for a connection without TLS."""
    server_name: str | None = None
    """The name that the certificate must have."""

    @classmethod
    def of(cls, url: URL, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> "Origin":
        """The origin of an http or https URL. Without `tls`, the authorities of the system are trusted.

        Raises ValueError for any other URL.
        """
        if url.scheme not in {"http", "https"} or not url.raw_host or not url.port:
            raise ValueError("the URL of an upstream needs http or https, and a host")
        host = url.raw_host
        if url.scheme == "http":
            return cls(host, url.port)
        return cls(host, url.port, tls or _system_trust(), (server_name or host).rstrip("."))


@cache
def _system_trust() -> ssl.SSLContext:
    """One context for all, because making one reads every certificate of the system."""
    return ssl.create_default_context()

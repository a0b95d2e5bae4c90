"""The URL of one upstream, updated when the upstream redirects.

Credentials stay within its origin.
"""

from typing import Final

from yarl import URL

from gateway.protocol.errors import Redirected, clean
from gateway.telemetry.redaction import Secrets

_QUOTED_CHARACTERS: Final = 200


class Endpoint:
    """The URL of one upstream, shared by all its channels."""

    def __init__(self, url: str, where: str, *, as_client: bool = True) -> None:
        """`where`: how errors name the upstream; `as_client`: requests to it carry the client's own credential."""
        self.where = where
        self.as_client = as_client
        self.url = URL(url)
        self._secrets = Secrets((self.url.raw_query_string, *self.url.query.values()))

    def quoted(self, said: str) -> str:
        """Return what an error may quote of an upstream's message: bounded, and without the secrets of the query."""
        return clean(self._secrets.masked(said), _QUOTED_CHARACTERS)

    def follow(self, location: str | None) -> None:
        """Follow a redirect within the origin (`/mcp` to `/mcp/`). Raises Redirected for any other."""
        target = self.within(location) if location else None
        if target is None:
            raise Redirected(f"{self.where} redirects to another origin; set upstream.url to the final address")
        self.url = target

    def within(self, address: str, base: URL | None = None) -> URL | None:
        """Return the URL that an upstream names, or None if it is invalid or leaves the origin.

        An upstream must not be able to direct credentials and bodies to another origin.
        """
        try:
            target = (base or self.url).join(URL(address))
            return target.with_user(None) if target.origin() == self.url.origin() else None
        except (ValueError, IndexError):  # yarl raises both, IndexError for `http://[]@`
            return None

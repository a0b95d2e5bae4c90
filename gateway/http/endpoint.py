"""The URL of an upstream, with the redirects that it was found behind.

Credentials stay within the origin of this URL.
"""

from typing import Final

from yarl import URL

from gateway.config import redacted_url
from gateway.protocol.errors import Unreachable

_SHORTEST_SECRET: Final = 4
"""Shorter values in a query are not treated as secrets: hiding them would garble what the upstream says."""
_QUOTED_CHARACTERS: Final = 200


class Endpoint:
    """One upstream URL and what was learnt about it; shared by all its channels."""

    def __init__(self, route: str, url: str, *, as_client: bool = True) -> None:
        """`as_client`: the client's own credential goes there."""
        self.as_client = as_client
        self.url = URL(url)
        values = (self.url.raw_query_string, *self.url.query.values())
        # The longest first: one value may be part of another.
        self._secrets = sorted({value for value in values if len(value) >= _SHORTEST_SECRET}, key=len, reverse=True)
        self.where = f"The upstream {redacted_url(url)} of route {route}"

    def quoted(self, said: str) -> str:
        """What an error may quote of the upstream's own words, which may repeat the query that it was asked with."""
        for secret in self._secrets:
            said = said.replace(secret, "[hidden]")
        return said[:_QUOTED_CHARACTERS]

    def follow(self, location: str | None) -> None:
        """Take a redirect within the origin (`/mcp` to `/mcp/`); anything else is refused."""
        target = self.within(location) if location else None
        if target is None:
            raise Unreachable(f"{self.where} redirects to another origin; set upstream.url to the final address")
        self.url = target

    def within(self, address: str, base: URL | None = None) -> URL | None:
        """The URL that an upstream names, None when it leads out of the origin or is none.

        Credentials and bodies must not travel to another origin because an upstream says so.
        """
        try:
            target = (base or self.url).join(URL(address))
            return target.with_user(None) if target.origin() == self.url.origin() else None
        except ValueError:
            return None

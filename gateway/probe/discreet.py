"""What others wrote is made fit to be printed: no control characters, no endless text, none of the given secrets."""

import re
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from gateway.probe.findings import Check, Server, Upstream

_CHARACTERS: Final = 1000
_SHORTEST_SECRET: Final = 4
"""Shorter ones would hide half of the words, and are none."""
_HIDDEN: Final = "<hidden>"
_SCHEME: Final = re.compile(r"(?:bearer|basic) +(?P<token>\S+)", re.IGNORECASE)


def clean(text: str, limit: int = _CHARACTERS) -> str:
    """Return one line of it that a terminal cannot misread, of `limit` characters at most."""
    shown = "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text[:limit])
    return shown + ("…" if len(text) > limit else "")


class Discretion:
    """Hides what was given to the probe and must not come out of it, whoever repeats it."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """`secrets` are header values, tokens and the like, as they are sent."""
        words = set(secrets)
        words |= {match["token"] for word in words if (match := _SCHEME.fullmatch(word)) is not None}
        # The longest first: a secret may be part of another.
        self._words = sorted((word for word in words if len(word) >= _SHORTEST_SECRET), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text, of any number of lines, with every secret in it replaced."""
        for word in self._words:
            text = text.replace(word, _HIDDEN)
        return text

    def check(self, check: Check) -> Check:
        """Return it so that it can be printed."""
        found, why, fix = (self.text(clean(each)) for each in (check.found, check.why, check.fix))
        return structs.replace(check, found=found, why=why, fix=fix)

    def upstream(self, upstream: Upstream) -> Upstream:
        """Return it so that it can be printed; the configuration has nothing in it but what the operator wrote."""
        return structs.replace(
            upstream,
            target=self.text(upstream.target),
            checks=tuple(map(self.check, upstream.checks)),
            server=None if upstream.server is None else self._server(upstream.server),
        )

    def _server(self, server: Server) -> Server:
        named = {
            name: tuple(self.text(clean(each)) for each in getattr(server, name))
            for name in ("versions", "capabilities", "left_out_tools")
        }
        return structs.replace(server, name=self.text(clean(server.name)), **named)

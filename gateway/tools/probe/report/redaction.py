"""Makes foreign text safe to print: no control characters, no endless text, no secrets."""

import re
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from gateway.protocol.errors import clean
from gateway.tools.probe.report.findings import Check, ProbedServer, Server

_SHORTEST_SECRET: Final = 4
"""Hiding shorter words would garble the report."""
_HIDDEN: Final = "<hidden>"
_SCHEME: Final = re.compile(r"(?:bearer|basic) +(?P<token>\S+)", re.IGNORECASE)


class Redactor:
    """Hides the secrets given to the probe, even if the server repeats them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """`secrets` are header values, tokens and so on, exactly as they are sent."""
        words = set(secrets)
        words |= {match["token"] for word in words if (match := _SCHEME.fullmatch(word)) is not None}
        # Longest first, because a secret may be part of another.
        self._words = sorted((word for word in words if len(word) >= _SHORTEST_SECRET), key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text, which may have several lines, with every secret replaced."""
        for word in self._words:
            text = text.replace(word, _HIDDEN)
        return text

    def check(self, check: Check) -> Check:
        """Return the check, safe to print."""
        found, why, fix = (self.text(clean(each)) for each in (check.found, check.why, check.fix))
        return structs.replace(check, found=found, why=why, fix=fix)

    def upstream(self, upstream: ProbedServer) -> ProbedServer:
        """Return the result, safe to print; the configuration needs no treatment, the operator wrote all of it."""
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

"""Makes foreign text safe to print: no control characters, no endless text, no secrets."""

import re
from collections.abc import Iterable
from typing import Final

from msgspec import structs

from gateway.protocol.errors import clean
from gateway.telemetry.redaction import Secrets
from gateway.tools.probe.report.findings import Server

_SCHEME: Final = re.compile(r"(?:bearer|basic) +(?P<token>\S+)", re.IGNORECASE)


class Redactor(Secrets):
    """Hides the secrets given to the probe, even if the server repeats them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """`secrets` are header values, tokens and so on, exactly as they are sent."""
        words = set(secrets)
        words |= {match["token"] for word in words if (match := _SCHEME.fullmatch(word)) is not None}
        super().__init__(words, mask="<hidden>")

    def line(self, text: str) -> str:
        """Return the text as one printable line, with every secret replaced."""
        return self.masked(clean(text))

    def server(self, server: Server) -> Server:
        """Return what a server says of itself, safe to print."""
        named = {
            name: tuple(map(self.line, getattr(server, name)))
            for name in ("versions", "capabilities", "left_out_tools")
        }
        return structs.replace(server, name=self.line(server.name), **named)

"""Suggests a configuration for the probed server, as commented YAML; pure.

Secrets become variables: no value that was given to the probe is in it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.config import Route
from gateway.telemetry import secret_arguments
from gateway.tools.probe.report.findings import Server

_AUTHORIZATION: Final = "authorization"
_SLOW_PART: Final = 0.5
"""A handshake that uses more than this fraction of its timeout needs a longer one."""
_HEADROOM: Final = 4
_NOT_IN_VARIABLES: Final = re.compile(r"[^A-Za-z0-9_]+")


def snippet(server: Server, route: Route, sent: Sequence[str], handshake_seconds: float, *, needs_sse: bool) -> str:
    """Return YAML that `mrtr-gateway check` accepts; `sent` holds the names of the headers given to the probe."""
    lines = ["# mrtr-gateway serve --config gateway.yaml", "routes:", "  - path: /mcp", "    upstream:"]
    lines += _upstream(server, route, needs_sse=needs_sse)
    if others := [name for name in map(str.lower, sent) if name != _AUTHORIZATION]:
        lines.append(f"    forward_headers: {_text(others)}")
    if server.handshake_seconds > handshake_seconds * _SLOW_PART:
        wanted = round(server.handshake_seconds * _HEADROOM)
        lines += [
            "timeouts:",
            f"  # the handshake took {server.handshake_seconds:.1f} s",
            f"  handshake_seconds: {wanted}",
        ]
    return "\n".join(lines) + "\n"


def _upstream(server: Server, route: Route, *, needs_sse: bool) -> Iterator[str]:
    upstream = route.upstream
    if upstream.command is not None:
        secrets = secret_arguments(upstream.command)
        if secrets:
            yield "      # what looks like a secret is left to variables"
        yield f"      command: {_command(upstream.command, secrets)}"
        if upstream.env:
            yield "      env:"
            yield from (f'        {name}: "${{{name}}}"' for name in sorted(upstream.env))
        return
    url, query, _ = (upstream.url or "").partition("?")
    if query:
        yield "      # the query may be secret, so it is a variable"
        yield f'      url: {_text(url)[:-1]}?${{UPSTREAM_QUERY}}"'
    else:
        yield f"      url: {_text(url)}"
    if upstream.transport != "auto":
        yield f"      transport: {upstream.transport}"
    elif needs_sse:
        yield "      transport: sse  # auto cannot detect it: a POST to this URL gets no answer"
    elif server.transport == "sse":
        yield "      # HTTP+SSE, which auto detects; transport: sse saves one request"
    tls = upstream.tls
    if tls.ca_file is not None:
        yield f"      tls: {{ca_file: {_text(tls.ca_file)}}}"
    elif not tls.verify:
        yield "      # better: ca_file with the authority of the certificate"
        yield "      tls: {verify: false}"


def _command(command: Sequence[str], secrets: Mapping[int, int]) -> str:
    """The command as a list, with a variable in place of each secret."""
    shown = []
    for index, text in enumerate(command):
        if index not in secrets:
            shown.append(_text(text))
            continue
        plain = text[: secrets[index]]
        # A variable cannot begin with a digit.
        option = (
            _NOT_IN_VARIABLES.sub("_", (plain or command[index - 1]).strip("-=: ")).upper().lstrip("0123456789")
            or "SECRET"
        )
        name = "UPSTREAM_QUERY" if plain.endswith("?") else option
        shown.append(f'{_text(plain)[:-1]}${{{name}}}"')
    return f"[{', '.join(shown)}]"


def _text(value: object) -> str:
    """Return JSON, which is also YAML, with `${` escaped."""
    return json.dumps(value).replace("${", "$${")

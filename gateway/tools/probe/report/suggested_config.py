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
    if server.legacy_sessions:
        lines += [
            "    # If a tool that asks the user fails with `no back-channel` or `unavailable on",
            "    # 2026-07-28 connections`, give modern clients the legacy side of the server:",
            "    # era: bridge",
        ]
    if server.legacy_sessions is not None:
        lines += [
            "    # If it fails for legacy clients, with `Handler returned an invalid result` or",
            "    # `per-request legacy serving`, give them the modern side of the server:",
            "    # era: mirror",
        ]
    if server.optional_task_tools:
        lines += [
            "    # If a tool that supports tasks asks its user and fails after 60 s, run it as one:",
            "    # tasks: {optional: drive}",
        ]
    names = [name.lower() for name in sent]
    if _AUTHORIZATION in names and route.upstream.command is None:
        lines += [
            "    # The probe sent Authorization; the gateway forwards each client's own.",
            "    # To use one credential for all clients instead:",
            "    # credentials: {mode: replace, token_file: /run/secrets/upstream-token}",
        ]
    if others := [name for name in names if name != _AUTHORIZATION]:
        lines += [
            "    # The probe sent these; the gateway forwards each client's own.",
            "    # For one value for all clients, use set_headers.",
            f"    forward_headers: {_text(others)}",
        ]
    is_held = server.era == "old" and server.sessions and not server.event_store
    if is_held and server.tools > server.ephemeral_tools:
        lines += [
            "    # Tools that may run twice, besides those that declare it. Their calls",
            "    # survive the death of the replica that holds them.",
            '    # ephemeral: ["get_*"]',
        ]
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

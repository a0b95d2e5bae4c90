"""Sends the first request, `server/discover`, to examine the reply below the MCP level.

That covers the kind of answer (server, proxy or web page), redirects, the clock, authorization and the era.
"""

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.http.upstream_client import REDIRECTS
from gateway.http.upstream_reply import clock_ahead
from gateway.http_client.errors import RequestFailed
from gateway.protocol import era, jsonrpc, mcp, reply_messages
from gateway.protocol.errors import Unreachable, clean
from gateway.tools.probe.steps import network
from gateway.tools.probe.steps.context import ProbeContext, ProbeStopped
from gateway.tools.probe.steps.requests import NO_REPLY, ProbeReply, ask
from gateway.upstream.http.era_probe import PROBE_SECONDS, discover_headers

_LATER_SECONDS: Final = 0.2
_GATEWAYS: Final = (502, 503, 504)
_PROXY: Final = re.compile(
    r"nginx|openresty|cloudflare|envoy|istio|haproxy|traefik|caddy|apache|awselb|cloudfront|google frontend|"
    r"varnish|kong|akamai|squid|gunicorn",
    re.IGNORECASE,
)
_PROXY_HEADERS: Final = ("Server", "Via", "X-Served-By", "X-Powered-By")
_SKEW_SECONDS: Final = 60
_HOST_WORDING: Final = re.compile(rb"\b(?:host|origin)\b", re.IGNORECASE)
_METADATA: Final = re.compile(r'resource_metadata="(?P<url>[^"\s]{1,2000})"')
_WELL_KNOWN: Final = "/.well-known/oauth-protected-resource"


class _Metadata(msgspec.Struct):
    """RFC 9728, section 2."""

    authorization_servers: list[str] = []
    scopes_supported: list[str] = []


async def greet(exam: ProbeContext) -> bool | None:
    """Return whether the server is modern; None if the reply does not tell. Raises ProbeStopped."""
    reply = await _first_reply(exam)
    if reply is not None and reply.status in REDIRECTS:
        try:
            exam.endpoint.follow(reply.headers.get("Location"))
        except Unreachable as exc:
            raise exam.notes.failed(
                "http",
                clean(exc.message),
                "The gateway does not send credentials and contents to an address that a server names.",
                "If the address is right, use it as the URL.",
            ) from exc
        exam.notes.ok(
            "redirect",
            f"to {clean(exam.endpoint.url.path)}",
            "The gateway follows it, because the origin is the same; this delays the first request of each process.",
            "Use the address that it leads to.",
        )
        reply = await _first_reply(exam)
    if reply is None:
        return None
    if exam.endpoint.url.scheme == "https":
        await network.look_at_certificate(exam)
    _look_at_head(exam, reply)
    if reply.status in (401, 403, 421):
        raise await _refused(exam, reply)
    # None if the reply does not tell.
    is_modern = era.verdict(reply.status, reply.content_type, reply.body, exam.discover_id)
    if is_modern:
        _note_discovered(exam, reply)
    return is_modern


async def _first_reply(exam: ProbeContext) -> ProbeReply | None:
    seconds, endpoint = min(PROBE_SECONDS, exam.timeouts.handshake_seconds), exam.endpoint
    headers = discover_headers(exam.subject.headers)
    # Longer than it takes to find that there is no connection, which is another fault.
    deadline = max(seconds, exam.timeouts.connect_seconds + _LATER_SECONDS)
    try:
        question, asked = era.discover(exam.discover_id), exam.discover_id
        return await ask(exam.client, "POST", endpoint.url, headers, question, seconds=deadline, asked=asked)
    except TimeoutError:
        exam.notes.warn(
            "http",
            f"no answer to a POST of `server/discover` within {seconds:g} s",
            "Behind the gateway, the first request of a modern client waits this long.",
            "Check that the path is the server's MCP endpoint.",
        )
        return None
    except RequestFailed as exc:
        raise await network.explain(exam, exc) from None


def _look_at_head(exam: ProbeContext, reply: ProbeReply) -> None:
    """Say who answers, and compare the clocks. Raises ProbeStopped if the reply cannot come from an MCP server."""
    named = next((reply.headers[name] for name in _PROXY_HEADERS if _PROXY.search(reply.headers.get(name, ""))), "")
    named = clean(named, 80)
    is_page = "html" in reply.content_type or reply.body.lstrip()[:1] == b"<"
    server = clean(reply.headers.get("Server", ""), 80)
    answer = f"HTTP {reply.status}, {clean(reply.content_type, 80)}" + (f", Server: {server}" if server else "")
    if reply.status in _GATEWAYS:
        raise exam.notes.failed(
            "http",
            answer,
            "A proxy answers instead of the server: it cannot reach the server, or gave up waiting."
            if named or is_page
            else "The server, or a proxy in front of it, is not available.",
            f"Check that the server runs, and that the proxy {named and f'({named}) '}forwards to the right address.",
        )
    # Some frameworks answer an unknown method with an error page, so that proves nothing yet.
    if is_page and reply.status < 400:
        raise website(exam, f"{answer}: a web page")
    exam.met_page = is_page
    exam.notes.ok("http", answer)
    if named:
        exam.notes.ok(
            "proxy",
            f"{named} is in front of the server",
            "A proxy that buffers replies or closes silent streams breaks questions and long calls.",
            "Disable response buffering for this path, and set its timeouts above timeouts.idle_seconds.",
        )
    skew = clock_ahead(reply.headers)
    if skew is None:
        return
    if abs(skew) > _SKEW_SECONDS:
        exam.notes.warn(
            "clock",
            f"the server's clock is {abs(skew)} s {'ahead' if skew > 0 else 'behind'}",
            "Certificates and tokens have validity times: one side accepts them, the other does not.",
            "Synchronise the clocks of both machines (NTP).",
        )
    else:
        exam.notes.ok("clock", f"in sync, to within {max(1, abs(skew))} s")


def website(exam: ProbeContext, found: str) -> ProbeStopped:
    """Report that a website answers; the caller raises the result."""
    return exam.notes.failed(
        "http",
        found,
        "This URL belongs to a website. An MCP server answers with JSON or an event stream.",
        "Use the path of the MCP endpoint, usually /mcp (HTTP+SSE: /sse), not the path of the website. A sign-in "
        "page means that a proxy requires credentials.",
    )


async def _refused(exam: ProbeContext, reply: ProbeReply) -> ProbeStopped:
    """Explain a 401, 403 or 421."""
    challenge = reply.headers.get("WWW-Authenticate", "")
    # The Python SDK answers 421 to a foreign Host, `createMcpExpressApp` of the TypeScript SDK 403.
    if reply.status == 421 or (reply.status == 403 and not challenge and _HOST_WORDING.search(reply.body)):
        return exam.notes.failed(
            "host",
            f"HTTP {reply.status}: {clean(reply.body.decode(errors='replace'), 120)}",
            "The server checks the Host header. The gateway sends the host of the URL "
            f"({exam.endpoint.url.authority}), and no Origin.",
            "Allow that host in the server (Python: TransportSecuritySettings.allowed_hosts; TypeScript: "
            "allowedHosts), or use a host in the URL that the server allows.",
        )
    if exam.met_page and reply.status == 403 and not challenge:
        return website(exam, "HTTP 403: the request is refused with a web page")
    has_sent = bool(exam.subject.headers)
    if reply.status == 401 and not has_sent:
        why, fix = "The server requires a credential.", "Pass one: --bearer-file FILE, or --header 'NAME: VALUE'."
    else:
        why = "The server rejects the credential." if has_sent else "The server refuses requests without a credential."
        fix = "Pass a credential that is valid for this server and has not expired."
    shown = f", WWW-Authenticate: {clean(challenge, 200)}" if challenge else ""
    return exam.notes.failed("authorization", f"HTTP {reply.status}{shown}", why + await _wanted(exam, challenge), fix)


async def _wanted(exam: ProbeContext, challenge: str) -> str:
    """Return a sentence about the credential from OAuth metadata, which is fetched from the server's origin only."""
    named = _METADATA.search(challenge)
    address = named["url"] if named else _WELL_KNOWN + exam.endpoint.url.path
    target = exam.endpoint.within(address)
    if target is None:
        return f" Its metadata is at {clean(address, 200)}."
    try:
        accept, seconds = {"Accept": "application/json"}, exam.timeouts.handshake_seconds
        reply = await ask(exam.client, "GET", target, accept, seconds=seconds)
        found = msgspec.json.decode(reply.body, type=_Metadata)
    except (*NO_REPLY, ValueError, RecursionError):
        return f" Its metadata should be at {clean(str(target), 200)}, but is not." if named else ""
    if reply.status != 200 or not found.authorization_servers:
        return ""
    servers = ", ".join(clean(each, 100) for each in found.authorization_servers[:3])
    scopes = " ".join(clean(each, 40) for each in found.scopes_supported[:10])
    of_scopes = f", scopes: {scopes}" if scopes else ""
    return f" Tokens are issued by {servers}{of_scopes} (from {clean(str(target.with_query(None)), 200)})."


def _note_discovered(exam: ProbeContext, reply: ProbeReply) -> None:
    """Record a modern server's DiscoverResult; a modern error carries no such data."""
    exam.learn(era="modern", versions=(mcp.MODERN,))
    for message in reply.messages():
        if isinstance(message.result, Raw) and reply_messages.is_answer(message, exam.discover_id):
            found = jsonrpc.members(message.result)
            exam.learn(
                versions=tuple(clean(each, 40) for each in era.versions(message.result, "supportedVersions")[:20]),
                capabilities=capability_names(jsonrpc.members(found.get("capabilities"))),
                name=described(jsonrpc.members(found.get("_meta")).get(mcp.META_SERVER_INFO)),
            )


def capability_names(capabilities: jsonrpc.Fields) -> tuple[str, ...]:
    """Return names such as `tools`, and `tools.listChanged` for each flag that is set; bounded."""
    found: list[str] = []
    for name, raw in list(capabilities.items())[:40]:
        if jsonrpc.is_null(raw) or bytes(raw) == b"false":
            continue
        found.append(clean(name, 40))
        if bytes(raw).startswith(b"{"):
            found += (
                f"{clean(name, 40)}.{clean(flag, 40)}"
                for flag, value in list(jsonrpc.fields(raw).items())[:10]
                if bytes(value) == b"true"
            )
    return tuple(found)


def described(server_info: bytes | Raw | None) -> str:
    """Return the name and version from a `serverInfo`."""
    info = jsonrpc.members(server_info)
    words = (jsonrpc.text(info.get("name")), jsonrpc.text(info.get("version")))
    return clean(" ".join(word for word in words if word), 200)

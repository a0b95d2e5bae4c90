"""The first request: `server/discover`, as the gateway sends it, and all that its reply tells before it is MCP.

Who answers (a proxy, a web page, a server), where it redirects, which clock it has, whom it lets in; and its era.
"""

import re
import time
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp
import msgspec
from msgspec import Raw
from yarl import URL

from gateway.config import redacted_url
from gateway.core import era, jsonrpc, mcp
from gateway.net.client import FOREIGN, REDIRECTS, Endpoint
from gateway.net.era import PROBE_SECONDS, discover_headers
from gateway.probe.discreet import clean
from gateway.probe.examination import Examination, Stopped
from gateway.probe.requests import Reply, ask, messages

_FOLLOWED: Final = 2
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


class _Discovered(msgspec.Struct):
    supportedVersions: list[str]  # noqa: N815  (the wire's spelling)
    capabilities: dict[str, Raw] = {}
    meta: dict[str, Raw] = msgspec.field(name="_meta", default={})


async def greet(exam: Examination) -> bool | None:
    """Whether the server is modern, None where its reply does not say; raises Stopped."""
    endpoint = exam.endpoint
    given = endpoint.url
    for _ in range(_FOLLOWED):
        reply = await _first_reply(exam)
        if reply is None:
            return None
        if reply.status not in REDIRECTS:
            break
        _follow(exam, endpoint, reply)
    else:
        raise exam.failed(
            "http",
            "the URL redirects in a circle",
            "No request arrives at the server.",
            "Find the address that answers itself, and use that.",
        )
    if endpoint.url != given:
        exam.ok(
            "redirect",
            f"to {clean(endpoint.url.path)}",
            "Followed, because it stays at the same origin; it costs the first request of each process.",
            "Write the address that it leads to.",
        )
    _who_answers(exam, reply)
    _compare_clocks(exam, reply)
    if reply.status in (401, 403, 421):
        raise await _refused(exam, reply)
    return _era(exam, reply)


async def _first_reply(exam: Examination) -> Reply | None:
    seconds, endpoint = min(PROBE_SECONDS, exam.timeouts.handshake_seconds), exam.endpoint
    headers = discover_headers(exam.subject.headers)

    def is_told(reply: Reply) -> bool:
        return era.verdict(reply.status, reply.content_type, reply.body) is not None and bool(messages(reply)[0])

    try:
        return await ask(exam.client, "POST", endpoint.url, headers, era.discover(), seconds, is_told)
    except TimeoutError:
        exam.warn(
            "http",
            f"no answer to a POST of `server/discover` within {seconds:g} s",
            "A modern client's first request waits for as long, each time.",
            "Check that the path is the server's MCP endpoint.",
        )
        return None
    except aiohttp.ClientResponseError as exc:
        raise exam.failed(
            "http",
            f"what answers there is not HTTP ({clean(exc.message, 80)})",
            "MCP is spoken over HTTP here.",
            "Check the port; if the server speaks TLS there, write https.",
        ) from None
    except FOREIGN as exc:
        tls = (
            " A server of TLS 1.3 that misses a client certificate does this too: see upstream.tls.cert_file."
            if endpoint.url.scheme == "https"
            else " A port that speaks TLS does this too: then write https."
        )
        raise exam.failed(
            "http",
            f"the connection was closed without an answer ({type(exc).__name__})",
            f"Something accepts connections there, and does not serve them.{tls}",
            "Look at the server's own log.",
        ) from None


def _follow(exam: Examination, endpoint: Endpoint, reply: Reply) -> None:
    location = reply.headers.get("Location", "")
    target = endpoint.within(location) if location else None
    if target is None:
        raise exam.failed(
            "http",
            f"HTTP {reply.status}, a redirect to {_shown(endpoint.url, location)}",
            "That is another origin: the gateway sends credentials and contents nowhere that a server points to.",
            "If that is the right address, use it as the URL.",
        )
    endpoint.url = target


def _shown(base: URL, location: str) -> str:
    try:
        target = base.join(URL(location))
    except ValueError:
        return "what is no address"
    return clean(redacted_url(str(target)), 200) if location else "nowhere"


def _who_answers(exam: Examination, reply: Reply) -> None:
    """Raise Stopped for what cannot be an MCP server's reply."""
    named = next((reply.headers[name] for name in _PROXY_HEADERS if _PROXY.search(reply.headers.get(name, ""))), "")
    named = clean(named, 80)
    is_page = "html" in reply.content_type or reply.body.lstrip()[:1] == b"<"
    server = clean(reply.headers.get("Server", ""), 80)
    answer = f"HTTP {reply.status}, {clean(reply.content_type, 80)}" + (f", Server: {server}" if server else "")
    if reply.status in _GATEWAYS:
        raise exam.failed(
            "http",
            answer,
            "A proxy answers in the server's place: it cannot reach it, or waits no longer for it."
            if named or is_page
            else "The server, or what stands before it, does not serve now.",
            f"Check that the server runs and that the proxy's own upstream is right{_of(named)}.",
        )
    if is_page and reply.status < 400:
        raise exam.failed(
            "http",
            f"{answer}: a web page",
            "An MCP server answers with JSON or an event stream.",
            "Give the path of the MCP endpoint, mostly /mcp (HTTP+SSE: /sse), and not that of the site. A page to "
            "sign in means that a proxy wants credentials.",
        )
    exam.met_page = is_page
    exam.ok("http", answer)
    if named:
        exam.ok(
            "proxy",
            f"{named} stands before the server",
            "A proxy that gathers replies, or closes streams that are silent, breaks questions and long calls.",
            "Switch its response buffering off for this path, and let it wait longer than timeouts.idle_seconds.",
        )


def _of(named: str) -> str:
    return f" (it calls itself {named})" if named else ""


def _compare_clocks(exam: Examination, reply: Reply) -> None:
    said = reply.headers.get("Date")
    if said is None:
        return
    try:
        skew = parsedate_to_datetime(said).timestamp() - time.time()
    except (ValueError, OverflowError):
        return
    if abs(skew) > _SKEW_SECONDS:
        exam.warn(
            "clock",
            f"the server's clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
            "Certificates and tokens begin and end by the clock: one side takes them for good, the other does not.",
            "Synchronise the clocks of both machines (NTP).",
        )
    else:
        exam.ok("clock", f"as here, to within {max(1, round(abs(skew)))} s")


async def _refused(exam: Examination, reply: Reply) -> Stopped:
    """Say what a 401, 403 or 421 wants."""
    challenge = reply.headers.get("WWW-Authenticate", "")
    if reply.status == 421 or (reply.status == 403 and not challenge and _HOST_WORDING.search(reply.body)):
        return exam.failed(
            "host",
            f"HTTP {reply.status}: {clean(reply.body.decode(errors='replace'), 120)}",
            "The server checks by which name it is called. The gateway calls it as the URL does "
            f"({exam.endpoint.url.authority}), and sends no Origin.",
            "Allow that host in the server (Python: TransportSecuritySettings.allowed_hosts; TypeScript: "
            "allowedHosts), or use the name that it allows in the URL.",
        )
    has_sent = bool(exam.subject.headers)
    wanted = await _wanted(exam, challenge)
    if reply.status == 401 and not has_sent:
        why, fix = "The server wants a credential.", "Pass one: --bearer-file FILE, or --header 'NAME: VALUE'."
    else:
        why = "The server does not accept what was sent." if has_sent else "The server lets nobody in without leave."
        fix = "Pass a credential that is good for this server, and not over."
    shown = f", WWW-Authenticate: {clean(challenge, 200)}" if challenge else ""
    return exam.failed("authorization", f"HTTP {reply.status}{shown}", f"{why}{wanted}", fix)


async def _wanted(exam: Examination, challenge: str) -> str:
    """What the server's OAuth metadata says of the credential, as sentences; it is asked for at its origin only."""
    endpoint = exam.endpoint
    named = _METADATA.search(challenge)
    target = endpoint.within(named["url"] if named else _WELL_KNOWN + endpoint.url.path)
    if target is None:
        return f" Its metadata is at {clean(named['url'], 200)}." if named else ""
    try:
        reply = await ask(
            exam.client, "GET", target, {"Accept": "application/json"}, None, exam.timeouts.handshake_seconds
        )
        found = msgspec.json.decode(reply.body, type=_Metadata)
    except (*FOREIGN, ValueError, RecursionError):
        return f" Its metadata should be at {clean(str(target), 200)}, and is not." if named else ""
    if reply.status != 200 or not found.authorization_servers:
        return ""
    servers = ", ".join(clean(each, 100) for each in found.authorization_servers[:3])
    scopes = " ".join(clean(each, 40) for each in found.scopes_supported[:10])
    of_scopes = f", scopes: {scopes}" if scopes else ""
    return f" Tokens are issued by {servers}{of_scopes} (from {clean(str(target.with_query(None)), 200)})."


def _era(exam: Examination, reply: Reply) -> bool | None:
    is_modern = era.verdict(reply.status, reply.content_type, reply.body)
    if is_modern:
        _note_discovered(exam, reply)
    return is_modern


def _note_discovered(exam: Examination, reply: Reply) -> None:
    """Take over what a modern server says of itself; one that only refuses in modern words says nothing."""
    server = exam.server
    server.versions = (mcp.MODERN,)
    for message in messages(reply)[0]:
        if not isinstance(message.result, Raw):
            continue
        try:
            found = msgspec.json.decode(message.result, type=_Discovered)
        except (ValueError, RecursionError):
            continue
        server.versions = tuple(clean(each, 40) for each in found.supportedVersions[:20])
        server.capabilities = capability_names(found.capabilities)
        server.name = described(found.meta.get(mcp.META_SERVER_INFO, Raw(b"{}")))


def capability_names(capabilities: jsonrpc.Fields) -> tuple[str, ...]:
    """`tools`, and `tools.listChanged` for each flag that is set; bounded."""
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


def described(server_info: Raw) -> str:
    """Name and version that a server gives itself."""
    try:
        info = jsonrpc.fields(server_info)
    except ValueError:
        return ""
    words = (jsonrpc.text(info.get("name")), jsonrpc.text(info.get("version")))
    return clean(" ".join(word for word in words if word), 200)

"""Examines the way to the server: DNS, and why the gateway's client cannot connect or trusts no certificate."""

import asyncio
import os
import ssl
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from gateway import world
from gateway.config.advisories import SOON
from gateway.http_client.errors import MalformedReply, NotConnected, RequestFailed, TlsRefused
from gateway.protocol.errors import clean
from gateway.tools.probe.steps.context import ProbeContext, ProbeStopped

_SHOWN: Final = 4
"""The number of addresses that are shown."""
_PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


async def resolve(exam: ProbeContext) -> None:
    """Look up the server's name; raises ProbeStopped if it has no address."""
    host, port, seconds = exam.endpoint.url.host, exam.endpoint.url.port, exam.timeouts.connect_seconds
    if host is None or port is None:
        raise exam.notes.failed("address", "the URL has no host", "", "Use the form http(s)://host:port/path.")
    try:
        async with asyncio.timeout(seconds):
            addresses = list(dict.fromkeys(str(to[0]) for *_, to in await world.resolve(host, port)))
    except TimeoutError:
        raise exam.notes.failed(
            "address",
            f"DNS did not answer within {seconds:g} s",
            f"Without an address, {host} cannot be reached.",
            "Check the DNS servers of this machine or container (/etc/resolv.conf).",
        ) from None
    except (OSError, UnicodeError) as exc:
        raise exam.notes.failed(
            "address",
            f"{host} has no address ({clean(getattr(exc, 'strerror', None) or str(exc))})",
            "The name is wrong, or unknown on this machine: names from a compose file or a cluster are known only "
            "inside it.",
            "Check the spelling of the URL, and run the probe where the gateway will run.",
        ) from None
    more = f" and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    is_here = host == "localhost" or addresses[0].startswith("127.") or addresses[0] == "::1"
    note = "Inside a container, this is the container itself, not its host." if is_here else ""
    exam.notes.ok("address", f"{', '.join(addresses[:_SHOWN])}{more}", note)


async def explain(exam: ProbeContext, exc: RequestFailed) -> ProbeStopped:
    """Explain why the first request has no reply; the caller raises the result."""
    url = exam.endpoint.url
    match exc:
        case TlsRefused():
            cause, _, fix = str(exc).partition("; ")
            shown, _ = await _certificate(exam)
            name, found = "tls", f"{cause} ({shown})" if shown else cause
            why = "The gateway sends nothing to a server that it cannot verify."
            fix = (
                f"{fix[:1].upper()}{fix[1:] or 'Check the certificate on the server'}. For a private authority, pass "
                "its certificate here with --ca-file."
            )
        case NotConnected():
            name, found = "connection", f"no connection to port {url.port}: {exc}"
            why = "The server is not running or listens elsewhere, or a firewall or network policy blocks it."
            if any(variable in os.environ for variable in _PROXIES):
                why += " A proxy variable such as HTTP_PROXY is set; the gateway does not use it."
            fix = (
                "Check that the server runs, and on which address it listens: another container cannot reach a server "
                "that listens on 127.0.0.1."
            )
        case MalformedReply():
            name, found = "http", f"the server {clean(str(exc), 160)}"
            why = "The probe expects MCP over HTTP here."
            fix = "Check the port. If the server uses TLS there, change the URL to https."
        case _:
            name, found = "http", f"the connection was closed without an answer ({type(exc).__name__})"
            why = "Something accepts connections there, but does not serve them. " + (
                "A TLS 1.3 server that requires a client certificate does this too: see upstream.tls.cert_file."
                if url.scheme == "https"
                else "A TLS port does this too: then change the URL to https."
            )
            fix = "Look in the server's log."
    return exam.notes.failed(name, found, why, fix)


async def look_at_certificate(exam: ProbeContext) -> None:
    """Report the certificate of a server that the gateway's client has talked to."""
    context = exam.subject.tls
    shown, days = await _certificate(exam)
    if context is not None and context.verify_mode == ssl.CERT_NONE:
        exam.notes.warn(
            "tls",
            f"{shown}; not verified",
            "An attacker on the path can impersonate the server, and read everything that is sent to it.",
            "Pass the authority of its certificate: --ca-file here, upstream.tls.ca_file in the configuration.",
        )
    elif days is not None and days < SOON.days:
        exam.notes.warn(
            "tls",
            shown,
            f"The certificate expires in {days} days; every call fails from then on.",
            "Renew it on the server, and check why it was not renewed automatically.",
        )
    else:
        exam.notes.ok("tls", shown)


async def _certificate(exam: ProbeContext) -> tuple[str, int | None]:
    """Return what describes the server's certificate, and its days; it is not verified, and nothing is sent."""
    url, context = exam.endpoint.url, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    name = exam.subject.route.upstream.tls.server_name or url.host
    try:
        async with asyncio.timeout(exam.timeouts.connect_seconds):
            _, writer = await asyncio.open_connection(url.host, url.port, ssl=context, server_hostname=name)
    except (OSError, TimeoutError):
        return "", None
    tls = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    try:
        certificate = x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")
        subject, issuer = _short(certificate.subject), _short(certificate.issuer)
        ends = certificate.not_valid_after_utc
    except ValueError:
        return f"{tls.version()}, an unreadable certificate", None
    days = (ends - datetime.fromtimestamp(world.wall(), UTC)).days
    left = f"{days} days left" if days >= 0 else "expired"
    return f"{tls.version()}, certificate of {subject} by {issuer}, until {ends:%Y-%m-%d} ({left})", days


def _short(name: x509.Name) -> str:
    common = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return clean(str(common[0].value) if common else name.rfc4514_string(), 80) or "unknown"

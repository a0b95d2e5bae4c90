"""Examines the way to the server: DNS, TCP, TLS.

Each step is separate, so that the report names the one that fails. No HTTP and no credential is sent.
"""

import asyncio
import os
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from cryptography import x509

from gateway import world
from gateway.http_client.tls_errors import certificate_cause, handshake_cause
from gateway.protocol.errors import clean
from gateway.tools.probe.steps.context import ProbeContext, ProbeStopped

_SHOWN: Final = 4
"""The number of addresses that are tried and shown."""
_SOON_DAYS: Final = 14
_CLOSE_SECONDS: Final = 0.5
_PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


async def reach(exam: ProbeContext) -> None:
    """Examine the way to the server; raises Stopped if it cannot be reached."""
    url, subject = exam.endpoint.url, exam.subject
    host, port = url.host, url.port
    if host is None or port is None:
        raise exam.failed("address", "the URL has no host", "", "Use the form http(s)://host:port/path.")
    seconds = exam.timeouts.connect_seconds
    address = await _connect(exam, await _resolve(exam, host, port, seconds), port, seconds)
    if url.scheme == "https":
        name = subject.route.upstream.tls.server_name or host
        await _shake_hands(exam, (address, port), name, seconds)


async def _resolve(exam: ProbeContext, host: str, port: int, seconds: float) -> list[str]:
    try:
        async with asyncio.timeout(seconds):
            found = await world.resolve(host, port)
    except TimeoutError:
        raise exam.failed(
            "address",
            f"DNS did not answer within {seconds:g} s",
            f"Without an address, {host} cannot be reached.",
            "Check the DNS servers of this machine or container (/etc/resolv.conf).",
        ) from None
    except (OSError, UnicodeError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        raise exam.failed(
            "address",
            f"{host} has no address ({clean(why)})",
            "The name is wrong, or unknown on this machine: names from a compose file or a cluster are known only "
            "inside it.",
            "Check the spelling of the URL, and run the probe where the gateway will run.",
        ) from None
    addresses = list(dict.fromkeys(str(to[0]) for *_, to in found))
    more = f" and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    note = ""
    if host == "localhost" or addresses[0].startswith("127.") or addresses[0] == "::1":
        note = "Inside a container, this is the container itself, not its host."
    exam.ok("address", f"{', '.join(addresses[:_SHOWN])}{more}", note)
    return addresses[:_SHOWN]


async def _connect(exam: ProbeContext, addresses: Iterable[str], port: int, seconds: float) -> str:
    """Return the first address that accepts a connection."""
    reached: list[tuple[str, float]] = []
    refused: list[str] = []
    for address in addresses:
        began = world.monotonic()
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            refused.append(f"{address} did not answer within {seconds:g} s")
        except OSError as exc:
            refused.append(f"{address}: {os.strerror(exc.errno) if exc.errno else 'refused'}")
        else:
            reached.append((address, (world.monotonic() - began) * 1000))
            await _close(writer)
    if not reached:
        proxied = any(name in os.environ for name in _PROXIES)
        raise exam.failed(
            "connection",
            f"no connection to port {port}: {'; '.join(refused)}",
            "The server is not running or listens elsewhere, or a firewall or network policy blocks it."
            + (" A proxy variable such as HTTP_PROXY is set; the gateway does not use it." if proxied else ""),
            "Check that the server runs, and on which address it listens: another container cannot reach a server "
            "that listens on 127.0.0.1.",
        )
    found = ", ".join(f"{address} port {port} in {milliseconds:.0f} ms" for address, milliseconds in reached)
    if refused:
        exam.ok("connection", found, f"Not reached: {'; '.join(refused)}. The gateway uses the addresses that answer.")
    else:
        exam.ok("connection", found)
    return reached[0][0]


async def _shake_hands(exam: ProbeContext, to: tuple[str, int], name: str, seconds: float) -> None:
    context = exam.subject.tls or ssl.create_default_context()
    verifies = context.verify_mode != ssl.CERT_NONE
    try:
        version, certificate = await _hand_shake(to, context, name, seconds)
    except TimeoutError:
        raise exam.failed(
            "tls",
            f"the handshake did not complete within {seconds:g} s",
            "The port may not use TLS.",
            "Check that https is right for this port.",
        ) from None
    except ssl.SSLCertVerificationError as exc:
        raise await _not_trusted(exam, exc, to, name, seconds) from None
    except ssl.SSLError as exc:
        raise exam.failed(
            "tls",
            handshake_cause(exc.reason or str(exc)),
            "Without TLS, nothing can be sent.",
            "Check the scheme and the port. If the server requires a client certificate, set upstream.tls.cert_file.",
        ) from None
    except OSError as exc:
        raise exam.failed(
            "tls",
            f"the connection was closed during the handshake ({type(exc).__name__})",
            "The port may not use TLS, or the server may require a client certificate.",
            "Check the scheme, the port, and upstream.tls.cert_file.",
        ) from None
    described, days = _described(certificate)
    found = f"{version}, {described}"
    if not verifies:
        exam.warn(
            "tls",
            f"{found}; not verified",
            "An attacker on the path can impersonate the server, and read everything that is sent to it.",
            "Pass the authority of its certificate: --ca-file here, upstream.tls.ca_file in the configuration.",
        )
    elif days is not None and days < _SOON_DAYS:
        exam.warn(
            "tls",
            found,
            f"The certificate expires in {days} days; every call fails from then on.",
            "Renew it on the server, and check why it was not renewed automatically.",
        )
    else:
        exam.ok("tls", found)


async def _not_trusted(
    exam: ProbeContext, exc: ssl.SSLCertVerificationError, to: tuple[str, int], name: str, seconds: float
) -> ProbeStopped:
    """Explain an untrusted certificate; the connection that fetches it carries no data."""
    described = ""
    try:
        _, certificate = await _hand_shake(to, _trusting(), name, seconds)
        described = f" ({_described(certificate)[0]})"
    except (OSError, TimeoutError):
        pass
    cause, _, fix = certificate_cause(exc).partition("; ")
    return exam.failed(
        "tls",
        f"{cause}{described}",
        "The gateway sends nothing to a server that it cannot verify.",
        f"{fix[:1].upper()}{fix[1:] or 'Check the certificate on the server'}. For a private authority, pass its "
        "certificate here with --ca-file.",
    )


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _hand_shake(
    to: tuple[str, int], context: ssl.SSLContext, name: str, seconds: float
) -> tuple[str, bytes | None]:
    """Return (TLS version, certificate in DER), and close the connection."""
    async with asyncio.timeout(seconds):
        _, writer = await asyncio.open_connection(*to, ssl=context, server_hostname=name)
    try:
        tls = writer.get_extra_info("ssl_object")
        return str(tls.version()), tls.getpeercert(binary_form=True)
    finally:
        await _close(writer)


def _described(certificate: bytes | None) -> tuple[str, int | None]:
    """Return a description of the certificate, and the days until it expires."""
    try:
        opened = x509.load_der_x509_certificate(certificate or b"")
        subject, issuer = (_short(name) for name in (opened.subject, opened.issuer))
        ends = opened.not_valid_after_utc
    except ValueError:
        return "an unreadable certificate", None
    days = (ends - datetime.fromtimestamp(world.wall(), UTC)).days
    left = f"{days} days left" if days >= 0 else "expired"
    return f"certificate of {subject} by {issuer}, until {ends:%Y-%m-%d} ({left})", days


def _short(name: x509.Name) -> str:
    common = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return clean(str(common[0].value) if common else name.rfc4514_string(), 80) or "unknown"


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()

"""Explanations of TLS failures for operators, each with its fix.

A TLS handshake that fails ends before any request is sent.
"""

from typing import Final

import aiohttp

_CERTIFICATE_CAUSES: Final = {
    9: "its certificate is not valid yet; check the clocks",
    10: "its certificate has expired; renew it there",
    18: "its certificate is self-signed; put it into upstream.tls.ca_file if it is the right one",
    19: "its certificate is of an unknown authority; give that authority's in upstream.tls.ca_file",
    20: "its certificate is of an unknown authority; give that authority's in upstream.tls.ca_file, and check that "
    "the server sends its intermediate certificates",
    21: "its certificate is of an unknown authority; give that authority's in upstream.tls.ca_file",
    62: "its certificate is for another name; correct upstream.url, or give the name in upstream.tls.server_name",
    64: "its certificate is for another address; give the name that it is for in upstream.tls.server_name",
}
"""By the X509_V_ERR number that OpenSSL gives."""


def tls_cause(exc: BaseException) -> str | None:
    """What went wrong with TLS before anything was sent, in an operator's words; None where it is no such error."""
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return certificate_cause(exc.certificate_error)
    if isinstance(exc, aiohttp.ClientConnectorSSLError):
        return handshake_cause(getattr(exc.os_error, "reason", None) or str(exc.os_error))
    return None


def certificate_cause(failure: Exception) -> str:
    """What is wrong with a certificate, and after a semicolon what to do."""
    code = getattr(failure, "verify_code", 0)
    said = getattr(failure, "verify_message", "") or "it is not accepted"
    return _CERTIFICATE_CAUSES.get(code, f"its certificate is refused ({said})")


def handshake_cause(reason: str) -> str:
    """What OpenSSL's word for a failed handshake means, and what to do."""
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
        return f"it does not speak TLS there ({reason}); check https and the port of upstream.url"
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "HANDSHAKE_FAILURE" in reason:
        return f"it refused the handshake ({reason}); check upstream.tls.cert_file, if it asks for client certificates"
    return f"the handshake failed ({reason}); check what the server demands"

"""How TLS ends, and explanations of its failures for operators, each with its fix.

A TLS handshake that fails ends before any request is sent.
"""

import asyncio
import re
import ssl
from typing import Final

_CERTIFICATE_ALERT: Final = re.compile(r"ALERT_(.*CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|DECRYPT_ERROR)")
"""What OpenSSL calls the alerts about a certificate, and the signature that proves it (RFC 8446 section 6.2)."""
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
"""By OpenSSL's X509_V_ERR number."""


def certificate_cause(failure: Exception) -> str:
    """Explain why a certificate is not accepted; the fix follows after a semicolon."""
    code = getattr(failure, "verify_code", 0)
    said = getattr(failure, "verify_message", "") or "it is not accepted"
    return _CERTIFICATE_CAUSES.get(code, f"its certificate is refused ({said})")


def refuses_certificate(reason: str) -> bool:
    """Whether OpenSSL's reason for the end of a connection is an alert about our certificate.

    No other alert proves that the handshake failed: it may come when the request was read.
    """
    return _CERTIFICATE_ALERT.search(reason) is not None


def handshake_cause(reason: str) -> str:
    """Explain OpenSSL's reason for a failed handshake; the fix follows after a semicolon."""
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
        return f"it does not speak TLS there ({reason}); check https and the port of upstream.url"
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason or "HANDSHAKE_FAILURE" in reason:
        return f"it refused the handshake ({reason}); check upstream.tls.cert_file, if it asks for client certificates"
    return f"the handshake failed ({reason}); check what the server demands"


def is_ended_properly(transport: asyncio.Transport) -> bool:
    """Whether the peer itself ended the connection. Over TLS, its alert proves it (RFC 9112 section 9.8)."""
    tls = transport.get_extra_info("ssl_object")
    if tls is None:
        return True
    try:
        # asyncio reports both ends alike. After the alert, OpenSSL reads the end; without it, OpenSSL wants more.
        return not tls.read(1)
    except ssl.SSLZeroReturnError:
        return True
    except ssl.SSLError:
        return False

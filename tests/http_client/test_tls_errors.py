"""TLS failures are explained, each with its fix."""

import pytest

from gateway.http_client.tls_errors import certificate_cause, handshake_cause, refuses_certificate


class FakeFailure(Exception):
    """A FAKE of ssl.SSLCertVerificationError, whose fields only OpenSSL sets."""

    def __init__(self, code: int, message: str) -> None:
        self.verify_code, self.verify_message = code, message


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (FakeFailure(10, "certificate has expired"), "its certificate has expired; renew it there"),
        (
            FakeFailure(18, "self-signed certificate"),
            "its certificate is self-signed; put it into upstream.tls.ca_file",
        ),
        (FakeFailure(62, "Hostname mismatch"), "its certificate is for another name; correct upstream.url"),
        (FakeFailure(23, "certificate revoked"), "its certificate is refused (certificate revoked)"),
        (FakeFailure(1, ""), "its certificate is refused (it is not accepted)"),
        (OSError("no certificate"), "its certificate is refused (it is not accepted)"),
    ],
)
def test_a_refused_certificate_is_explained(failure: Exception, expected: str) -> None:
    assert certificate_cause(failure).startswith(expected)


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("WRONG_VERSION_NUMBER", "check https and the port of upstream.url"),
        ("RECORD_LAYER_FAILURE", "check https and the port of upstream.url"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "check upstream.tls.cert_file, if it asks for client certificates"),
        ("TLSV1_ALERT_UNKNOWN_CA", "check upstream.tls.cert_file, if it asks for client certificates"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "check upstream.tls.cert_file, if it asks for client certificates"),
        ("NO_PROTOCOLS_AVAILABLE", "check what the server demands"),
    ],
)
def test_a_failed_handshake_is_explained_with_openssls_reason(reason: str, fix: str) -> None:
    explained = handshake_cause(reason)
    assert f"({reason})" in explained
    assert explained.endswith(f"; {fix}")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", True),
        ("SSLV3_ALERT_BAD_CERTIFICATE", True),
        ("SSLV3_ALERT_UNSUPPORTED_CERTIFICATE", True),
        ("SSLV3_ALERT_CERTIFICATE_REVOKED", True),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", True),
        ("SSLV3_ALERT_CERTIFICATE_UNKNOWN", True),
        ("TLSV1_ALERT_UNKNOWN_CA", True),
        ("TLSV1_ALERT_ACCESS_DENIED", True),
        ("TLSV1_ALERT_DECRYPT_ERROR", True),
        ("TLSV1_ALERT_INTERNAL_ERROR", False),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", False),
        ("SSLV3_ALERT_UNEXPECTED_MESSAGE", False),
        ("SSLV3_ALERT_BAD_RECORD_MAC", False),
        ("TLSV1_ALERT_DECODE_ERROR", False),
        ("TLSV1_ALERT_USER_CANCELLED", False),
        ("CERTIFICATE_VERIFY_FAILED", False),
        ("", False),
    ],
)
def test_only_alerts_about_a_certificate_refuse_it(reason: str, *, expected: bool) -> None:
    assert refuses_certificate(reason) is expected

"""What clients read of a request that failed, and whether it may have had effects."""

import pytest

from gateway.http_client.errors import (
    ClientClosed,
    ConnectTimedOut,
    ListenerFailed,
    MalformedReply,
    NoReply,
    NotConnected,
    ReplyCut,
    RequestFailed,
    TlsRefused,
)
from gateway.protocol.errors import CallLost, Unreachable

WHERE = "The upstream http://h/mcp of route /mcp"
NOT_SENT = [
    (
        NotConnected("Connection refused"),
        "cannot be reached (Connection refused); check that the server runs and that upstream.url is right",
    ),
    (ConnectTimedOut(), "did not accept a connection within timeouts.connect_seconds; check address and firewall"),
    (TlsRefused("its certificate has expired; renew it"), "cannot be reached over TLS: its certificate has expired; "),
]
SENT = [
    (NoReply(), "broke the connection without a reply;"),
    (ReplyCut(), "broke the connection in the middle of its reply;"),
    (MalformedReply("Invalid status"), "sent a reply that is not valid HTTP/1.1 (Invalid status);"),
    (ListenerFailed(), "sent a reply that the gateway could not process;"),
    (ClientClosed(sent=True), "was disconnected because the gateway is shutting down;"),
]


@pytest.mark.parametrize(("failure", "said"), NOT_SENT)
def test_a_request_that_was_not_sent_finds_the_upstream_unreachable(failure: RequestFailed, said: str) -> None:
    error = failure.mapped(WHERE)
    assert isinstance(error, Unreachable)
    assert error.message.startswith(f"{WHERE} {said}")
    assert not failure.sent


@pytest.mark.parametrize(("failure", "said"), SENT)
def test_a_request_that_was_sent_may_have_had_effects(failure: RequestFailed, said: str) -> None:
    error = failure.mapped(WHERE)
    assert isinstance(error, CallLost)
    assert error.message.startswith(f"{WHERE} {said}")
    assert error.message.endswith("; the request may have had effects")
    assert failure.sent


def test_a_request_that_a_closing_client_did_not_send_had_no_effects() -> None:
    error = ClientClosed(sent=False).mapped(WHERE)
    assert isinstance(error, Unreachable)
    assert "effects" not in error.message

"""The errors for requests that cannot be passed through."""

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http.incoming import Incoming
from gateway.passthrough.rejections import forwarding_loop, not_passable
from gateway.protocol.errors import GatewayError, InvalidRequest, ParseError

PING = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'


def refusal(body: bytes, method: str = "POST", **headers: str) -> GatewayError:
    return not_passable(Incoming("/mcp", CIMultiDictProxy(CIMultiDict(headers)), None, body, method=method))


def test_a_legacy_stream_gets_the_methods_that_are_served() -> None:
    error = refusal(b"", "GET")
    assert (error.status, error.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize(("body", "kind"), [(b"{", ParseError), (b"[]", InvalidRequest)])
def test_a_body_that_is_not_one_request_is_refused_for_that(body: bytes, kind: type[GatewayError]) -> None:
    assert type(refusal(body)) is kind


def test_a_legacy_client_without_a_session_learns_how_to_begin_one() -> None:
    error = refusal(PING)
    assert isinstance(error, InvalidRequest)
    assert "begin with `initialize`" in error.message


def test_a_loop_names_the_setting_that_leads_back() -> None:
    error = forwarding_loop("/mcp")
    assert (error.status, "upstream.url of route /mcp leads back here" in error.message) == (508, True)

"""The headers of a request that passes through, and those of a message on its behalf."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.config import Config, parse
from gateway.http.incoming import Incoming
from gateway.http_client.request_head import HeaderLines
from gateway.passthrough import header_rules
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.header_mismatch import KnownValues

CLAIMED = {"Forwarded": "for=1", "X-Real-IP": "1", "X-Forwarded-For": "1", "X-User": "ada"}


def config(**principal: Any) -> Config:
    tree = {"principal": principal, "routes": [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]}
    return parse(json.dumps(tree), "test", {})


BEHIND_A_PROXY = config(source="header", header="X-User", trusted_proxies=["10.0.0.0/8"])


def live(config: Config, **changes: Any) -> Any:
    """A FAKE route of this configuration, in the process `abc`."""
    route = structs.replace(config.routes[0], **changes)
    return SimpleNamespace(config=config, route=route, process=SimpleNamespace(epoch="abc"))


OPEN, PROXIED = live(config()), live(BEHIND_A_PROXY)


def passed(at: Any, headers: dict[str, str], remote: str = "10.0.0.1") -> dict[str, str]:
    incoming = Incoming("/mcp", CIMultiDictProxy(CIMultiDict(headers)), remote)
    sent = header_rules.passing(incoming, at)
    assert header_rules.lines(incoming, at) == HeaderLines.of(sent.items())
    return dict(sent)


def test_headers_that_only_a_trusted_proxy_may_set_are_dropped_from_others() -> None:
    via = {"Via": "1.1 mrtr-abc"}
    assert passed(PROXIED, CLAIMED) == CLAIMED | via
    assert passed(PROXIED, CLAIMED | {"Accept": "a"}, "192.0.2.1") == {"Accept": "a"} | via
    assert "X-Real-IP" not in passed(OPEN, CLAIMED)


def test_another_spelling_of_the_callers_header_does_not_pass_even_from_a_trusted_proxy() -> None:
    sent = passed(PROXIED, {"X_User": "eve", "x_forwarded_for": "1", "X-User": "ada"})
    assert sent == {"X-User": "ada", "Via": "1.1 mrtr-abc"}


def test_a_request_that_was_here_before_is_refused() -> None:
    assert passed(OPEN, {"Via": "1.1 mrtr-other"})["Via"] == "1.1 mrtr-other"
    with pytest.raises(InvalidRequest, match="of route /mcp leads back here") as caught:
        passed(OPEN, {"Via": "1.1 proxy, 1.1 mrtr-abc"})
    assert caught.value.status == 508


def test_a_message_of_the_gateway_has_the_credentials_of_its_request_and_no_header_of_its_message() -> None:
    headers = CIMultiDict(
        Authorization="t", Accept="a", **{"X-A": "1", "Mcp-Session-Id": "s", "Content-Type": "c", "Last-Event-ID": "1"}
    )
    headers.add("X-A", "2")
    incoming = Incoming("/mcp", CIMultiDictProxy(headers), "10.0.0.1")
    sent = header_rules.on_behalf(incoming, OPEN)
    assert sent == {"Authorization": "t", "X-A": "1, 2", "Via": "1.1 mrtr-abc"}


@pytest.mark.parametrize("value", ["a\x01", "a\r\nX-B: c", b"\xff".decode("utf-8", "surrogateescape")])
def test_a_value_that_cannot_be_sent_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="X-A is not UTF-8"):
        passed(OPEN, {"X-A": value})


def known(headers: dict[str, str], remote: str = "10.0.0.1") -> Incoming:
    """A request whose head came before."""
    found = CIMultiDictProxy(CIMultiDict(headers))
    return Incoming("/mcp", found, remote, known=KnownValues(found))


def test_what_passes_of_a_known_head_is_found_out_once_for_a_route_as_it_is_configured() -> None:
    incoming = known({"X-User": "ada", "Accept": "a"})
    lines = header_rules.lines(incoming, OPEN)
    assert header_rules.lines(incoming, OPEN) is lines
    assert b"X-User: ada\r\n" in lines.text
    other = live(config(), drop_headers=("accept",))
    assert header_rules.lines(incoming, other).text == b"X-User: ada\r\nVia: 1.1 mrtr-abc\r\n"
    assert header_rules.lines(incoming, OPEN) == lines


def test_what_passes_of_a_known_head_may_depend_on_where_it_comes_from() -> None:
    incoming = known(CLAIMED)
    assert header_rules.lines(incoming, OPEN).text == b"X-User: ada\r\nVia: 1.1 mrtr-abc\r\n"
    trusted = header_rules.lines(incoming, PROXIED)
    assert b"X-Real-IP: 1\r\n" in trusted.text
    stranger = Incoming("/mcp", incoming.headers, "192.0.2.1", known=incoming.known)
    assert header_rules.lines(stranger, PROXIED).text == b"Via: 1.1 mrtr-abc\r\n"
    assert header_rules.lines(incoming, PROXIED) == trusted


def test_a_known_head_that_has_been_here_before_is_refused_each_time() -> None:
    incoming = known({"Via": "1.1 mrtr-abc"})
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="leads back here"):
            _ = header_rules.lines(incoming, OPEN)

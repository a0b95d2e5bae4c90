"""The headers of a request that passes through, and those of a message on its behalf."""

import json
from typing import Any

import pytest
from msgspec import structs
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.config import Config, InForce, Route, Upstream, parse
from gateway.http.incoming import Incoming
from gateway.http_client.request_head import HeaderLines
from gateway.passthrough.header_rules import HeaderRules
from gateway.protocol.errors import InvalidRequest
from gateway.protocol.header_mismatch import KnownValues

CLAIMED = {"Forwarded": "for=1", "X-Real-IP": "1", "X-Forwarded-For": "1", "X-User": "ada"}


def config(**principal: Any) -> Config:
    tree = {"principal": principal, "routes": [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]}
    return parse(json.dumps(tree), "test", {})


BEHIND_A_PROXY = config(source="header", header="X-User", trusted_proxies=["10.0.0.0/8"])


ROUTE = config().routes[0]


def passed(rules: HeaderRules, headers: dict[str, str], remote: str = "10.0.0.1") -> dict[str, str]:
    incoming = Incoming("/mcp", CIMultiDictProxy(CIMultiDict(headers)), remote)
    one_by_one = rules.upstream(incoming, ROUTE)
    for _ in range(2):  # the second time, the names are known
        assert rules.lines(incoming, ROUTE) == HeaderLines.of(one_by_one.items())
    return dict(one_by_one)


def test_headers_that_only_a_trusted_proxy_may_set_are_dropped_from_others() -> None:
    rules = HeaderRules(InForce(BEHIND_A_PROXY), "abc")
    via = {"Via": "1.1 mrtr-abc"}
    assert passed(rules, CLAIMED) == CLAIMED | via
    assert passed(rules, CLAIMED | {"Accept": "a"}, "192.0.2.1") == {"Accept": "a"} | via


def test_another_spelling_of_the_callers_header_does_not_pass_even_from_a_trusted_proxy() -> None:
    rules = HeaderRules(InForce(BEHIND_A_PROXY), "abc")
    sent = passed(rules, {"X_User": "eve", "x_forwarded_for": "1", "X-User": "ada"})
    assert sent == {"X-User": "ada", "Via": "1.1 mrtr-abc"}


def test_a_reload_changes_which_proxies_are_trusted() -> None:
    in_force = InForce(config())
    rules = HeaderRules(in_force, "abc")
    assert "X-Real-IP" not in passed(rules, CLAIMED)
    in_force.replace(BEHIND_A_PROXY)
    assert "X-Real-IP" in passed(rules, CLAIMED)


@pytest.mark.parametrize(("coding", "kept"), [("gzip", False), ("BR", False), ("compress", True)])
def test_the_coding_of_a_body_that_was_decoded_here_is_not_named(coding: str, *, kept: bool) -> None:
    sent = passed(HeaderRules(InForce(config()), "abc"), {"Content-Encoding": coding, "Origin": "https://page"})
    assert ("Content-Encoding" in sent, "Origin" in sent) == (kept, False)


def test_a_request_that_was_here_before_is_refused() -> None:
    rules = HeaderRules(InForce(config()), "abc")
    assert passed(rules, {"Via": "1.1 mrtr-other"})["Via"] == "1.1 mrtr-other"
    with pytest.raises(InvalidRequest, match="of route /mcp leads back here") as caught:
        passed(rules, {"Via": "1.1 proxy, 1.1 mrtr-abc"})
    assert caught.value.status == 508


def test_a_message_of_the_gateway_has_the_credentials_of_its_request_and_no_header_of_its_message() -> None:
    headers = CIMultiDict(
        Authorization="t", Accept="a", **{"X-A": "1", "Mcp-Session-Id": "s", "Content-Type": "c", "Last-Event-ID": "1"}
    )
    headers.add("X-A", "2")
    incoming = Incoming("/mcp", CIMultiDictProxy(headers), "10.0.0.1")
    sent = HeaderRules(InForce(config()), "abc").on_behalf(incoming, ROUTE)
    assert sent == {"Authorization": "t", "X-A": "1, 2", "Via": "1.1 mrtr-abc"}


@pytest.mark.parametrize("value", ["100%", "%s", "é", "a\tb", ""])
def test_any_value_goes_up_as_it_is_the_second_time_too(value: str) -> None:
    rules = HeaderRules(InForce(config()), "abc")
    assert passed(rules, {"X-A": "1", "100%": "2"}) == {"X-A": "1", "100%": "2", "Via": "1.1 mrtr-abc"}
    assert passed(rules, {"X-A": value, "100%": value}) == {"X-A": value, "100%": value, "Via": "1.1 mrtr-abc"}


def test_a_value_that_cannot_be_sent_is_refused_the_second_time_too() -> None:
    rules = HeaderRules(InForce(config()), "abc")
    assert "X-A" in passed(rules, {"X-A": "1"})
    for value in ("a\x01", "a\r\nX-B: c", b"\xff".decode("utf-8", "surrogateescape")):
        incoming = Incoming("/mcp", CIMultiDictProxy(CIMultiDict({"X-A": value})), "10.0.0.1")
        with pytest.raises(InvalidRequest, match="X-A is not UTF-8"):
            _ = rules.lines(incoming, ROUTE)


def test_what_a_list_of_names_depends_on_is_looked_at_each_time() -> None:
    rules = HeaderRules(InForce(BEHIND_A_PROXY), "abc")
    via = {"Via": "1.1 mrtr-abc"}
    assert passed(rules, {"X-Hop": "1", "Connection": "close"}) == {"X-Hop": "1"} | via
    assert passed(rules, {"X-Hop": "1", "Connection": "X-Hop"}) == via
    assert passed(rules, {"Content-Encoding": "br"}) == via
    assert passed(rules, {"Content-Encoding": "x"}) == {"Content-Encoding": "x"} | via
    assert passed(rules, {"X-User": "ada"}) == {"X-User": "ada"} | via
    assert passed(rules, {"X-User": "eve"}, "192.0.2.1") == via


def test_another_configuration_of_a_route_has_rules_of_its_own() -> None:
    rules = HeaderRules(InForce(config()), "abc")
    incoming = Incoming("/mcp", CIMultiDictProxy(CIMultiDict({"X-A": "1"})), "10.0.0.1")
    own = Route(upstream=Upstream(), set_headers={"x-a": "100%"})
    for route, line in ((ROUTE, b"X-A: 1"), (own, b"x-a: 100%"), (ROUTE, b"X-A: 1")):
        for _ in range(2):
            assert rules.lines(incoming, route).text == line + b"\r\nVia: 1.1 mrtr-abc\r\n"


def test_names_that_clients_make_up_do_not_pile_up() -> None:
    rules = HeaderRules(InForce(config()), "abc")
    for number in range(600):
        assert passed(rules, {f"X-{number}": "1"})[f"X-{number}"] == "1"
    assert len(rules._plans) <= 256
    before = len(rules._plans)
    assert passed(rules, {"X-" + "y" * 3000: "1"})
    assert len(rules._plans) == before


def known(headers: dict[str, str], remote: str = "10.0.0.1") -> Incoming:
    """A request whose head came before."""
    found = CIMultiDictProxy(CIMultiDict(headers))
    return Incoming("/mcp", found, remote, known=KnownValues(lambda name: found.getall(name, ())))


def test_what_passes_of_a_known_head_is_found_out_once_for_a_route_as_it_is_configured() -> None:
    rules, incoming = HeaderRules(InForce(config()), "abc"), known({"X-User": "ada", "Accept": "a"})
    lines = rules.lines(incoming, ROUTE)
    assert rules.lines(incoming, ROUTE) is lines
    assert b"X-User: ada\r\n" in lines.text
    other = structs.replace(ROUTE, drop_headers=("accept",))
    assert rules.lines(incoming, other).text == b"X-User: ada\r\nVia: 1.1 mrtr-abc\r\n"
    assert rules.lines(incoming, ROUTE) == lines


def test_what_passes_of_a_known_head_may_depend_on_where_it_comes_from() -> None:
    in_force = InForce(config())
    rules, incoming = HeaderRules(in_force, "abc"), known(CLAIMED)
    assert rules.lines(incoming, ROUTE).text == b"X-User: ada\r\nVia: 1.1 mrtr-abc\r\n"
    in_force.replace(BEHIND_A_PROXY)
    trusted = rules.lines(incoming, ROUTE)
    assert b"X-Real-IP: 1\r\n" in trusted.text
    stranger = Incoming("/mcp", incoming.headers, "192.0.2.1", known=incoming.known)
    assert rules.lines(stranger, ROUTE).text == b"Via: 1.1 mrtr-abc\r\n"
    assert rules.lines(incoming, ROUTE) == trusted


def test_a_known_head_that_has_been_here_before_is_refused_each_time() -> None:
    rules, incoming = HeaderRules(InForce(config()), "abc"), known({"Via": "1.1 mrtr-abc"})
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="leads back here"):
            _ = rules.lines(incoming, ROUTE)

"""The headers of a client that go upstream, for a bridged call or for a request that passes through."""

from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.config import Route, Upstream
from gateway.config.model.route import Credentials
from gateway.http.upstream_headers import (
    asks_as_client,
    check_once,
    credential_of,
    credentials_in,
    for_call,
    for_passing,
    is_valid_value,
    joined,
    own_headers,
    passed_back,
)
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol.errors import InvalidRequest

NOT_UTF_8 = b"\xff".decode("utf-8", "surrogateescape")


def route(**settings: Any) -> Route:
    return Route(upstream=Upstream(), **settings)


def head(*pairs: tuple[str, str]) -> ReplyHead:
    return ReplyHead(200, [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in pairs])


def headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


def credentials(mode: Any, token: str | None = None, header: str | None = None) -> Credentials:
    return Credentials(mode=mode, token=token, header=header)


SENT = headers(("Authorization", "Bearer client"), ("X-Tenant", "t"), ("X-Other", "o"), ("X-Key", "the client's"))


def test_a_call_forwards_the_credential_and_the_listed_headers() -> None:
    assert for_call(route(forward_headers=("x-tenant", "x-absent")), SENT) == {
        "Authorization": "Bearer client",
        "x-tenant": "t",
    }


@pytest.mark.parametrize("listed", [(), ("dpop",)])
@pytest.mark.parametrize("scheme", ["DPoP", "dpop"])
def test_a_token_that_needs_a_proof_goes_with_it(scheme: str, listed: tuple[str, ...]) -> None:
    sent = headers(("authorization", f"{scheme} token"), ("dpop", "proof"))
    proven = {"Authorization": f"{scheme} token", "dpop": "proof"}
    assert for_call(route(forward_headers=listed), sent) == proven
    assert credential_of(proven) == (f"{scheme} token", "proof")
    with pytest.raises(InvalidRequest, match="dpop came 2 times"):
        _ = for_call(route(forward_headers=listed), headers(*sent.items(), ("DPoP", "another")))


def test_a_proof_stays_here_without_its_token() -> None:
    bearer = headers(("Authorization", "Bearer token"), ("DPoP", "proof"))
    assert for_call(route(), bearer) == {"Authorization": "Bearer token"}
    proven = headers(("Authorization", "DPoP token"), ("DPoP", "proof"))
    assert for_call(route(credentials=credentials("drop")), proven) == {}
    assert for_call(route(forward_headers=("dpop",)), bearer)["dpop"] == "proof", "it is configured"


@pytest.mark.parametrize(
    ("chosen", "own"),
    [
        (credentials("drop"), {}),
        (credentials("replace", "ours"), {"Authorization": "Bearer ours"}),
        (credentials("replace", "ours", "x-api-key"), {"x-api-key": "ours"}),
        (credentials("replace"), {}),
    ],
)
def test_the_clients_credential_stays_here_unless_it_is_forwarded(chosen: Credentials, own: dict[str, str]) -> None:
    changed = route(credentials=chosen)
    assert not asks_as_client(changed)
    assert own_headers(changed) == for_call(changed, SENT) == own
    assert dict(for_passing(changed, headers(("Authorization", "Bearer client")))) == own


def test_a_header_that_the_route_sets_replaces_the_clients() -> None:
    fixed = route(set_headers={"x-key": "ours"}, forward_headers=("x-tenant",))
    assert for_call(fixed, SENT)["x-key"] == "ours"
    assert for_passing(fixed, SENT).getall("X-Key") == ["ours"]


def test_a_header_that_is_distrusted_stays_here_unless_the_route_sets_it() -> None:
    given = headers(("x-user", "ann"), ("x-tenant", "a"))
    listed = route(forward_headers=("x-user", "x-tenant"))
    assert for_call(listed, given, "x-user") == {"x-tenant": "a"}
    assert for_call(route(forward_headers=("x-user",), set_headers={"x-user": "us"}), given, "x-user") == {
        "x-user": "us"
    }


@pytest.mark.parametrize("build", [for_call, for_passing])
def test_a_header_that_identifies_the_caller_must_not_be_repeated(build: Any) -> None:
    bound = route(forward_headers=("x-key",), bind_headers=("x-key",))
    for name in ("Authorization", "X-Key"):
        with pytest.raises(InvalidRequest, match=r"came 2 times, and it tells who is calling"):
            build(bound, headers((name, "1"), (name.lower(), "2")))
    free = build(route(forward_headers=("x-key",), bind_headers=()), headers(("x-key", "1"), ("x-key", "2")))
    assert ", ".join(free.values()) == "1, 2"
    check_once((None, "Absent"), headers())


@pytest.mark.parametrize("build", [for_call, for_passing])
def test_a_header_that_is_not_utf_8_is_refused(build: Any) -> None:
    with pytest.raises(InvalidRequest, match="X-Tenant is not UTF-8"):
        build(route(forward_headers=("X-Tenant",)), headers(("X-Tenant", NOT_UTF_8)))


def test_the_values_of_a_repeated_header_are_joined_in_order() -> None:
    repeated = headers(("Accept", "a"), ("Cookie", "a=1"), ("accept", "b"), ("Cookie", "b=2"), ("Once", "x"))
    assert joined(repeated, "Accept") == "a, b"
    assert joined(repeated, "cookie") == "a=1; b=2"
    assert joined(repeated, "Once") == "x"
    assert joined(repeated, "Absent") is None


def test_a_request_passes_with_all_but_the_headers_of_its_connection() -> None:
    sent = headers(
        ("Host", "gw"),
        ("Connection", "keep-alive, X-Hop"),
        ("X-Hop", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "3"),
        ("Accept", "a"),
        ("accept", "b"),
        ("X-Dropped", "by the route"),
        ("Via", "by the caller"),
        ("Authorization", "Bearer client"),
    )
    passed = for_passing(route(drop_headers=("x-dropped",)), sent, {"via"})
    assert list(passed.items()) == [("Accept", "a"), ("accept", "b"), ("Authorization", "Bearer client")]


def test_a_reply_passes_with_all_but_the_headers_of_its_connection() -> None:
    reply = head(
        ("Connection", "X-Hop"), ("X-Hop", "1"), ("Keep-Alive", "5"), ("Set-Cookie", "a"), ("Set-Cookie", "b"),
        ("X-Broken", NOT_UTF_8),
    )  # fmt: skip
    assert list(passed_back(reply).items()) == [("Set-Cookie", "a"), ("Set-Cookie", "b")]


def test_the_upstream_sees_a_credential_if_it_is_forwarded_or_bound() -> None:
    bound = route(credentials=credentials("drop"), forward_headers=("x-key",), bind_headers=("x-key",))
    assert credentials_in(route(), {"Authorization": "Bearer client"})
    assert not credentials_in(route(), {})
    assert not credentials_in(bound, {"Authorization": "Bearer service"})
    assert credentials_in(bound, {"x-key": "k"})


INVALID = ["a\x01b", "a\x00", "a\r\nX: b", "\x7f", NOT_UTF_8]


@pytest.mark.parametrize("value", INVALID)
def test_a_value_that_http_forbids_is_neither_sent_up_nor_passed_back(value: str) -> None:
    assert not is_valid_value(value)
    assert dict(passed_back(head(("X-Bad", value), ("X-Good", "a\tb é")))) == {"X-Good": "a\tb é"}
    for build in (for_call, for_passing):
        with pytest.raises(InvalidRequest, match="X-Bad is not UTF-8 without control characters"):
            build(route(forward_headers=("X-Bad",)), headers(("X-Bad", value)))


@pytest.mark.parametrize(
    "name",
    [
        "X_Tenant",
        "x_KEY",
        "X_Own",
        "X_Dropped",
        "Content_Length",
        "Transfer_Encoding",
        "X_Forwarded_For",
        "X-Real_IP",
        "Mcp_Session-Id",
    ],
)
def test_another_spelling_of_a_header_that_counts_does_not_pass(name: str) -> None:
    one = route(forward_headers=("x-tenant", "x-key"), set_headers={"x-own": "o"}, drop_headers=("x-dropped",))
    sent = for_passing(one, headers((name, "forged"), ("Api_Key", "k"), ("X-Tenant", "t")))
    assert dict(sent) == {"Api_Key": "k", "X-Tenant": "t", "x-own": "o"}
    assert for_call(one, headers((name, "forged"))) == {"x-own": "o"}


def test_a_listed_header_may_have_an_underscore() -> None:
    one = route(forward_headers=("api_key",))
    assert dict(for_passing(one, headers(("Api_Key", "k")))) == {"Api_Key": "k"}
    assert for_call(one, headers(("Api_Key", "k"))) == {"api_key": "k"}

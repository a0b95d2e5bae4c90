"""Who is calling: what makes two requests one principal."""

import base64
import json
from typing import Any

import pytest

from gateway.identity.principal import (
    ANONYMOUS,
    is_trusted,
    of_authorization,
    of_header,
    of_headers,
)


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def jwt(claims: Any, signature: str = "sig", scheme: str = "Bearer") -> str:
    return f"{scheme} {part({'alg': 'RS256'})}.{part(claims)}.{part(signature)}"


ADA = {"iss": "https://as.example", "sub": "ada", "client_id": "app"}


def test_no_credential_is_one_principal() -> None:
    assert of_authorization(None) == ANONYMOUS
    assert of_authorization("") != ANONYMOUS, "an empty credential is not none"


def test_a_refreshed_token_is_the_same_principal() -> None:
    first = of_authorization(jwt(ADA | {"exp": 1, "jti": "a", "scope": "x"}))
    assert first == of_authorization(jwt(ADA | {"exp": 2, "jti": "b"}, signature="other"))
    assert first == of_authorization(jwt(dict(reversed(ADA.items()))))


@pytest.mark.parametrize(
    "other",
    [
        ADA | {"iss": "https://evil.example"},
        ADA | {"sub": "eve"},
        ADA | {"client_id": "other"},
        {"iss": ADA["iss"], "sub": ADA["sub"]},
        # The parts are joined so that none can slip into its neighbour.
        {"iss": ADA["iss"] + "ada", "sub": "", "client_id": "app"},
        {"iss": ADA["iss"], "sub": 'ada","app', "client_id": ""},
        {"iss": ADA["iss"], "sub": "adaa", "client_id": "pp"},
    ],
)
def test_another_issuer_subject_or_client_is_another_principal(other: dict[str, str]) -> None:
    assert of_authorization(jwt(other)) != of_authorization(jwt(ADA))


def test_azp_names_the_client_where_client_id_does_not() -> None:
    azp = {"iss": ADA["iss"], "sub": "ada", "azp": "app"}
    assert of_authorization(jwt(azp)) == of_authorization(jwt(ADA))
    assert of_authorization(jwt(ADA | {"azp": "other"})) == of_authorization(jwt(ADA))


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer", "bEaReR"])
def test_the_scheme_has_no_case(scheme: str) -> None:
    assert of_authorization(jwt(ADA, scheme=scheme)) == of_authorization(jwt(ADA))
    assert of_authorization(" " + jwt(ADA, scheme=scheme + "  ") + " ") == of_authorization(jwt(ADA))


def test_a_jwt_without_a_scheme_or_under_another_is_opaque() -> None:
    for other in (jwt(ADA).removeprefix("Bearer "), jwt(ADA, scheme="DPoP")):
        assert of_authorization(other) == of_authorization(other, is_checked=False)


MALFORMED = [
    "Bearer a.b.c",
    "Bearer ..",
    "Bearer .e30.",
    f"Bearer x.{part([])}.y",
    f"Bearer x.{part('text')}.y",
    f"Bearer x.{part({})}.y",
    f"Bearer x.{part({'iss': 'i'})}.y",
    f"Bearer x.{part({'sub': 's'})}.y",
    f"Bearer x.{part({'iss': 1, 'sub': 's'})}.y",
    f"Bearer x.{part({'iss': None, 'sub': 's'})}.y",
    f"Bearer x.{part(bytes([255, 254]))}.y",
    f"Bearer x.{part(b'{' * 3000)}.y",
    f"Bearer x.{part(b'[' * 100_000)}.y",
    f"Bearer x.{part(ADA)}",
    f"Bearer x.{part(ADA)}.y.z",
    "Bearer",
    "Bearer ",
    "Bearer é.é.é",
    "Bearer a\udcff",
    "Basic dXNlcjpwYXNz",
]


def test_what_is_no_jwt_is_an_opaque_token_named_by_its_digest() -> None:
    named = [of_authorization(authorization) for authorization in MALFORMED]
    assert named == [of_authorization(authorization, is_checked=False) for authorization in MALFORMED]
    assert {len(each) for each in named} == {32}
    assert len({ANONYMOUS, of_authorization(jwt(ADA)), *named}) >= len(named) + 1, "`Bearer` comes twice"


def test_a_name_from_a_proxy_is_no_token() -> None:
    assert of_header(None) == ANONYMOUS
    assert of_header("ada") == of_header(" ada ")
    assert of_header("ada") != of_header("Ada")
    assert of_header("Bearer x") != of_authorization("Bearer x")
    assert of_header("") != ANONYMOUS
    assert len(of_header("\udcff")) == 32


NETWORKS = ("10.0.0.0/8", "192.0.2.7/32", "2001:db8::/32", "::1/128")


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [
        ("10.1.2.3", True),
        ("11.0.0.1", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("2001:db8::1", True),
        ("2001:db9::1", False),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("127.0.0.1", False),
        # A dual-stack listener shows IPv4 peers in this form.
        ("::ffff:10.1.2.3", True),
        ("::ffff:11.1.2.3", False),
        (None, False),
        ("", False),
        ("localhost", False),
        ("10.1.2.3:80", False),
        ("010.1.2.3", False),
    ],
)
def test_only_the_configured_networks_are_trusted(peer: str | None, trusted: bool) -> None:  # noqa: FBT001
    assert is_trusted(peer, NETWORKS) is trusted


def headers(**values: str) -> bytes:
    """Of a request whose bound headers are `a` and `b`."""
    return of_headers(("a", "b"), values.get)


def test_bound_headers_are_their_values_whatever_their_order() -> None:
    assert headers(a="1", b="2") == of_headers(("b", "a"), {"a": "1", "b": "2"}.get)
    others = [headers(), headers(a=""), headers(b=""), headers(a="1"), headers(b="1"), headers(a="2", b="1")]
    assert len({headers(a="1", b="2"), *others}) == 7, "one that is missing is like no value"
    assert of_headers((), {"a": "1"}.get) == b""


def test_a_refreshed_token_in_a_bound_header_is_the_same_with_and_without_its_scheme() -> None:
    first = headers(a=jwt(ADA | {"jti": "a"}))
    refreshed = jwt(ADA | {"jti": "b"}, signature="other")
    assert first == headers(a=refreshed) == headers(a=refreshed.removeprefix("Bearer "))
    for other in (
        jwt(ADA | {"sub": "eve"}),
        jwt({"sub": "ada"}),
        "Bearer opaque",
        refreshed.replace("Bearer", "DPoP"),
    ):
        assert headers(a=other) != first
    assert headers(a=jwt({"sub": "ada", "jti": "a"})) != headers(a=jwt({"sub": "ada", "jti": "b"})), (
        "no issuer: opaque"
    )


def test_a_token_that_no_upstream_checks_is_opaque() -> None:
    token = jwt(ADA | {"exp": 1})
    assert of_authorization(token, is_checked=False) == of_authorization(token, is_checked=False)
    assert of_authorization(token, is_checked=False) != of_authorization(jwt(ADA | {"exp": 2}), is_checked=False)
    assert of_authorization(token, is_checked=False) != of_authorization(token)


@pytest.mark.parametrize("value", [b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b'{"iss":"x","sub":"\\ud800"}'])
def test_hostile_claims_make_a_token_opaque(value: bytes) -> None:
    token = jwt(value)
    assert of_authorization(token) == of_authorization(token, is_checked=False)
    assert of_headers(["x"], lambda _: token) != of_headers(["x"], lambda _: jwt(ADA))

"""Warnings about settings that are allowed but risky."""

import msgspec

from gateway.config import (
    cautions,
)
from tests.support.configurations import (
    with_route,
)

SECRET = "s3cret-of-the-gateway"


def test_a_credential_of_the_gateway_for_unverified_callers_is_a_warning() -> None:
    replace = {"mode": "replace", "token": SECRET}
    assert not list(cautions(with_route(credentials=replace))), "loopback"
    open_to_all = {"listen": "0.0.0.0:8080"}
    (said,) = cautions(with_route(open_to_all, credentials=replace))
    assert said.startswith("routes[/a].credentials.mode is replace, but callers are not verified")
    verified = {"principal": {"source": "jwt", "issuer": "i", "jwks_url": "https://a/j"}}
    assert not list(cautions(with_route({**open_to_all, **verified}, credentials=replace)))
    assert msgspec.json.encode([said]).find(SECRET.encode()) < 0


def test_a_forwarded_header_that_may_be_an_unbound_credential_is_a_warning() -> None:
    names = ["x-api-key", "x-forwarded-for", "x-forwarded-access-token"]
    (said,) = cautions(with_route(forward_headers=names))
    assert said.startswith(
        "routes[/a].forward_headers has x-forwarded-access-token, which requestStates are not bound to"
    )
    for bound in ([], names[:1], names[2:]):
        assert not list(cautions(with_route(forward_headers=names, bind_headers=bound)))
    assert not list(cautions(with_route(forward_headers=names[:2])))


def test_messages_in_the_log_and_an_unverified_upstream_are_warnings() -> None:
    (logged,) = cautions(with_route({"debug": {"bodies": True}}))
    assert logged.startswith("debug.bodies is true: the log contains what users typed")
    (unverified,) = cautions(with_route(upstream={"url": "https://a/mcp", "tls": {"verify": False}}))
    assert unverified.startswith("routes[/a].upstream.tls.verify is false: an attacker on the path can impersonate")

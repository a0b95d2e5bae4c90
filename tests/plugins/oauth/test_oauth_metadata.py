"""Metadata of an upstream under the gateway's name."""

import pytest

from gateway.plugins.oauth import oauth_metadata
from gateway.plugins.oauth.oauth_metadata import Place

PLACE = Place("https://mcp.example.com", "/files", "http://10.0.0.7:9000")
ROOT = Place(PLACE.public, "", PLACE.upstream)
UPSTREAM, PUBLIC = PLACE.upstream, PLACE.public

ORIGINS = [
    ("http://10.0.0.7:9000/mcp?x#y", "http://10.0.0.7:9000"),
    ("HTTPS://MCP.Example.COM:443/", "https://mcp.example.com"),
    ("http://h:80", "http://h"),
    ("https://h:80", "https://h:80"),
    ("http://[::1]:9000/mcp", "http://[::1]:9000"),
    ("http://user@h/", "http://h"),
    ("http://h:port", None),
    ("ftp://h/", None),
    ("javascript:alert(1)", None),
    ("/mcp", None),
    ("http:///mcp", None),
    ("", None),
    (7, None),
    (None, None),
]


@pytest.mark.parametrize(("url", "origin"), ORIGINS)
def test_an_origin_has_one_spelling(url: object, origin: str | None) -> None:
    assert oauth_metadata.origin(url) == origin


CHALLENGES = [
    (
        f'Bearer error="invalid_token", resource_metadata="{UPSTREAM}/.well-known/oauth-protected-resource/m", x="y"',
        f'Bearer error="invalid_token", resource_metadata="{PUBLIC}{oauth_metadata.RESOURCE}/files", x="y"',
    ),
    (f"Bearer resource_metadata={UPSTREAM}/x", f'Bearer resource_metadata="{PUBLIC}{oauth_metadata.RESOURCE}/files"'),
    ('Bearer resource_metadata="https://elsewhere/x"', 'Bearer resource_metadata="https://elsewhere/x"'),
    (f'Bearer resource_metadata="{PUBLIC}/x"', f'Bearer resource_metadata="{PUBLIC}/x"'),
    (f'Bearer realm="{UPSTREAM}"', f'Bearer realm="{UPSTREAM}"'),
    ('Bearer resource_metadata=""', 'Bearer resource_metadata=""'),
]


@pytest.mark.parametrize(("came", "goes"), CHALLENGES)
def test_a_challenge_leads_to_the_gateway_only_where_it_led_to_the_upstream(came: str, goes: str) -> None:
    assert oauth_metadata.challenge(came, PLACE) == goes


LED = [
    ("Bearer", f'Bearer resource_metadata="{PUBLIC}{oauth_metadata.RESOURCE}/files"'),
    ('bearer error="x"', f'bearer resource_metadata="{PUBLIC}{oauth_metadata.RESOURCE}/files", error="x"'),
    ('Bearer error="x", Resource_Metadata="https://a/"', 'Bearer error="x", Resource_Metadata="https://a/"'),
    ('Basic realm="x"', 'Basic realm="x"'),
    ("", ""),
]


@pytest.mark.parametrize(("came", "goes"), LED)
def test_a_challenge_without_metadata_gets_that_of_the_route(came: str, goes: str) -> None:
    assert oauth_metadata.with_metadata(came, PUBLIC, "/files") == goes


RESOURCES = [
    (
        {"resource": f"{UPSTREAM}/mcp", "authorization_servers": [f"{UPSTREAM}/"], "scopes_supported": ["a"]},
        {"resource": f"{PUBLIC}/files", "authorization_servers": [f"{PUBLIC}/files"], "scopes_supported": ["a"]},
    ),
    (
        {"resource": f"{UPSTREAM}/mcp", "authorization_servers": ["https://login.example.com/t", f"{UPSTREAM}/a", 3]},
        {"resource": f"{PUBLIC}/files", "authorization_servers": ["https://login.example.com/t", f"{PUBLIC}/files"]},
    ),
    (
        {"resource": f"{PUBLIC}/files", "authorization_servers": [f"{PUBLIC}/"]},
        {"resource": f"{PUBLIC}/files", "authorization_servers": [f"{PUBLIC}/"]},
    ),
    (
        {"resource": "https://elsewhere/mcp", "authorization_servers": "none"},
        {"resource": "https://elsewhere/mcp", "authorization_servers": "none"},
    ),
    ({}, {}),
]


@pytest.mark.parametrize(("came", "goes"), RESOURCES)
def test_a_protected_resource_is_what_the_client_was_given(
    came: oauth_metadata.Document, goes: oauth_metadata.Document
) -> None:
    assert oauth_metadata.protected_resource(came, PLACE) == goes


def test_the_resource_of_the_root_route_ends_with_a_slash() -> None:
    assert oauth_metadata.protected_resource({"resource": UPSTREAM}, ROOT) == {"resource": f"{PUBLIC}/"}


SERVERS = [
    (None, ""),
    ({"authorization_servers": "x"}, ""),
    ({"authorization_servers": ["https://login.example.com/t"]}, ""),
    ({"authorization_servers": ["https://login.example.com/t", f"{UPSTREAM}/tenant/"]}, "/tenant"),
    ({"authorization_servers": [f"{PUBLIC}/"]}, ""),
]


@pytest.mark.parametrize(("document", "path"), SERVERS)
def test_the_own_authorization_server_is_found(document: oauth_metadata.Document | None, path: str) -> None:
    assert oauth_metadata.own_server(document, PLACE) == path


METADATA = {
    "issuer": f"{UPSTREAM}/",
    "authorization_endpoint": f"{UPSTREAM}/oauth/authorize?flow=1",
    "token_endpoint": f"{PUBLIC}/token",
    "registration_endpoint": "https://login.example.com/register",
    "jwks_uri": f"{UPSTREAM}/keys",
}


def test_an_authorization_server_is_served_where_it_was_asked_for() -> None:
    assert oauth_metadata.authorization_server(METADATA, PLACE, "/files") == {
        "issuer": f"{PUBLIC}/files",
        "authorization_endpoint": f"{PUBLIC}/authorize/files",
        "token_endpoint": f"{PUBLIC}/token/files",
        "registration_endpoint": "https://login.example.com/register",
        "jwks_uri": f"{UPSTREAM}/keys",
    }


ISSUERS = [
    (f"{UPSTREAM}/", "", f"{PUBLIC}/"),
    (UPSTREAM, "", PUBLIC),
    (f"{UPSTREAM}/tenant", "/files", f"{PUBLIC}/files"),
    (PUBLIC, "/files", PUBLIC),
    ("https://login.example.com", "/files", "https://login.example.com"),
]


@pytest.mark.parametrize(("came", "asked", "goes"), ISSUERS)
def test_the_issuer_is_the_one_that_the_well_known_url_was_made_from(came: str, asked: str, goes: str) -> None:
    assert oauth_metadata.authorization_server({"issuer": came}, PLACE, asked) == {"issuer": goes}


ENDPOINTS = [
    ("authorization_endpoint", "/oauth/authorize?flow=1"),
    ("token_endpoint", "/token"),
    ("registration_endpoint", None),
    ("revocation_endpoint", None),
]


@pytest.mark.parametrize(("name", "target"), ENDPOINTS)
def test_an_endpoint_is_only_one_of_the_upstreams_own(name: str, target: str | None) -> None:
    assert oauth_metadata.endpoint(METADATA, name, PLACE) == target


def test_an_endpoint_at_the_root_has_a_path() -> None:
    assert oauth_metadata.endpoint({"token_endpoint": UPSTREAM}, "token_endpoint", PLACE) == "/"


FORMS = [
    ("a=1&resource=https%3A%2F%2Fg%2Fmcp&b=x+y", "a=1&resource=http%3A%2F%2Fu%2Fa%20b&b=x+y"),
    ("resource=https://g/mcp", "resource=http%3A%2F%2Fu%2Fa%20b"),
    ("resource=https%3A%2F%2Fg%2Fother&resource", "resource=https%3A%2F%2Fg%2Fother&resource"),
    ("xresource=https%3A%2F%2Fg%2Fmcp", "xresource=https%3A%2F%2Fg%2Fmcp"),
    ("", ""),
]


@pytest.mark.parametrize(("came", "goes"), FORMS)
def test_one_field_with_one_value_is_replaced_and_every_other_byte_stays(came: str, goes: str) -> None:
    assert oauth_metadata.replaced(came, {"resource": ("https://g/mcp", "http://u/a b")}) == goes

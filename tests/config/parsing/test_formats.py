"""The text forms of values: addresses, URLs, names, networks."""

import pytest

from gateway.config import (
    split_address,
)
from gateway.config.parsing.formats import FORMS, redacted_url, sendable_header
from tests.support.configurations import (
    ROUTE,
    check_refused,
)

REFUSED = [
    ("admin: false\n", 'admin: false is not host:port; write "127.0.0.1:9464"'),
    ("listen: 8080\n", 'listen: 8080 is not host:port; write "127.0.0.1:8080"'),
    ("listen: ':8080'\n", 'listen: ":8080" is not host:port; write "127.0.0.1:8080"'),
    ("listen: 'localhost:70000'\n", 'listen: "localhost:70000" has a port over 65535; correct it'),
    ("listen: '[::1]:99999'\n", 'listen: "[::1]:99999" has a port over 65535; correct it'),
    (
        "security: {allowed_hosts: ['a:70000']}\n",
        'security.allowed_hosts[0]: "a:70000" has a port over 65535; correct it',
    ),
    ("listen: '256.1.1.1:80'\n", 'listen: "256.1.1.1:80" is not host:port; write "127.0.0.1:80"'),
    ("listen: 8090\n", 'listen: 8090 is not host:port; write "127.0.0.1:8090"'),
    ("admin: ':9090'\n", 'admin: ":9090" is not host:port; write "127.0.0.1:9090"'),
    ("listen: null\n", 'listen: null is not host:port; write "127.0.0.1:8080"'),
    ("security: {allowed_hosts: a.example}\n", None),
    ("security: {allowed_hosts: ['http://a']}\n", None),
    ("security: {allowed_origins: ['https://a/b']}\n", None),
    ("security: {allowed_origins: ['null']}\n", None),
    ("principal: {trusted_proxies: ['10.0.0.1/8']}\n", None),
    ("principal: {header: 'x tenant', source: header, trusted_proxies: [10.0.0.1]}\n", None),
    ("replica: {id: 'gw 1'}\n", 'replica.id: "gw 1" is not a replica id; write "gw-1"'),
    (
        "routes: [{upstream: {url: 'ftp://a/'}}]",
        'routes[0].upstream.url: "ftp://a/" is not an http(s) URL; write "http://a/"',
    ),
    (
        "routes: [{upstream: {url: 'localhost:9000'}}]",
        'routes[0].upstream.url: "localhost:9000" is not an http(s) URL; write "http://localhost:9000/mcp"',
    ),
    (
        "routes: [{path: search, upstream: {url: 'http://a/'}}]",
        'routes[0].path: "search" is not a plain absolute path; write "/search"',
    ),
    ("routes: [{upstream: {url: 'http:///mcp'}}]", None),
    ("routes: [{upstream: {url: 'http://a:x/mcp'}}]", None),
    ("routes: [{upstream: {url: 'http://a/\\n'}}]", None),
    ('routes: [{upstream: {url: "http://a/\\n"}}]', None),
    (
        "routes: [{upstream: {url: 'http://me:hunter2@a/'}}]",
        (
            'routes[0].upstream.url: "...@a/" contains a user name; '
            "remove it: the client's Authorization goes upstream"
        ),
    ),
    ("routes: [{upstream: {url: 'http://a/#b'}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, path: mcp}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, path: /mcp/}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, path: /a/../b}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, path: '/{{x}}'}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [Connection]}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [Mcp-Session-Id]}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [content-length]}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [Host]}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: ['a:b']}}]", None),
    (
        "routes: [{upstream: {command: [npx], env: {A-B: c}}}]",
        'routes[0].upstream.env.A-B: "A-B" is not a variable name; write "API_KEY"',
    ),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_a_text_of_another_form_is_one_problem_with_its_path_and_fix(text: str, problem: str | None) -> None:
    check_refused(text, problem)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("a.b-c:0", ("a.b-c", 0))],
)
def test_an_address_splits_into_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize(
    "text", ["::1:80", "[::1]", "a:", "a:b", "a b:1", "[1.2.3.4]:1", "a:-1", "http://a:1", "a:1\n"]
)
def test_a_text_that_is_not_an_address_raises(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(text)


@pytest.mark.parametrize(
    ("form", "text", "normal"),
    [
        ("origin", "https://A.example", "https://a.example"),
        ("origin", "https://u@a.example", None),
        ("host", "A.Example:80", "a.example:80"),
        ("host", "[::1]", "[::1]"),
        ("host", "[::1]:80", "[::1]:80"),
        ("host", "::1", None),
        ("host", "2001:db8::1:80", None),
        ("host", "a:80\n", None),
        ("header", "X-Tenant", "x-tenant"),
        ("header value", "a" * 8193, None),
        ("network", "10.0.0.0/8", "10.0.0.0/8"),
        ("network", "::1", "::1/128"),
        ("path", "/a/b", "/a/b"),
        ("variable", "A_1", "A_1"),
        ("replica id", "gw-1", "gw-1"),
        ("url", "https://a/mcp?key=x", "https://a/mcp?key=x"),
        ("address", "[::1]:80", "[::1]:80"),
    ],
)
def test_a_form_normalises_a_text_or_refuses_it(form: str, text: str, normal: str | None) -> None:
    assert FORMS[form].parse(text) == normal


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@a.example:1/mcp?key=x#f", "https://a.example:1/mcp"),
        ("http://[", "a URL that cannot be read"),
    ],
)
def test_a_redacted_url_has_no_part_that_may_be_secret(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


def test_a_header_of_the_command_line_may_be_the_authorization_but_none_of_the_gateways_own() -> None:
    assert sendable_header("Authorization", "Bearer x") == ("authorization", "Bearer x")
    assert sendable_header("X-Tenant", "acme") == ("x-tenant", "acme")
    for name, value, error in (
        ("Host", "a", "is written by the gateway itself"),
        ("a b", "a", "this is not a header name"),
        ("x-a", "two\nlines", "the value of x-a is not one line of plain text"),
    ):
        with pytest.raises(ValueError, match=error):
            sendable_header(name, value)

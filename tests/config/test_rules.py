"""The rules between keys: each broken one is a problem with its path and its fix."""

from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config.model.config import Tls
from gateway.config.rules import broken_rules
from tests.support.configurations import (
    KEY,
    ROUTE,
    check_refused,
    good,
    problems,
    route_problems,
    with_route,
)

REFUSED = [
    ("state: {keys: ['']}\n", "state.keys[0]: is empty; make one with `mrtr-gateway keygen`"),
    (
        f"state: {{keys: ['{KEY[:40]}']}}\n",
        "state.keys[0]: has 30 bytes, but at least 32 are needed; make one with `mrtr-gateway keygen`",
    ),
    (
        f"state: {{keys: ['{KEY}', '{bytes(range(32)).hex()}']}}\n",
        "state.keys[1]: is the same key as state.keys[0]; remove one of them",
    ),
    (
        "admin: 127.0.0.1:8080\n",
        "admin: 127.0.0.1:8080 is already used by listen (127.0.0.1:8080); choose another port",
    ),
    ("admin: 0.0.0.0:8080\n", "admin: 0.0.0.0:8080 is already used by listen (127.0.0.1:8080); choose another port"),
    (
        "principal: {header: x-user}\n",
        "principal.header: is only read with principal.source: header; set that, or remove it",
    ),
    (
        "replica: {id: a, peers: {a: 'b:1'}}\nstate: {keys: [KEY]}\n".replace("KEY", KEY),
        "replica.listen: is missing, but peers are set; give the host:port at which they reach this replica",
    ),
    (
        "replica: {peers_dns: 'b:1'}\nstate: {keys: [KEY]}\n".replace("KEY", KEY),
        "replica.listen: is missing, but peers are set; give the host:port at which they reach this replica",
    ),
    (
        "workers: 2\nlisten: 127.0.0.1:0\n",
        "listen: is port 0, which picks a free port per process, but workers share one; write the port",
    ),
    (
        "routes: [{upstream: {}}]",
        'routes[0].upstream: has neither url nor command; add url: "http://127.0.0.1:9000/mcp", or a command',
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [x-a, X-A]}}]",
        'routes[0].forward_headers: lists "x-a" 2 times; keep one',
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}'}}}}, {{upstream: {{url: '{ROUTE}'}}}}]",
        'routes[1].path: "/mcp" is also routes[0].path; change one',
    ),
    ('routes: [{upstream: {command: [npx, "a\\0b"]}}]', None),
    ('routes: [{upstream: {command: [npx], env: {A: "\\0"}}}]', None),
    (
        "routes: [{upstream: {command: [npx], transport: streamable-http}}]",
        "routes[0].upstream.transport: is for a url, but a command speaks stdio; write stdio or auto",
    ),
    (
        "routes: [{upstream: {command: [npx], max_children: 2, warm: 3}}]",
        "routes[0].upstream.warm: is more than max_children (2); lower it",
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}', env: {{A: b}}}}}}]",
        "routes[0].upstream.env: is only used with upstream.command; remove it",
    ),
    (f"routes: [{{upstream: {{url: '{ROUTE}', cwd: /}}}}]", None),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}', transport: stdio}}}}]",
        "routes[0].upstream.transport: is stdio, but stdio has no url; give upstream.command, or another transport",
    ),
    (
        "limits: {calls_bytes: 1000, calls_bytes_per_principal: 1001}\n",
        "limits.calls_bytes_per_principal: is more than limits.calls_bytes (1000); lower it",
    ),
    (
        "tls: {key_file: /dev/null}\n",
        "tls.key_file: is set without tls.cert_file; give the certificate too, or remove it",
    ),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_a_broken_rule_is_one_problem_with_its_path_and_fix(text: str, problem: str | None) -> None:
    check_refused(text, problem)


SECRET = "s3cret-of-the-gateway"


REFUSED_ROUTES: list[tuple[dict[str, Any], str]] = [
    (
        {"credentials": {"mode": "replace"}},
        "credentials.token: is missing, but mode is replace; give token or token_file",
    ),
    ({"credentials": {"token": SECRET}}, "credentials.token: is only read with mode: replace; set that, or remove it"),
    ({"credentials": "drop"}, 'credentials: "drop" is a text, but a section is expected; write {mode: "drop"}'),
    (
        {"credentials": {"mode": "replace", "token": f"{SECRET}\nx"}},
        "credentials.token: a secret is not one line of plain text for a header; remove what cannot be printed",
    ),
    ({"set_headers": {"x-a": 5}}, "set_headers.x-a: is a number, but a text is expected; put it in quotes"),
    (
        {"set_headers": {"x-a": ""}},
        "set_headers.x-a: a secret is not one line of plain text for a header; remove what cannot be printed",
    ),
    (
        {"set_headers": {"x-a": SECRET}, "forward_headers": ["X-A"]},
        'set_headers: lists "x-a", which is in forward_headers too; keep one',
    ),
    (
        {"upstream": {"url": ROUTE, "request_id_header": "X-Request-Id"}, "forward_headers": ["x-request-id"]},
        'upstream.request_id_header: lists "x-request-id", which is in forward_headers too; keep one',
    ),
    (
        {"upstream": {"command": ["npx"], "request_id_header": "x-request-id"}},
        "upstream.request_id_header: is only used with upstream.url; remove it",
    ),
    (
        {"upstream": {"url": ROUTE, "request_id_header": "Mcp-Session-Id"}},
        'upstream.request_id_header: "Mcp-Session-Id" is written by the gateway itself; remove it',
    ),
    ({"drop_headers": ["x-a", "x-a"]}, 'drop_headers: lists "x-a" 2 times; keep one'),
    *(
        ({"set_headers": {name: SECRET}}, f'set_headers.{name}: "{name}" is written by the gateway itself; remove it')
        for name in ("Host", "Content-Length", "Mcp-Session-Id", "Accept", "Origin", "Sec-Fetch-Mode")
    ),
    *(
        (
            {"drop_headers": [name]},
            f'drop_headers[0]: "{name}" concerns one connection and is never forwarded; remove it',
        )
        for name in ("Connection", "Transfer-Encoding", "Keep-Alive", "Upgrade")
    ),
    (
        {"hold": {"max_calls": 5}},
        "hold.max_calls: unknown key; it is a key of hold; move it there, out of routes[].hold",
    ),
    (
        {"forward_headers": ["x-api-key"], "bind_headers": ["x-apikey"]},
        (
            'bind_headers: lists "x-apikey", which is not in forward_headers and so does not go upstream; '
            'did you mean "x-api-key"?'
        ),
    ),
    (
        {"bind_headers": ["X-Tenant"]},
        'bind_headers: lists "x-tenant", which is not in forward_headers and so does not go upstream; add it there, ',
    ),
    (
        {"forward_headers": ["x-api-key"], "bind_headers": ["x-api-key", "X-Api-Key"]},
        'bind_headers: lists "x-api-key" 2 times; keep one',
    ),
    ({"bind_headers": ["authorization"]}, 'bind_headers[0]: "authorization" is the header of routes[].credentials'),
    (
        {"set_headers": {"Authorization": SECRET}},
        'set_headers.Authorization: "Authorization" is the header of routes[].credentials',
    ),
    ({"sessions": {"max": 0}}, "sessions.max: 0 is too small; write 1 or more"),
    (
        {"sessions": {"affinity": "principal", "idle_seconds": 0}},
        "sessions.affinity: is principal, but sessions.idle_seconds is 0, so no session is kept; raise sessions.idle",
    ),
    (
        {"upstream": {"url": "http://a/mcp", "tls": {"verify": False}}},
        "upstream.tls: is set, but upstream.url is not https; give an https url, or remove it",
    ),
    (
        {"upstream": {"url": "https://a/mcp", "tls": {"verify": False, "server_name": "b"}}},
        "upstream.tls.verify: is false, so ca_file and server_name have no effect; remove verify, or remove them",
    ),
    (
        {"upstream": {"url": "https://a/mcp", "tls": {"key_file": "/dev/null"}}},
        "upstream.tls.key_file: is set without cert_file; give the certificate too, or remove it",
    ),
    (
        {
            "credentials": {"mode": "replace", "token": SECRET, "header": "x-api-key"},
            "forward_headers": ["x-api-key"],
        },
        'credentials.header: lists "x-api-key", which is in forward_headers too; keep one',
    ),
    (
        {"upstream": {"url": "https://a/mcp", "tls": {"verify": "no"}}},
        'upstream.tls.verify: "no" is a text; write false',
    ),
]


@pytest.mark.parametrize(("route", "said"), REFUSED_ROUTES)
def test_a_wrong_route_is_one_problem_and_quotes_no_secret(route: dict[str, Any], said: str) -> None:
    (problem,) = route_problems(**route)
    assert problem.startswith(f"routes[0].{said}")
    assert SECRET not in problem


def test_peers_without_keys_or_without_this_replica_are_refused() -> None:
    found = problems("replica: {id: c, peers: {a: 'x:1', b: 'y:1'}, peers_dns: 'z:1'}\n")
    assert [problem.partition(":")[0] for problem in found] == [
        "state.keys",
        "replica.listen",
        "replica.peers",
        "replica.peers_dns",
    ]
    assert found[2] == 'replica.peers: does not list "c", which is replica.id; list this replica too'
    assert "replica.id: is missing" in "".join(problems("replica: {peers: {a: 'x:1'}}\n"))
    dns_only = problems("replica: {peers_dns: 'z:1'}\n")
    assert any(
        problem.startswith("state.keys: is empty, but peers are set: each replica would refuse")
        for problem in dns_only
    )


def test_one_caller_has_a_quarter_of_the_bytes_for_calls_or_up_to_all() -> None:
    fine = good("limits: {calls_bytes: 1000, calls_bytes_per_principal: 1000}\n").limits
    assert fine.share_of_calls_bytes == 1000
    assert good("limits: {calls_bytes: 1000}\n").limits.share_of_calls_bytes == 250


def test_a_principal_from_a_header_needs_its_name_and_a_trusted_proxy() -> None:
    found = problems("principal: {source: header}\n")
    assert [problem.partition(":")[0] for problem in found] == [
        "principal.header",
        "principal.trusted_proxies",
    ]
    fine = good("principal: {source: header, header: X-User, trusted_proxies: [10.0.0.0/8, '::1']}\n")
    assert fine.principal.header == "x-user"
    assert fine.principal.trusted_proxies == ("10.0.0.0/8", "::1/128")


PRINCIPALS: list[tuple[dict[str, Any], set[str]]] = [
    ({"source": "jwt"}, {"issuer: is missing", "jwks_url: neither of jwks_url and jwks_file"}),
    (
        {"source": "jwt", "issuer": "i", "jwks_url": "http://as.example/jwks"},
        {"jwks_url: is http: an attacker on the path could replace the signing keys"},
    ),
    ({"issuer": "i"}, {"issuer: is only read with principal.source: jwt"}),
    ({"source": "jwt", "issuer": "i", "jwks_url": "https://a/j", "header": "x-u"}, {"header: is only read with"}),
]


@pytest.mark.parametrize(("principal", "said"), PRINCIPALS)
def test_a_wrong_principal_section_is_refused(principal: dict[str, Any], said: set[str]) -> None:
    found = route_problems({"principal": principal})
    assert len(found) == len(said)
    assert all(any(each.startswith(f"principal.{start}") for each in found) for start in said), found


def test_two_listeners_may_both_ask_for_any_free_port() -> None:
    assert good("listen: 'a:0'\nadmin: 'a:0'\n").admin == "a:0"


def test_a_certificate_authority_for_keys_needs_an_https_url() -> None:
    principal = {"source": "jwt", "issuer": "i", "jwks_url": "http://127.0.0.1/jwks", "jwks_ca_file": "/dev/null"}
    found = route_problems({"principal": principal})
    assert "principal.jwks_ca_file: is only read with an https jwks_url; remove it" in found


def test_a_configuration_with_a_certificate_breaks_no_rule() -> None:
    config = replace(with_route(), tls=Tls(cert_file="gateway.pem", client_ca_file="ca.pem"))
    assert not list(broken_rules(config))

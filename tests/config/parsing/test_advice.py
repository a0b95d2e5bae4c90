"""The correction that an error suggests is accepted when it is taken literally."""

import re

import pytest

from gateway.config import ConfigError
from gateway.config.load import parse

ROUTES = "\nroutes:\n  - upstream: {url: http://127.0.0.1:9000/mcp}\n"

# The text, the error, and the text with the correction.
CASES = [
    ("traces: yes" + ROUTES, 'traces: "yes" is a text; write true', "traces: true" + ROUTES),
    ("traces: off" + ROUTES, 'traces: "off" is a text; write false', "traces: false" + ROUTES),
    (
        "hold: {ttl_seconds: 10m}" + ROUTES,
        'hold.ttl_seconds: "10m" is a text, but a number is expected; write 600',
        "hold: {ttl_seconds: 600}" + ROUTES,
    ),
    (
        "timeouts: {peer_connect_seconds: 500ms}" + ROUTES,
        'timeouts.peer_connect_seconds: "500ms" is a text, but a number is expected; write 0.5',
        "timeouts: {peer_connect_seconds: 0.5}" + ROUTES,
    ),
    (
        "limits: {body_bytes: 8MiB}" + ROUTES,
        'limits.body_bytes: "8MiB" is a text, but a whole number is expected; write 8388608',
        "limits: {body_bytes: 8388608}" + ROUTES,
    ),
    (
        "workers: '2'" + ROUTES,
        'workers: "2" is a text, but a whole number is expected; write 2',
        "workers: 2" + ROUTES,
    ),
    (
        "workers: many" + ROUTES,
        'workers: "many" is a text, but a whole number is expected; write e.g. 1',
        "workers: 1" + ROUTES,
    ),
    (
        "limits: {body_bytes: 1_000_000}" + ROUTES,
        'limits.body_bytes: "1_000_000" is a text, but a whole number is expected; write 1000000',
        "limits: {body_bytes: 1000000}" + ROUTES,
    ),
    (
        "routes:\n  - upstream: {command: npx -y 'a b'}\n",
        'routes[0].upstream.command: "npx -y \'a b\'" is a text, but a list is expected; write ["npx", "-y", "a b"]',
        'routes:\n  - upstream: {command: ["npx", "-y", "a b"]}\n',
    ),
    (
        "routes:\n  - upstream: {url: 'htp://mcp.example:8000'}\n",
        'routes[0].upstream.url: "htp://mcp.example:8000" is not an http(s) URL; write "http://mcp.example:8000/mcp"',
        "routes:\n  - upstream: {url: 'http://mcp.example:8000/mcp'}\n",
    ),
    (
        "routes:\n  - upstream: {url: 'htps://mcp.example/x'}\n",
        'routes[0].upstream.url: "htps://mcp.example/x" is not an http(s) URL; write "https://mcp.example/x"',
        "routes:\n  - upstream: {url: 'https://mcp.example/x'}\n",
    ),
    (
        "security: {allowed_hosts: 'a.example, b.example'}" + ROUTES,
        (
            'security.allowed_hosts: "a.example, b.example" is a text, but a list is expected; '
            'write ["a.example", "b.example"]'
        ),
        'security: {allowed_hosts: ["a.example", "b.example"]}' + ROUTES,
    ),
    (
        "routes:\n  path: /mcp\n  upstream: {url: http://127.0.0.1:9000/mcp}\n",
        (
            'routes: is a mapping, but a list is expected; write "- " before its first key, and indent its other keys '
            "by the same two characters"
        ),
        "routes:\n  - path: /mcp\n    upstream: {url: http://127.0.0.1:9000/mcp}\n",
    ),
    (
        "routes:\n  /mcp:\n    upstream: {url: http://127.0.0.1:9000/mcp}\n",
        'routes: is a mapping, but a list is expected; write each entry as an item that begins with "- path: ..."',
        "routes:\n  - path: /mcp\n    upstream: {url: http://127.0.0.1:9000/mcp}\n",
    ),
    (
        "routes:\n  - upstream: http://127.0.0.1:9000/mcp\n",
        (
            'routes[0].upstream: "http://127.0.0.1:9000/mcp" is a text, but a section is expected; '
            'write {url: "http://127.0.0.1:9000/mcp"}'
        ),
        'routes:\n  - upstream: {url: "http://127.0.0.1:9000/mcp"}\n',
    ),
    (
        "routes:\n  - http://127.0.0.1:9000/mcp\n",
        (
            'routes[0]: "http://127.0.0.1:9000/mcp" is a text, but a section is expected; '
            'write {upstream: {url: "http://127.0.0.1:9000/mcp"}}'
        ),
        'routes:\n  - {upstream: {url: "http://127.0.0.1:9000/mcp"}}\n',
    ),
    (
        "workers: 1.5" + ROUTES,
        "workers: 1.5 is a number, but a whole number is expected; write e.g. 1",
        "workers: 1" + ROUTES,
    ),
]


@pytest.mark.parametrize(("text", "error", "corrected"), CASES, ids=[case[1].partition(" ")[0] for case in CASES])
def test_a_correction_taken_literally_is_accepted(text: str, error: str, corrected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "gateway.yaml", {})
    assert caught.value.problems == (error,)
    _ = parse(corrected, "gateway.yaml", {})


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("traces: 1:30" + ROUTES, "write true or false"),
        ("security: {allowed_hosts: on}" + ROUTES, 'write ["on"]'),
        ("log: {level: off}" + ROUTES, "write debug or error or info or warning"),
        ("security: {allowed_hosts: {a: b}}" + ROUTES, "write its entries as a list"),
        ("security: {allowed_hosts: 1}" + ROUTES, "write [ ] around it"),
        ("""routes: [{upstream: {command: "npx 'a"}}]""", """write ["npx", "'a"]"""),
        ("routes: [{upstream: {command: '" + "k" * 40 + " x'}}]", "write its words as a list, each in quotes"),
        ("routes: [{upstream: {url: http://h/mcp}, credentials: drop}]", 'write {mode: "drop"}'),
        ("routes: [{upstream: {url: http://h/mcp}, credentials: odd}]", "write key: value"),
        ("routes: [{upstream: {url: http://h/mcp}, credentials: 1}]", "write key: value"),
        ("routes: [{upstream: 'http://ann:pw@h/mcp'}]", "write key: value"),
        ("routes: [{}]", 'add upstream: {url: "http://127.0.0.1:9000/mcp"}'),
    ],
)
def test_a_value_of_the_wrong_kind_gets_the_advice_for_its_key(text: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "gateway.yaml", {})
    assert caught.value.problems[0].endswith(advice)


def test_a_misspelt_key_and_its_wrong_value_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("hold: {ttl: 10m}" + ROUTES, "gateway.yaml", {})
    assert caught.value.problems == (
        'hold.ttl: unknown key; did you mean "ttl_seconds"?',
        'hold.ttl_seconds: "10m" is a text, but a number is expected; write 600',
    )


def test_a_secret_is_not_shown_as_a_list() -> None:
    with pytest.raises(ConfigError, match=re.escape("state.keys: is a text, but a list is expected; write [ ]")):
        parse("state: {keys: hunter2}" + ROUTES, "gateway.yaml", {})


# -- lines ------------------------------------------------------------------------------------------------------------


def test_every_error_names_its_line_also_those_between_keys() -> None:
    text = """\
listen: 8080
hold:
  ttl_secs: 5
principal:
  source: jwt
  issuer: https://issuer.example
routes:
  - path: /one
    upstream:
      url: ftp://x
  - path: /two
    upstream: {url: http://x/mcp, command: [a]}
  - path: /two
"""
    with pytest.raises(ConfigError) as caught:
        parse(text, "gateway.yaml", {})
    lines = [line.removeprefix("gateway.yaml:").partition(": ")[0::2] for line in caught.value.located]
    assert [(where, what.partition(": ")[0]) for where, what in lines] == [
        ("1:1", "listen"),
        ("3:3", "hold.ttl_secs"),
        ("10:7", "routes[0].upstream.url"),
        ("13:5", "routes[2].upstream"),
        ("4:1", "principal.jwks_url"),
        ("12:5", "routes[1].upstream"),
        ("13:5", "routes[2].path"),
    ]


def test_a_value_of_the_environment_names_its_variable_and_no_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("listen: 127.0.0.1:80" + ROUTES, "gateway.yaml", {"GATEWAY_LISTEN": "80"})
    assert caught.value.located == ('listen: "80" (from GATEWAY_LISTEN) is not host:port; write "127.0.0.1:80"',)

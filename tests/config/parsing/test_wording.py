"""What an error suggests, and the line that it names."""

import pytest

from gateway.config import ConfigError
from gateway.config.load import parse

ROUTES = "\nroutes:\n  - upstream: {url: http://127.0.0.1:9000/mcp}\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("traces: yes", "traces: yes is read as true by YAML; write true or false"),
        ("traces: 1:30", "traces: 1:30 is read as a number in another notation by YAML; write true or false"),
        ("log: {level: off}", "log.level: off is read as false by YAML; write debug or error or info or warning"),
        ("listen: 1:30", 'listen: 1:30 is read as a number in another notation by YAML; write "1:30" in quotes'),
        (
            "hold: {max_calls: 1_000}",
            "hold.max_calls: 1_000 is read as a number in another notation by YAML; write a plain decimal number",
        ),
        (
            "hold: {ttl_seconds: 10m}",
            'hold.ttl_seconds: "10m" is a text, but a number is expected; write e.g. 600',
        ),
        (
            "routes: [{upstream: {command: npx -y}}]",
            (
                'routes[0].upstream.command: "npx -y" is a text, but a list is expected; write its words as a list, '
                "each in quotes"
            ),
        ),
        (
            "security: {allowed_hosts: 1}",
            "security.allowed_hosts: 1 is a number, but a list is expected; write [ ] around it",
        ),
        (
            "routes: {path: /mcp, upstream: {url: 'http://127.0.0.1:9000/mcp'}}",
            'routes: is a mapping, but a list is expected; write each entry as an item that begins with "- "',
        ),
        (
            "routes: [{upstream: 'http://127.0.0.1:9000/mcp'}]",
            'routes[0].upstream: "http://127.0.0.1:9000/mcp" is a text, but a section is expected; write key: value',
        ),
    ],
)
def test_a_value_of_the_wrong_kind_gets_the_advice_for_its_key(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text if "routes" in text else text + ROUTES, "gateway.yaml", {})
    assert caught.value.problems == (error,)


def test_a_misspelt_key_and_its_wrong_value_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("hold: {ttl: 10m}" + ROUTES, "gateway.yaml", {})
    assert caught.value.problems == (
        'hold.ttl: unknown key; did you mean "ttl_seconds"?',
        'hold.ttl_seconds: "10m" is a text, but a number is expected; write e.g. 600',
    )


def test_a_secret_in_place_of_a_list_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("state: {keys: hunter2}" + ROUTES, "gateway.yaml", {})
    assert "hunter2" not in str(caught.value)


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
    lines = [line.partition(": ")[0::2] for line in caught.value.located]
    assert [(where, what.partition(": ")[0]) for where, what in lines] == [
        ("line 1", "listen"),
        ("line 3", "hold.ttl_secs"),
        ("line 10", "routes[0].upstream.url"),
        ("line 13", "routes[2].upstream"),
        ("line 4", "principal.jwks_url"),
        ("line 12", "routes[1].upstream"),
        ("line 13", "routes[2].path"),
    ]


def test_a_value_of_the_environment_names_its_variable_and_no_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("listen: 127.0.0.1:80" + ROUTES, "gateway.yaml", {"GATEWAY_LISTEN": "80"})
    assert caught.value.located == ('listen: "80" (from GATEWAY_LISTEN) is not host:port; write "127.0.0.1:8080"',)

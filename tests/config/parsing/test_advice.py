"""The correction that an error suggests is accepted when it is taken literally."""

import os
import re
from pathlib import Path

import pytest

from gateway.config import ConfigError
from gateway.config.load import lines, parse
from tests.support.configurations import KEY, ROUTE

ROUTES = "\nroutes:\n  - upstream: {url: http://127.0.0.1:9000/mcp}\n"

# The text, with § before the place of the error; the error; the text with the correction, if that can be pasted.
CASES = [
    ("§traces: yes" + ROUTES, 'traces: "yes" is a text; write true', "traces: true" + ROUTES),
    ("§traces: off" + ROUTES, 'traces: "off" is a text; write false', "traces: false" + ROUTES),
    (
        "hold: {§ttl_seconds: 10m}" + ROUTES,
        'hold.ttl_seconds: "10m" is a text, but a number is expected; write 600',
        "hold: {ttl_seconds: 600}" + ROUTES,
    ),
    (
        "timeouts: {§peer_connect_seconds: 500ms}" + ROUTES,
        'timeouts.peer_connect_seconds: "500ms" is a text, but a number is expected; write 0.5',
        "timeouts: {peer_connect_seconds: 0.5}" + ROUTES,
    ),
    (
        "limits: {§body_bytes: 8MiB}" + ROUTES,
        'limits.body_bytes: "8MiB" is a text, but a whole number is expected; write 8388608',
        "limits: {body_bytes: 8388608}" + ROUTES,
    ),
    (
        "§workers: '2'" + ROUTES,
        'workers: "2" is a text, but a whole number is expected; write 2',
        "workers: 2" + ROUTES,
    ),
    (
        "§workers: many" + ROUTES,
        'workers: "many" is a text, but a whole number is expected; write e.g. 1',
        "workers: 1" + ROUTES,
    ),
    (
        "limits: {§body_bytes: 1_000_000}" + ROUTES,
        'limits.body_bytes: "1_000_000" is a text, but a whole number is expected; write 1000000',
        "limits: {body_bytes: 1000000}" + ROUTES,
    ),
    (
        "routes:\n  - upstream: {§command: npx -y 'a b'}\n",
        'routes[0].upstream.command: "npx -y \'a b\'" is a text, but a list is expected; write ["npx", "-y", "a b"]',
        'routes:\n  - upstream: {command: ["npx", "-y", "a b"]}\n',
    ),
    (
        "routes:\n  - upstream: {§url: 'htp://mcp.example:8000'}\n",
        'routes[0].upstream.url: "htp://mcp.example:8000" is not an http(s) URL; write "http://mcp.example:8000/mcp"',
        "routes:\n  - upstream: {url: 'http://mcp.example:8000/mcp'}\n",
    ),
    (
        "routes:\n  - upstream: {§url: 'htps://mcp.example/x'}\n",
        'routes[0].upstream.url: "htps://mcp.example/x" is not an http(s) URL; write "https://mcp.example/x"',
        "routes:\n  - upstream: {url: 'https://mcp.example/x'}\n",
    ),
    (
        "security: {§allowed_hosts: 'a.example, b.example'}" + ROUTES,
        (
            'security.allowed_hosts: "a.example, b.example" is a text, but a list is expected; '
            'write ["a.example", "b.example"]'
        ),
        'security: {allowed_hosts: ["a.example", "b.example"]}' + ROUTES,
    ),
    (
        "§routes:\n  path: /mcp\n  upstream: {url: http://127.0.0.1:9000/mcp}\n",
        (
            'routes: is a mapping, but a list is expected; write "- " before its first key, and indent its other keys '
            "by the same two characters"
        ),
        "routes:\n  - path: /mcp\n    upstream: {url: http://127.0.0.1:9000/mcp}\n",
    ),
    (
        "§routes:\n  /mcp:\n    upstream: {url: http://127.0.0.1:9000/mcp}\n",
        'routes: is a mapping, but a list is expected; write each entry as an item that begins with "- path: ..."',
        "routes:\n  - path: /mcp\n    upstream: {url: http://127.0.0.1:9000/mcp}\n",
    ),
    (
        "routes:\n  - §upstream: http://127.0.0.1:9000/mcp\n",
        (
            'routes[0].upstream: "http://127.0.0.1:9000/mcp" is a text, but a section is expected; '
            'write {url: "http://127.0.0.1:9000/mcp"}'
        ),
        'routes:\n  - upstream: {url: "http://127.0.0.1:9000/mcp"}\n',
    ),
    (
        "routes:\n  - §http://127.0.0.1:9000/mcp\n",
        (
            'routes[0]: "http://127.0.0.1:9000/mcp" is a text, but a section is expected; '
            'write {upstream: {url: "http://127.0.0.1:9000/mcp"}}'
        ),
        'routes:\n  - {upstream: {url: "http://127.0.0.1:9000/mcp"}}\n',
    ),
    (
        "§workers: 1.5" + ROUTES,
        "workers: 1.5 is a number, but a whole number is expected; write e.g. 1",
        "workers: 1" + ROUTES,
    ),
    # -- keys
    ("hold: {§ttlSeconds: 5}" + ROUTES, 'hold.ttlSeconds: unknown key; did you mean "ttl_seconds"?', None),
    ("§\u200bLISTEN: a:1" + ROUTES, '"\\u200bLISTEN": unknown key; did you mean "listen"?', None),
    (
        "§mcpServers: {}" + ROUTES,
        (
            "mcpServers: unknown key; each server is an item of routes: "
            '{path: "/name", upstream: {command: [program, argument]}}'
        ),
        None,
    ),
    (
        "§port: 80" + ROUTES,
        'port: unknown key; write both into listen: "127.0.0.1:8080"',
        'listen: "127.0.0.1:8080"' + ROUTES,
    ),
    (
        "§cors: ['*']" + ROUTES,
        "cors: unknown key; list the origins of pages in security.allowed_origins",
        "security: {allowed_origins: ['https://a']}" + ROUTES,
    ),
    (
        "routes: [{upstream: {command: [npx], §args: [x]}}]",
        "routes[0].upstream.args: unknown key; write the arguments into command, after the program",
        "routes: [{upstream: {command: [npx, x]}}]",
    ),
    (
        "§# nothing",
        'routes: is missing; add routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
        'routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
    ),
    (
        "§routes:\n",
        'routes: is empty, but a list is expected; add routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
        'routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
    ),
    (
        "routes: [{§upstream:}]",
        'routes[0].upstream: is empty, but a section is expected; write upstream: {url: "http://127.0.0.1:9000/mcp"}',
        'routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
    ),
    # -- values
    ("log: {§level: INFO}" + ROUTES, 'log.level: "INFO" is not one of the choices; did you mean "info"?', None),
    ("§traces: 'true'" + ROUTES, 'traces: "true" is a text; write true', "traces: true" + ROUTES),
    (
        "§workers: $WORKERS" + ROUTES,
        'workers: "$WORKERS" is a text, but a whole number is expected; write ${WORKERS}',
        "workers: ${WORKERS:-1}" + ROUTES,
    ),
    (
        "hold: {§max_calls: '1,000'}" + ROUTES,
        'hold.max_calls: "1,000" is a text, but a whole number is expected; write 1000',
        "hold: {max_calls: 1000}" + ROUTES,
    ),
    (
        "§hold:\n  - ttl_seconds: 3" + ROUTES,
        'hold: is a list, but a section is expected; remove the "- " before its keys',
        "hold:\n  ttl_seconds: 3" + ROUTES,
    ),
    (
        "§hold:\n  ttl_seconds:3" + ROUTES,
        'hold: "ttl_seconds:3" is a text, but a section is expected; write a space after "ttl_seconds:"',
        "hold:\n  ttl_seconds: 3" + ROUTES,
    ),
    (
        "§tls: true" + ROUTES,
        "tls: true is true or false, but a section is expected; write its keys below it, such as cert_file",
        None,
    ),
    *(
        (
            f"§listen: {wrong}" + ROUTES,
            f'listen: "{wrong}" is not host:port; write "{right}"',
            f"listen: '{right}'" + ROUTES,
        )
        for wrong, right in (
            ("22:22", "127.0.0.1:22"),
            (":8090", "127.0.0.1:8090"),
            ("::1:8090", "[::1]:8090"),
            ("localhost", "localhost:8080"),
            ("http://0.0.0.0:8090/", "0.0.0.0:8090"),
            ("“a:1”", "a:1"),
        )
    ),
    *(
        (
            f"routes: [{{upstream: {{§url: '{wrong}'}}}}]",
            f'routes[0].upstream.url: "{wrong}" {why}',
            right and f"routes: [{{upstream: {{url: '{right}'}}}}]",
        )
        for wrong, why, right in (
            ("a:9000", 'is not an http(s) URL; write "http://a:9000/mcp"', "http://a:9000/mcp"),
            ("http://a/b c ", 'is not an http(s) URL; write "http://a/b%20c"', "http://a/b%20c"),
            ("http:/a/x", 'is not an http(s) URL; write "http://a/x"', "http://a/x"),
            ("9000", 'is not an http(s) URL; write "http://127.0.0.1:9000/mcp"', "http://127.0.0.1:9000/mcp"),
            ("unix:/run/x", 'is not an http(s) URL; write "http://127.0.0.1:9000/mcp"', None),
            ("http://a,http://b", 'is not an http(s) URL; write "http://b/mcp"', "http://b/mcp"),
            ("http://a:90000/mcp", "has a port over 65535; correct it", None),
            ("$(URL)", "is not an http(s) URL; write ${URL}", "${URL:-http://a}"),
        )
    ),
    *(
        (
            f"routes: [{{upstream: {{url: {ROUTE}}}, {item}}}]",
            f"routes[0].{error}",
            right and f"routes: [{{upstream: {{url: {ROUTE}}}, {right}}}]",
        )
        for item, error, right in (
            ("§path: mcp/", 'path: "mcp/" is not a plain absolute path; write "/mcp"', "path: /mcp"),
            ("§path: /mcp/*", 'path: "/mcp/*" has a *, which stands for nothing here; list each one in full', None),
            (
                "set_headers: {§'X A:': b}",
                'set_headers."X A:": "X A:" is not a header name; write "X-A"',
                "set_headers: {X-A: b}",
            ),
            (
                "forward_headers: [§'X-*']",
                'forward_headers[0]: "X-*" has a *, which stands for nothing here; list each one in full',
                None,
            ),
            (
                "§set_headers: [X-A=b]",
                "set_headers: is a list, but a mapping is expected; write x-tenant: acme, one pair a line",
                None,
            ),
            (
                "credentials: {mode: replace, §token: Bearer abc}",
                "credentials.token: begins with Bearer, which the gateway adds; remove that word",
                "credentials: {mode: replace, token: abc}",
            ),
            (
                "dialects: [§1442]",
                'dialects[0]: 1442 is not one of the choices; did you mean "sep-1442"?',
                "dialects: [sep-1442]",
            ),
        )
    ),
    (
        "security: {allowed_origins: [§app.example/x]}" + ROUTES,
        'security.allowed_origins[0]: "app.example/x" is not an origin; write "https://app.example"',
        "security: {allowed_origins: ['https://app.example']}" + ROUTES,
    ),
    (
        "security: {allowed_origins: [§'https://*.a']}" + ROUTES,
        'security.allowed_origins[0]: "https://*.a" has a *, which stands for nothing here; list each one in full',
        None,
    ),
    (
        "security: {allowed_hosts: [§'https://a.example/mcp']}" + ROUTES,
        'security.allowed_hosts[0]: "https://a.example/mcp" is not a host name; write "a.example"',
        "security: {allowed_hosts: [a.example]}" + ROUTES,
    ),
    (
        "principal: {source: header, header: x-a, trusted_proxies: [§192.168.1.7/24]}" + ROUTES,
        'principal.trusted_proxies[0]: "192.168.1.7/24" is not an IP network; write "192.168.1.0/24"',
        "principal: {source: header, header: x-a, trusted_proxies: [192.168.1.0/24]}" + ROUTES,
    ),
    ("replica: {§id: 1}" + ROUTES, 'replica.id: 1 is not a replica id; write "1"', "replica: {id: '1'}" + ROUTES),
    (
        f"state: {{keys: [{KEY}]}}\nreplica: {{id: a, listen: 'a:1', peers: {{a: 'a:1', §b: 'a:1'}}}}" + ROUTES,
        "replica.peers.b: a:1 is the address of a too; change one",
        None,
    ),
    (
        "state: {keys: [abc], §keys_file: keys}" + ROUTES,
        "state.keys_file: is set together with state.keys; keep only one of them",
        None,
    ),
    (
        f"routes: [{{upstream: {{url: {ROUTE}, §warm: 2}}}}]",
        "routes[0].upstream.warm: is only used with upstream.command; remove it",
        None,
    ),
    ("state: {keys: [§'']}" + ROUTES, "state.keys[0]: is empty; make one with `mrtr-gateway keygen`", None),
    ("state: {keys: [§$KEY]}" + ROUTES, "state.keys[0]: is not base64 or hex; write ${KEY}", None),
    (
        "tls:\n  §cert_file: |\n    -----BEGIN\n    x" + ROUTES,
        "tls.cert_file: is the text of a file; write that into a file, and its path here",
        None,
    ),
    (
        "tls: {§cert_file: ~/a.pem}" + ROUTES,
        (
            "tls.cert_file: cannot be read (No such file or directory); write the path in full, without ~ "
            f"({Path.cwd()}/~/a.pem, read as uid {os.geteuid()})"
        ),
        None,
    ),
    (
        "security: {§allowed_hosts: ''}" + ROUTES,
        'security.allowed_hosts: "" is a text, but a list is expected; write its entries as a list, or remove it',
        None,
    ),
    (
        "replica:\n  §id: |\n    gw" + ROUTES,
        'replica.id: "gw\\n" is not a replica id; write "gw"',
        "replica: {id: gw}" + ROUTES,
    ),
    # -- YAML
    *(
        (text, f"is not YAML: it {error}", None)
        for text, error in (
            ("hold:\n§\tttl_seconds: 3", "has a tab; indent with spaces, which YAML requires"),
            (
                "hold:\n  max_calls: 3\n §ttl_seconds: 3",
                "is not aligned with the lines around it; indent it as they are",
            ),
            ("listen: *§:8080", "has a value that begins with * or &; put it in quotes"),
            ("listen: §@x", "has a character that no value may begin with; put the value in quotes"),
            ('listen: §"a:1\nroutes: []', "has a quotation that does not end; close it"),
            ('listen: "a\\§p"', "has a backslash in double quotes; write it twice, or use single quotes"),
            ("state:\n  keys: §[a\nroutes:\n  - x", "has a bracket that is not closed, or a comma is missing; add it"),
            ("hold:\n  a: 1\n  §ttl\n", "has no colon after a key; write key: value"),
            (
                "routes\n  - upstream§: {}",
                (
                    "has a colon where no key can be; end the key above with a colon and a space, "
                    "or put the value in quotes"
                ),
            ),
            ("[server]\n§listen = 1", "has text after the end of what is written; write key: value"),
            (
                "replica: {id: '\n'}\nlisten: >§x",
                "has a character that no value may begin with; put the value in quotes",
            ),
            ("a: 1\n§---\nb: 2", "has a second document; remove the line ---, or what follows"),
        )
    ),
    (
        "routes: [{upstream: {url: {§{ URL }}}}]",
        "has the {{ of a template that was not filled in; write ${NAME} for a variable",
        "routes: [{upstream: {url: '${URL:-http://a}'}}]",
    ),
    ("a: &x 1\nb: [§*x, *x]", 'alias "x" is not allowed; write the value out', None),
    ("# caf§\udce9", "is not UTF-8 text; save it as UTF-8", None),
    ("a: b§\0", "the character 0x00 is not allowed; remove it", None),
]


@pytest.mark.parametrize(("text", "error", "corrected"), CASES, ids=[case[1].partition(" ")[0] for case in CASES])
def test_a_wrong_configuration_is_told_with_its_place_and_a_correction(
    text: str, error: str, corrected: str | None
) -> None:
    before = text.partition("§")[0].rsplit("\n", 1)
    place = f"gateway.yaml:{text[: text.index('§')].count(chr(10)) + 1}:{len(before[-1]) + 1}"
    with pytest.raises(ConfigError) as caught:
        parse(text.replace("§", ""), "gateway.yaml", {})
    assert lines(caught.value.found, "gateway.yaml") == [f"{place}: {error}"]
    if corrected is not None:
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
        ("routes: [{upstream: {url: http://h/mcp}, credentials: odd}]", "write its keys below it, such as mode"),
        ("routes: [{upstream: {url: http://h/mcp}, credentials: 1}]", "write its keys below it, such as mode"),
        ("routes: [{upstream: 'http://ann:pw@h/mcp'}]", 'write upstream: {url: "http://127.0.0.1:9000/mcp"}'),
        ("routes: [{}]", 'add upstream: {url: "http://127.0.0.1:9000/mcp"}'),
    ],
)
def test_a_value_of_the_wrong_kind_gets_the_advice_for_its_key(text: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "gateway.yaml", {})
    assert caught.value.problems[0].endswith(advice)


def test_a_key_that_begins_with_a_section_is_taken_for_a_key_of_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("log_level: debug" + ROUTES, "gateway.yaml", {})
    assert caught.value.problems == (
        'log_level: unknown key; did you mean "log"?',
        'log: "debug" is a text, but a section is expected; write {level: "debug"}',
    )


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


def test_every_error_names_its_line_also_those_between_keys_and_the_first_line_comes_first() -> None:
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
    found = [line.removeprefix("gateway.yaml:").split(": ")[:2] for line in lines(caught.value.found, "gateway.yaml")]
    assert found == [
        ["1:1", "listen"],
        ["3:3", "hold.ttl_secs"],
        ["4:1", "principal.jwks_url"],
        ["10:7", "routes[0].upstream.url"],
        ["12:5", "routes[1].upstream"],
        ["13:5", "routes[2].upstream"],
        ["13:5", "routes[2].path"],
    ]


def test_a_value_of_the_environment_names_its_variable_and_no_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("listen: 127.0.0.1:80" + ROUTES, "gateway.yaml", {"GATEWAY_LISTEN": "80"})
    assert lines(caught.value.found, "gateway.yaml") == [
        'listen: "80" (from GATEWAY_LISTEN) is not host:port; write "127.0.0.1:80"'
    ]
    with pytest.raises(ConfigError) as caught:
        parse(ROUTES, "gateway.yaml", {"GATEWAY_LISTN": "80"})
    assert lines(caught.value.found, "gateway.yaml") == [
        'GATEWAY_LISTN: is not a setting; did you mean "GATEWAY_LISTEN"?'
    ]

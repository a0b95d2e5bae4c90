"""The configuration: what loads, what is refused, and how each refusal names its fix."""

import base64
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from gateway.config import (
    Config,
    ConfigError,
    Route,
    State,
    Upstream,
    decode_key,
    digest,
    for_command,
    for_upstream,
    json_schema,
    load,
    parse,
    split_address,
)
from gateway.config.load import config_shape
from gateway.config.parsing.yaml_tree import MAX_TEXT_CHARACTERS

ROOT = Path(__file__).parents[2]
ROUTES = "routes: [{upstream: {url: 'http://127.0.0.1:9000/mcp'}}]\n"
KEY = base64.b64encode(bytes(range(32))).decode()
OTHER_KEY = base64.urlsafe_b64encode(bytes(range(200, 240))).decode().rstrip("=")


def problems(text: str, env: dict[str, str] | None = None, *, routes: bool = True) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text + (ROUTES if routes else ""), "test.yaml", env or {})
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def good(text: str = "", env: dict[str, str] | None = None) -> Config:
    return parse(text + ROUTES, "test.yaml", env or {})


# One refusal each: (text, the whole problem).
REFUSED = [
    ("listen: 8080\n", 'listen: 8080 is not host:port; write "127.0.0.1:8080"'),
    ("listen: ':8080'\n", 'listen: ":8080" is not host:port; write "127.0.0.1:8080"'),
    ("listen: 'localhost:70000'\n", 'listen: "localhost:70000" is not host:port; write "127.0.0.1:8080"'),
    ("listen: '256.1.1.1:80'\n", 'listen: "256.1.1.1:80" is not host:port; write "127.0.0.1:8080"'),
    ("listen: null\n", 'listen: null is not host:port; write "127.0.0.1:8080"'),
    ("lisen: a:1\n", 'lisen: unknown key; did you mean "listen"?'),
    ("hold: {ttl: 5}\n", 'hold.ttl: unknown key; did you mean "ttl_seconds"?'),
    (
        "cache: {}\n",
        (
            "cache: unknown key; remove it, or use one of: listen, public_url, admin, workers, tls, state, replica, "
            "hold, limits, timeouts, sessions, legs, principal, security, log, traces, debug, routes"
        ),
    ),
    ("hold: 5\n", "hold: 5 is a number, but a section is expected; write key: value"),
    ("hold:\n", "hold: is empty, but a section is expected; write key: value"),
    (
        "workers: true\n",
        "workers: true is true or false, but a whole number is expected; write e.g. 1",
    ),
    ("workers: 1.0\n", "workers: 1.0 is a number, but a whole number is expected; write e.g. 1"),
    ("workers: '1'\n", 'workers: "1" is a text, but a whole number is expected; write e.g. 1'),
    ("workers: 0\n", "workers: 0 is too small; write 1 or more"),
    ("legs: {rounds: 10}\n", "legs.rounds: 10 is too large; write 9 or less"),
    ("hold: {quiet_seconds: -1}\n", "hold.quiet_seconds: -1 is too small; write 0 or more"),
    ("log: {level: inf}\n", 'log.level: "inf" is not one of the choices; did you mean "info"?'),
    ("log: {format: 5}\n", "log.format: 5 is not one of the choices; write auto or console or json"),
    ("state: {keys_file: ''}\n", "state.keys_file: is empty; give a text, or remove it"),
    ("state: {keys_file: 5}\n", "state.keys_file: 5 is a number, but a text is expected; put it in quotes"),
    ("security: {allowed_hosts: a.example}\n", None),
    ("security: {allowed_hosts: ['http://a']}\n", None),
    ("security: {allowed_origins: ['https://a/b']}\n", None),
    ("security: {allowed_origins: ['null']}\n", None),
    ("principal: {trusted_proxies: ['10.0.0.1/8']}\n", None),
    ("principal: {header: 'x tenant', source: header, trusted_proxies: [10.0.0.1]}\n", None),
    ("replica: {id: 'gw 1'}\n", 'replica.id: "gw 1" is not a replica id; write "gw-1"'),
    # YAML 1.1 reads these as something else.
    (
        "log: {level: on}\n",
        'log.level: on is read as true by YAML; write "on" in quotes for the text, or a plain value',
    ),
    (
        "hold: {ttl_seconds: 1:30}\n",
        (
            "hold.ttl_seconds: 1:30 is read as a number in another notation by YAML; "
            'write "1:30" in quotes for the text, or a plain value'
        ),
    ),
    ("hold: {ttl_seconds: 0600}\n", None),
    ("hold: {ttl_seconds: 0x10}\n", None),
    ("hold: {ttl_seconds: .nan}\n", None),
    ("hold: {ttl_seconds: .inf}\n", None),
    ("hold: {max_calls: 1_000}\n", None),
    ("replica: {id: 2026-11-21}\n", None),
    ("replica: {id: yes}\n", None),
    ("on: 5\n", 'line 1: "on" is not a text key; put it in quotes if that is the intended key'),
    ("<<: {}\n", 'line 1: "<<" is not a text key; put it in quotes if that is the intended key'),
    ("? [a]\n: b\n", "line 1: has a key that is not text; put it in quotes if that is the intended key"),
    ("listen: !!python/name:os.system x\n", "line 1: has a YAML tag, which is not supported; remove it"),
    ("listen: !!binary aGk=\n", None),
    ("hold: !!set {}\n", "line 1: has a YAML tag, which is not supported; remove it"),
    # Rules between keys.
    ("state: {keys: [abc]}\n", None),
    ("state: {keys: ['a b']}\n", "state.keys[0]: is not base64 or hex; make one with `mrtr-gateway keygen`"),
    ("state: {keys: ['']}\n", "state.keys[0]: is not base64 or hex; make one with `mrtr-gateway keygen`"),
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
    ("hold: {drain_delay_seconds: -1}\n", "hold.drain_delay_seconds: -1 is too small; write 0 or more"),
    ("timeouts: {peer_connect_seconds: 0}\n", None),
    ("timeouts: {peer_accept_seconds: 0}\n", None),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED, ids=[text.strip() for text, _ in REFUSED])
def test_a_wrong_value_is_one_problem_with_its_path_and_fix(text: str, problem: str | None) -> None:
    found = problems(text)
    assert len(found) == 1
    assert problem is None or found[0] == problem
    assert re.match(r"^[\w.\[\]]+( \w+)*: .+[;?]", found[0])


ROUTE = "http://127.0.0.1:9000/mcp"
REFUSED_ROUTES = [
    ("", "routes: is missing; add it"),
    ("routes: []", "routes: is an empty list; give at least one entry"),
    ("routes: {}", "routes: is a mapping, but a list is expected; write [ ] around it"),
    ("routes: [{path: /mcp}]", "routes[0].upstream: is missing; add it"),
    ("routes: [{upstream: {}}]", "routes[0].upstream: has neither of url and command; give exactly one"),
    (f"routes: [{{upstrem: {{url: '{ROUTE}'}}, upstream: {{url: '{ROUTE}'}}}}]", None),
    (
        "routes: [{upstream: {url: 'ftp://a/'}}]",
        'routes[0].upstream.url: "ftp://a/" is not an http(s) URL; write "http://127.0.0.1:9000/mcp"',
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
        f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [x-a, X-A]}}]",
        'routes[0].forward_headers: lists "x-a" 2 times; keep one',
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}'}}}}, {{upstream: {{url: '{ROUTE}'}}}}]",
        'routes[1].path: "/mcp" is also routes[0].path; change one',
    ),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, continuation: resume}}]", None),
    ("routes: [{upstream: {command: []}}]", None),
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
        "routes: [{upstream: {command: [npx], env: {A-B: c}}}]",
        'routes[0].upstream.env.A-B: "A-B" is not a variable name; write "API_KEY"',
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}', env: {{A: b}}}}}}]",
        "routes[0].upstream.env: is only used with upstream.command; remove it",
    ),
    (f"routes: [{{upstream: {{url: '{ROUTE}', cwd: /}}}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}', transport: streamable}}}}]", None),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED_ROUTES)
def test_a_wrong_route_is_one_problem_with_its_path_and_fix(text: str, problem: str | None) -> None:
    found = problems(text, routes=False)
    assert len(found) == 1, found
    assert problem is None or found[0] == problem
    assert found[0].startswith("routes")


def test_a_misspelt_key_is_blamed_alone_and_not_for_what_is_missing_because_of_it() -> None:
    assert problems("routes: [{upstream: {ulr: 'http://a/'}}]", routes=False) == (
        'routes[0].upstream.ulr: unknown key; did you mean "url"?',
    )
    assert problems("state: {key: [x]}\nreplica: {id: a, listen: 'b:1', peers: {a: 'b:1'}}\n") == (
        'state.key: unknown key; did you mean "keys"?',
    )


def test_a_value_with_a_tag_or_an_alias_is_blamed_alone() -> None:
    for value in ("!!binary aGk=", "*x"):
        found = problems(f"routes: [{{upstream: {{url: {value}}}}}]", routes=False)
        assert len(found) == 1
        assert found[0].startswith("line 1: ")


def test_every_error_is_reported_at_once() -> None:
    text = "listen: 8080\nworkers: on\nhold: {ttl_second: 5, max_calls: many}\nlisten: a:1\nadmin: 'b:2'\n"
    found = problems(text + "legs: []\nprincipal: {source: header}\nrotes: []\n", {"GATEWAY_ADMN": "x"}, routes=False)
    assert [problem.partition(":")[0] for problem in found] == [
        "line 4",
        "GATEWAY_ADMN",
        "rotes",
        "listen",
        "workers",
        "hold.ttl_second",
        "hold.max_calls",
        "legs",
        "routes",
        "principal.header",
        "principal.trusted_proxies",
    ]


def test_two_peers_without_keys_or_their_own_name_are_refused() -> None:
    found = problems("replica: {id: c, peers: {a: 'x:1', b: 'y:1'}, peers_dns: 'z:1'}\n")
    assert [problem.partition(":")[0] for problem in found[:3]] == [
        "replica.peers_dns",
        "state.keys",
        "replica.peers",
    ]
    assert found[2] == 'replica.peers: does not list "c", which is replica.id; list this replica too'
    assert "replica.id: is missing" in "".join(problems("replica: {peers: {a: 'x:1'}}\n"))
    dns_only = problems("replica: {peers_dns: 'z:1'}\n")
    assert any(problem.startswith("state.keys: is empty, but peers cannot open") for problem in dns_only)


def test_replicas_workers_and_replay_load() -> None:
    keys = f"state: {{keys: [{KEY}]}}\n"
    peers = good(keys + "replica: {id: a, listen: '0.0.0.0:1', peers: {a: 'x:1', b: 'y:1'}}\nworkers: 3\n")
    assert (peers.workers, peers.replica.peers) == (3, {"a": "x:1", "b": "y:1"})
    assert good(keys + "replica: {listen: 'a:1', peers_dns: 'peers:1'}\n").replica.peers_dns == "peers:1"
    assert good("replica: {listen: 'a:1'}\n").replica.listen == "a:1", "a listener without peers yet"
    assert good("workers: 2\n").state.keys == (), "their supervisor gives them one"
    assert good("workers: 2\nreplica: {listen: 'a:1'}\nadmin: 'a:2'\n").admin == "a:2"
    assert good("listen: 'a:0'\n").workers == 1
    replay = parse(f"routes: [{{upstream: {{url: '{ROUTE}'}}, continuation: replay}}]", "test.yaml", {})
    assert replay.routes[0].continuation == "replay"


def test_affinity_without_idle_sessions_is_refused() -> None:
    route = f"routes: [{{upstream: {{url: '{ROUTE}'}}, sessions: {{affinity: principal}}}}]\n"
    assert parse(route, "test.yaml", {}).routes[0].sessions.affinity == "principal"
    found = problems(route + "sessions: {idle_seconds: 0}\n", routes=False)
    assert [problem.partition(":")[0] for problem in found] == ["routes[0].sessions.affinity"]


def test_the_new_times_have_their_defaults() -> None:
    config = good()
    assert config.hold.drain_delay_seconds == 2
    assert (config.timeouts.peer_connect_seconds, config.timeouts.peer_accept_seconds) == (0.5, 1)
    assert good("hold: {drain_delay_seconds: 0}\n").hold.drain_delay_seconds == 0


def test_a_principal_from_a_header_needs_its_name_and_a_trusted_proxy() -> None:
    found = problems("principal: {source: header}\n")
    assert [problem.partition(":")[0] for problem in found] == [
        "principal.header",
        "principal.trusted_proxies",
    ]
    fine = good("principal: {source: header, header: X-User, trusted_proxies: [10.0.0.0/8, '::1']}\n")
    assert fine.principal.header == "x-user"
    assert fine.principal.trusted_proxies == ("10.0.0.0/8", "::1/128")


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x\n",
        "a: &a [x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n",
        "&k listen: a:1\nadmin: *k\n",
    ],
)
def test_an_alias_is_refused_with_its_line(text: str) -> None:
    assert any(re.match(r'line 2: alias "\w" is not allowed; write the value out', line) for line in problems(text))


@pytest.mark.parametrize(
    "text", ["[" * 10_000, "a: " * 2 + "{a: " * 40, "- " * 5_000, "x" * (MAX_TEXT_CHARACTERS + 1)]
)
def test_a_bomb_is_refused_at_once(text: str) -> None:
    started = time.monotonic()
    assert len(problems(text, routes=False)) == 1
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("text", ["a: b: c\n", "'", "\x00", "a\n---\nb\n", "%YAML 9.9\n---\na", "\t- a", "- a\nb: c"])
def test_broken_yaml_is_one_problem_with_its_line(text: str) -> None:
    found = problems(text, routes=False)
    assert len(found) == 1
    assert re.match(r"(line \d+|document): is not YAML: ", found[0])


@given(st.text(alphabet=st.sampled_from("abk:-[]{}&*!|>'\"#%@`,? \n0129.~${}"), max_size=60))
def test_no_text_gets_anything_but_a_configuration_or_a_configuration_error(text: str) -> None:
    with suppress(ConfigError):
        parse(text, "x", {})


def test_a_file_that_is_too_long_is_not_even_parsed() -> None:
    assert problems("#" * (MAX_TEXT_CHARACTERS + 1)) == ("document: has over 262144 characters; split the routes",)


def test_a_list_for_a_document_is_one_problem() -> None:
    assert problems("- a\n", routes=False) == ("document: is a list, but a section is expected; write key: value",)


def test_duplicate_keys_are_refused_at_every_depth_with_their_line() -> None:
    found = problems("hold:\n  ttl_seconds: 1\n  ttl_seconds: 2\nlisten: a:1\nlisten: b:1\n")
    assert found == (
        'line 3: duplicate key "ttl_seconds"; keep one of them',
        'line 5: duplicate key "listen"; keep one of them',
    )


# Variables.


def test_variables_are_substituted_in_parsed_strings_only() -> None:
    text = "replica: {id: 'gw-${N}'}  # ${MISSING}\nlog: {level: '${L:-warning}'}\nstate: {keys_file: null}\n"
    config = good(text, {"N": "7", "L": ""})
    assert (config.replica.id, config.log.level) == ("gw-7", "warning")


def test_a_variable_cannot_add_structure_or_refer_to_another() -> None:
    found = problems("replica: {id: '${A}'}\n", {"A": "x}\nworkers: 7"})
    assert len(found) == 1
    assert found[0].startswith("replica.id: ")
    escaped = good("routes: [{upstream: {url: 'http://a/'}, ephemeral: ['$${A}', '${B}']}]\n#", {"B": "${A}"})
    assert escaped.routes[0].ephemeral == ("${A}", "${A}")
    optional = good("routes: [{upstream: {command: [x], cwd: '$${A}'}}]\n#", {})
    assert optional.routes[0].upstream.cwd == "${A}"


def test_a_missing_variable_is_named_with_its_path() -> None:
    assert problems("state: {keys: ['${MRTR_KEY}']}\n") == (
        "state.keys[0]: ${MRTR_KEY} is not set; export MRTR_KEY, or give a default: ${MRTR_KEY:-value}",
    )
    assert problems("replica: {id: 'a${1}'}\n") == (
        "replica.id: has a ${ that does not begin a variable; write ${NAME}, or $${ for a literal ${",
    )


def test_a_variable_may_be_a_number_where_one_is_expected() -> None:
    config = good("hold: {ttl_seconds: '${T}', max_calls: '${M:-5}'}\n", {"T": "1.5"})
    assert (config.hold.ttl_seconds, config.hold.max_calls) == (1.5, 5)
    for text in ("1:30", "nan", "0x10", "", "ten", "1e5", "1_0"):
        assert len(problems("hold: {ttl_seconds: '${T}'}\n", {"T": text})) == 1


def test_the_environment_overrides_single_values() -> None:
    env = {
        "GATEWAY_LISTEN": "0.0.0.0:80",
        "GATEWAY_ADMIN": "",
        "GATEWAY_HOLD__TTL_SECONDS": "20",
        "GATEWAY_LOG__LEVEL": "debug",
        "OTHER": "x",
    }
    config = good("hold: {ttl_seconds: 30, max_calls: 3}\nlisten: a:1\n", env)
    assert (config.listen, config.admin, config.log.level) == ("0.0.0.0:80", None, "debug")
    assert (config.hold.ttl_seconds, config.hold.max_calls) == (20, 3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("GATEWAY_HOLD_TTL_SECONDS", 'did you mean "GATEWAY_HOLD__TTL_SECONDS"?'),
        ("GATEWAY_LISTENS", 'did you mean "GATEWAY_LISTEN"?'),
        ("GATEWAY_ROUTES", "set lists and routes in the file, with ${VAR} for their values"),
        ("GATEWAY_listen", 'did you mean "GATEWAY_LISTEN"?'),
    ],
)
def test_an_unknown_override_is_refused_with_a_hint(name: str, hint: str) -> None:
    found = problems("", {name: KEY})
    assert len(found) == 1
    assert found[0].startswith(f"{name}: is not a setting; ")
    assert hint in found[0]


def test_a_wrong_override_names_its_variable_and_its_path() -> None:
    assert problems("", {"GATEWAY_LISTEN": "8080"}) == (
        'listen: "8080" (from GATEWAY_LISTEN) is not host:port; write "127.0.0.1:8080"',
    )


def test_the_variables_of_a_kubernetes_service_called_gateway_are_no_settings() -> None:
    link = "tcp://10.0.0.1:8080"
    env = {
        "GATEWAY_SERVICE_HOST": "10.0.0.1",
        "GATEWAY_SERVICE_PORT": "8080",
        "GATEWAY_SERVICE_PORT_HTTP": "8080",
        "GATEWAY_PORT": link,
        "GATEWAY_PORT_8080_TCP": link,
        "GATEWAY_PORT_8080_TCP_ADDR": "10.0.0.1",
        "GATEWAY_PEERS_SERVICE_HOST": "10.0.0.2",
        "GATEWAY_PEERS_PORT": link,
    }
    assert good("", env) == good()
    assert problems("", {"GATEWAY_PORT": "8080"})


# Keys and secrets.


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        KEY.rstrip("="),
        KEY.replace("+", "-").replace("/", "_"),
        bytes(range(32)).hex(),
        bytes(range(32)).hex().upper(),
    ],
)
def test_a_key_may_be_hex_or_base64_of_either_alphabet_padded_or_not(text: str) -> None:
    assert decode_key(text) == bytes(range(32))
    assert good(f"state: {{keys: ['{text}']}}\n").state.raw_keys() == (bytes(range(32)),)


@given(st.binary(min_size=32, max_size=64))
def test_every_key_that_keygen_could_make_is_read_back(key: bytes) -> None:
    texts = {base64.b64encode(key), base64.urlsafe_b64encode(key), key.hex().encode()}
    for text in texts | {text.rstrip(b"=") for text in texts}:
        assert decode_key(text.decode()) == key


def test_a_key_file_has_one_key_per_line(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# new\n{KEY}\n\n  {OTHER_KEY}  # old\n")
    path = tmp_path / "gateway.yaml"
    path.write_text("state: {keys_file: keys}\n" + ROUTES)
    assert load(path, {}).state.keys == (KEY, OTHER_KEY)


def test_a_bad_key_file_is_refused_by_its_path_and_key_number(tmp_path: Path) -> None:
    (tmp_path / "short").write_text(f"{KEY}\nc2hvcnQ\n{KEY}\n")
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    source = str(tmp_path / "x.yaml")

    def refused(name: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            parse(f"state: {{keys_file: {name}}}\n{ROUTES}", source, {})
        return caught.value.problems

    assert refused("short") == (
        "state.keys_file key 2: has 5 bytes, but at least 32 are needed; make one with `mrtr-gateway keygen`",
        "state.keys_file key 3: is the same key as state.keys_file key 1; remove one of them",
    )
    assert refused("empty") == ("state.keys_file: contains no key; add one with `mrtr-gateway keygen`",)
    assert refused("binary") == ("state.keys_file: is not UTF-8 text; write one key per line",)
    assert refused("gone, ttl_seconds: 600}\nreplica: {id: a, peers: {a: 'b:1'}")[0].startswith("state.keys_file: ")
    assert not any("ephemeral" in line for line in refused("gone}\nreplica: {peers_dns: 'b:1'"))
    assert refused("gone") == (
        "state.keys_file: cannot be read (No such file or directory); check its path and permissions",
    )
    assert problems(f"state: {{keys: ['{KEY}'], keys_file: x}}\n") == (
        "state.keys_file: is set together with state.keys; keep only one of them",
    )


CANARY = "C4naryC4naryC4naryC4naryC4naryC4naryC4naryC4"
LEAKS = [
    f"state: {{keys: {CANARY}}}\n",
    f"state: {{keys: ['{CANARY}', '{CANARY}']}}\n",
    f"state: {{keys: ['{CANARY[:20]}']}}\n",
    f"state: {{keys: ['{CANARY} ']}}\n",
    f"state: {{keys: {{{CANARY}: 1, {CANARY}: 2}}}}\n",
    f"state: {{keys: [[{CANARY}]]}}\n",
    f"state: {{key: [{CANARY}]}}\n",
    f"state: {{{CANARY}: 1}}\n",
    f"{CANARY}: 1\n",
    f"? {CANARY}\n",
    f"state: {{keys: [*{CANARY}]}}\n",
    f"state: {{keys: ['{CANARY}]}}\n",
    f"state: {{keys: [!{CANARY} x]}}\n",
    f"state:\n  keys: {CANARY}: x\n",
    f"state: {{ttl_seconds: {CANARY}}}\n",
    f"log: {{level: {CANARY}}}\n",
    f"replica: {{id: '${{{CANARY}}}'}}\n",
    "state: {keys: ['${K}x y']}\n",
    "replica: {id: '${K} '}\n",
    "hold: {ttl_seconds: '${K}'}\n",
    "state: {keys: [" + "7" * 64 + "]}\n",
    "state: {keys: [" + "7" * 25 + "]}\n",
    f"state: {{keys: {CANARY[:20]}}}\n",
    "replica: {id: " + "7" * 64 + "}\n",
    f"replica: {{id: '{CANARY} ${{N:-x}}'}}\n",
    f"routes: [{{upstream: {{url: 'http://u:{CANARY[:20]}/x@a/'}}}}]\n",
    f"routes: [{{upstream: {{url: 'u:{CANARY[:20]}@a'}}}}]\n",
    f"routes: [{{upstream: {{url: 'ftp://a/?key={CANARY[:20]}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'ftp://u:{CANARY[:20]}@a${{N:-x}}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'http://a/#{CANARY[:20]}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'http://a/?q=\"{CANARY[:20]}'}}}}]\n",
    f"routes: [{{upstream: {{url: 'http://u:{CANARY[:20]} x@a/'}}}}]\n",
    "routes: [{upstream: {url: 'http://${K}@a/'}}]\n",
    "routes: [{upstream: {url: 'http://u:${K}@a/'}}]\n",
]


@pytest.mark.parametrize("text", LEAKS)
def test_a_key_never_stands_in_a_problem(text: str) -> None:
    found = problems(text, {"K": CANARY}, routes="routes" not in text)
    hidden = CANARY[:20] if "${C4" not in text else CANARY + "!"
    assert hidden not in "\n".join(found)
    assert "7" * 20 not in "\n".join(found)


def test_keys_never_stand_in_a_repr_or_the_digest() -> None:
    config = good(f"state: {{keys: ['{KEY}', '{OTHER_KEY}']}}\n")
    assert KEY not in f"{config!r} {config} {config.state!r} {config.state.__rich_repr__()}"
    assert "keys='<2 hidden>'" in repr(config)
    swapped = replace(config, state=State(keys=config.state.keys[::-1]))
    assert digest(config) == digest(swapped)
    assert re.fullmatch(r"[0-9a-f]{12}", digest(config))


def test_a_url_of_a_repr_has_no_secrets() -> None:
    principal = {"source": "jwt", "issuer": "i", "jwks_url": f"https://a/jwks?key={CANARY}"}
    tree = {"principal": principal, "routes": [{"upstream": {"url": f"http://h:1/mcp?key={CANARY}"}}]}
    config = parse(json.dumps(tree), "test", {})
    assert CANARY not in repr(config)
    assert "jwks_url='https://a/jwks'" in repr(config)
    assert "url='http://h:1/mcp'" in repr(config)
    assert config.routes[0].upstream.name == "http://h:1/mcp"


def test_the_digest_tells_configurations_apart() -> None:
    texts = ("", "hold: {max_calls: 1}\n", "listen: a:1\n", f"state: {{keys: ['{KEY}']}}\n")
    assert len({digest(good(text)) for text in texts}) == len(texts)
    assert digest(good("hold: {ttl_seconds: 600}\n")) == digest(good())


# Files.


def test_a_missing_file_and_a_binary_file_are_problems(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read \(.+\); check --config"):
            load(path, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(tmp_path / "binary", {})
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + ROUTES.encode())
    assert load(tmp_path / "bom", {}) == good()


def test_the_short_form_is_one_route_with_the_defaults() -> None:
    assert for_upstream("http://a/x", env={}) == Config(routes=(Route(upstream=Upstream(url="http://a/x")),))


def test_a_flag_wins_over_the_environment_and_is_named_in_its_problem() -> None:
    env = {"GATEWAY_LISTEN": "a:1", "GATEWAY_ADMIN": "a:2", "GATEWAY_LOG__LEVEL": "debug"}
    config = for_upstream("http://a/", "b:1", env=env)
    assert (config.listen, config.admin, config.log.level) == ("b:1", "a:2", "debug")
    with pytest.raises(ConfigError) as caught:
        for_upstream("localhost:9000", "1", "${X}", {})
    assert [re.findall(r"\(from (\S+)\)", problem) for problem in caught.value.problems] == [
        ["--listen"],
        ["--admin"],
        ["--upstream"],
    ]


def test_a_command_of_the_command_line_is_taken_word_by_word() -> None:
    config = for_command(["npx", "${X}", "--flag"], ["KEY", "A=b=c"], "b:1", env={"KEY": "${Y}"})
    assert config.listen == "b:1"
    assert config.routes[0].upstream == Upstream(command=("npx", "${X}", "--flag"), env={"KEY": "${Y}", "A": "b=c"})
    with pytest.raises(ConfigError, match="--env NONE: is not set"):
        for_command(["npx"], ["NONE"], env={})


def test_what_a_command_is_given_is_neither_printed_nor_part_of_the_digest() -> None:
    text = "routes: [{{upstream: {{command: [npx, --key, hunter2], env: {{KEY: {}}}}}}}]"
    one, other = parse(text.format("sesame1"), "x", {}), parse(text.format("sesame2"), "x", {})
    assert "hunter2" not in repr(one)
    assert "sesame" not in repr(one)
    assert one.routes[0].upstream.name == "npx"
    assert digest(one) == digest(other)
    found = problems("routes: [{upstream: {command: [npx], env: {KEY: [sesame]}}}]", routes=False)
    assert found == ("routes[0].upstream.env.KEY: is a list, but a text is expected; put it in quotes",)


def test_two_listeners_may_both_ask_for_any_free_port() -> None:
    assert good("listen: 'a:0'\nadmin: 'a:0'\n").admin == "a:0"


def test_a_url_is_not_spoken_to_over_stdio() -> None:
    found = problems(f"routes: [{{upstream: {{url: '{ROUTE}', transport: stdio}}}}]", routes=False)
    assert found[0].startswith("routes[0].upstream.transport: is stdio, but stdio has no url; give upstream.command")


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), ("a.b-c:0", ("a.b-c", 0))],
)
def test_an_address_splits_into_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize(
    "text", ["::1:80", "[::1]", "a:", "a:b", "a b:1", "[1.2.3.4]:1", "a:-1", "http://a:1", "a:1\n"]
)
def test_a_text_that_is_no_address_raises(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(text)


def test_the_full_example_has_every_key_with_its_default() -> None:
    full, minimal = ROOT / "config/full.yaml", ROOT / "config/minimal.yaml"
    assert load(full, {}) == load(minimal, {})
    written = re.findall(r"^(?:  )*(?:- )?([a-z_]+):", full.read_text(), re.MULTILINE)
    assert sorted(written) == sorted(keys_of(config_shape()))


def keys_of(kind: inspect.Type) -> Iterator[str]:
    while isinstance(kind, inspect.Metadata | inspect.VarTupleType):
        kind = kind.type if isinstance(kind, inspect.Metadata) else kind.item_type
    for field in kind.fields if isinstance(kind, inspect.StructType) else ():
        yield field.name
        yield from keys_of(field.type)


def test_the_published_schema_is_the_generated_one() -> None:
    run = [sys.executable, "-W", "error", "-m", "gateway.config"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert (ROOT / "config/mrtr-gateway.schema.json").read_text() == printed
    assert json.loads(printed) == json.loads(json.dumps(json_schema()))


def test_the_schema_describes_every_key_and_allows_no_other() -> None:
    for section in json_schema()["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(item.get("description") for item in section["properties"].values()), section["title"]


def test_the_configuration_of_the_command_line_has_a_digest() -> None:
    config = for_upstream("http://127.0.0.1:9000/mcp", "127.0.0.1:8080", "127.0.0.1:9090", {})
    assert len(digest(config)) == 12
    assert {type(text) for text in (config.listen, config.admin, config.routes[0].upstream.url)} == {str}

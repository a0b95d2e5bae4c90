"""From a tree to structs: each value of a wrong type or range, and each unknown key, is a problem."""

import pytest
from msgspec import Struct, inspect

from gateway.config.parsing.decoder import Walker
from tests.support.configurations import (
    KEY,
    ROUTE,
    check_refused,
    good,
    problems,
)

REFUSED = [
    ("lisen: a:1\n", 'lisen: unknown key; did you mean "listen"?'),
    ("hold: {ttl: 5}\n", 'hold.ttl: unknown key; did you mean "ttl_seconds"?'),
    (
        "cach: {}\n",
        (
            "cach: unknown key; remove it, or use one of: listen, public_url, admin, workers, tls, state, replica, "
            "hold, limits, timeouts, sessions, legs, tasks, principal, security, log, traces, errors, debug, routes"
        ),
    ),
    ("cache: {}\n", "cache: unknown key; it is a key of routes[]; move it there"),
    ("body_bytes: 64\n", "body_bytes: unknown key; it is a key of limits; move it there"),
    ("verify: false\n", "verify: unknown key; it is a key of routes[].upstream.tls; move it there"),
    (
        "timeouts: {session_ttl_seconds: 5}\n",
        "timeouts.session_ttl_seconds: unknown key; it is a key of state; move it there, out of timeouts",
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}', forward_headers: [x-a]}}}}]",
        (
            "routes[0].upstream.forward_headers: unknown key; it is a key of routes[]; move it there, out of "
            "routes[].upstream"
        ),
    ),
    (
        f"routes: [{{upstream: {{url: '{ROUTE}'}}, listen: 'a:1'}}]",
        "routes[0].listen: unknown key; it is a key of the top level or of replica; move it there, out of routes[]",
    ),
    (f"state: {{key_file: {__file__}}}\n", 'state.key_file: unknown key; did you mean "keys_file"?'),
    ("hold: 5\n", "hold: 5 is a number, but a section is expected; write its keys below it, such as ttl_seconds"),
    (
        "hold:\n",
        "hold: is empty, but a section is expected; write its keys below it, such as ttl_seconds, or remove it",
    ),
    (
        "workers: true\n",
        "workers: true is true or false, but a whole number is expected; write e.g. 1",
    ),
    ("workers: 1.0\n", "workers: 1.0 is a number, but a whole number is expected; write 1"),
    ("workers: 0\n", "workers: 0 is too small; write 1 or more"),
    ("legs: {rounds: 10}\n", "legs.rounds: 10 is too large; write 9 or less"),
    ("hold: {quiet_seconds: -1}\n", "hold.quiet_seconds: -1 is too small; write 0 or more"),
    ("log: {level: inf}\n", 'log.level: "inf" is not one of the choices; did you mean "info"?'),
    ("log: {format: 5}\n", "log.format: 5 is not one of the choices; write auto or console or json"),
    ("state: {keys_file: ''}\n", "state.keys_file: is empty; give a text, or remove it"),
    ("state: {keys_file: 5}\n", "state.keys_file: 5 is a number, but a text is expected; put it in quotes"),
    ("# no routes\n", 'routes: is missing; add routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]'),
    ("routes: []", 'routes: is an empty list; add routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]'),
    ("routes: [{path: /mcp}]", 'routes[0].upstream: is missing; add upstream: {url: "http://127.0.0.1:9000/mcp"}'),
    (f"routes: [{{upstrem: {{url: '{ROUTE}'}}, upstream: {{url: '{ROUTE}'}}}}]", None),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, continuation: resume}}]", None),
    (
        "routes: [{upstream: {command: []}}]",
        'routes[0].upstream.command: is an empty list; add command: ["npx", "some-server"]',
    ),
    (
        "principal: {source: bearer}\n",
        'principal.source: "bearer" is not one of the choices; write authorization or header or jwt',
    ),
    (f"routes: [{{upstream: {{url: '{ROUTE}', transport: streamable}}}}]", None),
    (
        "replica: {peers: [a]}\n",
        "replica.peers: is a list, but a mapping is expected; write gw-1: 127.0.0.1:8080, one pair a line",
    ),
    ("traces: 1\n", "traces: 1 is a number; write true or false"),
    ("traces: '${MISSING}'\n", "traces: ${MISSING} is not set; export MISSING, or give a default: ${MISSING:-value}"),
    ("state: {keys: [5]}\n", "state.keys[0]: is a number, but a text is expected; put it in quotes"),
    ("state: {keys: {}}\n", "state.keys: is a mapping, but a list is expected; write its entries as a list"),
    ("replica: {id: ['a']}\n", 'replica.id: a list is not a replica id; write "gw-1"'),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_a_wrong_value_is_one_problem_with_its_path_and_fix(text: str, problem: str | None) -> None:
    check_refused(text, problem)


def test_values_of_each_kind_are_read() -> None:
    config = good(
        "hold: {ttl_seconds: 5, quiet_seconds: 0.5}\nadmin: null\ntraces: true\nlog: {level: debug}\n"
        "security: {allowed_hosts: [A.Example, b.example:80]}\n"
        f"replica: {{id: a, listen: 'b:1', peers: {{a: 'b:1'}}}}\nstate: {{keys: ['{KEY}']}}\n"
    )
    assert (config.hold.ttl_seconds, config.hold.quiet_seconds, config.admin) == (5.0, 0.5, None)
    assert isinstance(config.hold.ttl_seconds, float)
    assert (config.traces, config.log.level) == (True, "debug")
    assert config.security.allowed_hosts == ("a.example", "b.example:80")
    assert config.replica.peers == {"a": "b:1"}


def test_values_of_variables_are_read_by_their_kind() -> None:
    text = "workers: '${N}'\ntraces: '${T}'\nadmin: '${E:-}'\nreplica: {id: '${I}'}\n"
    config = good(text, {"N": "3", "T": "true", "I": "gw-3"})
    assert (config.workers, config.traces, config.admin, config.replica.id) == (3, True, None, "gw-3")
    assert type(config.replica.id) is str


def test_a_list_in_place_of_the_document_is_one_problem() -> None:
    assert problems("- a\n", routes=False) == (
        'document: is a list, but a section is expected; write routes: [{upstream: {url: "http://127.0.0.1:9000/mcp"}}]',
    )


def test_a_value_in_a_mapping_has_its_own_path() -> None:
    assert 'replica.peers.a: "b" is not host:port; write "b:8080"' in problems("replica: {peers: {a: b}}\n")


def test_a_value_that_yaml_could_not_give_leaves_one_problem() -> None:
    assert problems("listen: !tag x\n") == (
        "line 1: has a YAML tag, which is not supported; remove it, or put the value in quotes",
    )


def test_a_model_with_a_type_that_cannot_be_read_is_a_bug() -> None:
    class Odd(Struct):
        value: bytes

    shape = inspect.type_info(Odd)
    assert isinstance(shape, inspect.StructType)
    with pytest.raises(TypeError, match="value: the model uses"):
        Walker(shape, {}).read(shape, {"value": "x"}, "", {})


def test_the_texts_beside_an_unset_variable_are_checked_at_their_own_places() -> None:
    assert problems("state: {keys: ['${UNSET}', short]}\n") == (
        "state.keys[0]: ${UNSET} is not set; export UNSET, or give a default: ${UNSET:-value}",
        "state.keys[1]: is not base64 or hex; make one with `mrtr-gateway keygen`",
    )

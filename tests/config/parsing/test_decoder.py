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
            "hold, limits, timeouts, sessions, legs, tasks, principal, security, log, traces, debug, routes"
        ),
    ),
    ("hold: 5\n", "hold: expected section, e.g. {ttl_seconds: ...}; got 5"),
    ("hold:\n", "hold: expected section, e.g. {ttl_seconds: ...}; got null"),
    ("workers: true\n", "workers: expected whole number, 1 to 1024; got true"),
    ("workers: 1.0\n", "workers: expected whole number, 1 to 1024; got 1.0"),
    ("workers: '1'\n", 'workers: expected whole number, 1 to 1024; got "1"'),
    ("workers: 0\n", "workers: expected whole number, 1 to 1024; got 0"),
    ("legs: {rounds: 10}\n", "legs.rounds: expected whole number, 0 to 9; got 10"),
    ("hold: {quiet_seconds: -1}\n", "hold.quiet_seconds: expected seconds, 0 to 5; got -1"),
    ("hold: {ttl_seconds: 10m}\n", 'hold.ttl_seconds: expected seconds, 0.001 to 86400; got "10m"'),
    ("log: {format: 5}\n", "log.format: expected `auto` or `console` or `json`; got 5"),
    ("state: {keys_file: ''}\n", 'state.keys_file: expected text; got ""'),
    ("state: {keys_file: 5}\n", "state.keys_file: expected text; got 5"),
    ("# no routes\n", "routes: is missing; expected non-empty list of: section, e.g. {path: ...}"),
    ("routes: []", "routes: expected non-empty list of: section, e.g. {path: ...}; got a list"),
    ("routes: {}", "routes: expected non-empty list of: section, e.g. {path: ...}; got a mapping"),
    ("routes: [{path: /mcp}]", "routes[0].upstream: is missing; expected section, e.g. {url: ...}"),
    (f"routes: [{{upstrem: {{url: '{ROUTE}'}}, upstream: {{url: '{ROUTE}'}}}}]", None),
    (f"routes: [{{upstrem: {{url: '{ROUTE}'}}}}]", 'routes[0].upstrem: unknown key; did you mean "upstream"?'),
    (
        "routes: [{upstream: {command: npx server}}]",
        'routes[0].upstream.command: expected non-empty list of: text; got "npx server"',
    ),
    ("replica: {peers: [a]}\n", "replica.peers: expected map of replica id to host:port; got a list"),
    ("traces: yes\n", 'traces: expected true or false; got "yes"'),
    ("traces: '${MISSING}'\n", "traces: ${MISSING} is not set; export MISSING, or give a default: ${MISSING:-value}"),
    ("state: {keys: [5]}\n", "state.keys[0]: expected text; got a secret"),
    ("state: {keys: {}}\n", "state.keys: expected list of: text; got a secret"),
    ("replica: {id: ['a']}\n", 'replica.id: expected replica id, e.g. "gw-1"; got a list'),
    (f"routes: [{{upstream: {{url: '{ROUTE}'}}, forward_headers: [te]}}]", None),
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
    assert problems("- a\n", routes=False) == ("document: expected section, e.g. {listen: ...}; got a list",)


def test_a_value_in_a_mapping_has_its_own_path() -> None:
    assert 'replica.peers.a: expected host:port, e.g. "127.0.0.1:8080"; got "b"' in problems(
        "replica: {peers: {a: b}}\n"
    )


def test_a_value_that_yaml_could_not_give_leaves_one_problem() -> None:
    assert problems("listen: !tag x\n") == ("line 1: has a YAML tag, which is not supported; remove it",)


def test_a_model_with_a_type_that_cannot_be_read_is_a_bug() -> None:
    class Odd(Struct):
        value: bytes

    shape = inspect.type_info(Odd)
    assert isinstance(shape, inspect.StructType)
    with pytest.raises(TypeError, match="the model uses"):
        Walker({}).read(shape, {"value": "x"})

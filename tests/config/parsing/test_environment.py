"""Variables in values, and values from variables."""

import pytest

from tests.support.configurations import (
    KEY,
    good,
    problems,
)


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


def test_the_variables_of_a_kubernetes_service_called_gateway_are_not_settings() -> None:
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


def test_a_variable_for_a_key_of_a_section_that_is_not_a_mapping_leaves_one_problem() -> None:
    assert problems("hold: 5\n", {"GATEWAY_HOLD__TTL_SECONDS": "5"}) == (
        "hold: 5 is a number, but a section is expected; write its keys below it, such as ttl_seconds",
    )

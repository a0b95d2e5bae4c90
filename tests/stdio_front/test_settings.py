"""The configuration of one host: its route, and the environment of its child."""

from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.config import ConfigError, for_command, parse
from gateway.config.programs import environment
from gateway.stdio_front.settings import for_host

TEXT = (
    """
state: {keys: ["%s"], session_keys: [OLD_KEY]}
admin: 127.0.0.1:9999
workers: 4
routes:
  - {path: /a, upstream: {command: [a], env: {OWN: "1"}}}
  - {path: /b, upstream: {url: "http://127.0.0.1:9/mcp"}, credentials: {mode: replace, token: a-token-of-b}}
  - {path: /c, upstream: {url: "http://127.0.0.1:9/mcp?key=query-of-c"}, set_headers: {X-Key: "Bearer header-of-c"}}
  - {path: /d, upstream: {command: [d], env: {SECRET: variable-of-d, DEBUG: "1"}}}
""".replace("OLD_KEY", "f2" * 32)
    % ("f0" * 32)
)


def test_only_the_named_route_is_left_and_nothing_listens() -> None:
    config = for_host(parse(TEXT, "test", {}), "/b", {})
    assert [route.path for route in config.routes] == ["/b"]
    assert (config.admin, config.workers, config.replica.peers) == (None, 1, {})


def test_the_first_route_is_taken_if_none_is_named() -> None:
    assert for_host(parse(TEXT, "test", {}), None, {}).routes[0].path == "/a"


def test_an_unknown_route_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="/a, /b"):
        for_host(parse(TEXT, "test", {}), "/e", {})


def test_states_get_a_key_of_their_own() -> None:
    config = parse(TEXT, "test", {})
    assert for_host(config, None, {}).state.keys != config.state.keys
    assert for_host(config, None, {}).state.keys != for_host(config, None, {}).state.keys


def test_a_child_gets_the_environment_without_what_is_the_gateways() -> None:
    own = {
        "PATH": "/bin",
        "API_KEY": "key",
        "GATEWAY_ADMIN": "127.0.0.1:1",
        "MRTR_STATE_KEY": "f1" * 32,
        "COPY_OF_KEY": "f0" * 32,
        "COPY_OF_TOKEN": "a-token-of-b",
        "OLD_KEY": "f2" * 32,
        "PART_OF_URL": "query-of-c",
        "PART_OF_HEADER": "header-of-c",
        "VARIABLE_OF_D": "variable-of-d",
        "SHORT": "head",
    }
    (route,) = for_host(parse(TEXT, "test", {}), "/a", own).routes
    assert environment(route.upstream, own) == {"PATH": "/bin", "API_KEY": "key", "SHORT": "head", "OWN": "1"}


def test_a_child_gets_what_its_own_route_is_made_of() -> None:
    own = {"SECRET_OF_D": "variable-of-d"}
    (route,) = for_host(parse(TEXT, "test", {}), "/d", own).routes
    assert environment(route.upstream, own) == {**own, "SECRET": "variable-of-d", "DEBUG": "1"}


def test_a_host_keeps_one_session_for_as_long_as_it_lives() -> None:
    (route,) = for_host(for_command(["server"]), None, {}).routes
    assert route.sessions.affinity == "principal"
    assert route.sessions.idle_seconds == 86_400
    assert route.upstream.warm == 0


def test_a_command_of_a_host_may_take_long_to_start_but_a_server_behind_a_url_may_not() -> None:
    config = parse(TEXT, "test", {})
    assert [for_host(config, path, {}).timeouts.handshake_seconds for path in ("/a", "/b")] == [55, 10]


@pytest.mark.parametrize("era", ["bridge", "mirror"])
def test_the_era_may_be_given(era: str) -> None:
    (route,) = for_host(for_command(["server"]), None, {}, era).routes
    assert route.era == era


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "wrap takes exactly one of -- COMMAND, --upstream URL or --config FILE; you gave 0"),
        (["--upstream", "http://a/mcp", "--", "cat"], "or --config FILE; you gave 2"),
        (["--route", "/x", "--", "cat"], "--route chooses a route of the file that --config names"),
    ],
)
def test_wrap_takes_one_server(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wrap", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_host_sees_which_program_refuses_which_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("state: {keys: ['${NOT_SET_ANYWHERE}']}\nroutes: [{upstream: {command: [a]}}]\n")
    assert main(["wrap", "--config", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"mrtr-gateway: {file}:1:16: state.keys[0]: ${{NOT_SET_ANYWHERE}}")

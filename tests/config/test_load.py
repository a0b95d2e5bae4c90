"""Loading: files, command lines, digests, and every problem at once."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import (
    Config,
    ConfigError,
    Route,
    Upstream,
    digest,
    for_command,
    for_upstream,
    load,
    parse,
)
from tests.support.authority import Authority
from tests.support.configurations import (
    KEY,
    ROUTE,
    ROUTES,
    good,
    problems,
)


def test_every_error_is_reported_at_once() -> None:
    text = "listen: 8080\nworkers: on\nhold: {ttl_second: 5, max_calls: many}\nlisten: a:1\nadmin: 'b:2'\n"
    found = problems(text + "legs: []\nprincipal: {source: header}\nrotes: []\n", {"GATEWAY_ADMN": "x"}, routes=False)
    assert [problem.partition(":")[0] for problem in found] == [
        "GATEWAY_ADMN",
        "listen",
        "workers",
        "hold.ttl_second",
        "hold.max_calls",
        "line 4",
        "legs",
        "principal.header",
        "principal.trusted_proxies",
        "rotes",
        "routes",
    ]


def test_a_misspelt_key_is_one_problem_although_it_breaks_rules_too() -> None:
    assert problems("routes: [{upstream: {ulr: 'http://a/'}}]", routes=False) == (
        'routes[0].upstream.ulr: unknown key; did you mean "url"?',
    )
    assert problems("state: {key: [x]}\nreplica: {id: a, listen: 'b:1', peers: {a: 'b:1'}}\n") == (
        'state.key: unknown key; did you mean "keys"?',
    )


def test_a_value_with_a_tag_or_an_alias_is_one_problem_although_it_breaks_rules_too() -> None:
    for value in ("!!binary aGk=", "*x"):
        found = problems(f"routes: [{{upstream: {{url: {value}}}}}]", routes=False)
        assert len(found) == 1
        assert found[0].startswith("line 1: ")


@given(st.text(alphabet=st.sampled_from("abk:-[]{}&*!|>'\"#%@`,? \n0129.~${}"), max_size=60))
def test_any_text_gives_a_configuration_or_a_configuration_error(text: str) -> None:
    with suppress(ConfigError):
        parse(text, "x", {})


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


def test_the_digests_of_different_configurations_differ() -> None:
    texts = ("", "hold: {max_calls: 1}\n", "workers: 2\n", f"state: {{keys: ['{KEY}']}}\n")
    assert len({digest(good(text)) for text in texts}) == len(texts)
    assert digest(good("hold: {ttl_seconds: 600}\n")) == digest(good())


def test_a_digest_is_the_same_however_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` says whether a file is the one that runs, which was named by its full path."""
    authority = Authority(tmp_path).sign("ca").name
    file = tmp_path / "gateway.yaml"
    _ = file.write_text(f"routes: [{{upstream: {{url: 'https://h/mcp', tls: {{ca_file: {authority}}}}}}}]\n")
    monkeypatch.chdir(tmp_path)
    assert digest(load(file.name)) == digest(load(file))


def test_the_own_id_and_addresses_of_a_replica_are_not_in_the_digest() -> None:
    own = "listen: a:1\nadmin: a:2\nreplica: {id: gw-1, listen: 'a:3'}\n"
    assert digest(good(own)) == digest(good("replica: {id: gw-2, listen: 'b:3'}\n")) == digest(good())


def test_the_arguments_and_variables_of_a_command_are_neither_printed_nor_in_the_digest() -> None:
    text = "routes: [{{upstream: {{command: [npx, --key, hunter2], env: {{KEY: {}}}}}}}]"
    one, other = parse(text.format("sesame1"), "x", {}), parse(text.format("sesame2"), "x", {})
    assert "hunter2" not in repr(one)
    assert "sesame" not in repr(one)
    assert one.routes[0].upstream.name == "npx"
    assert digest(one) == digest(other)
    found = problems("routes: [{upstream: {command: [npx], env: {KEY: [sesame]}}}]", routes=False)
    assert found == ("routes[0].upstream.env.KEY: is a list, but a text is expected; write one text",)


def test_a_missing_file_and_a_binary_file_are_problems(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be read \(.+\); check its path"):
            load(path, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(tmp_path / "binary", {})
    (tmp_path / "long").write_text("# \U0001f512" + "\U0001f512" * 300_000)
    with pytest.raises(ConfigError, match="has over 262144 characters"):
        load(tmp_path / "long", {})
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + ROUTES.encode())
    assert load(tmp_path / "bom", {}) == good()


def test_the_short_form_is_one_route_with_the_defaults() -> None:
    assert for_upstream("http://a/x") == Config(routes=(Route(upstream=Upstream(url="http://a/x")),))


def test_a_flag_wins_over_the_environment_and_is_named_in_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"LISTEN": "a:1", "ADMIN": "a:2", "LOG__LEVEL": "debug"}.items():
        monkeypatch.setenv(f"GATEWAY_{name}", text)
    config = for_upstream("http://a/", "b:1")
    assert (config.listen, config.admin, config.log.level) == ("b:1", "a:2", "debug")
    with pytest.raises(ConfigError) as caught:
        for_upstream("localhost:9000", "1", "${X}")
    assert [re.findall(r"\(from (\S+)\)", problem) for problem in caught.value.problems] == [
        ["--listen"],
        ["--admin"],
        ["--upstream"],
    ]


def test_a_command_of_the_command_line_is_taken_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "${Y}")
    config = for_command(["npx", "${X}", "--flag"], ["KEY", "A=b=c"], "b:1")
    assert config.listen == "b:1"
    assert config.routes[0].upstream == Upstream(command=("npx", "${X}", "--flag"), env={"KEY": "${Y}", "A": "b=c"})
    with pytest.raises(ConfigError, match="--env NONE: is not set"):
        for_command(["npx"], ["NONE"])


def test_the_configuration_of_the_command_line_has_a_digest() -> None:
    config = for_upstream("http://127.0.0.1:9000/mcp", "127.0.0.1:8080", "127.0.0.1:9464")
    assert len(digest(config)) == 12
    assert {type(text) for text in (config.listen, config.admin, config.routes[0].upstream.url)} == {str}

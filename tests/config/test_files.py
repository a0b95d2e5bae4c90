"""The files that a configuration names: keys, secrets, and how a bad one is refused."""

import json
from pathlib import Path

import pytest

from gateway.config import (
    Config,
    ConfigError,
    Route,
    Upstream,
    UpstreamTls,
    contents,
    digest,
    load,
    parse,
)
from gateway.config.model.config import Tls
from tests.support.configurations import (
    KEY,
    OTHER_KEY,
    ROUTES,
    missing,
    problems,
    route_problems,
    with_route,
)

SECRET = "s3cret-of-the-gateway"


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
        "state.keys_file: key 2 has 5 bytes, but at least 32 are needed; make one with `mrtr-gateway keygen`",
        "state.keys_file: key 3 is the same key as state.keys_file key 1; remove one of them",
    )
    assert refused("empty") == ("state.keys_file: contains no key; add one with `mrtr-gateway keygen`",)
    assert refused("binary") == ("state.keys_file: is not UTF-8 text; write one key per line",)
    assert refused("gone, ttl_seconds: 600}\nreplica: {id: a, peers: {a: 'b:1'}")[0].startswith("state.keys_file: ")
    assert not any("ephemeral" in line for line in refused("gone}\nreplica: {peers_dns: 'b:1'"))
    assert refused("gone") == (f"state.keys_file: {missing(tmp_path / 'gone')}",)
    assert problems(f"state: {{keys: ['{KEY}'], keys_file: x}}\n") == (
        "state.keys_file: is set together with state.keys; keep only one of them",
    )


def test_a_secret_file_is_read_from_the_configurations_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"\n{SECRET}\n")
    config = with_route(folder=str(tmp_path), credentials={"mode": "replace", "token_file": "secret"})
    assert config.routes[0].credentials.token == SECRET
    assert SECRET not in repr(config)
    other = {"credentials": {"mode": "replace", "token_file": "secret"}}
    (tmp_path / "secret").write_text("renewed")
    assert digest(with_route(folder=str(tmp_path), **other)) == digest(config), "a digest says nothing of a secret"
    for text in ("", "two\nlines", "\x00", "ä"):
        (tmp_path / "secret").write_text(text)
        assert route_problems(folder=str(tmp_path), **other) == (
            "routes[0].credentials.token_file: is not one line of plain text; write the secret and nothing else",
        )
    assert route_problems(folder=str(tmp_path), credentials={"mode": "replace", "token_file": "none"}) == (
        f"routes[0].credentials.token_file: {missing(tmp_path / 'none')}",
    )
    both = {"mode": "replace", "token_file": "secret", "token": SECRET}
    assert route_problems(folder=str(tmp_path), credentials=both) == (
        "routes[0].credentials.token_file: is set together with token; keep only one of them",
    )


JWT = {"source": "jwt", "issuer": "i", "jwks_file": "keys.json"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, None),
        (b"nothing", 'is not a JWKS, which is JSON with a list "keys"; fetch it from the issuer again'),
    ],
)
def test_a_key_set_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None, problem: str | None) -> None:
    if content is not None:
        (tmp_path / "keys.json").write_bytes(content)
    problem = problem or missing(tmp_path / "keys.json")
    assert route_problems({"principal": JWT}, str(tmp_path)) == (f"principal.jwks_file: {problem}",)


def test_a_key_set_is_found_in_the_folder_of_the_configuration(tmp_path: Path) -> None:
    key = {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}))
    config = with_route({"principal": JWT}, str(tmp_path))
    assert config.principal.jwks_file == str(tmp_path / "keys.json")


def test_the_contents_change_with_a_file_and_leave_out_missing_ones(tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    tls = UpstreamTls(ca_file=str(file), cert_file=str(tmp_path / "none.pem"))
    config = Config(
        routes=(Route(path="/a", upstream=Upstream(url="https://a/", tls=tls)),), tls=Tls(cert_file=str(file))
    )
    assert contents(config) == {}
    file.write_text("one")
    before = contents(config)
    assert before.keys() == {"tls.cert_file", "routes[/a].upstream.tls.ca_file"}
    file.write_text("two")
    after = contents(config)
    assert all(after[key] != before[key] for key in before)

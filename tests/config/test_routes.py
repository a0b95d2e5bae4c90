"""What routes, credentials, headers, TLS and verified callers may be configured to be."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import inspect

from gateway.config import Config, ConfigError, cautions, digest, on_route, parse
from gateway.config.route_overrides import OWN_SECTIONS

SECRET = "s3cret-of-the-gateway"


def loaded(over: Any = (), folder: str = "", **route: Any) -> Config:
    tree = {"routes": [{"path": "/a", "upstream": {"url": "https://a.example/mcp"}, **route}], **dict(over)}
    return parse(yaml.safe_dump(tree), f"{folder}/gateway.yaml" if folder else "gateway.yaml", {})


def problems(over: Any = (), folder: str = "", **route: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        loaded(over, folder, **route)
    return caught.value.problems


ROUTE: list[tuple[dict[str, Any], str]] = [
    (
        {"credentials": {"mode": "replace"}},
        "credentials.token: is missing, but mode is replace; give token or token_file",
    ),
    ({"credentials": {"token": SECRET}}, "credentials.token: is only read with mode: replace; set that, or remove it"),
    ({"credentials": "drop"}, 'credentials: "drop" is a text, but a section is expected; write key: value'),
    (
        {"credentials": {"mode": "replace", "token": f"{SECRET}\nx"}},
        'credentials.token: a secret is not one line of plain text for a header; write "acme"',
    ),
    ({"set_headers": {"x-a": 5}}, "set_headers.x-a: is a number, but a text is expected; put it in quotes"),
    (
        {"set_headers": {"x-a": ""}},
        'set_headers.x-a: a secret is not one line of plain text for a header; write "acme"',
    ),
    (
        {"set_headers": {"x-a": SECRET}, "forward_headers": ["X-A"]},
        'set_headers: lists "x-a", which is in forward_headers too; keep one',
    ),
    ({"drop_headers": ["x-a", "x-a"]}, 'drop_headers: lists "x-a" 2 times; keep one'),
    *(
        ({"set_headers": {name: SECRET}}, f'set_headers.{name}: "{name}" is written by the gateway itself; remove it')
        for name in ("Host", "Content-Length", "Authorization", "Mcp-Session-Id", "Accept", "Origin", "Sec-Fetch-Mode")
    ),
    *(
        (
            {"drop_headers": [name]},
            f'drop_headers[0]: "{name}" concerns one connection and is never forwarded; remove it',
        )
        for name in ("Connection", "Transfer-Encoding", "Keep-Alive", "Upgrade")
    ),
    (
        {"hold": {"max_calls": 5}},
        "hold.max_calls: unknown key; remove it, or use one of: ttl_seconds, quiet_seconds, ",
    ),
    (
        {"forward_headers": ["x-api-key"], "bind_headers": ["x-apikey"]},
        (
            'bind_headers: lists "x-apikey", which is not in forward_headers and so does not go upstream; '
            'did you mean "x-api-key"?'
        ),
    ),
    (
        {"bind_headers": ["X-Tenant"]},
        'bind_headers: lists "x-tenant", which is not in forward_headers and so does not go upstream; add it there, ',
    ),
    (
        {"forward_headers": ["x-api-key"], "bind_headers": ["x-api-key", "X-Api-Key"]},
        'bind_headers: lists "x-api-key" 2 times; keep one',
    ),
    ({"bind_headers": ["authorization"]}, 'bind_headers[0]: "authorization" is written by the gateway itself'),
    ({"legs": {"rounds": 10}}, "legs.rounds: 10 is too large; write 9 or less"),
    (
        {"upstream": {"url": "http://a/mcp", "tls": {"verify": False}}},
        "upstream.tls: is set, but upstream.url is not https; give an https url, or remove it",
    ),
    (
        {"upstream": {"url": "https://a/mcp", "tls": {"verify": False, "server_name": "b"}}},
        "upstream.tls.verify: is false, so ca_file and server_name have no effect; remove verify, or remove them",
    ),
    (
        {"upstream": {"url": "https://a/mcp", "tls": {"verify": "no"}}},
        'upstream.tls.verify: "no" is a text; write true or false',
    ),
]


@pytest.mark.parametrize(("route", "said"), ROUTE)
def test_a_wrong_route_is_one_problem_and_tells_no_secret(route: dict[str, Any], said: str) -> None:
    (problem,) = problems(**route)
    assert problem.startswith(f"routes[0].{said}")
    assert SECRET not in problem


PRINCIPAL: list[tuple[dict[str, Any], set[str]]] = [
    ({"source": "jwt"}, {"issuer: is missing", "jwks_url: neither of jwks_url and jwks_file"}),
    (
        {"source": "jwt", "issuer": "i", "jwks_url": "http://as.example/jwks"},
        {"jwks_url: is http: an attacker on the path could replace the signing keys"},
    ),
    ({"issuer": "i"}, {"issuer: is only read with principal.source: jwt"}),
    (
        {"source": "jwt", "issuer": "i", "jwks_url": "https://a/j", "algorithms": ["HS256"]},
        {'algorithms[0]: "HS256" is not one of the choices'},
    ),
    ({"source": "jwt", "issuer": "i", "jwks_url": "https://a/j", "algorithms": []}, {"algorithms: is an empty list"}),
    ({"source": "jwt", "issuer": "i", "jwks_url": "https://a/j", "header": "x-u"}, {"header: is only read with"}),
]


@pytest.mark.parametrize(("principal", "said"), PRINCIPAL)
def test_a_wrong_way_to_tell_callers_is_refused(principal: dict[str, Any], said: set[str]) -> None:
    found = problems({"principal": principal})
    assert len(found) == len(said)
    assert all(any(each.startswith(f"principal.{start}") for each in found) for start in said), found


def test_a_secret_file_is_read_from_the_configurations_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"\n{SECRET}\n")
    config = loaded(folder=str(tmp_path), credentials={"mode": "replace", "token_file": "secret"})
    assert config.routes[0].credentials.token == SECRET
    assert SECRET not in repr(config)
    other = {"credentials": {"mode": "replace", "token_file": "secret"}}
    (tmp_path / "secret").write_text("renewed")
    assert digest(loaded(folder=str(tmp_path), **other)) == digest(config), "a digest says nothing of a secret"
    for text in ("", "two\nlines", "\x00", "ä"):
        (tmp_path / "secret").write_text(text)
        assert problems(folder=str(tmp_path), **other) == (
            "routes[0].credentials.token_file: is not one line of plain text; write the secret and nothing else",
        )
    assert problems(folder=str(tmp_path), credentials={"mode": "replace", "token_file": "none"}) == (
        "routes[0].credentials.token_file: cannot be read (No such file or directory); check its path and permissions",
    )
    both = {"mode": "replace", "token_file": "secret", "token": SECRET}
    assert problems(folder=str(tmp_path), credentials=both) == (
        "routes[0].credentials.token_file: is set together with token; keep only one of them",
    )


def bare(kind: inspect.Type) -> list[inspect.Type]:
    """What a key may be, without None and without words."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    types = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    found = [each.type if isinstance(each, inspect.Metadata) else each for each in types]
    return [each for each in found if not isinstance(each, inspect.NoneType)]


@pytest.mark.parametrize("section", OWN_SECTIONS)
def test_a_routes_own_key_takes_what_the_key_in_common_takes(section: str) -> None:
    common = {field.name: field for field in inspect.type_info(type(getattr(loaded(), section))).fields}  # type: ignore[attr-defined]
    own = [field for field in inspect.type_info(OWN_SECTIONS[section]).fields if field.name != "affinity"]  # type: ignore[attr-defined]
    assert len(own) > 1
    for field in own:
        assert bare(field.type) == bare(common[field.name].type), field.name
        assert field.default is None


def test_a_route_has_its_own_keys_and_the_others_in_common() -> None:
    config = loaded({"hold": {"ttl_seconds": 5, "quiet_seconds": 1}}, hold={"quiet_seconds": 0}, legs={"rounds": 1})
    there = on_route(config, config.routes[0])
    assert (there.hold.ttl_seconds, there.hold.quiet_seconds, there.legs.rounds) == (5, 0, 1)
    assert there.limits == config.limits
    assert (config.hold.quiet_seconds, config.legs.rounds) == (1, 4)
    plain = loaded()
    assert on_route(plain, plain.routes[0]) is plain


def test_what_is_allowed_and_dangerous_is_said() -> None:
    replace = {"mode": "replace", "token": SECRET}
    assert not list(cautions(loaded(credentials=replace))), "loopback"
    open_to_all = {"listen": "0.0.0.0:8080"}
    (said,) = cautions(loaded(open_to_all, credentials=replace))
    assert said.startswith("routes[/a].credentials.mode is replace, but callers are not verified")
    verified = {"principal": {"source": "jwt", "issuer": "i", "jwks_url": "https://a/j"}}
    assert not list(cautions(loaded({**open_to_all, **verified}, credentials=replace)))
    assert msgspec.json.encode([said]).find(SECRET.encode()) < 0


TRACE_AND_PROXY = [
    *("traceparent", "tracestate", "baggage", "x-request-id", "x-forwarded-for", "x-forwarded-user"),
    *("user-agent", "accept-language"),
]


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        ({}, ()),
        ({"forward_headers": ["X-Api-Key", *TRACE_AND_PROXY, "cookie"]}, ("x-api-key", "cookie")),
        ({"forward_headers": ["x-api-key", "x-forwarded-user"], "bind_headers": []}, ()),
        (
            {"forward_headers": ["x-api-key", "x-forwarded-user"], "bind_headers": ["X-Forwarded-User"]},
            ("x-forwarded-user",),
        ),
    ],
)
def test_forwarded_headers_are_credentials_unless_they_speak_of_trace_or_proxy(
    keys: dict[str, Any], bound: tuple[str, ...]
) -> None:
    route = {"upstream": {"url": "http://a/mcp"}, **keys}
    assert parse(yaml.safe_dump({"routes": [route]}), "t", {}).routes[0].bound_headers == bound


def test_a_header_that_may_be_a_credential_and_is_not_bound_is_said() -> None:
    names = ["x-api-key", "x-forwarded-for", "x-forwarded-access-token"]
    (said,) = cautions(loaded(forward_headers=names))
    assert said.startswith(
        "routes[/a].forward_headers has x-forwarded-access-token, which requestStates are not bound to"
    )
    for bound in ([], names[:1], names[2:]):
        assert not list(cautions(loaded(forward_headers=names, bind_headers=bound)))
    assert not list(cautions(loaded(forward_headers=names[:2])))

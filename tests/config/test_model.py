"""The structs of the configuration: their defaults, and what they hide when they are printed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import inspect
from msgspec.structs import replace

from gateway.config import (
    State,
    digest,
    load,
    parse,
)
from gateway.config.load import config_shape
from gateway.config.model import Cache, Freshness
from tests.support.configurations import (
    KEY,
    OTHER_KEY,
    good,
)

SECRET = "s3cret-of-the-gateway"
ROOT = Path(__file__).parents[2]


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


def test_the_times_of_drains_and_peers_have_their_defaults() -> None:
    config = good()
    assert config.hold.drain_delay_seconds == 2
    assert (config.timeouts.peer_connect_seconds, config.timeouts.peer_accept_seconds) == (0.5, 1)
    assert good("hold: {drain_delay_seconds: 0}\n").hold.drain_delay_seconds == 0


def test_no_key_is_in_a_repr_or_in_the_digest() -> None:
    config = good(f"state: {{keys: ['{KEY}', '{OTHER_KEY}']}}\n")
    assert KEY not in f"{config!r} {config} {config.state!r} {config.state.__rich_repr__()}"
    assert "keys='<2 hidden>'" in repr(config)
    swapped = replace(config, state=State(keys=config.state.keys[::-1]))
    assert digest(config) == digest(swapped)
    assert re.fullmatch(r"[0-9a-f]{12}", digest(config))


def test_a_url_of_a_repr_has_no_secrets() -> None:
    principal = {"source": "jwt", "issuer": "i", "jwks_url": f"https://a/jwks?key={SECRET}"}
    tree = {"principal": principal, "routes": [{"upstream": {"url": f"http://h:1/mcp?key={SECRET}"}}]}
    config = parse(json.dumps(tree), "test", {})
    assert SECRET not in repr(config)
    assert "jwks_url='https://a/jwks'" in repr(config)
    assert "url='http://h:1/mcp'" in repr(config)
    assert config.routes[0].upstream.name == "http://h:1/mcp"


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
def test_forwarded_headers_are_credentials_except_for_those_of_traces_and_proxies(
    keys: dict[str, Any], bound: tuple[str, ...]
) -> None:
    route = {"upstream": {"url": "http://a/mcp"}, **keys}
    assert parse(yaml.safe_dump({"routes": [route]}), "t", {}).routes[0].bound_headers == bound


def test_the_keys_of_a_state_are_read_as_bytes() -> None:
    assert State(keys=(KEY, OTHER_KEY)).raw_keys() == (bytes(range(32)), bytes(range(200, 240)))


def test_freshness_of_one_method_overrides_that_of_all() -> None:
    assert Cache(ttl_ms=5, scope="public").of("tools/list") == (5, "public")
    cache = Cache(ttl_ms=5, methods={"tools/list": Freshness(scope="public"), "prompts/list": Freshness(ttl_ms=7)})
    assert cache.of("tools/list") == (5, "public")
    assert cache.of("prompts/list") == (7, "private")
    assert cache.of("resources/list") == (5, "private")

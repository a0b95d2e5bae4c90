"""Sections with secrets hide them when they are printed."""

import json
import re

from msgspec.structs import replace

from gateway.config import State, digest, parse
from tests.support.configurations import KEY, OTHER_KEY, good

SECRET = "s3cret-of-the-gateway"


def test_no_key_is_in_a_repr_or_in_the_digest() -> None:
    config = good(f"state: {{keys: ['{KEY}', '{OTHER_KEY}']}}\n")
    assert KEY not in f"{config!r} {config} {config.state!r}"
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

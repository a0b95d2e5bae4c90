"""Sections print no values, since many are secrets."""

import re

from msgspec.structs import replace

from gateway.config import State, digest
from tests.support.configurations import KEY, OTHER_KEY, good


def test_no_value_is_in_a_repr_and_no_key_in_the_digest() -> None:
    config = good(f"state: {{keys: ['{KEY}', '{OTHER_KEY}']}}\n")
    assert f"{config!r} {config.routes}" == "Config(...) (Route(...),)"
    swapped = replace(config, state=State(keys=config.state.keys[::-1]))
    assert digest(config) == digest(swapped)
    assert re.fullmatch(r"[0-9a-f]{12}", digest(config))

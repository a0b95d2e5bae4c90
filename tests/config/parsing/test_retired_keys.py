"""Keys of earlier releases: refused with what replaces them, wherever they stand."""

import pytest
from msgspec import inspect

from gateway.config.load import config_shape
from gateway.config.parsing.environment import _places
from gateway.config.parsing.retired_keys import RETIRED
from tests.support.configurations import ROUTE, problems

CAP = "sessions: {max_newcomers: 5}"


@pytest.mark.parametrize(
    ("text", "path"), [(CAP, "sessions"), (f"routes: [{{upstream: {{url: '{ROUTE}'}}, {CAP}}}]", "routes[0].sessions")]
)
def test_a_retired_key_is_refused_with_what_replaces_it(text: str, path: str) -> None:
    found = problems(f"{text}\n", routes="routes" not in text)
    assert found == (f"{path}.max_newcomers: was removed: {RETIRED['sessions.max_newcomers']}",)


def test_so_is_its_variable() -> None:
    name = "GATEWAY_SESSIONS__MAX_NEWCOMERS"
    assert problems("", {name: "5"}) == (f"{name}: was removed: {RETIRED['sessions.max_newcomers']}",)


def test_no_key_that_is_read_is_retired() -> None:
    shape = config_shape()
    assert isinstance(shape, inspect.StructType)
    read = {".".join(keys) for _, keys in _places(shape, ())}
    assert read
    assert not read.intersection(RETIRED)

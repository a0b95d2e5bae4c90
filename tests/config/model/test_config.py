"""The structs of the configuration: their defaults."""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import inspect

from gateway.config import (
    State,
    load,
)
from gateway.config.load import config_shape
from tests.support.configurations import (
    KEY,
    OTHER_KEY,
)

ROOT = Path(__file__).parents[3]


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


def test_the_keys_of_a_state_are_read_as_bytes() -> None:
    state = State(keys=(KEY,), session_keys=(OTHER_KEY,))
    assert state.raw_keys() == (bytes(range(32)),)
    assert state.raw_session_keys() == (bytes(range(200, 240)),)

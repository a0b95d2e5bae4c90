"""State keys as text."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.parsing.state_keys import decode_key, read_key_lines
from tests.support.configurations import (
    KEY,
    good,
)


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        KEY.rstrip("="),
        KEY.replace("+", "-").replace("/", "_"),
        bytes(range(32)).hex(),
        bytes(range(32)).hex().upper(),
    ],
)
def test_a_key_may_be_hex_or_base64_of_either_alphabet_padded_or_not(text: str) -> None:
    assert decode_key(text) == bytes(range(32))
    assert good(f"state: {{keys: ['{text}']}}\n").state.raw_keys() == (bytes(range(32)),)


@given(st.binary(min_size=32, max_size=64))
def test_every_key_that_keygen_could_make_is_read_back(key: bytes) -> None:
    texts = {base64.b64encode(key), base64.urlsafe_b64encode(key), key.hex().encode()}
    for text in texts | {text.rstrip(b"=") for text in texts}:
        assert decode_key(text.decode()) == key


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a b", "is not base64 or hex"),
        ("A" * 45, "is not base64 or hex"),
        ("c2hvcnQ", "has 5 bytes, but at least 32 are needed"),
    ],
)
def test_a_text_that_is_not_a_key_raises(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        decode_key(text)


def test_a_key_file_has_comments_and_blank_lines() -> None:
    assert read_key_lines(f"# new\n{KEY}  # first\n\n  b\n") == (KEY, "b")

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.json_text.unpaired_surrogates import MAX_HALVES, well_formed

_TOKENS = (
    r"\ud83d",
    r"\uDE00",
    r"\ud83d\ude00",
    r"\\",
    r"\n",
    r"\"",
    r"\u005c",
    r"\u005C",
    r"\u0041",
    "u",
    "d83d",
    "é",
)


@given(st.lists(st.sampled_from(_TOKENS), max_size=6).map("".join))
def test_each_half_becomes_a_replacement_character_and_nothing_else_changes(text: str) -> None:
    data = f'"{text}"'.encode()
    read = json.loads(data)
    whole = read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    found = well_formed(data)
    assert (found is None) is (whole == read)
    assert msgspec.json.decode(found or data) == whole
    assert len(found or data) == len(data)


def test_text_that_is_not_utf8_is_not_mended() -> None:
    with pytest.raises(UnicodeDecodeError):
        well_formed(b'"\\ud83d\xfe"')


def test_text_with_more_halves_than_cuts_can_cause_is_refused() -> None:
    most = rb"\ud83d" * MAX_HALVES
    assert well_formed(b'"%b"' % most) is not None
    with pytest.raises(ValueError, match="unpaired surrogates"):
        well_formed(rb'"%b-\ud83d"' % most)

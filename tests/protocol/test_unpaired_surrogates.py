import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.protocol.json_text import unpaired_surrogates

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
TEXTS = st.lists(st.sampled_from(_TOKENS), max_size=6).map("".join)
_decode = msgspec.json.Decoder(dict[str, Raw]).decode


@pytest.mark.parametrize("whole", ["", "a", r"\ud83d\ude00", r"\\ud83d", r"\uDBFF\uDFFF", r"\\\\ude00", r"\u00e9"])
def test_whole_characters_are_not_touched(whole: str) -> None:
    assert unpaired_surrogates.hidden(f'"{whole}"'.encode()) is None


@given(keys=st.lists(TEXTS, max_size=3), values=st.lists(TEXTS, max_size=3))
def test_every_spelling_has_an_exact_way_back(keys: list[str], values: list[str]) -> None:
    members = {json.loads(f'"{key}"'): (key, value) for key, value in zip(keys, values, strict=False)}
    data = ("{" + ",".join(f'"{key}":"{value}"' for key, value in members.values()) + "}").encode()
    hidden = unpaired_surrogates.hidden(data)
    if hidden is None:
        assert msgspec.json.decode(data) == {key: json.loads(f'"{value}"') for key, (_, value) in members.items()}
        return
    assert unpaired_surrogates.shown(hidden) == data
    assert len(hidden) == len(data)
    escaped = unpaired_surrogates.escaped(hidden)
    assert unpaired_surrogates.unescaped(escaped) == data
    opened = _decode(escaped)
    assert unpaired_surrogates.strings(opened) == list(members)
    assert [unpaired_surrogates.unescaped(bytes(raw)) for raw in opened.values()] == [
        f'"{value}"'.encode() for _, value in members.values()
    ]
    assert "\ufffd" in str(msgspec.json.decode(unpaired_surrogates.replaced(hidden)))


@given(keys=st.lists(TEXTS, max_size=3), values=st.lists(TEXTS, max_size=3))
def test_an_object_with_halves_is_opened_and_loses_its_white_space(keys: list[str], values: list[str]) -> None:
    members = {json.loads(f'"{key}"'): (key, value) for key, value in zip(keys, values, strict=False)}
    data = ("{" + ",".join(f'"{key}":"{value}"' for key, value in members.values()) + "}").encode()
    assert unpaired_surrogates.compacted(data.replace(b'":"', b'" : "').replace(b'","', b'",\n"')) == data
    try:
        _ = _decode(data)
    except msgspec.DecodeError as exc:
        opened = unpaired_surrogates.fields(data, exc)
        assert {key: bytes(raw) for key, raw in opened.items()} == {
            key: f'"{value}"'.encode() for key, (_, value) in members.items()
        }


def test_what_was_refused_for_another_reason_stays_refused() -> None:
    for data in (b'{"a":"\xff"}', b"[]", b"{"):
        refused = msgspec.DecodeError("why")
        with pytest.raises(msgspec.DecodeError, match="why"):
            unpaired_surrogates.fields(data, refused)
    with pytest.raises(msgspec.ValidationError, match="type"):
        unpaired_surrogates.fields(rb'{"a":"\ud83d"}', msgspec.ValidationError("type"))
    nested = rb'{"a":"\ud83d","b":%b}' % (b"[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        unpaired_surrogates.fields(nested, msgspec.DecodeError("why"))


def test_json_that_is_nested_too_deeply_keeps_its_white_space() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        unpaired_surrogates.compacted(b"[" * 100_000 + b"]" * 100_000)


def test_text_that_is_not_utf8_has_no_place_to_hide_in() -> None:
    with pytest.raises(UnicodeDecodeError):
        unpaired_surrogates.hidden(b'"\\ud83d\xff"')


def test_a_string_with_a_half_is_written_as_an_escape() -> None:
    assert unpaired_surrogates.written("\ud83dé") == rb'"\ud83d\u00e9"'


def test_text_with_more_halves_than_cuts_can_cause_is_refused() -> None:
    most = rb"\ud83d" * unpaired_surrogates.MAX_HALVES
    assert unpaired_surrogates.hidden(b'"%b"' % most) is not None
    with pytest.raises(ValueError, match="unpaired surrogates"):
        unpaired_surrogates.hidden(rb"\"%b-\ud83d\"" % most)

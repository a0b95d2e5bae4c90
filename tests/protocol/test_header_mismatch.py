"""The headers that repeat the body: MCP-Protocol-Version, Mcp-Method, Mcp-Name."""

import base64
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.protocol import header_mismatch, mcp
from gateway.protocol.errors import HeaderMismatch
from tests.protocol.test_request import values

HEADERS = {mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: mcp.TOOLS_CALL, mcp.NAME_HEADER: "greet"}


def check(headers: dict[str, Any], name: str | None = "greet", method: str = mcp.TOOLS_CALL) -> None:
    """Check a call with these headers; a list is a header that came more than once."""
    given = {key: value for key, value in headers.items() if value is not None}
    header_mismatch.check(method, name, mcp.MODERN, values(given))


def test_the_names_of_headers_may_be_in_any_case() -> None:
    check({name.upper(): value for name, value in HEADERS.items()})


def test_a_request_without_a_target_needs_no_name_header() -> None:
    listed = {**HEADERS, mcp.METHOD_HEADER: mcp.TOOLS_LIST, mcp.NAME_HEADER: None}
    check(listed, name=None, method=mcp.TOOLS_LIST)


def test_a_body_without_a_name_is_for_the_next_check() -> None:
    check(HEADERS, name=None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({mcp.PROTOCOL_VERSION: None}, "MCP-Protocol-Version is missing"),
        ({mcp.PROTOCOL_VERSION: "2025-11-25"}, "MCP-Protocol-Version"),
        ({mcp.METHOD_HEADER: ["tools/call"] * 2}, "Mcp-Method came 2 times"),
        ({mcp.METHOD_HEADER: "Tools/Call"}, "Mcp-Method"),
        ({mcp.NAME_HEADER: None}, "Mcp-Name is missing"),
        ({mcp.NAME_HEADER: "Greet"}, "Mcp-Name header value 'Greet' does not match body value 'greet'"),
        ({mcp.NAME_HEADER: "a\x01"}, "need the"),
        ({mcp.NAME_HEADER: "\xe9"}, "need the"),
        ({mcp.NAME_HEADER: "=?base64?Z3JlZXQ?="}, "invalid Base64"),
        ({mcp.NAME_HEADER: "=?base64?Z3Jl*ZXQ=?="}, "invalid Base64"),
        ({mcp.NAME_HEADER: "=?base64?\xe9?="}, "invalid Base64"),
        ({mcp.NAME_HEADER: "=?base64?/w==?="}, "invalid Base64"),
    ],
)
def test_a_header_that_differs_from_the_body_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(HeaderMismatch, match=says):
        check({**HEADERS, **changed})


def test_the_name_of_a_task_is_compared_if_it_was_sent() -> None:
    headers = {**HEADERS, mcp.METHOD_HEADER: mcp.TASKS_GET}
    check(headers, name="greet", method=mcp.TASKS_GET)
    check({**headers, mcp.NAME_HEADER: None}, name="greet", method=mcp.TASKS_GET)
    for name in ("other", None):
        with pytest.raises(HeaderMismatch, match="Mcp-Name"):
            check(headers, name=name, method=mcp.TASKS_GET)
    check({**HEADERS, mcp.METHOD_HEADER: mcp.TOOLS_LIST}, name=None, method=mcp.TOOLS_LIST)


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("greet", "greet"),
        ("greet", " \tgreet "),
        ("a b", "a b"),
        ("a\tb", "a\tb"),
        ("", ""),
        ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
        (" padded ", "=?base64?IHBhZGRlZCA=?="),
        ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
        ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ("=?base64?", "=?base64?"),
        ("=?BASE64?Z3JlZXQ=?=", "=?BASE64?Z3JlZXQ=?="),
        ("", "=?base64??="),
    ],
)
def test_a_name_is_compared_as_it_was_meant(name: str, header: str) -> None:
    check({**HEADERS, mcp.NAME_HEADER: header}, name=name)


@given(st.text())
def test_every_name_can_be_sent_in_base64(name: str) -> None:
    header = f"=?base64?{base64.b64encode(name.encode()).decode()}?="
    assert header_mismatch.decode_value("Mcp-Name", header) == name


@given(st.text())
def test_a_header_is_decoded_or_refused(value: str) -> None:
    with contextlib.suppress(HeaderMismatch):
        header_mismatch.decode_value("Mcp-Name", value)


@given(st.text())
def test_a_value_goes_into_a_header_and_back(value: str) -> None:
    written = header_mismatch.encode_value(value)
    assert written.isascii()
    assert header_mismatch.decode_value("Mcp-Name", written) == value
    assert written == written.strip()


@pytest.mark.parametrize(
    ("changed", "is_told"),
    [
        ({}, True),
        ({mcp.NAME_HEADER: []}, False),
        ({mcp.PROTOCOL_VERSION: [mcp.MODERN] * 2}, False),
        ({mcp.NAME_HEADER: ["greet"] * 2}, False),
        ({mcp.METHOD_HEADER: []}, False),
        ({mcp.PROTOCOL_VERSION: []}, False),
        ({mcp.NAME_HEADER: ["\xe9"]}, False),
        ({mcp.NAME_HEADER: ["a\tb"]}, False),
        ({mcp.NAME_HEADER: ["=?base64?eA==?="]}, False),
        ({mcp.NAME_HEADER: ['a"b']}, False),
        ({mcp.NAME_HEADER: ["a\\b"]}, False),
    ],
    ids=range(11),
)
def test_a_head_tells_what_its_body_must_repeat_if_it_is_plain(
    changed: dict[str, list[str]], *, is_told: bool
) -> None:
    known = header_mismatch.KnownValues(values(HEADERS | changed))
    expected = header_mismatch.Repeated(mcp.MODERN, mcp.TOOLS_CALL, b'"greet"', "greet")
    assert known.repeated == (expected if is_told else None)


@pytest.mark.parametrize(("name", "is_bare"), [("Authorization", False), ("baggage", False), ("Cookie", True)])
def test_a_head_is_bare_without_a_credential_and_a_trace(name: str, *, is_bare: bool) -> None:
    known = header_mismatch.KnownValues(CIMultiDict({name: "x"}))
    assert known.is_bare is is_bare
    assert known[name] == ["x"]
    assert known[name] is known[name], "it is looked up once"

"""What a modern client says of itself in `_meta`, and what it may not say."""

import json
from typing import Any

import pytest
from msgspec import Raw

from gateway.protocol import mcp, request_meta
from gateway.protocol.errors import InvalidParams
from gateway.protocol.request_meta import Capabilities, Declarations, capabilities_of, meta_of
from tests.protocol.test_request import META
from tests.support.memory import left_by


def raw(**changes: Any) -> Raw:
    """A `_meta` with members of the protocol replaced; None removes one."""
    merged = {**META, **{mcp.RESERVED + key: value for key, value in changes.items()}}
    return Raw(json.dumps({key: value for key, value in merged.items() if value is not None}).encode())


def said(meta: Raw) -> Declarations:
    return request_meta.declarations(meta_of(meta).members)


def test_it_is_taken_apart() -> None:
    declared = {"elicitation": {"url": {}}, "sampling": {"tools": {}}, "roots": {}, "tasks": {}}
    members = {**META, "progressToken": "p", "traceparent": "00-1", mcp.META_CAPABILITIES: declared}
    found = said(Raw(json.dumps({**members, mcp.META_LOG_LEVEL: "info"}).encode()))
    assert (found.version, found.log_level, found.progress_token) == (mcp.MODERN, "info", Raw(b'"p"'))
    assert list(found.user_meta) == ["traceparent"]
    assert found.declared == Capabilities(url=True, sampling=True, sampling_tools=True, roots=True, legacy_tasks=True)
    assert json.loads(bytes(found.capabilities)) == declared
    assert json.loads(bytes(found.client_info)) == {"name": "c", "version": "1"}


def test_what_is_optional_may_be_missing() -> None:
    found = said(raw(clientInfo=None))
    assert json.loads(bytes(found.client_info)) == {"name": "unknown", "version": "0"}
    assert (found.log_level, found.progress_token, found.declared) == (None, None, Capabilities())


@pytest.mark.parametrize(
    ("elicitation", "form", "url"),
    [
        ({}, True, False),
        ({"form": {}}, True, False),
        ({"url": {}}, False, True),
        ({"form": {}, "url": {}}, True, True),
        (None, False, False),
    ],
)
def test_an_empty_elicitation_capability_means_forms(
    elicitation: dict[str, Any] | None, *, form: bool, url: bool
) -> None:
    declared = said(raw(clientCapabilities={"elicitation": elicitation})).declared
    assert (declared.form, declared.url) == (form, url)


def test_an_extension_of_null_is_not_declared() -> None:
    assert capabilities_of(b'{"extensions":{"%b":{}}}' % mcp.TASKS.encode()).tasks
    assert not capabilities_of(b'{"extensions":{"%b":null}}' % mcp.TASKS.encode()).tasks


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"protocolVersion": None}, "protocolVersion"),
        ({"protocolVersion": 2026}, "protocolVersion"),
        ({"clientCapabilities": None}, "clientCapabilities"),
        ({"clientCapabilities": []}, "is not ClientCapabilities"),
        ({"clientCapabilities": {"roots": True}}, "is not ClientCapabilities"),
        ({"clientCapabilities": {"experimental": {"x": {"a": "x" * 20_000}}}}, "larger than"),
        ({"clientInfo": {"name": "x" * 20_000, "version": "1"}}, "larger than"),
        ({"clientInfo": "me"}, "clientInfo"),
        ({"clientInfo": {"version": "1"}}, "clientInfo"),
        ({"clientInfo": {"name": "c"}}, "clientInfo"),
        ({"logLevel": "loud"}, "emergency"),
        ({"logLevel": 7}, "emergency"),
    ],
)
def test_a_fault_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParams, match=says):
        said(raw(**changes))
    if "protocolVersion" not in changes:
        assert meta_of(raw(**changes)).declarations is None


def test_a_progress_token_is_an_id() -> None:
    with pytest.raises(InvalidParams, match="progressToken"):
        said(Raw(json.dumps({**META, "progressToken": 1.5}).encode()))


@pytest.mark.parametrize("key", ["clientInfo", "clientCapabilities"])
def test_a_key_comes_once_in_what_a_client_declares(key: str) -> None:
    repeated = bytes(raw()).replace(b'%b": {' % key.encode(), b'%b": {"x": {"a": 1, "a": 2}, ' % key.encode())
    with pytest.raises(InvalidParams, match=f"{key}.* repeats a key"):
        said(Raw(repeated.replace(b", }", b"}")))


def test_it_is_shallow_if_it_is_no_deeper_than_what_is_usual() -> None:
    for depth, is_shallow in ((5, True), (6, False)):
        nested = json.loads("[" * depth + "]" * depth)
        assert meta_of(Raw(json.dumps({"x": nested}).encode())).is_shallow is is_shallow


def test_a_legacy_one_says_nothing() -> None:
    assert meta_of(Raw(b'{"progressToken":1}')).declarations is None


def test_a_large_declaration_is_checked_but_not_remembered() -> None:
    def check(number: int) -> None:
        info = {"name": f"{number}" + "x" * 2_000, "version": "1"}
        declared = {"experimental": {"x": {"y": f"{number}" + "z" * 2_000}}, "roots": {}}
        checked = said(raw(clientInfo=info, clientCapabilities=declared))
        assert checked.declared.roots
        assert json.loads(bytes(checked.client_info)) == info
        with pytest.raises(InvalidParams):
            said(raw(clientInfo={"name": info["name"]}, clientCapabilities=declared))

    check(0)
    assert left_by(lambda: [check(number) for number in range(100)]) < 50_000


def test_metadata_that_differs_each_time_is_not_remembered() -> None:
    metas = [raw(x="kept"), Raw(json.dumps({**META, "progressToken": 7}).encode()), raw(x="0" * 2000)]
    assert [meta_of(each) is meta_of(each) for each in metas] == [True, False, False]
    kept = meta_of(metas[0])
    for number in range(1024):
        _ = meta_of(raw(x=number))
    assert meta_of(metas[0]) is not kept, "not for ever"

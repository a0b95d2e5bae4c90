"""What the draft's words mean, whoever writes them."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams, InvalidRequest
from gateway.sep_1442.vocabulary import (
    CAPABILITIES,
    SUPPORTED,
    VERSION,
    Declared,
    UnknownVersion,
    declared,
    discover_result,
    initialize_result,
    is_declared,
)
from tests.support.mirrored_client import Json

RESULT = jsonrpc.encode(
    {"protocolVersion": "2025-06-18", "capabilities": {"resources": {"subscribe": True, "listChanged": True}}}
)


def read(meta: Any, *versions: str, **params: Any) -> Declared:
    def headers(name: str) -> Sequence[str]:
        assert name == mcp.PROTOCOL_VERSION
        return versions

    return declared(jsonrpc.fields(jsonrpc.encode({**params, "_meta": meta})), headers)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_request_brings_its_profile_and_loses_the_words_of_the_draft(version: str) -> None:
    meta = {VERSION: version, CAPABILITIES: {"elicitation": {}}, "logLevel": "error", "a": 1}
    found = read({**meta, "modelcontextprotocol.io/sessionId": "s"}, version, name="t")
    assert jsonrpc.decode(found.params) == {"name": "t", "_meta": {"a": 1}}
    assert (found.profile.version, found.profile.capabilities) == (version, b'{"elicitation":{}}')
    assert (found.streams, found.roots, found.log_level) == (True, None, "error")


def test_a_request_that_says_nothing_more_has_no_meta_left() -> None:
    found = read({VERSION: "2025-06-18"}, "2025-06-18")
    assert (found.params, found.profile.capabilities, found.streams) == (b"{}", b"{}", False)


def test_roots_are_a_capability_and_an_answer() -> None:
    found = read({VERSION: "2025-06-18", "roots": [{"uri": "file:///a"}]}, "2025-06-18")
    assert found.profile.declared.roots
    assert found.roots is not None
    assert bytes(found.roots) == b'[{"uri":"file:///a"}]'


@pytest.mark.parametrize("versions", [(), ("2025-06-18", "2025-06-18"), ("2026-07-28",), ("",), ("x",)])
def test_a_version_must_come_once_in_the_header(versions: tuple[str, ...]) -> None:
    with pytest.raises(UnknownVersion):
        read({VERSION: "2025-06-18"}, *versions)


@pytest.mark.parametrize("named", ["2025-11-25", None, 1, ["2025-06-18"]])
def test_meta_must_repeat_the_header(named: Any) -> None:
    with pytest.raises(InvalidRequest):
        read({VERSION: named}, "2025-06-18")


@pytest.mark.parametrize(
    "meta", [{CAPABILITIES: []}, {CAPABILITIES: 1, "roots": []}, {"roots": {}}, {"roots": None}, {"logLevel": 1}]
)
def test_a_malformed_declaration_is_refused(meta: Json) -> None:
    with pytest.raises(InvalidParams):
        read({VERSION: "2025-06-18", **meta}, "2025-06-18")


@pytest.mark.parametrize("params", [b"1", b"[]", b"{}", b'{"_meta":1}', b'{"_meta":{"%b":1,"%b":2}}', b"[" * 9_999])
def test_other_requests_are_not_of_the_draft(params: bytes) -> None:
    params = params.replace(b"%b", VERSION.encode())
    message = jsonrpc.Message("2.0", method="tools/list", params=Raw(params))
    assert not is_declared(message)


def test_the_key_is_told_however_it_is_escaped() -> None:
    params = rb'{"_meta":{"modelcontextprotocol.io\/mcpProtocolVersion":"x"}}'
    assert is_declared(jsonrpc.Message("2.0", method="tools/list", params=Raw(params)))


def test_the_results_have_the_shapes_of_the_paper() -> None:
    capabilities = {"resources": {"listChanged": True}}
    assert jsonrpc.decode(discover_result(RESULT)) == {
        "supportedVersions": list(SUPPORTED),
        "capabilities": capabilities,
    }
    assert jsonrpc.decode(initialize_result(RESULT, "s")) == {
        "sessionId": "s",
        "protocolVersion": "2025-06-18",
        "capabilities": capabilities,
    }

"""What the draft's words mean, whoever writes them."""

from typing import Any

import pytest
from msgspec import Raw
from multidict import CIMultiDict

from gateway.plugins.sep_1442.vocabulary import CAPABILITIES, VERSION, UnknownVersion, declared, is_declared
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import InvalidParams
from tests.support.legacy_client import Json


def read(meta: Any, *versions: str) -> None:
    headers = CIMultiDict([(mcp.PROTOCOL_VERSION, version) for version in versions])
    _ = declared(jsonrpc.fields(jsonrpc.encode({"_meta": meta})), headers)


@pytest.mark.parametrize(
    "meta", [{CAPABILITIES: []}, {CAPABILITIES: 1, "roots": []}, {"roots": {}}, {"roots": None}, {"logLevel": 1}]
)
def test_a_malformed_declaration_is_refused(meta: Json) -> None:
    with pytest.raises(InvalidParams):
        read({VERSION: "2025-06-18", **meta}, "2025-06-18")


@pytest.mark.parametrize("versions", [(), ("2025-06-18", "2025-06-18")])
def test_a_version_must_come_once_in_the_header(versions: tuple[str, ...]) -> None:
    with pytest.raises(UnknownVersion):
        read({VERSION: "2025-06-18"}, *versions)


@pytest.mark.parametrize("params", [b"1", b"[]", b"{}", b'{"_meta":1}', b'{"_meta":{"%b":1,"%b":2}}', b"[" * 9_999])
def test_other_requests_are_not_of_the_draft(params: bytes) -> None:
    params = params.replace(b"%b", VERSION.encode())
    message = jsonrpc.Message("2.0", method="tools/list", params=Raw(params))
    assert not is_declared(message)


def test_the_key_is_told_however_it_is_escaped() -> None:
    params = rb'{"_meta":{"modelcontextprotocol.io\/mcpProtocolVersion":"x"}}'
    assert is_declared(jsonrpc.Message("2.0", method="tools/list", params=Raw(params)))

"""Which era a request, or an upstream, is of."""

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.protocol import era, mcp, request

CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": {mcp.META_VERSION: mcp.MODERN}}}
OLD = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": {"progressToken": 1}}}
ANSWER = {"jsonrpc": "2.0", "id": 1, "result": {"_meta": {mcp.META_VERSION: mcp.MODERN}}}


@pytest.mark.parametrize(
    ("method", "header", "body", "modern"),
    [
        ("POST", mcp.MODERN, b"", True),
        ("POST", "2027-01-01", b"{", True),
        ("POST", f" {mcp.MODERN} ", b"{}", True),
        ("GET", mcp.MODERN, b"", True),
        ("POST", None, json.dumps(CALL).encode(), True),
        ("POST", "2025-11-25", json.dumps(CALL).encode(), True),
        ("POST", None, json.dumps(OLD).encode(), False),
        ("POST", None, json.dumps(CALL).replace("/protocolVersion", "\\u002fprotocolVersion").encode(), True),
        ("POST", None, json.dumps(CALL).replace("/protocolVersion", "\\/protocolVersion").encode(), True),
        ("POST", "2025-11-25", json.dumps(OLD).encode(), False),
        ("POST", "nonsense", json.dumps(OLD).encode(), False),
        ("POST", None, json.dumps(ANSWER).encode(), False),
        ("POST", None, json.dumps([CALL]).encode(), False),
        ("POST", None, b"{", False),
        ("POST", None, b"", False),
        ("GET", None, json.dumps(CALL).encode(), False),
        ("DELETE", "2025-06-18", b"", False),
    ],
)
def test_the_era_of_a_request(method: str, header: str | None, body: bytes, *, modern: bool) -> None:
    assert era.is_modern(method, header, body, lambda: request.read(body)) is modern


def test_the_probe_is_a_modern_request() -> None:
    parsed = request.read(era.discover(b'"probe"'))
    headers = CIMultiDict({mcp.PROTOCOL_VERSION: mcp.MODERN, mcp.METHOD_HEADER: mcp.DISCOVER})
    assert request.check(parsed, headers).method == mcp.DISCOVER


def result(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": "probe", "result": fields}).encode()


def error(code: int, **data: Any) -> bytes:
    body = {"code": code, "message": "no", **({"data": data} if data else {})}
    return json.dumps({"jsonrpc": "2.0", "id": None, "error": body}).encode()


JSON, SSE, HTML, TEXT = "application/json", "text/event-stream", "text/html", "text/plain"
MODERN = result(supportedVersions=["2025-11-25", mcp.MODERN])

VERDICTS: dict[str, tuple[int, str, bytes, bool | None]] = {
    "a DiscoverResult": (200, JSON, MODERN, True),
    "a DiscoverResult as an event": (200, SSE, b": hi\n\ndata: %b\n\n" % MODERN, True),
    "with half an emoji": (200, JSON, result(supportedVersions=[mcp.MODERN], instructions="\ud83d"), True),
    "-32022 with half an emoji": (400, JSON, error(-32022, supported=["2027-05-05"], requested="\ud83d"), True),
    "of a later version": (200, JSON, result(supportedVersions=["2027-05-05"]), True),
    "of old versions only": (200, JSON, result(supportedVersions=["2025-11-25"]), False),
    "-32022 that names a modern version": (400, JSON, error(-32022, supported=["2027-05-05"], requested="x"), True),
    "-32022 that names old versions": (400, JSON, error(-32022, supported=["2025-11-25"], requested="x"), False),
    "-32022 with a number for its versions": (400, JSON, error(-32022, supported=5), False),
    "-32022 that names none": (400, JSON, error(-32022), False),
    "-32020": (400, JSON, error(-32020), True),
    "-32021": (400, JSON, error(-32021), True),
    "ts132": (400, JSON, error(-32000), False),
    "py130": (400, JSON, error(-32600), False),
    "py110": (400, JSON, b"Bad Request: Unsupported protocol version", False),
    "stateless, unknown method": (200, JSON, error(-32601), False),
    "404 -32601": (404, JSON, error(-32601), False),
    "another result": (200, JSON, result(tools=[]), False),
    "404 in words": (404, TEXT, b"Not Found", False),
    "an empty 400": (400, JSON, b"", None),
    "an empty 200": (200, JSON, b" ", None),
    "words with 200": (200, TEXT, b"ok", None),
    "HTML": (200, HTML, b"<html>", None),
    "HTML that says it is none": (404, TEXT, b" <!doctype html>", None),
    "401": (401, JSON, error(-32600), None),
    "403": (403, JSON, error(-32600), None),
    "429": (429, JSON, error(-32600), None),
    "421": (421, TEXT, b"Invalid Host header", None),
    "431": (431, TEXT, b"Request Header Fields Too Large", None),
    "500": (500, JSON, error(-32603), None),
    "503": (503, HTML, b"<html>", None),
    "a redirect": (307, JSON, error(-32600), None),
    "the response to another request": (200, JSON, MODERN.replace(b"probe", b"other"), None),
    "an error for another request": (400, JSON, error(-32601).replace(b"null", b"7"), None),
    "a stream that brings the response to another request first": (
        200,
        SSE,
        b"data: %b\n\ndata: %b\n\n" % (error(-32601).replace(b"null", b"7"), MODERN),
        True,
    ),
    "a stream without an answer": (200, SSE, b'data: {"jsonrpc":"2.0","method":"x"}\n\n', None),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_what_a_probe_says(case: str) -> None:
    status, content_type, body, expected = VERDICTS[case]
    assert era.verdict(status, content_type, body, b'"probe"') is expected


@pytest.mark.parametrize(
    ("status", "body", "refutes"),
    [
        (200, error(-32000), False),
        (500, error(-32000), False),
        (400, error(-32000), True),
        (400, error(-32600), True),
        (400, b"Bad Request: No valid session ID provided", True),
        (400, b"", True),
        (404, b"Not Found", True),
        (405, b"", True),
        (404, error(-32601), False),
        (400, error(-32602), False),
        (400, error(-32700), False),
        (400, error(-32020), False),
        (400, error(-32021), False),
        (400, error(-32022, supported=[mcp.MODERN]), False),
        (400, error(-32022, supported=["2025-11-25"]), True),
    ],
)
def test_which_answer_of_a_modern_upstream_makes_it_doubtful(status: int, body: bytes, *, refutes: bool) -> None:
    assert era.refutes(status, body) is refutes


@pytest.mark.parametrize(
    ("content_type", "body", "refuses"),
    [
        (JSON, error(-32022, supported=[mcp.MODERN]), True),
        (JSON, error(-32020), True),
        (SSE, b"data: " + error(-32022, supported=[mcp.MODERN]) + b"\n\n", True),
        (JSON, error(-32022, supported=[mcp.LEGACY, mcp.MODERN]), False),
        (JSON, error(-32022, supported=[]), False),
        (JSON, error(-32022), False),
        (JSON, error(-32600), False),
        (JSON, b"Bad Request: No valid session ID provided", False),
        (HTML, b"<html>", False),
        (JSON, b"", False),
    ],
)
def test_which_refusal_shows_that_a_server_serves_no_legacy_client(
    content_type: str, body: bytes, *, refuses: bool
) -> None:
    assert era.refuses_legacy(content_type, body) is refuses

"""Validates what the gateway sends against the published models of both protocol revisions.

    assert_modern_result(method, raw)       a `result` of 2026-07-28 for a request of that method
    assert_modern_message(raw, method)      a whole message to a client: response, error or notification
    assert_legacy_message(raw, answering)   a whole message to a legacy server: request, notification or answer

`raw` is bytes or `msgspec.Raw`. Validation is strict: a number in a string is no number, a null is no absent member.
"""

import json
from functools import cache
from typing import Any, get_args

import mcp_types._v2026_07_28 as modern
from mcp_types import methods
from msgspec import Raw
from pydantic import TypeAdapter

MODERN = "2026-07-28"
LEGACY = "2025-11-25"

_ERRORS = {
    -32700: modern.ParseError,
    -32600: modern.InvalidRequestError,
    -32601: modern.MethodNotFoundError,
    -32602: modern.InvalidParamsError,
    -32603: modern.InternalError,
    -32020: modern.HeaderMismatchError,
    -32021: modern.MissingRequiredClientCapabilityError,
    -32022: modern.UnsupportedProtocolVersionError,
}
_WHOLE = {-32020, -32021, -32022}
"""Codes whose models are a whole response; the models of other codes are its `error` member."""


@cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _validate(model: Any, value: Any) -> None:
    # Pydantic cannot read unpaired surrogates, which JSON allows and the tests send.
    written = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    _adapter(model).validate_json(written, strict=True, by_name=False)


def _object(raw: bytes | Raw) -> dict[str, Any]:
    value = json.loads(bytes(raw))
    assert isinstance(value, dict), value
    return value


def assert_modern_result(method: str, raw: bytes | Raw) -> dict[str, Any]:
    """Validate a result and return it decoded."""
    result = _object(raw)
    assert None not in result.values(), result
    if result["resultType"] == "input_required":
        assert method in methods.INPUT_REQUIRED_METHODS, f"{method} must not answer InputRequiredResult"
        assert "inputRequests" in result or "requestState" in result
        assert not {"ttlMs", "cacheScope"} & result.keys(), "an interim result carries no caching hints"
        _validate(modern.InputRequiredResult, result)
        return result
    assert result["resultType"] == "complete"
    row = methods.SERVER_RESULTS[method, MODERN]
    # InputRequiredResult has no required member but resultType: as an arm of a union it would accept anything.
    complete = [arm for arm in get_args(row) or (row,) if arm is not modern.InputRequiredResult]
    assert len(complete) == 1, complete
    _validate(complete[0], result)
    if method in methods.CACHEABLE_METHODS:
        assert result["ttlMs"] >= 0
    return result


def assert_modern_message(raw: bytes | Raw, method: str | None = None) -> dict[str, Any]:
    """Validate a message to a client; `method` is that of its request. Returns it decoded."""
    message = _object(raw)
    assert message["jsonrpc"] == "2.0"
    if "method" in message:
        assert "id" not in message, "servers send no requests"
        _validate(methods.SERVER_NOTIFICATIONS[message["method"], MODERN], message)
    elif "error" in message:
        _validate(modern.JSONRPCErrorResponse, message)
        _assert_error(message)
    else:
        assert method is not None, "the method says what result is right"
        _validate(modern.JSONRPCResultResponse, message)
        assert_modern_result(method, json.dumps(message["result"]).encode())
    return message


def _assert_error(message: dict[str, Any]) -> None:
    code = message["error"]["code"]
    if code in _WHOLE:
        _validate(_ERRORS[code], {"id": 0, **message})
    elif code in _ERRORS:
        _validate(_ERRORS[code], message["error"])
    assert code not in {-32002, -32042}, "codes of earlier versions must not be emitted"
    assert code in _WHOLE or not -32099 <= code <= -32020, "reserved for the specification"


def assert_legacy_message(raw: bytes | Raw, answering: str | None = None) -> dict[str, Any]:
    """Validate a message to a legacy server; `answering` is the method that a response answers. Returns it decoded."""
    message = _object(raw)
    assert message["jsonrpc"] == "2.0"
    if "error" in message:
        assert isinstance(message["error"]["code"], int)
        assert isinstance(message["error"]["message"], str)
        assert isinstance(message["id"], str | int)
    elif "method" not in message:
        assert answering is not None, "the method says what result is right"
        assert isinstance(message["id"], str | int)
        assert None not in message["result"].values()
        _validate(methods.CLIENT_RESULTS[answering, LEGACY], message["result"])
    elif "id" in message:
        _validate(methods.CLIENT_REQUESTS[message["method"], LEGACY], message)
    else:
        _validate(methods.CLIENT_NOTIFICATIONS[message["method"], LEGACY], message)
    return message

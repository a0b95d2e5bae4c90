"""Bounds label values that come from clients or upstreams: text that is in no list becomes `other`."""

from collections.abc import Container
from typing import Final

from gateway.protocol import mcp
from gateway.telemetry.metrics.labels import TOOL_ERROR

OTHER: Final = "other"
NESTED_METHODS: Final = frozenset({mcp.ELICIT, mcp.SAMPLE, mcp.ROOTS})
METHODS: Final = frozenset(
    {
        *mcp.METHODS,
        *mcp.FIRST_FORM_METHODS,
        *NESTED_METHODS,
        mcp.INITIALIZE,
        mcp.PING,
        mcp.SET_LEVEL,
        mcp.SUBSCRIBE,
        mcp.UNSUBSCRIBE,
    }
)
VERSIONS: Final = frozenset({*mcp.SUPPORTED_VERSIONS, *mcp.LEGACY_VERSIONS})
NOTIFICATIONS: Final = frozenset(
    {
        mcp.CANCELLED,
        mcp.PROGRESS,
        mcp.LOG,
        mcp.TOOLS_CHANGED,
        mcp.PROMPTS_CHANGED,
        mcp.RESOURCES_CHANGED,
        mcp.RESOURCE_UPDATED,
    }
)
_CODES: Final = (
    mcp.PARSE_ERROR,
    mcp.INVALID_REQUEST,
    mcp.METHOD_NOT_FOUND,
    mcp.INVALID_PARAMS,
    mcp.INTERNAL_ERROR,
    mcp.HEADER_MISMATCH,
    mcp.MISSING_CAPABILITY,
    mcp.UNSUPPORTED_VERSION,
)
_ODD_CODES: Final = (0, -32000, -32001)
"""Codes outside the specification that legacy SDKs answer with: any exception, a lost connection, a timeout."""
ERROR_TYPES: Final = frozenset({"", TOOL_ERROR, *map(str, _CODES + _ODD_CODES)})
"""The values of `error_type` besides OTHER_ERROR: for MCP, OpenTelemetry's `error.type` is the JSON-RPC code."""


def bounded(reason: str, known: Container[str]) -> str:
    """Return a known value unchanged, any other text as `other`."""
    return reason if reason in known else OTHER

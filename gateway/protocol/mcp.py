"""The constants of the protocol: methods, headers, `_meta` keys, error codes, versions.

Source: specification 2026-07-28 (basic/index, basic/transports/streamable-http, schema) and 2025-11-25.
"""

from typing import Final

MODERN: Final = "2026-07-28"
SUPPORTED_VERSIONS: Final = (MODERN,)
"""The versions that `server/discover` and error -32022 list."""

LEGACY: Final = "2025-11-25"
"""The version the gateway offers upstream; the upstream may answer with any of LEGACY_VERSIONS."""
LEGACY_VERSIONS: Final = frozenset({"2024-11-05", "2025-03-26", "2025-06-18", LEGACY})

# HTTP headers (names are case-insensitive, values are not)
PROTOCOL_VERSION: Final = "MCP-Protocol-Version"
METHOD_HEADER: Final = "Mcp-Method"
NAME_HEADER: Final = "Mcp-Name"
PARAM_HEADER: Final = "Mcp-Param-"
SESSION_ID: Final = "Mcp-Session-Id"
LAST_EVENT_ID: Final = "Last-Event-ID"

# keys of `_meta`
RESERVED: Final = "io.modelcontextprotocol/"
META_VERSION: Final = RESERVED + "protocolVersion"
META_CLIENT_INFO: Final = RESERVED + "clientInfo"
META_CAPABILITIES: Final = RESERVED + "clientCapabilities"
META_LOG_LEVEL: Final = RESERVED + "logLevel"
META_SUBSCRIPTION: Final = RESERVED + "subscriptionId"
META_SERVER_INFO: Final = RESERVED + "serverInfo"
META_RELATED_TASK: Final = RESERVED + "related-task"
META_PROGRESS_TOKEN: Final = "progressToken"  # noqa: S105  (a key, not a secret)
META_INPUT_KEY: Final = "mrtr-gateway/inputKey"
"""The gateway's own key: a legacy server may choose the key of its question in `inputRequests`."""
TRACE_KEYS: Final = ("traceparent", "tracestate", "baggage")

# methods of 2026-07-28
DISCOVER: Final = "server/discover"
LISTEN: Final = "subscriptions/listen"
TOOLS_CALL: Final = "tools/call"
TOOLS_LIST: Final = "tools/list"
PROMPTS_GET: Final = "prompts/get"
PROMPTS_LIST: Final = "prompts/list"
RESOURCES_READ: Final = "resources/read"
RESOURCES_LIST: Final = "resources/list"
TEMPLATES_LIST: Final = "resources/templates/list"
COMPLETE: Final = "completion/complete"

TARGET_FIELD: Final = {TOOLS_CALL: "name", PROMPTS_GET: "name", RESOURCES_READ: "uri"}
"""The parameter that `Mcp-Name` repeats. These three are also the methods that may ask (basic/patterns/mrtr)."""
ASKING: Final = frozenset(TARGET_FIELD)
_LISTS: Final = frozenset({TOOLS_LIST, PROMPTS_LIST, RESOURCES_LIST, TEMPLATES_LIST})
CACHEABLE: Final = _LISTS | {DISCOVER, RESOURCES_READ}
BRIDGED: Final = ASKING | _LISTS | {COMPLETE}
"""Methods that the gateway translates to one upstream call."""

# the extension io.modelcontextprotocol/tasks (ext-tasks, specification/2026-07-28), and SEP-2322's first form of it
TASKS: Final = RESERVED + "tasks"
TASKS_GET: Final = "tasks/get"
TASKS_UPDATE: Final = "tasks/update"
TASKS_CANCEL: Final = "tasks/cancel"
TASKS_RESULT: Final = "tasks/result"
TASKS_INPUT: Final = "tasks/input_response"
TASK_METHODS: Final = frozenset({TASKS_GET, TASKS_UPDATE, TASKS_CANCEL})
FIRST_FORM_METHODS: Final = frozenset({TASKS_GET, TASKS_CANCEL, TASKS_RESULT, TASKS_INPUT})
"""The methods for clients that declare the tasks of 2025-11-25, but not the extension."""

METHODS: Final = BRIDGED | TASK_METHODS | {DISCOVER, LISTEN}

# methods of 2025-11-25 that only the upstream receives or sends
INITIALIZE: Final = "initialize"
INITIALIZED: Final = "notifications/initialized"
PING: Final = "ping"
SET_LEVEL: Final = "logging/setLevel"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"
ELICIT: Final = "elicitation/create"
SAMPLE: Final = "sampling/createMessage"
ROOTS: Final = "roots/list"

# notifications
CANCELLED: Final = "notifications/cancelled"
PROGRESS: Final = "notifications/progress"
LOG: Final = "notifications/message"
ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"
TOOLS_CHANGED: Final = "notifications/tools/list_changed"
PROMPTS_CHANGED: Final = "notifications/prompts/list_changed"
RESOURCES_CHANGED: Final = "notifications/resources/list_changed"
RESOURCE_UPDATED: Final = "notifications/resources/updated"

LOG_LEVELS: Final = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")

# JSON-RPC and MCP error codes
PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
HEADER_MISMATCH: Final = -32020
MISSING_CAPABILITY: Final = -32021
UNSUPPORTED_VERSION: Final = -32022
LEGACY_RESOURCE_NOT_FOUND: Final = -32002
LEGACY_URL_REQUIRED: Final = -32042

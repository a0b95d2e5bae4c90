"""SEP-1442, a draft of a stateless MCP, for routes that name it in `dialects`."""

"""Child processes that speak MCP on stdin and stdout."""

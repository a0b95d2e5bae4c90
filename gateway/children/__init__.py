"""Child processes that speak MCP over their standard streams."""

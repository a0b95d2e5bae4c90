"""The front of `mrtr-gateway wrap`: a host that speaks MCP over the standard streams of this process."""

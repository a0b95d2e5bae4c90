"""The stateless MCP gateway: an old server behind it serves modern clients."""

__version__ = "0.1.0"

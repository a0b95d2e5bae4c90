"""The stateless MCP gateway, in front of a legacy server that it makes a modern one."""

__version__ = "0.1.0"

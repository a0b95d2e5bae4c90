"""The mirror: legacy clients before a modern server."""

"""The mirror over streamable HTTP, where any replica may get the next request of a session."""

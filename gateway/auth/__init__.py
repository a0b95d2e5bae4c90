"""The callers of the gateway: who they are, and which of them are let in."""

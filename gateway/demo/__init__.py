"""A tour of the gateway between an unmodified old server and an unmodified modern client."""

"""A demonstration of the gateway: a legacy server on one side, a modern client on the other."""

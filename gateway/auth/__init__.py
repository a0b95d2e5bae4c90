"""Authentication of callers, the Host check, OAuth of the upstreams."""

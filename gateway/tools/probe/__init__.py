"""`mrtr-gateway probe` or `doctor`: what a legacy server can do behind the gateway.

It opens sessions, lists the tools and calls one that does not exist: nothing runs, and every session is ended.
"""

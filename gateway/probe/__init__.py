"""`mrtr-gateway probe` and `doctor`: what an old server can do behind the gateway, and what is in the way.

It opens sessions, lists the tools and calls one that does not exist: nothing runs, and every session is ended.
"""

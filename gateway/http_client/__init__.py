"""The HTTP/1.1 client of calls: connections to upstreams whose replies arrive by callback.

Decision 61 says what it leaves out.
"""

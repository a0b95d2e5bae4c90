"""FastMCP's proxy, run by the Python of its own environment.

In mode `legacy`, because in its default mode it shows a modern client none of the tools of a legacy server.
"""

import sys

from fastmcp.server import create_proxy

if __name__ == "__main__":
    upstream, port = sys.argv[1:]
    proxy = create_proxy(upstream, mode="legacy")
    proxy.run(transport="http", host="127.0.0.1", port=int(port), show_banner=False, log_level="error")

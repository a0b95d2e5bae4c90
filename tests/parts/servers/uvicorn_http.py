"""Serves an application over HTTP on this machine, for servers of every SDK."""

import socket
from typing import Any

import uvicorn


async def serve_http(app: Any, port: int) -> None:
    """Print `READY http://127.0.0.1:PORT/mcp` once it accepts, and serve."""
    listener = socket.create_server(("127.0.0.1", port))
    uv = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    # The socket listens already: what connects before the server runs waits in the backlog.
    print(f"READY http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    await uv.serve(sockets=[listener])

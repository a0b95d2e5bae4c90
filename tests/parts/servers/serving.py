"""What the Python servers of all SDKs have in common: the arguments, the ledger, the READY line."""

import argparse
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

JSON = dict[str, Any]


def arguments(*switches: str) -> argparse.Namespace:
    """What the command says; a server may have further switches."""
    parser = argparse.ArgumentParser()
    for switch in switches:
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--event-store", action="store_true", help="SSE events carry ids and can be replayed")
    parser.add_argument("--stateless", action="store_true", help="no sessions")
    parser.add_argument("--sse", action="store_true", help="HTTP+SSE of 2024-11-05 at /sse, and nothing else")
    parser.add_argument("--json", action="store_true", help="JSON bodies instead of SSE streams")
    parser.add_argument("--page-size", type=int, default=0, help="tools on one page of tools/list; 0 for all")
    parser.add_argument("--tls", type=Path, help="serve TLS with the certificate and the key in FILE")
    parser.add_argument("--tls-clients", type=Path, help="only clients with a certificate of the authority in FILE")
    parser.add_argument("--stdio", action="store_true", help="speak on stdin and stdout instead of HTTP")
    parser.add_argument("--ledger", type=Path, help="append to FILE what the tools did")
    return parser.parse_args()


class Ledger:
    """A JSON line for each thing that happened, so that a test can prove what ran, and how often."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, event: str, tool: str, **detail: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"t": time.time(), "event": event, "tool": tool, **detail}, default=str) + "\n"
        # One write on an O_APPEND file: lines of two servers with the same ledger never mix.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


Scope = JSON
Application = Callable[[Scope, Callable[[], Awaitable[JSON]], Callable[[JSON], Awaitable[None]]], Awaitable[None]]


class AnnouncingServer(uvicorn.Server):
    """Says READY when requests are accepted, not when the process has started."""

    url = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"READY {self.url}", flush=True)


def serve(application: Application, options: argparse.Namespace) -> None:
    """Serve until SIGTERM. Open streams would keep uvicorn waiting for ever, so it waits a second only."""
    # asyncio sets TCP_NODELAY only on sockets that say they are TCP. Without it, a message that follows another on the
    # same stream waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options.host, options.port))
    listener.listen(128)
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
        ssl_certfile=options.tls,
        ssl_ca_certs=options.tls_clients and str(options.tls_clients),
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.tls_clients else ssl.CERT_NONE,
    )
    server = AnnouncingServer(config)
    path = "/sse" if options.sse else "/mcp"
    server.url = f"{'https' if options.tls else 'http'}://{options.host}:{listener.getsockname()[1]}{path}"
    server.run(sockets=[listener])


def compact(value: Any) -> str:
    """JSON as JavaScript writes it, so that every server answers with the same text."""
    return json.dumps(value, separators=(",", ":"))


@asynccontextmanager
async def recorded(ledger: Ledger, tool: str, **detail: Any) -> AsyncIterator[None]:
    """Write how a run began and how it ended."""
    ledger.write("run", tool, **detail)
    session = detail.get("session")
    try:
        yield
    except Exception as exc:
        ledger.write("failed", tool, session=session, message=str(exc))
        raise
    except BaseException:  # what anyio raises on cancellation is no Exception
        ledger.write("cancelled", tool, session=session)
        raise
    ledger.write("finished", tool, session=session)

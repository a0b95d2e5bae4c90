"""What the old Python servers have in common: the arguments, the ledger, the event store, the READY line."""

import argparse
import json
import os
import socket
import ssl
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.sse import SseServerTransport
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCMessage, JSONRPCNotification
from starlette.applications import Starlette
from starlette.routing import Mount, Route

JSON = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--event-store", action="store_true", help="SSE events carry ids and can be replayed")
    parser.add_argument("--stateless", action="store_true", help="no sessions")
    parser.add_argument("--sse", action="store_true", help="HTTP+SSE of 2024-11-05 at /sse, and nothing else")
    parser.add_argument("--json", action="store_true", help="JSON bodies instead of SSE streams")
    parser.add_argument("--page-size", type=int, default=0, help="tools on one page of tools/list; 0 for all")
    parser.add_argument("--nagle", action="store_true", help="small messages wait for acknowledgements")
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


class MemoryEventStore(EventStore):
    """The event store that people copy from the SDK's examples.

    Streams are named by the client's request id alone, so two sessions that use the same id share a stream.
    That is how those servers behave, and whoever talks to them must survive it. The event ids are random: a
    cursor from before a restart is unknown afterwards.
    """

    def __init__(self) -> None:
        self._events: list[tuple[str, str, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        event_id = uuid.uuid4().hex
        self._events.append((event_id, stream_id, message))
        return event_id

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        position = next((i for i, event in enumerate(self._events) if event[0] == last_event_id), None)
        if position is None:
            return None
        wanted = self._events[position][1]
        for event_id, stream_id, message in self._events[position + 1 :]:
            # A priming event has no message: it only named a place in the stream.
            if stream_id == wanted and message is not None:
                await send_callback(EventMessage(message, event_id))
        return wanted


class BroadcastingServer(Server[Any, Any]):
    """Declares list changes, and can tell every session of one, also those that have only listened so far."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self._outgoing: set[Any] = set()

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, JSON] | None = None,
    ) -> InitializationOptions:
        # The session manager passes nothing: there is no other place to say what the server can do.
        changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        options = super().create_initialization_options(changes, experimental_capabilities)
        if options.capabilities.resources is not None:
            options.capabilities.resources.subscribe = True  # the SDK says false even with a handler
        return options

    async def run(self, read_stream: Any, write_stream: Any, *rest: Any, **options: Any) -> None:
        self._outgoing.add(write_stream)
        try:
            await super().run(read_stream, write_stream, *rest, **options)
        finally:
            self._outgoing.discard(write_stream)

    async def broadcast(self, method: str) -> None:
        notification = JSONRPCNotification(jsonrpc="2.0", method=method)
        for stream in list(self._outgoing):
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                await stream.send(SessionMessage(JSONRPCMessage(notification)))


LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def is_local(host: str) -> bool:
    """Whether FastMCP of the newer SDKs takes a server bound to this host for one of this machine only."""
    return host in LOCAL_NAMES


def local_only() -> TransportSecuritySettings:
    """What FastMCP of the newer SDKs sets when it is bound to localhost: 421 for a foreign Host, 403 for an Origin."""
    names = LOCAL_NAMES
    return TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=[f"{name}:*" for name in names],
        allowed_origins=[f"http://{name}:*" for name in names],
    )


def mcp_application(
    manager: StreamableHTTPSessionManager,
    *,
    mounted: bool = False,
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
) -> Starlette:
    """Serve the sessions at /mcp; a mounted application answers 307 to /mcp/ there, as older FastMCPs do."""

    @asynccontextmanager
    async def running(_app: Starlette) -> AsyncIterator[None]:
        async with lifespan(), manager.run():
            yield

    class Endpoint:
        """An object: Starlette takes a function for a request handler, not for an ASGI application."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await manager.handle_request(scope, receive, send)

    route = Mount("/mcp", app=Endpoint()) if mounted else Route("/mcp", endpoint=Endpoint())
    return Starlette(routes=[route], lifespan=running)


def sse_application(
    server: Server[Any, Any],
    security: TransportSecuritySettings | None,
    *,
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
) -> Starlette:
    """Serve HTTP+SSE as FastMCP's `sse` does: the stream at /sse, messages below /messages/."""
    transport = SseServerTransport("/messages/", security)

    @asynccontextmanager
    async def running(_app: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            yield

    class Stream:
        """An object, for the same reason as above."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async with transport.connect_sse(scope, receive, send) as (incoming, outgoing):
                await server.run(incoming, outgoing, server.create_initialization_options())

    stream = Route("/sse", endpoint=Stream(), methods=["GET"])
    return Starlette(routes=[stream, Mount("/messages/", app=transport.handle_post_message)], lifespan=running)


Scope = JSON
Application = Callable[[Scope, Callable[[], Awaitable[JSON]], Callable[[JSON], Awaitable[None]]], Awaitable[None]]


class AnnouncingServer(uvicorn.Server):
    """Says READY when requests are accepted, not when the process has started."""

    url = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"READY {self.url}", flush=True)


def listen(host: str, port: int, *, nagle: bool) -> socket.socket:
    """Listen.

    asyncio sets TCP_NODELAY only on sockets that say they are TCP. `uvicorn --workers` makes one that does not, and a
    message that follows another on the same stream then waits 40 ms for the client's delayed acknowledgement.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0 if nagle else socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(128)
    return listener


def serve(application: Application, options: argparse.Namespace) -> None:
    """Serve until SIGTERM. Open streams would keep uvicorn waiting for ever, so it waits a second only."""
    listener = listen(options.host, options.port, nagle=options.nagle)
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


def serve_stdio(
    server: Server[Any, Any], lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
) -> None:
    """Serve one session on stdin and stdout, until stdin ends."""

    async def run() -> None:
        async with lifespan(), stdio_server() as (incoming, outgoing):
            print("READY", file=sys.stderr, flush=True)
            await server.run(incoming, outgoing, server.create_initialization_options())

    anyio.run(run)


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

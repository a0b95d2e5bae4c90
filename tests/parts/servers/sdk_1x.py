"""What the servers on the Python SDK 1.x have in common: the event store, changes, questions, and applications."""

import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.sse import SseServerTransport
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import McpError
from mcp.shared.message import SessionMessage
from mcp.types import ElicitResult, JSONRPCMessage, JSONRPCNotification
from serving import JSON, Ledger, compact
from starlette.applications import Starlette
from starlette.routing import Mount, Route


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


class Background:
    """The task group for what outlives its call."""

    group: TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncIterator[None]:
    async with anyio.create_task_group() as Background.group:
        yield
        Background.group.cancel_scope.cancel()


async def answered(ledger: Ledger, tool: str, question: Awaitable[Any]) -> Any:
    """Wait for the client, and write what came."""
    try:
        result = await question
    except McpError as exc:
        ledger.write("refused", tool, code=exc.error.code, message=exc.error.message)
        raise
    is_model = hasattr(result, "model_dump")  # else it is one of fastmcp's own
    written = result.model_dump(mode="json", by_alias=True, exclude_none=True) if is_model else result
    ledger.write("answered", tool, result=written)
    return result


def said(result: ElicitResult) -> str:
    # An accepted url has no content.
    return f"accept:{compact(result.content)}" if result.content is not None else result.action


def ask_late(ledger: Ledger, delay_seconds: float, ask: Callable[[], Awaitable[Any]]) -> None:
    """Ask a question of the tool `late` when its call is over."""

    async def ask_unasked() -> None:
        await anyio.sleep(delay_seconds)
        try:
            await ask()
        except McpError:
            pass  # in the ledger already
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            ledger.write("refused", "late", code=None, message="the session is gone")

    Background.group.start_soon(ask_unasked)


def seen_of_client(session: Any, headers: Iterable[tuple[str, str]], session_id: str | None) -> str:
    """What a server knows of its client."""
    client = session.client_params
    wanted = ("authorization", "cookie", "host", "origin", "traceparent", "user-agent")
    described = client.model_dump(mode="json", by_alias=True, exclude_none=True) if client else {}
    return compact(
        {
            "headers": {name: value for name, value in headers if name in wanted or name.startswith("x-")},
            "capabilities": described.get("capabilities"),
            "clientInfo": described.get("clientInfo"),
            "session": session_id,
        }
    )


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


def serve_stdio(
    server: Server[Any, Any], lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
) -> None:
    """Serve one session on stdin and stdout, until stdin ends."""

    async def run() -> None:
        async with lifespan(), stdio_server() as (incoming, outgoing):
            print("READY", file=sys.stderr, flush=True)
            await server.run(incoming, outgoing, server.create_initialization_options())

    anyio.run(run)

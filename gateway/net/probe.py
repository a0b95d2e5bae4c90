"""`mrtr-gateway probe URL`: what an old server speaks, and what the gateway can do for it.

It opens a session for each protocol version, lists the tools, and calls one that does not exist: nothing runs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from msgspec import Raw

from gateway import __version__
from gateway.config import Config
from gateway.core import jsonrpc, mcp, negotiate, sse, toolparams
from gateway.core.negotiate import Handshake
from gateway.errors import Unreachable
from gateway.net.client import FOREIGN, Client, Endpoint, mapped
from gateway.net.era import Era
from gateway.net.finding import connector
from gateway.net.refusals import read_body
from gateway.net.streamable import StreamableChannel
from gateway.net.tasks import Tasks
from gateway.net.upstream import Channel, Headers
from gateway.telemetry import Metrics

_VERSIONS: Final = tuple(sorted(mcp.LEGACY_VERSIONS, reverse=True))
_CLIENT: Final = Raw(jsonrpc.encode({"name": "mrtr-gateway", "version": __version__}))
_CAPABILITIES: Final = Raw(b'{"elicitation":{"form":{},"url":{}},"sampling":{"tools":{}},"roots":{}}')
"""All that a client can declare: some servers offer a tool only to who can answer it."""
_NO_TOOL: Final = "mrtr-gateway-probe-no-such-tool"
_REPLY_BYTES: Final = 1_048_576


class Found(msgspec.Struct, kw_only=True):
    """What a probe found."""

    server: str
    """Name and version that it gives itself."""
    over_sse: bool
    """HTTP+SSE of 2024-11-05; else streamable HTTP."""
    versions: tuple[str, ...]
    """What it can be spoken to in, the newest first."""
    has_sessions: bool
    hears_side: bool
    """Whether a stream is open for what the server says outside of calls."""
    replies_json: bool = False
    """Whether a call is answered by a JSON body, on which nothing can be asked."""
    has_store: bool = False
    """Whether the events of a call have ids, which proves an event store."""
    tools: int = 0
    ephemeral: int = 0
    """How many of the tools say that they may run twice."""


async def probe(config: Config, headers: Headers) -> Found | None:
    """Find out; None for a server of 2026-07-28, for which the gateway translates nothing. Raises GatewayError.

    `config` has one route, which is probed with its timeouts.
    """
    route = config.routes[0]
    assert route.upstream.url is not None, "only what has a URL is probed"
    metrics = Metrics(__version__, [route.path])
    client, tasks = Client(config.limits, config.timeouts), Tasks(metrics)
    endpoint = Endpoint(route.path, route.upstream.url)
    endpoint.where = route.upstream.url
    era = Era(route.path, endpoint, client, metrics, tasks)
    connect = connector(route.upstream.transport, client, endpoint, tasks, era.transport_found)
    try:
        async with asyncio.timeout(config.timeouts.handshake_seconds * len(_VERSIONS)):
            if await era.is_modern(headers):
                return None
            return await _look(connect, client, endpoint, headers)
    except TimeoutError as exc:
        raise Unreachable(f"{endpoint.where} did not answer in time; check that it is an MCP server") from exc
    except ValueError as exc:
        raise Unreachable(f"{endpoint.where} is no MCP server: {exc}") from exc
    finally:
        await tasks.close()
        await client.close()


async def _look(connect: Callable[[], Channel], client: Client, endpoint: Endpoint, headers: Headers) -> Found:
    async with _session(connect, mcp.LEGACY, headers) as (channel, shaken):
        found = Found(
            server=_named(shaken.server_info),
            over_sse=not isinstance(channel, StreamableChannel),
            versions=(shaken.version,),
            has_sessions=channel.can_ask,
            hears_side=channel.hears_side,
        )
        if shaken.offers("tools"):
            listed = await _ask(channel, mcp.TOOLS_LIST, {}, headers)
            tools = toolparams.of_tools(bytes(listed)).values() if listed is not None else ()
            found.tools, found.ephemeral = len(tools), sum(tool.ephemeral for tool in tools)
        if not found.over_sse:
            method, params = mcp.PING, {}
            if shaken.offers("tools"):
                method, params = mcp.TOOLS_CALL, {"name": _NO_TOOL, "arguments": {}}
            own = {**headers, mcp.PROTOCOL_VERSION: shaken.version}
            if channel.session_id is not None:
                own[mcp.SESSION_ID] = channel.session_id
            await _look_at_reply(found, client, endpoint, own, jsonrpc.request(b'"form"', method, params))
    for version in _VERSIONS:
        if version not in found.versions:
            async with _session(connect, version, headers) as (_, shaken):
                found.versions += (shaken.version,) if shaken.version not in found.versions else ()
    found.versions = tuple(sorted(found.versions, reverse=True))
    return found


@asynccontextmanager
async def _session(
    connect: Callable[[], Channel], version: str, headers: Headers
) -> AsyncIterator[tuple[Channel, Handshake]]:
    """One session, whole: some servers die of half a handshake."""
    channel = connect()
    params = {**negotiate.initialize_params(_CLIENT, _CAPABILITIES), "protocolVersion": version}
    try:
        channel, result = await channel.open(jsonrpc.request(b'"init"', mcp.INITIALIZE, params), headers)
        shaken = negotiate.handshake(result)
        await channel.listen(shaken.version, headers, lambda _: False, lambda: None)
        await channel.send(jsonrpc.notification(mcp.INITIALIZED), headers)
        yield channel, shaken
    finally:
        await channel.close(end_session=True)


async def _ask(channel: Channel, method: str, params: dict[str, object], headers: Headers) -> Raw | None:
    """The result of one request; None for an error."""
    results: list[Raw] = []

    def receive(data: bytes) -> bool:
        said = jsonrpc.message(data)
        if said.method is not None:
            return False
        if isinstance(said.result, Raw):
            results.append(said.result)
        return True

    _ = await channel.request(jsonrpc.request(b'"probe"', method, params), headers, receive)
    return results[0] if results else None


async def _look_at_reply(
    found: Found, client: Client, endpoint: Endpoint, headers: dict[str, str], message: bytes
) -> None:
    """Send a call that runs nothing, and look at the form of the reply."""
    own = {**headers, "Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    try:
        async with client.exchange("POST", endpoint.url, own, message, endpoint.where) as response:
            found.replies_json = response.content_type != "text/event-stream"
            if found.replies_json:
                _ = await read_body(response, _REPLY_BYTES, endpoint.where)
                return
            parser = sse.Parser(_REPLY_BYTES)
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    found.has_store = found.has_store or bool(event.id)
                    if event.data and jsonrpc.message(event.data).method is None:
                        return
    except FOREIGN as exc:
        raise mapped(exc, endpoint.where) from exc


def _named(server_info: Raw) -> str:
    info = jsonrpc.fields(server_info)
    words = (jsonrpc.text(info.get("name")), jsonrpc.text(info.get("version")))
    shown = " ".join(word for word in words if word)
    return "".join(letter if letter.isprintable() else "?" for letter in shown)[:200]


def report(found: Found | None) -> Iterator[str]:
    """The findings and what they mean, line by line."""
    if found is None:
        yield f"versions     {mcp.MODERN}"
        yield ""
        yield "- It is a modern server: requests go through the gateway to it, and its answers back, as they are."
        return
    yield f"server       {found.server}"
    yield f"transport    {'HTTP+SSE (2024-11-05)' if found.over_sse else 'streamable HTTP'}"
    yield f"versions     {', '.join(found.versions)}"
    yield f"sessions     {'yes' if found.has_sessions else 'no: stateless'}"
    yield f"side stream  {'yes' if found.hears_side else 'no'}"
    if not found.over_sse:
        yield f"replies      {'JSON bodies' if found.replies_json else 'event streams'}"
    yield f"event store  {'yes' if found.has_store else 'no'}"
    yield f"tools        {found.tools}, of which {found.ephemeral} say that they may run twice"
    yield ""
    yield from (f"- {sentence}" for sentence in _meaning(found))


def _meaning(found: Found) -> Iterator[str]:
    if not found.has_sessions:
        yield (
            "Tools that ask the user end with an error: without sessions no answer can reach the server. Run it with "
            "sessions. Tools that do not ask work."
        )
    if found.replies_json:
        yield (
            "A question on a call's own reply is swallowed by the server, and the call ends with an error after "
            "timeouts.idle_seconds. Have the server answer with event streams (no json_response, no "
            "enableJsonResponse). Tools that do not ask work."
        )
    if not found.has_sessions or found.replies_json:
        return
    yield "Tools that ask the user work: the call is held while the user thinks, and any replica takes the answer."
    if found.has_store:
        yield "If the replica that holds a call dies, or its stream breaks, another one resumes the call."
    elif found.over_sse:
        yield (
            "If the one stream of its session breaks, or the replica that holds it dies, a call is lost; one that may "
            "run twice is run again with the answers. HTTP+SSE cannot resume."
        )
    else:
        yield (
            "If the replica that holds a call dies, the call is lost; one that may run twice is run again with the "
            "answers. With an event store it would be resumed."
        )
    if not found.hears_side and not found.over_sse:
        yield "Questions and changes outside of a call's own reply are lost: the server opens no GET stream."

"""Examines one server, step by step, until there is no next step; the result is one `Upstream`."""

import asyncio
from typing import Final

from yarl import URL

from gateway import __version__
from gateway.core import jsonrpc, mcp, negotiate
from gateway.errors import GatewayError
from gateway.net.child import Child, given_secrets, not_here
from gateway.net.client import Client
from gateway.net.finding import connector
from gateway.net.nursery import Nursery
from gateway.net.stdio import StdioChannel
from gateway.net.streamable import StreamableChannel
from gateway.net.tasks import Tasks
from gateway.probe import handshakes, network, streams
from gateway.probe.discreet import Discretion, clean
from gateway.probe.examination import Examination, Stopped, Subject
from gateway.probe.findings import Upstream, worst
from gateway.probe.greeting import described, greet
from gateway.probe.handshakes import VERSIONS, Connect, Session, explain, session
from gateway.probe.snippet import snippet
from gateway.probe.verdicts import features, unknown
from gateway.telemetry import Metrics

_STEPS: Final = 12
"""As many waits may follow one another, each of its own bound; no server can make a probe longer than that."""
_KILL_SECONDS: Final = 5.0
_OPENING: Final = (GatewayError, ValueError, TimeoutError)


async def examine(subject: Subject, *, route: str | None = None) -> Upstream:
    """Examine one server; what is wrong with it is in the result, and nothing is raised.

    `route` is the path to tell, where the server is one of a configuration.
    """
    timeouts, upstream = subject.config.timeouts, subject.route.upstream
    metrics = Metrics(__version__, [subject.route.path])
    client, tasks = Client(subject.config.limits, timeouts), Tasks(metrics)
    client.change(subject.config.limits, timeouts, subject.tls, upstream.tls.server_name)
    exam = Examination(subject, client, tasks)
    longest = max(timeouts.handshake_seconds, timeouts.connect_seconds)
    try:
        async with asyncio.timeout(_STEPS * longest + subject.wait_seconds):
            if upstream.url is None:
                await _examine_child(exam, metrics)
            else:
                await _examine_url(exam)
    except Stopped:
        pass
    except TimeoutError:
        _ = exam.failed(
            "time",
            "the server took too long, step after step",
            "A gateway before it would end many calls for their time.",
            "Look what slows it down; --timeout gives each step more time.",
        )
    except Exception as exc:  # noqa: BLE001 - the outermost edge: an operator gets a sentence, never a traceback
        _ = exam.failed(
            "probe",
            f"what it answered could not be understood ({type(exc).__name__})",
            "A hostile or broken server, or a mistake in the probe.",
            "If the server is fine, please report it with the version of mrtr-gateway.",
        )
    finally:
        await tasks.close()
        await client.close()
    return Discretion(secrets(subject)).upstream(_concluded(exam, route))


def secrets(subject: Subject) -> list[str]:
    """What must not come out again."""
    upstream = subject.route.upstream
    url = URL(upstream.url or "")
    return [*subject.headers.values(), *given_secrets(upstream), url.raw_query_string, *url.query.values()]


def _concluded(exam: Examination, route: str | None) -> Upstream:
    subject = exam.subject
    upstream = subject.route.upstream
    checks = tuple(exam.checks)
    result = Upstream(target=upstream.name, route=route, state=worst(checks), checks=checks)
    if not exam.spoken or result.state == "failed":
        return result
    server = exam.server
    replays = subject.route.continuation == "replay"
    result.server = server
    result.features = features(server, subject.config, replays=replays)
    result.state = worst(checks, result.features)
    result.unknown = unknown(server, waited=subject.wait_seconds > 0)
    if route is None:
        result.configuration = snippet(
            server,
            subject.route,
            list(subject.headers),
            subject.config.timeouts.handshake_seconds,
            needs_sse=exam.needs_sse,
        )
    return result


# -- over HTTP ---------------------------------------------------------------------------------------------------


async def _examine_url(exam: Examination) -> None:
    await network.reach(exam)
    transport = exam.subject.route.upstream.transport
    # The gateway does not ask a server for its era either, where it is told that it speaks HTTP+SSE.
    is_modern = None if transport == "sse" else await greet(exam)
    if is_modern:
        await _examine_modern(exam)
        return
    try:
        await _examine_old(exam, _connector(exam, transport))
    except _OPENING as exc:
        if isinstance(exc, TimeoutError) and transport == "auto":
            await _try_sse(exam)
        if not exam.spoken:
            raise explain(exam, exc) from exc


def _connector(exam: Examination, transport: str) -> Connect:
    return connector(transport, exam.client, exam.endpoint, exam.tasks, lambda _: None)


async def _examine_modern(exam: Examination) -> None:
    server = exam.server
    exam.spoken, server.era = True, "modern"
    try:
        async with session(exam, _connector(exam, "streamable-http"), mcp.LEGACY) as opened:
            server.era = "both"
            server.versions = tuple(dict.fromkeys((*server.versions, opened.shaken.version)))
            server.name = server.name or described(opened.shaken.server_info)
    except _OPENING:
        pass
    exam.ok("era", "modern" if server.era == "modern" else "modern, and it serves old clients too")
    exam.ok("name", server.name or "none")
    _tell_authorization(exam)
    exam.ok("versions", ", ".join(server.versions))
    _tell_capabilities(exam)


async def _try_sse(exam: Examination) -> None:
    """A server that answers no POST is found by its stream only, and only where the transport is written down."""
    try:
        await _examine_old(exam, _connector(exam, "sse"))
    except _OPENING:
        return
    exam.needs_sse = True
    exam.warn(
        "auto",
        "`transport: auto` does not find out that it speaks HTTP+SSE",
        "It leaves a POST to this URL unanswered, where others refuse it.",
        "Write transport: sse, as the configuration below does.",
    )


async def _examine_old(exam: Examination, connect: Connect) -> None:
    async with session(exam, connect, mcp.LEGACY) as opened:
        _introduce(exam, opened)
        await handshakes.list_tools(exam, opened)
        if isinstance(opened.channel, StreamableChannel):
            own = streams.own_headers(exam, opened.channel, opened.shaken)
            await streams.look_at_reply(exam, own, has_tools=opened.shaken.offers("tools"))
            await _open_others(exam, connect)
            if opened.channel.session_id is not None:
                await _end(exam, own)
        else:
            await _open_others(exam, connect)
    if exam.subject.wait_seconds and exam.server.side_stream:
        await _wait_idle(exam)


def _introduce(exam: Examination, opened: Session) -> None:
    exam.ok("era", "old: the gateway translates for modern clients")
    handshakes.introduce(exam, opened)
    server = exam.server
    if isinstance(opened.channel, StdioChannel):
        server.transport = "stdio"
        exam.ok("handshake", f"{server.name or 'no name'}, {opened.shaken.version}, in {opened.seconds * 1000:.0f} ms")
        _tell_capabilities(exam)
        return
    server.transport = "streamable-http" if isinstance(opened.channel, StreamableChannel) else "sse"
    exam.ok("handshake", f"{server.name or 'no name'}, in {opened.seconds * 1000:.0f} ms")
    _tell_authorization(exam)
    exam.ok("transport", "streamable HTTP" if server.transport == "streamable-http" else "HTTP+SSE (2024-11-05)")
    _tell_session(exam)
    _tell_capabilities(exam)


def _tell_authorization(exam: Examination) -> None:
    sent = exam.subject.headers
    exam.ok("authorization", "what was sent is accepted" if sent else "nothing was sent, and nothing is asked for")


def _tell_session(exam: Examination) -> None:
    server = exam.server
    if not server.sessions:
        exam.warn(
            "session",
            "none: the server is stateless",
            "No answer to a question can reach it.",
            "If its tools ask the user, run it with sessions.",
        )
        return
    exam.ok("session", "yes" if server.transport == "streamable-http" else "yes, its stream is the session")
    if server.side_stream:
        exam.ok("GET stream", "open" if server.transport == "streamable-http" else "open, for everything")
    else:
        exam.warn(
            "GET stream",
            "none",
            "Questions and changes outside of a call's own reply are lost.",
            "Have the server serve GET with a session id.",
        )


def _tell_capabilities(exam: Examination) -> None:
    exam.ok("capabilities", ", ".join(exam.server.capabilities) or "none")


async def _open_others(exam: Examination, connect: Connect) -> None:
    """Open a session for each other version while the first one is open, as calls of two clients would."""
    server = exam.server
    found = set(server.versions)
    refused = ""
    for version in VERSIONS:
        if version in found:
            continue
        try:
            async with session(exam, connect, version) as opened:
                found.add(opened.shaken.version)
        except _OPENING as exc:
            refused = clean(str(exc) or type(exc).__name__, 200)
            break
    server.versions = tuple(sorted(found, reverse=True))
    exam.ok("versions", ", ".join(server.versions))
    if refused:
        exam.warn(
            "more sessions",
            f"refused while one is open: {refused}",
            "Each call that runs or waits needs a session of its own: with one, callers wait for one another.",
            "Have the server make a transport for each session.",
        )


async def _end(exam: Examination, own: dict[str, str]) -> None:
    if await streams.end(exam, own):
        exam.ok("DELETE", "ends a session")
    else:
        exam.ok(
            "DELETE",
            "does not end a session",
            "Sessions that the gateway is done with (sessions.idle_seconds) stay until the server forgets them.",
        )


async def _wait_idle(exam: Examination) -> None:
    """Listen to a stream on which nothing happens, in a session of its own: most servers allow one stream in each."""
    ready, headers = asyncio.Event(), exam.subject.headers
    if exam.server.transport == "sse":
        await streams.wait_idle(exam, headers, ready)
        return
    channel = StreamableChannel(exam.client, exam.endpoint, exam.tasks)
    try:
        async with asyncio.timeout(exam.timeouts.handshake_seconds):
            result = await channel.initialize(handshakes.initialize(mcp.LEGACY), headers)
        shaken = negotiate.handshake(result)
        if channel.session_id is None:
            return
        channel.adopt(channel.session_id, shaken.version)
        own = streams.own_headers(exam, channel, shaken)
        waiting = exam.tasks.start(streams.wait_idle(exam, own, ready), "listen to the idle stream")
        _ = await ready.wait()
        await channel.send(jsonrpc.notification(mcp.INITIALIZED), headers)
        _ = await asyncio.wait((waiting,))
    finally:
        await channel.close(end_session=True)


# -- a child -----------------------------------------------------------------------------------------------------


class _Living(set[Child]):
    """All children, and the last of them also after its end: it has the last lines of its stderr."""

    last: Child | None = None

    def add(self, child: Child) -> None:
        super().add(child)
        self.last = child


async def _examine_child(exam: Examination, metrics: Metrics) -> None:
    route = exam.subject.route
    if missing := not_here(route.upstream):
        raise exam.failed(
            "program",
            missing.partition(": ")[2],
            "It cannot be started.",
            "Install it, or correct the command; there is no shell that would find more.",
        )
    exam.ok("program", route.upstream.name)
    living, noise = _Living(), list[None]()
    nursery = Nursery(route, exam.client, metrics, exam.tasks, living, lambda _: None)
    try:
        async with session(exam, lambda: StdioChannel(nursery, lambda: noise.append(None)), mcp.LEGACY) as opened:
            _introduce(exam, opened)
            exam.ok("versions", opened.shaken.version)
            await handshakes.list_tools(exam, opened)
    except _OPENING as exc:
        raise _explain_child(exam, exc, living.last) from exc
    finally:
        nursery.cool()
        await _end_children(living)
    if noise:
        exam.warn(
            "stdout",
            f"{len(noise)} lines that are no JSON-RPC",
            "They are ignored; a line that looks like a message by chance would not be.",
            "Have the server print to stderr.",
        )


def _explain_child(exam: Examination, exc: Exception, child: Child | None) -> Stopped:
    lines = " / ".join(child.mutter.last) if child is not None else ""
    said = f"; its stderr ends: {clean(lines, 300)}" if lines else ""
    late = f"`initialize` was not answered within {exam.timeouts.handshake_seconds:g} s"
    what = late if isinstance(exc, TimeoutError) else clean(str(exc).partition("; the gateway's log")[0], 300)
    return exam.failed(
        "handshake",
        f"{what}{said}",
        "Every call needs a child that has answered `initialize`.",
        "Start the command by hand and see what it says. npx and uvx download at the first start: install the server "
        "beforehand, or raise --timeout here and timeouts.handshake_seconds there.",
    )


async def _end_children(living: set[Child]) -> None:
    left = list(living)
    for child in left:
        child.kill()
    if left:
        _ = await asyncio.wait([child.gone for child in left], timeout=_KILL_SECONDS)

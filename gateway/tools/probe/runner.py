"""Examines one server, step by step; the result is one `ProbedServer`."""

import asyncio
from contextlib import suppress
from typing import Final

from gateway.children.child import Child
from gateway.children.launcher import ChildLauncher, end_children
from gateway.config.programs import not_here
from gateway.http.upstream_client import Bounds
from gateway.protocol import mcp
from gateway.protocol.errors import GatewayError, Refused, clean
from gateway.telemetry import Metrics
from gateway.telemetry.recent_errors import RecentErrors
from gateway.telemetry.upstream_health import UpstreamHealth
from gateway.tools.probe.report.features import features, unknown
from gateway.tools.probe.report.findings import ProbedServer, worst
from gateway.tools.probe.report.suggested_config import snippet
from gateway.tools.probe.report.text import TextReport
from gateway.tools.probe.steps import network, sessions, wire_behaviour
from gateway.tools.probe.steps.context import ProbeContext, ProbeStopped, Subject
from gateway.tools.probe.steps.discover import capability_names, described, greet, website
from gateway.tools.probe.steps.requests import http_client
from gateway.tools.probe.steps.sessions import VERSIONS, Connect, ProbedSession, explain, session
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.streamable_http import StreamableChannel
from gateway.upstream.http.transport_detection import connector
from gateway.upstream.stdio import StdioChannel

_STEPS: Final = 12
"""The whole probe may take at most this many times the longest step."""
_OPENING: Final = (GatewayError, ValueError, TimeoutError)


async def run_probe(subject: Subject, text: TextReport, *, route: str | None) -> ProbedServer:
    """Examine one server; problems are part of the result, and nothing is raised.

    `route` is the route's path if the server comes from a configuration.
    """
    timeouts, upstream = subject.config.timeouts, subject.route.upstream
    bounds = Bounds(subject.config.limits, timeouts, subject.tls, upstream.tls.server_name)
    async with http_client(bounds) as (client, tasks):
        exam = ProbeContext(subject, client, tasks, text)
        target = exam.notes.safe(upstream.name)
        text.begin(target if route is None else f"{route} -> {target}")
        try:
            async with asyncio.timeout(_STEPS * max(timeouts.handshake_seconds, timeouts.connect_seconds)):
                await (_examine_child(exam) if upstream.url is None else _examine_url(exam))
        except ProbeStopped:
            pass
        except TimeoutError:
            _ = exam.notes.failed(
                "time",
                "the server took too long in every step",
                "Behind the gateway, many calls would time out.",
                "Find out what slows the server down, or give each step more time with --timeout.",
            )
        except Exception as exc:  # noqa: BLE001 - the outermost edge: an operator gets a sentence, never a traceback
            _ = exam.notes.failed(
                "probe",
                f"the probe could not handle an answer ({type(exc).__name__})",
                "The server is broken or hostile, or the probe has a bug.",
                "If the server works otherwise, please report this with the version of mrtr-gateway.",
            )
    result = _concluded(exam, target, route)
    text.conclude(result)
    return result


def _concluded(exam: ProbeContext, target: str, route: str | None) -> ProbedServer:
    subject = exam.subject
    checks = tuple(exam.notes.checks)
    result = ProbedServer(target=target, route=route, state=worst(checks), checks=checks)
    if result.state == "failed":
        return result
    server = exam.server
    result.server = exam.notes.safe_server(server)
    result.features = features(server, subject.route, subject.config)
    result.state = worst(checks, result.features)
    result.unknown = unknown(server)
    if route is None:
        result.configuration = snippet(
            server,
            subject.route,
            list(subject.headers),
            subject.config.timeouts.handshake_seconds,
            needs_sse=exam.notes.has_checked("auto"),
        )
    return result


# -- over HTTP ---------------------------------------------------------------------------------------------------


async def _examine_url(exam: ProbeContext) -> None:
    await network.resolve(exam)
    route = exam.subject.route
    transport = route.upstream.transport
    # With transport: sse the gateway skips the era probe too.
    is_modern = None if transport == "sse" else await greet(exam)
    if is_modern and route.era == "auto":
        await _examine_modern(exam)
        return
    try:
        await _examine_old(exam, _connector(exam, transport))
    except _OPENING as exc:
        if isinstance(exc, TimeoutError) and transport == "auto":
            # The gateway finds HTTP+SSE at a server that answers no POST only if the transport is configured.
            with suppress(*_OPENING):
                await _examine_old(exam, _connector(exam, "sse"))
                exam.notes.warn(
                    "auto",
                    "`transport: auto` cannot detect that the server speaks HTTP+SSE",
                    "The server leaves a POST to this URL unanswered, where other HTTP+SSE servers refuse it.",
                    "Set transport: sse, as in the configuration below.",
                )
        if exam.notes.has_checked("handshake"):
            return
        if exam.met_page and not isinstance(exc, Refused | TimeoutError):
            raise website(exam, f"{clean(str(exc), 300)}; its first answer was a web page") from exc
        raise explain(exam, exc) from exc


def _connector(exam: ProbeContext, transport: str) -> Connect:
    upstream = HttpUpstream(exam.client, exam.endpoint, exam.tasks)
    return connector(transport, upstream)


async def _examine_modern(exam: ProbeContext) -> None:
    """Report what a server that answered `server/discover` is, and whether it serves legacy clients too."""
    with suppress(*_OPENING):
        async with session(exam, _connector(exam, "streamable-http"), mcp.LEGACY) as opened:
            exam.learn(
                era="both",
                legacy_sessions=opened.channel.can_ask,
                versions=tuple(dict.fromkeys((*exam.server.versions, opened.shaken.version))),
                name=exam.server.name or described(opened.shaken.server_info),
            )
    server, both = exam.server, "modern, and it serves legacy clients too"
    if server.era == "modern":
        exam.notes.ok(
            "era",
            "modern",
            "Modern clients need no gateway to use this server. Legacy clients get its tools and its questions from "
            "the gateway, with era: auto.",
        )
    elif server.legacy_sessions:
        exam.notes.ok(
            "era",
            both,
            "Modern clients need no gateway to use its modern side. But the tools of some servers can ask the user "
            "only on the legacy side: for modern clients such a tool fails with -32600 `no back-channel for "
            "server-initiated requests`, or with isError and `unavailable on 2026-07-28 connections`.",
            "If you see one of these, set era: bridge on the route. If instead legacy clients see -32603 `Handler "
            "returned an invalid result`, set era: mirror. Otherwise leave era: auto.",
        )
    else:
        exam.notes.ok(
            "era",
            both,
            "Modern clients need no gateway to use its modern side. Its legacy side has no sessions, so no tool can "
            "ask there, and era: bridge would not help.",
            "Set era: mirror on the route if its tools ask: legacy clients are then asked too. Otherwise leave era: "
            "auto.",
        )
    exam.notes.ok("name", server.name or "none")
    _tell_authorization(exam)
    exam.notes.ok("versions", ", ".join(server.versions))
    exam.notes.ok("capabilities", ", ".join(server.capabilities) or "none")


async def _examine_old(exam: ProbeContext, connect: Connect) -> None:
    async with session(exam, connect, mcp.LEGACY) as opened:
        _introduce(exam, opened)
        await sessions.list_tools(exam, opened)
        own, session_id = {**exam.subject.headers, mcp.PROTOCOL_VERSION: opened.shaken.version}, None
        if isinstance(opened.channel, StreamableChannel):
            if (session_id := opened.channel.session_id) is not None:
                own[mcp.SESSION_ID] = session_id
            await wire_behaviour.look_at_reply(exam, own, has_tools=opened.shaken.offers("tools"))
        await _open_others(exam, connect)
        if session_id is not None:
            await wire_behaviour.end(exam, own)


def _introduce(exam: ProbeContext, opened: ProbedSession) -> None:
    if exam.server.era == "modern":
        exam.learn(era="both", legacy_sessions=opened.channel.can_ask)
        exam.notes.ok("era", "modern and legacy: with era: bridge, the gateway uses the legacy side")
    else:
        exam.notes.ok("era", "legacy: the gateway translates for modern clients")
    channel, shaken, seconds = opened
    is_http, took = isinstance(channel, StreamableChannel), f"in {seconds * 1000:.0f} ms"
    exam.learn(
        name=described(shaken.server_info),
        versions=tuple(dict.fromkeys((*exam.server.versions, shaken.version))),
        transport="streamable-http" if is_http else "stdio" if isinstance(channel, StdioChannel) else "sse",
        sessions=channel.can_ask,
        side_stream=channel.hears_side,
        handshake_seconds=round(seconds, 3),
        capabilities=capability_names(shaken.capabilities),
    )
    server, capabilities = exam.server, ", ".join(exam.server.capabilities) or "none"
    if server.transport == "stdio":
        exam.notes.ok("handshake", f"{server.name or 'no name'}, {shaken.version}, {took}")
        exam.notes.ok("capabilities", capabilities)
        return
    exam.notes.ok("handshake", f"{server.name or 'no name'}, {took}")
    _tell_authorization(exam)
    exam.notes.ok("transport", "streamable HTTP" if is_http else "HTTP+SSE (2024-11-05)")
    # What can carry a question; the features say what comes of it.
    if not server.sessions:
        exam.notes.warn("session", "none: the server is stateless")
    else:
        exam.notes.ok("session", "yes" if is_http else "yes, the stream is the session")
        if server.side_stream:
            exam.notes.ok("GET stream", "open" if is_http else "open, carries every message")
        else:
            exam.notes.warn("GET stream", "none")
    exam.notes.ok("capabilities", capabilities)


def _tell_authorization(exam: ProbeContext) -> None:
    if not exam.subject.headers:
        exam.notes.ok("authorization", "nothing sent, nothing required")
        return
    exam.notes.ok(
        "authorization",
        "the server accepts what was sent",
        "The gateway forwards each client's own.",
        "For one value for all clients, set credentials or set_headers on the route.",
    )


async def _open_others(exam: ProbeContext, connect: Connect) -> None:
    """Open a session for each other version while the first is open, as two clients would."""
    found = set(exam.server.versions)
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
    exam.learn(versions=tuple(sorted(found, reverse=True)))
    exam.notes.ok("versions", ", ".join(exam.server.versions))
    if refused:
        exam.notes.warn(
            "more sessions",
            f"refused while one is open: {refused}",
            "Every running or waiting call needs its own session: with only one, callers wait for each other.",
            "Make the server create one transport per session.",
        )


# -- a child -----------------------------------------------------------------------------------------------------


async def _examine_child(exam: ProbeContext) -> None:
    route = exam.subject.route
    if missing := not_here(route.upstream):
        raise exam.notes.failed(
            "program",
            missing.why,
            "The command cannot start.",
            "Install the program, or correct the command. No shell is involved, so shell syntax does not work.",
        )
    exam.notes.ok("program", route.upstream.name)
    metrics, children = Metrics(), dict[Child, None]()
    health = UpstreamHealth(route.path, metrics, RecentErrors(), url=None)
    launcher = ChildLauncher(route, exam.client, exam.tasks, health, children)
    try:
        async with session(exam, lambda: StdioChannel(launcher), mcp.LEGACY) as opened:
            _introduce(exam, opened)
            exam.notes.ok("versions", opened.shaken.version)
            await sessions.list_tools(exam, opened)
    except _OPENING as exc:
        lines = " / ".join(launcher.newest.stderr_log.last) if launcher.newest is not None else ""
        said = f"; its stderr ends with: {clean(lines, 300)}" if lines else ""
        late = f"`initialize` was not answered within {exam.timeouts.handshake_seconds:g} s"
        # The probe shows the stderr itself; it writes no log that the error could refer to.
        what = late if isinstance(exc, TimeoutError) else clean(str(exc).partition("; the gateway's log")[0], 300)
        raise exam.notes.failed(
            "handshake",
            f"{what}{said}",
            "Every call needs a child that has answered `initialize`.",
            "Start the command by hand and read its output. npx and uvx download at the first start: install the "
            "server first, or raise --timeout here and timeouts.handshake_seconds in the configuration.",
        ) from exc
    finally:
        launcher.stop_prestarting()
        await end_children(children)
    if noise := int(metrics.upstream_failures[route.path, "malformed"].value):
        exam.notes.warn(
            "stdout",
            f"{noise} lines that are not JSON-RPC",
            "They are ignored, but a line that happens to look like a message would not be.",
            "Make the server log to stderr.",
        )

"""Examines a server as the command does, in this process and with short times."""

import io
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from gateway.config import Route, UpstreamTls, contexts, for_upstream
from gateway.tools.probe.report.findings import Check, ProbedServer, ProbeReport, report
from gateway.tools.probe.report.text import TextReport
from gateway.tools.probe.runner import run_probe
from gateway.tools.probe.steps.context import Subject

SECONDS = 2.0


def subject(
    url: str,
    headers: dict[str, str] | None = None,
    *,
    seconds: float = SECONDS,
    transport: str = "auto",
    era: Literal["auto", "bridge"] = "auto",
    **tls: Any,
) -> Subject:
    config = for_upstream(url)
    names = ("connect_seconds", "handshake_seconds", "answer_seconds", "cancel_seconds")
    timeouts = structs.replace(config.timeouts, **dict.fromkeys(names, seconds))
    tls = {name: str(value) if isinstance(value, Path) else value for name, value in tls.items()}
    route: Route = config.routes[0]
    upstream = structs.replace(route.upstream, tls=UpstreamTls(**tls), transport=transport)
    route = structs.replace(route, upstream=upstream, era=era)
    config = structs.replace(config, routes=(route,), timeouts=timeouts)
    context = contexts(config).upstreams[route.path]
    return Subject(
        route=route,
        config=config,
        headers=headers or {},
        tls=context,
    )


async def look(url: str, headers: dict[str, str] | None = None, **options: Any) -> ProbedServer:
    return await run_probe(subject(url, headers, **options), TextReport(None), route=None)


def check(found: ProbedServer, name: str) -> Check:
    """The one check of that name."""
    (one,) = [check for check in found.checks if check.name == name]
    return one


def states(found: ProbedServer) -> dict[str, str]:
    return {check.name: check.state for check in found.checks}


def answers(found: ProbedServer) -> dict[str, str]:
    return {feature.name: feature.answer for feature in found.features}


def everything_in(found: ProbedServer) -> str:
    """Everything that is printed of it, as text and as (escaped) JSON."""
    return as_text(report("", (), (found,))) + repr(found)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def as_text(found: ProbeReport, out: io.StringIO | None = None) -> str:
    """A report as text, as it is printed while it is made."""
    out = out or io.StringIO()
    text = TextReport(out)
    if found.checks:
        text.begin("The configuration, on this machine")
    for each in found.checks:
        text.check(each)
    for server in found.upstreams:
        text.begin(server.target if server.route is None else f"{server.route} -> {server.target}")
        for each in server.checks:
            text.check(each)
        text.conclude(server)
    text.end(found.state)
    return out.getvalue()

"""The report, as `--json` prints it: these structs are the documented format (docs/probe.md).

Within one `schema`, names and meanings do not change, but keys may be added.
"""

from typing import Final, Literal

from msgspec import Struct

State = Literal["ok", "warning", "failed"]
"""`warning`: it works, with a limit or a risk; `failed`: the server cannot be used this way."""

Answer = Literal["yes", "partly", "no", "not offered"]

_EXIT: Final[dict[State, int]] = {"ok": 0, "warning": 3, "failed": 1}


class Check(Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    state: State
    found: str
    why: str = ""
    """Why it matters; may be empty."""
    fix: str = ""


class Feature(Struct, frozen=True, kw_only=True):
    """What clients get of one feature through the gateway."""

    name: str
    """For programs; it does not change."""
    title: str
    answer: Answer
    """`not offered`: the server does not have the feature, so nothing is missing."""
    short: str
    """The answer in a few words."""
    why: str = ""
    fix: str = ""


class Server(Struct, frozen=True, kw_only=True):
    """The properties of the server itself."""

    name: str = ""
    """Name and version, from its `serverInfo`."""
    era: Literal["old", "modern", "both"] = "old"
    legacy_sessions: bool | None = None
    """Whether the legacy side of a server of both eras has sessions, without which it cannot ask; null for others."""
    transport: Literal["streamable-http", "sse", "stdio"] = "streamable-http"
    """`sse` is HTTP+SSE of 2024-11-05."""
    versions: tuple[str, ...] = ()
    """Protocol versions that it supports, newest first."""
    sessions: bool = False
    """Whether an answer can reach its call."""
    ends_sessions: bool | None = None
    """Whether it ends a session on DELETE; null if not tried."""
    side_stream: bool = False
    """Whether it opens a stream for messages outside of calls."""
    json_replies: bool = False
    """Whether it answers calls with a JSON body, which cannot carry questions."""
    event_store: bool = False
    """Whether the events of a call have ids, which implies an event store."""
    replays: bool | None = None
    """Whether it replays events; null if that could not be tried."""
    capabilities: tuple[str, ...] = ()
    """Such as `tools`, and `tools.listChanged` for its flag."""
    tools: int = 0
    ephemeral_tools: int = 0
    """How many declare that they may run twice (`readOnlyHint`, `idempotentHint`)."""
    left_out_tools: tuple[str, ...] = ()
    """Those that would make modern clients reject the whole list."""
    task_tools: int = 0
    """How many can only be called as a task."""
    optional_task_tools: int = 0
    """How many can be called as a task, but need not."""
    handshake_seconds: float = 0.0


class ProbedServer(Struct, kw_only=True):
    """One probed server."""

    target: str
    """The URL without its query, or the program."""
    route: str | None = None
    """The path of its route; null without a configuration."""
    state: State = "failed"
    checks: tuple[Check, ...] = ()
    server: Server | None = None
    """null if it did not answer in MCP."""
    features: tuple[Feature, ...] = ()
    unknown: tuple[str, ...] = ()
    """What cannot be known without calling a tool."""
    configuration: str | None = None
    """The suggested configuration (YAML)."""


class ProbeReport(Struct, kw_only=True):
    """The whole report."""

    schema: int = 1
    gateway: str
    """The version of mrtr-gateway."""
    state: State
    exit_code: int
    checks: tuple[Check, ...] = ()
    """Of the configuration and of this machine; empty without a configuration."""
    upstreams: tuple[ProbedServer, ...] = ()


def worst(checks: tuple[Check, ...], features: tuple[Feature, ...] = ()) -> State:
    """Return the overall state: a missing feature is a warning, a feature that is not offered is not."""
    states = {check.state for check in checks}
    if "failed" in states:
        return "failed"
    limited = "warning" in states or any(feature.answer == "no" for feature in features)
    return "warning" if limited else "ok"


def report(version: str, checks: tuple[Check, ...], upstreams: tuple[ProbedServer, ...]) -> ProbeReport:
    """Assemble the report; its state is the worst of its parts."""
    states = {worst(checks), *(upstream.state for upstream in upstreams)}
    state: State = "failed" if "failed" in states else "warning" if "warning" in states else "ok"
    return ProbeReport(gateway=version, state=state, exit_code=_EXIT[state], checks=checks, upstreams=upstreams)

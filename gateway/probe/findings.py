"""What a probe finds, as `--json` prints it: these structs are the documented shape (docs/probe.md).

Names and meanings stay within one `schema`; keys may be added to it.
"""

from typing import Final, Literal

from msgspec import Struct

State = Literal["ok", "warning", "failed"]
"""`warning`: it works, with a limit or a risk; `failed`: the server cannot be used so."""

Answer = Literal["yes", "partly", "no", "not offered"]

SCHEMA: Final = 1
_EXIT: Final[dict[State, int]] = {"ok": 0, "warning": 3, "failed": 1}


class Check(Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    why: str = ""
    """Why it matters; empty where nothing is to be said of it."""
    fix: str = ""


class Feature(Struct, frozen=True, kw_only=True):
    """What clients get of one feature when the gateway stands before this server."""

    name: str
    """For programs; it stays."""
    title: str
    answer: Answer
    """`not offered`: the server has nothing of the kind, so that nothing is missing."""
    short: str
    """The answer in a few words."""
    why: str = ""
    fix: str = ""


class Server(Struct, kw_only=True):
    """What is known of the server in itself."""

    name: str = ""
    """Name and version that it gives itself."""
    era: Literal["old", "modern", "both"] = "old"
    transport: Literal["streamable-http", "sse", "stdio"] = "streamable-http"
    """`sse` is HTTP+SSE of 2024-11-05."""
    versions: tuple[str, ...] = ()
    """Protocol versions that it speaks, the newest first."""
    sessions: bool = False
    """Whether an answer can find its call."""
    ends_sessions: bool | None = None
    """Whether it lets a session be ended with DELETE; null where that was not tried."""
    side_stream: bool = False
    """Whether it opens a stream for what it says outside of calls."""
    json_replies: bool = False
    """Whether a call is answered by a JSON body, on which nothing can be asked."""
    event_store: bool = False
    """Whether the events of a call have ids, which proves that it stores them."""
    replays: bool | None = None
    """Whether it sent an event again when asked; null where that could not be tried."""
    capabilities: tuple[str, ...] = ()
    """As `tools`, and `tools.listChanged` for a flag of it."""
    tools: int = 0
    ephemeral_tools: int = 0
    """How many say that they may run twice (`readOnlyHint`, `idempotentHint`)."""
    left_out_tools: tuple[str, ...] = ()
    """Those that modern clients would refuse a whole list for."""
    task_tools: int = 0
    """How many can only be called as a task, which the gateway does not translate."""
    keep_alive_seconds: float | None = None
    """When the idle side stream first carried something; null where it did not, or nobody waited."""
    handshake_seconds: float = 0.0


class Upstream(Struct, kw_only=True):
    """One server that was probed."""

    target: str
    """Its URL without the query, or its program."""
    route: str | None = None
    """The path in the configuration that leads to it; null where there is no configuration."""
    state: State = "failed"
    checks: tuple[Check, ...] = ()
    server: Server | None = None
    """null where it could not be spoken to."""
    features: tuple[Feature, ...] = ()
    unknown: tuple[str, ...] = ()
    """What cannot be known without calling a tool."""
    configuration: str | None = None
    """YAML that serves it."""


class Report(Struct, kw_only=True):
    """The whole answer of the command."""

    schema: int = SCHEMA
    gateway: str
    """The version of mrtr-gateway."""
    state: State
    exit_code: int
    checks: tuple[Check, ...] = ()
    """Of the configuration and of this machine; empty where one server was asked for."""
    upstreams: tuple[Upstream, ...] = ()


def worst(checks: tuple[Check, ...], features: tuple[Feature, ...] = ()) -> State:
    """What they come to: a feature that is missing is a warning, one that is not offered is none."""
    states = {check.state for check in checks}
    if "failed" in states:
        return "failed"
    limited = "warning" in states or any(feature.answer == "no" for feature in features)
    return "warning" if limited else "ok"


def report(version: str, checks: tuple[Check, ...], upstreams: tuple[Upstream, ...]) -> Report:
    """Put the parts together; the state is that of the worst one."""
    states = {worst(checks), *(upstream.state for upstream in upstreams)}
    state: State = "failed" if "failed" in states else "warning" if "warning" in states else "ok"
    return Report(gateway=version, state=state, exit_code=_EXIT[state], checks=checks, upstreams=upstreams)

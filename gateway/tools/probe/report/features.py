"""Derives from a server's properties what clients get through the gateway, feature by feature; pure.

tests/e2e/test_probe.py makes the calls that prove these verdicts.
"""

from collections.abc import Iterator
from typing import Final

from gateway.config import Config, Route
from gateway.tools.probe.report.findings import Answer, Feature, Server

_TITLES: Final = {
    "calls": "tools that ask nothing",
    "questions": "questions",
    "replica_death": "survives a replica's death",
    "progress": "progress",
    "long_calls": "long calls",
    "subscriptions": "subscriptions",
    "caching": "caching",
    "old_clients": "legacy clients",
}
"""Every feature, in the order of their weight."""
_CHANGES: Final = ("tools.listChanged", "prompts.listChanged", "resources.listChanged", "resources.subscribe")
_NO_GET: Final = "Make the server answer GET requests that carry a session id."
_EVENT_STREAMS: Final = (
    "Make the server answer with event streams: remove json_response (Python) or enableJsonResponse (TypeScript)."
)


def features(server: Server, route: Route, config: Config) -> tuple[Feature, ...]:
    """Return every feature that clients of this route get; `config` is the configuration as it holds on the route."""
    if server.era != "old" and route.era == "auto":
        return tuple(_passed_through(server))
    replays, left_out = route.continuation == "replay", len(server.left_out_tools)
    calls = _feature("calls", "yes", "yes")
    if left_out:
        calls = _feature("calls", "partly", f"all but {left_out}", "See the check named tools.")
    caching = "The server does not announce changes of lists: with a longer ttlMs clients see them that much later."
    if server.side_stream and "tools.listChanged" in server.capabilities:
        caching = "The server announces changes of lists to clients that listen."
    relayed = "Requests over the server's own transport pass through unchanged; sessions over another one are relayed."
    return (
        calls,
        _questions(server, replays=replays),
        _replica_death(server, replays=replays),
        *_progress_and_long_calls(server, config),
        _subscriptions(server),
        _feature(
            "caching",
            "yes",
            "yes, off until you enable it",
            f"Results carry ttlMs 0 and cacheScope private, which is always correct. {caching}",
        ),
        _feature("old_clients", "yes", "yes, relayed", "Each of their sessions has a process of its own.")
        if server.transport == "stdio"
        else _feature("old_clients", "yes", "yes", relayed),
    )


def _feature(name: str, answer: Answer, short: str, why: str = "", fix: str = "") -> Feature:
    return Feature(name=name, title=_TITLES[name], answer=answer, short=short, why=why, fix=fix)


def _passed_through(server: Server) -> Iterator[Feature]:
    *others, legacy = _TITLES
    why = "The server is modern: the gateway passes requests and responses through unchanged, and holds nothing."
    for name in others:
        yield _feature(name, "yes", "as the server provides it", why if name == "calls" else "")
    if server.era == "both":
        yield _feature(legacy, "yes", "as the server serves them")
    else:
        yield _feature(
            legacy,
            "yes",
            "yes, mirrored",
            "The server refuses them, so the gateway mirrors it: docs/clients-and-servers.md says what is lost.",
        )


def _questions(server: Server, *, replays: bool) -> Feature:
    name = "questions"
    if not server.sessions:
        return _feature(
            name,
            "no",
            "no, the server is stateless",
            "Without sessions no answer can reach the server: a tool that asks the user ends with an error.",
            "Run the server with sessions: remove stateless_http=True (Python), set a sessionIdGenerator "
            "(TypeScript).",
        )
    if server.json_replies:
        return _feature(
            name,
            "partly" if server.side_stream else "no",
            "only those on the GET stream" if server.side_stream else "no, the server replies with JSON",
            "The server drops a question on a call's own reply, and the call ends with an error after "
            "timeouts.idle_seconds.",
            _EVENT_STREAMS,
        )
    if not server.side_stream:
        return _feature(
            name,
            "partly",
            "only those on the call's own stream",
            "The server opens no GET stream, so a question outside a call's reply is lost.",
            _NO_GET,
        )
    held = "The call is held while the user answers; any replica accepts the answer."
    replayed = "The call runs again with the answers (continuation: replay); nothing is held."
    return _feature(name, "yes", "yes", replayed if replays else held)


def _replica_death(server: Server, *, replays: bool) -> Feature:
    name = "replica_death"
    if not server.sessions:
        return _feature(name, "not offered", "nothing to survive", "No call waits for an answer, so none is held.")
    if replays:
        return _feature(
            name,
            "yes",
            "yes, run again",
            "The route has continuation: replay, so every call runs again with the answers.",
        )
    if server.event_store and server.replays is not False:
        return _feature(
            name,
            "yes",
            "yes, resumed from the event store",
            "Another replica resumes the call where it stopped, and delivers the answers.",
        )
    without_store = "the event store does not replay" if server.event_store else "no event store"
    causes = {"sse": "HTTP+SSE cannot resume", "stdio": "a child process ends with its gateway"}
    store = " With an event store, every call could be resumed." if server.transport == "streamable-http" else ""
    return _feature(
        name,
        "partly",
        f"only ephemeral tools, {causes.get(server.transport, without_store)}",
        f"{server.ephemeral_tools} of {server.tools} tools declare that they may run twice (readOnlyHint, "
        "idempotentHint). They run again with the answers; a call of any other tool is reported lost.",
        f"Give such tools the hint, or list them under the route's ephemeral.{store}",
    )


def _progress_and_long_calls(server: Server, config: Config) -> tuple[Feature, Feature]:
    idle = f"{config.timeouts.idle_seconds:g} s"
    if server.json_replies:
        progress = _feature(
            "progress",
            "no",
            "no, the server replies with JSON",
            "A JSON body cannot carry anything before the result.",
            _EVENT_STREAMS,
        )
        return progress, _feature(
            "long_calls",
            "partly",
            f"up to {idle}",
            "A JSON reply is silent until its end, and the gateway ends a call that is silent for "
            "timeouts.idle_seconds.",
            "Raise timeouts.idle_seconds above the duration of your longest tool.",
        )
    return _feature("progress", "yes", "yes"), _feature(
        "long_calls",
        "yes",
        "yes",
        f"For clients that time out at 60 s, a round ends after {config.legs.limit_seconds:g} s "
        "(legs.limit_seconds) and the client calls again. The gateway ends a call in which the server is silent for "
        f"{idle} (timeouts.idle_seconds).",
    )


def _subscriptions(server: Server) -> Feature:
    name = "subscriptions"
    offered = [change for change in _CHANGES if change in server.capabilities]
    if not offered:
        return _feature(
            name,
            "not offered",
            "the server announces no changes",
            "A modern client's subscription is acknowledged, but receives nothing.",
        )
    if not server.side_stream:
        return _feature(
            name,
            "no",
            "no, there is no GET stream",
            "The server declares change notifications, but opens no stream that could carry them.",
            _NO_GET,
        )
    return _feature(name, "yes", "yes", f"Declared: {', '.join(offered)}.")


def unknown(server: Server) -> tuple[str, ...]:
    """Return, as sentences, what cannot be known without calling a tool."""
    found = ["Which tools ask the user, and how often: the probe calls none."]
    if server.sessions:
        found.append("Whether a tool that declares that it may run twice really may.")
        if server.transport == "streamable-http":
            found.append("Whether a tool asks on its call's stream or on the GET stream.")
        if server.event_store:
            found.append("How long the event store keeps events, and whether it survives a restart of the server.")
    found.append("Whether every tool accepts the credential; some check it only when they are called.")
    if server.sessions and server.transport != "stdio":
        found.append(
            "Whether several servers share the URL. They must share their sessions too, or the load balancer must be "
            "sticky."
        )
        if server.side_stream:
            found.append("Whether idle streams stay open.")
    return tuple(found)

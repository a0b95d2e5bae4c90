"""From what a server is to what clients get of it through the gateway, feature by feature; pure.

What stands here is what the gateway does: tests/e2e/test_probe.py makes the calls.
"""

from collections.abc import Iterator
from typing import Final

from gateway.config import Config
from gateway.probe.findings import Feature, Server

_CHANGES: Final = ("tools.listChanged", "prompts.listChanged", "resources.listChanged", "resources.subscribe")


def features(server: Server, config: Config, *, replays: bool) -> tuple[Feature, ...]:
    """Every feature, in the order of their weight; `replays`: the route has `continuation: replay`."""
    if server.era != "old":
        return tuple(_passed_through(server))
    return (
        _calls(server),
        _questions(server, replays=replays),
        _replica_death(server, replays=replays),
        _progress(server),
        _long_calls(server, config),
        _subscriptions(server),
        _caching(server),
        _old_clients(server),
    )


def _passed_through(server: Server) -> Iterator[Feature]:
    for name, title in (
        ("calls", "tools that ask nothing"),
        ("questions", "questions"),
        ("replica_death", "survives a replica's death"),
        ("progress", "progress"),
        ("long_calls", "long calls"),
        ("subscriptions", "subscriptions"),
        ("caching", "caching"),
    ):
        yield Feature(
            name=name,
            title=title,
            answer="yes",
            short="as the server does it",
            why="The server is modern: requests go to it, and its answers back, as they are. Nothing is held."
            if name == "calls"
            else "",
        )
    has_both = server.era == "both"
    yield Feature(
        name="old_clients",
        title="old clients",
        answer="yes" if has_both else "not offered",
        short="as the server serves them" if has_both else "the server refuses them",
        why=""
        if has_both
        else "The gateway makes old servers modern, not modern ones old. Allow old clients in the "
        "server, if it can, or upgrade them.",
    )


def _calls(server: Server) -> Feature:
    missing = len(server.left_out_tools) + server.task_tools
    return Feature(
        name="calls",
        title="tools that ask nothing",
        answer="partly" if missing else "yes",
        short=f"all but {missing}" if missing else "yes",
        why="See the checks of tools and tasks." if missing else "",
    )


def _questions(server: Server, *, replays: bool) -> Feature:
    name, title = "questions", "questions"
    if not server.sessions:
        return Feature(
            name=name,
            title=title,
            answer="no",
            short="no, the server is stateless",
            why="Without sessions no answer can reach the server: a tool that asks the user ends with an error.",
            fix="Run it with sessions: no stateless_http=True (Python), a sessionIdGenerator (TypeScript).",
        )
    if server.json_replies:
        return Feature(
            name=name,
            title=title,
            answer="partly" if server.side_stream else "no",
            short="only those on its GET stream" if server.side_stream else "no, its replies are JSON",
            why="A question on a call's own reply is swallowed by the server, and the call ends with an error after "
            "timeouts.idle_seconds.",
            fix="Have it answer with event streams.",
        )
    if not server.side_stream:
        return Feature(
            name=name,
            title=title,
            answer="partly",
            short="only those on the call's own stream",
            why="It opens no GET stream: what it asks outside of a call's reply is lost.",
            fix="Have the server serve GET with a session id.",
        )
    return Feature(
        name=name,
        title=title,
        answer="yes",
        short="yes",
        why="The call is run again with the answers (continuation: replay); nothing is held."
        if replays
        else "The call is held while the user thinks; any replica takes the answer.",
    )


def _replica_death(server: Server, *, replays: bool) -> Feature:
    name, title = "replica_death", "survives a replica's death"
    if not server.sessions:
        return Feature(
            name=name,
            title=title,
            answer="not offered",
            short="nothing to survive",
            why="No call can wait for an answer, so none is held.",
        )
    if replays:
        return Feature(
            name=name,
            title=title,
            answer="yes",
            short="yes, run again",
            why="The route has continuation: replay, so every call is run again with the answers.",
        )
    if server.event_store and server.replays is not False:
        return Feature(
            name=name,
            title=title,
            answer="yes",
            short="yes, resumed from the event store",
            why="Another replica picks the call up where it stopped, with its answers.",
        )
    cause = {"sse": "HTTP+SSE cannot resume", "stdio": "a child ends with its gateway"}.get(
        server.transport, "no event store" if not server.event_store else "the event store does not replay"
    )
    return Feature(
        name=name,
        title=title,
        answer="partly",
        short=f"only ephemeral tools, {cause}",
        why=f"{server.ephemeral_tools} of {server.tools} tools say that they may run twice (readOnlyHint, "
        "idempotentHint): those are run again with the answers. A call of any other tool is reported lost.",
        fix="Give such tools the hint, or name them under ephemeral of the route."
        + ("" if server.transport != "streamable-http" else " With an event store every call would be resumed."),
    )


def _progress(server: Server) -> Feature:
    has_room = not server.json_replies
    return Feature(
        name="progress",
        title="progress",
        answer="yes" if has_room else "no",
        short="yes" if has_room else "no, its replies are JSON",
        why="" if has_room else "A JSON body has no room for what comes before the result.",
        fix="" if has_room else "Have the server answer with event streams.",
    )


def _long_calls(server: Server, config: Config) -> Feature:
    idle = f"{config.timeouts.idle_seconds:g} s"
    legs = f"{config.legs.limit_seconds:g} s"
    if server.json_replies:
        return Feature(
            name="long_calls",
            title="long calls",
            answer="partly",
            short=f"up to {idle}",
            why="A JSON reply is silent until its end, and a call that is silent for timeouts.idle_seconds is ended.",
            fix="Raise timeouts.idle_seconds above your longest tool.",
        )
    return Feature(
        name="long_calls",
        title="long calls",
        answer="yes",
        short="yes",
        why=f"Clients that give up at 60 s are sent back after {legs} (legs.limit_seconds). A call in which the "
        f"server says nothing for {idle} (timeouts.idle_seconds) is ended.",
    )


def _subscriptions(server: Server) -> Feature:
    offered = [name for name in _CHANGES if name in server.capabilities]
    if not offered:
        return Feature(
            name="subscriptions",
            title="subscriptions",
            answer="not offered",
            short="the server announces no changes",
            why="A modern client's subscription is acknowledged, and hears nothing.",
        )
    if not server.side_stream:
        return Feature(
            name="subscriptions",
            title="subscriptions",
            answer="no",
            short="no, there is no GET stream",
            why="The server declares changes, and opens no stream on which it could tell them.",
            fix="Have the server serve GET with a session id.",
        )
    return Feature(
        name="subscriptions",
        title="subscriptions",
        answer="yes",
        short="yes",
        why=f"Declared: {', '.join(offered)}.",
    )


def _caching(server: Server) -> Feature:
    is_told = server.side_stream and "tools.listChanged" in server.capabilities
    return Feature(
        name="caching",
        title="caching",
        answer="yes",
        short="yes, off until you switch it on",
        why="Results say ttlMs 0 and private, which is always right. "
        + (
            "Changes are announced, so cache.lists_seconds would end early by itself."
            if is_told
            else "Changes of lists are not announced: with cache.lists_seconds they are seen that much later."
        ),
    )


def _old_clients(server: Server) -> Feature:
    name, title = "old_clients", "old clients"
    if server.transport == "stdio":
        return Feature(
            name=name,
            title=title,
            answer="not offered",
            short="modern clients only",
            why="A child has no HTTP for them; old clients start it themselves.",
        )
    of = " that speak HTTP+SSE" if server.transport == "sse" else ""
    return Feature(
        name=name,
        title=title,
        answer="yes",
        short=f"yes, those{of}" if of else "yes",
        why="What they send is passed through to the server as it is.",
    )


def unknown(server: Server, *, waited: bool) -> tuple[str, ...]:
    """What cannot be known without calling a tool, as sentences."""
    found = ["Which tools ask the user, and how often: none was called."]
    if server.era == "old" and server.sessions:
        found.append("Whether a tool that says that it may run twice really may.")
        if server.transport == "streamable-http":
            found.append("Whether a tool asks on its call's stream or on the GET stream.")
        if server.event_store:
            found.append("How long the event store keeps events, and whether it outlives a restart of the server.")
    found.append("Whether the credential is good for each tool; some are checked only when one is called.")
    if server.sessions and server.transport != "stdio":
        found.append(
            "Whether there are several servers behind the URL. They must share their sessions, or be reached with "
            "stickiness."
        )
        if not waited and server.side_stream:
            found.append("Whether idle streams stay open: --wait 20 listens to one.")
    return tuple(found)

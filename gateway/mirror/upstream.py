"""The modern server of a mirrored call, with what calls of the same caller share."""

import msgspec

from gateway.config import TaskLimits
from gateway.mirror.server_client import HttpServerClient, ServerClient, StdioServerClient
from gateway.mirror.tool_catalog import CallerKey, ToolCatalog
from gateway.routes.live_route import LiveRoute
from gateway.runtime.tasks import Tasks
from gateway.upstream.channel import Headers


async def is_modern(live: LiveRoute, headers: Headers) -> bool:
    """Whether the server of a route is modern; asks it, unless that is known."""
    if live.upstream.stdio is not None:
        return await live.upstream.stdio.is_modern()
    return live.upstream.era is not None and await live.upstream.era.is_modern(headers, waits=True)


def server_of(live: LiveRoute) -> ServerClient:
    """The modern server of a route."""
    if live.upstream.stdio is not None:
        return StdioServerClient(live.upstream.stdio.modern)
    return HttpServerClient(live)


class CallServer(msgspec.Struct, frozen=True, eq=False):
    """The server of a call, with what calls of the same caller share."""

    server: ServerClient
    catalog: ToolCatalog
    caller: CallerKey
    tasks: Tasks
    drives_tasks: bool = True
    """Whether the gateway declares tasks for a client that cannot."""
    task_seconds: float = TaskLimits().ttl_seconds
    """How long a task may take."""

    @classmethod
    def of(
        cls, live: LiveRoute, caller: CallerKey, catalog: ToolCatalog, server: ServerClient | None = None
    ) -> "CallServer":
        """The upstream of a route, whose own server is the default."""
        drives, seconds = live.route.tasks.undeclared == "drive", live.config.tasks.ttl_seconds
        return cls(server or server_of(live), catalog, caller, live.process.tasks, drives, seconds)

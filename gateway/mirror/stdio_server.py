"""A modern server that is a child process."""

from gateway.bridge.upstream_call import BUG
from gateway.mirror.modern_server import Listener, Outgoing, Pending, PendingTask
from gateway.protocol.errors import CallLost, GatewayError
from gateway.runtime.tasks import Tasks
from gateway.upstream.children.modern_stdio import ModernStdio


class StdioServer:
    """A `ModernServer` whose requests share one child."""

    def __init__(self, modern: ModernStdio, tasks: Tasks) -> None:
        self._modern = modern
        self._tasks = tasks

    def begin(self, request: Outgoing, listener: Listener) -> Pending:
        """See `ModernServer`."""
        return PendingTask(self._tasks.start(self._run(request.body, listener), "modern request"))

    async def _run(self, body: bytes, listener: Listener) -> None:
        try:
            await self._modern.request(body, listener.on_message)
        except GatewayError as exc:
            listener.on_failed(exc)
        except ValueError as exc:
            listener.on_failed(CallLost(f"The server sent a malformed message ({exc}); the call may have had effects"))
        except Exception:  # the outermost edge of the request's task, where it is counted
            listener.on_failed(CallLost(BUG))
            raise

"""MCP over stdio towards one legacy server.

Source: specification 2025-11-25 basic/transports (stdio). A child process is a session. Nothing on its output says
which call a nested request belongs to, so a child has one call in flight, as every session has. There are no event
ids: a call is lost when its child ends. Credentials and forwarded headers select the child, and it does not see them.
"""

from typing import Final

from msgspec import Raw

from gateway.children.child import Child  # noqa: TC001  (one import style; it costs nothing here)
from gateway.children.launcher import ChildLauncher
from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallGone, CallLost, ChildUnreachable, SessionLost
from gateway.upstream.channel import Answer, Headers, Hearer, SideListener, new_ping
from gateway.upstream.one_stream import OneStreamChannel

_ANSWERED_SECONDS: Final = 2.0
"""How long a call may go on after an answer before its server gets a ping."""


class StdioChannel(OneStreamChannel):
    """One session, which is one child."""

    is_process = True

    def __init__(self, launcher: ChildLauncher) -> None:
        super().__init__()
        self._launcher = launcher
        self.child: Child
        """The process of this session, once it has begun its handshake."""
        self._started = False
        self._is_answered = False
        """Whether an answer or a notification was sent beside the request in flight, and no ping since."""

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Take a child and send `initialize` to it."""
        child = self.child = await self._launcher.take()
        self._started = True
        child.hear_with(lambda line, _: self.hear(line))
        answer = Answer(message)
        try:
            _ = await self.request(message, headers, answer)
        except (CallLost, SessionLost) as exc:
            why = child.over.result() if child.over.done() else "did not read its input"
            if child.has_started:
                why += " before it answered `initialize`; the gateway's log has its stderr"
            raise ChildUnreachable(f"{child.route.where} {why}") from exc
        assert answer.found is not None, "it was answered"
        if isinstance(answer.found, jsonrpc.Error):
            raise ChildUnreachable(f"{child.route.where} refused `initialize`: {answer.found.message[:200]}")
        self._launcher.works(child, is_legacy=True)
        return answer.found

    @property
    def hears_side(self) -> bool:
        """Whether the child runs and its messages outside of requests are heard."""
        return self._side is not None and not self.child.over.done()

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Hand over messages outside of requests; the side stream is lost when the child ends by itself."""
        self._side = listener

        def ended(_: object) -> None:
            if not self.child.asked:
                listener.side_closed(was_open=True)

        self.child.over.add_done_callback(ended)

    async def request(
        self, message: bytes, headers: Headers, hearer: Hearer, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """Write a request and wait until it is answered, or the child ends."""
        child = self.child
        if child.over.done():
            raise SessionLost(f"{child.route.where} {child.over.result()}")
        with self._awaited(hearer) as answered:
            self._is_answered = False
            await child.send(message)
            hearer.accepted()  # it receives no credential, so it cannot refuse one
            message = b""  # it is not sent again, and a call that waits should not keep it
            while not await child.answers(answered, _ANSWERED_SECONDS):
                if self._is_answered:
                    # The session of `mcp` 1.30 ends, and its process with the next message only, if an answer comes
                    # as the server gives its question up.
                    self._is_answered = False
                    child.write(new_ping())
            answered.result()
        return None

    async def send(self, message: bytes, headers: Headers) -> None:
        """Write an answer or a notification."""
        await self.child.send(message)
        self._is_answered |= self._beside is None  # a request beside the one in flight is as good as a ping

    async def ping(self, headers: Headers) -> None:
        """Do nothing: a child receives no credential that it could refuse."""

    def adopt(self, session_id: str, version: str) -> None:
        """Raise CallGone, because only the process that started a child can speak to it."""
        raise CallGone.by(self._launcher.route.where, "is a process of each gateway")

    async def resume(self, *_: object, **__: object) -> None:
        """Raise CallGone, as `adopt` does."""
        self.adopt("", "")

    def abandon(self) -> None:
        """End the child in the background."""
        if self._started:
            self.child.end()

    async def close(self, *, end_session: bool) -> None:
        """End the child."""
        if self._started:
            await self.child.close()

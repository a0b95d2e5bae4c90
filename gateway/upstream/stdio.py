"""MCP over stdio towards one legacy server.

Source: specification 2025-11-25 basic/transports (stdio). A child process is a session. Nothing on its output says
which call a nested request belongs to, so a child has one call in flight, as every session has. There are no event
ids: a call is lost when its child ends. Credentials and forwarded headers select the child, and it does not see them.
"""

import asyncio
from typing import Final

import msgspec
from msgspec import Raw

from gateway.children.child import Child
from gateway.children.launcher import ChildLauncher
from gateway.protocol import jsonrpc, lost_session
from gateway.protocol.errors import CallGone, CallLost, SessionLost, Unreachable
from gateway.upstream.channel import Channel, Headers, Receive, SideListener

_JSONRPC: Final = "2.0"
_Listening = tuple[Receive, "asyncio.Future[None]"]
"""The callback of a request, with the future of its answer."""


class StdioChannel(Channel):
    """One session, which is one child."""

    taken = True
    """A child receives no credential, so it cannot refuse one."""

    is_process = True

    def __init__(self, launcher: ChildLauncher) -> None:
        self._launcher = launcher
        self._child: Child
        self._started = False
        self._call: _Listening | None = None
        self._side: SideListener | None = None

    async def initialize(self, message: bytes, headers: Headers) -> Raw:
        """Take a child and send `initialize` to it."""
        child = self._child = await self._launcher.take()
        self._started = True
        child.receive_with(self._hear)
        answers: list[Raw] = []

        def receive(data: bytes) -> bool:
            opened = jsonrpc.message(data)
            if lost_session.is_foreign(opened, message):
                return False
            if isinstance(opened.error, Raw):
                raise Unreachable(f"{child.where} refused `initialize`: {jsonrpc.error(opened.error).message[:200]}")
            if isinstance(opened.result, Raw):
                answers.append(opened.result)
            return bool(answers)

        try:
            _ = await self.request(message, headers, receive)
        except (CallLost, SessionLost) as exc:
            why = child.over.result() if child.over.done() else "did not read its input"
            raise Unreachable(
                f"{child.where} {why} before it answered `initialize`; the gateway's log has its stderr"
            ) from exc
        self._launcher.initialized(child)
        self._launcher.has_initialized = True
        return answers[0]

    @property
    def child(self) -> Child:
        """The process of this session, after the handshake."""
        return self._child

    @property
    def hears_side(self) -> bool:
        """Whether the child runs and its messages outside of requests are heard."""
        return self._side is not None and not self._child.over.done()

    async def listen(self, version: str, headers: Headers, listener: SideListener) -> None:
        """Hand over messages outside of requests; the side stream is lost when the child ends by itself."""
        self._side = listener

        def ended(_: object) -> None:
            if not self._child.asked:
                listener.side_closed(was_open=True)

        self._child.over.add_done_callback(ended)

    async def request(
        self, message: bytes, headers: Headers, receive: Receive, *, is_repeatable: bool = False
    ) -> jsonrpc.Error | Raw | None:
        """Write a request and wait until it is answered, or the child ends."""
        child = self._child
        if child.over.done():
            raise SessionLost(f"{child.where} {child.over.result()}")
        answered = asyncio.get_running_loop().create_future()
        call = self._call = receive, answered
        try:
            await child.send(message, self._launcher.client.timeouts.answer_seconds)
            message = b""  # it is not sent again, and a call that waits should not keep it
            _ = await asyncio.wait((answered, child.over), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise CallLost(f"{child.where} {child.over.result()} in a call; the call may have had effects")
            answered.result()
        finally:
            self._forget(call)
            answered.cancel()
        return None

    def _forget(self, call: _Listening) -> None:
        """Remove this request. Another one may have been sent as soon as it was answered."""
        if self._call is call:
            self._call = None

    def _hear(self, line: bytes) -> None:
        if is_message(line):
            self.hear(line)
        else:
            self._launcher.malformed()

    def hear(self, line: bytes) -> None:
        """Take a message of the child."""
        if self._call is None:
            if self._side is not None:
                self._side.hear_side(line)
            return
        call = receive, answered = self._call
        try:
            if receive(line):
                self._forget(call)
                answered.set_result(None)
        except Exception as exc:  # noqa: BLE001  (the task of the request handles it, not the pipe)
            self._forget(call)
            answered.set_exception(exc)

    async def send(self, message: bytes, headers: Headers) -> None:
        """Write an answer or a notification."""
        await self._child.send(message, self._launcher.client.timeouts.answer_seconds)

    async def ping(self, headers: Headers) -> None:
        """Do nothing: a child receives no credential that it could refuse."""

    def adopt(self, session_id: str, version: str) -> None:
        """Raise CallGone, because only the process that started a child can speak to it."""
        raise CallGone(f"{self._launcher.where} is a process of each gateway; the call may have had effects")

    async def resume(self, *_: object, **__: object) -> None:
        """Raise CallGone, as `adopt` does."""
        self.adopt("", "")

    def abandon(self) -> None:
        """End the child in the background."""
        if self._started:
            self._launcher.end(self._child)

    async def close(self, *, end_session: bool) -> None:
        """End the child."""
        if self._started:
            await self._child.close()


def is_message(line: bytes) -> bool:
    """Whether a line is JSON-RPC. Many servers print log records in JSON."""
    if line.lstrip()[:1] != b"{":
        return False
    try:
        return jsonrpc.message(line).jsonrpc == _JSONRPC
    except (ValueError, msgspec.MsgspecError):
        return False

"""A FAKE replica: a process at a peer's address that misbehaves on command; also a connection that breaks.

It knows the state key and may speak as a replica does, or badly, or not at all. `replicas.py` has real ones.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from gateway.config import InForce
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.peer_messages import Data, End, Frame, Frames, Head, PeerRequest, PeerSealer
from tests.support.fake_http import FakeHttp, Wire

KEY = bytes(range(32))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Asked:
    """One request to a fake replica, with the actions of its script."""

    def __init__(self, wire: Wire, head: bytes) -> None:
        self._wire, self.head = wire, head
        self.silence = wire.gone
        self.peer_request: PeerRequest
        self.frames: Frames

    async def take(self) -> PeerRequest:
        """Accept the request, and read it."""
        await self.raw(_CONTINUE)
        length = self.head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        body = await self._wire.reader.readexactly(int(length))
        ring = Keyring((KEY,), "peer")
        # The forwarder's clock is this process's.
        self.peer_request = PeerSealer(InForce(Keys((KEY,)))).open(body, time.time())
        self.frames = Frames(ring, self.peer_request.nonce)
        return self.peer_request

    async def raw(self, data: bytes) -> None:
        """Send bytes; what is sent at once arrives in one read."""
        self._wire.writer.write(data)
        await self._wire.writer.drain()

    async def refuse(self, status: int, date: str = "", body: bytes = b"") -> None:
        told = f"Date: {date}\r\n".encode() if date else b""
        await self.raw(b"HTTP/1.1 %d No\r\n%bContent-Length: %d\r\n\r\n%b" % (status, told, len(body), body))

    async def begin(self) -> None:
        await self.raw(_STREAM)

    async def send(self, data: bytes) -> None:
        """A piece of the reply's body."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def say(self, *frames: Frame) -> None:
        for frame in frames:
            await self.send(self.frames.seal(frame))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def reply(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole reply, as a replica would."""
        await self.begin()
        await self.say(Head(status, tuple((headers or {}).items()), streamed=False), Data(body), End("complete"))
        await self.end()

    async def tell(self, *frames: Frame) -> None:
        """Take the request, unless that is done, and reply with these frames."""
        if not hasattr(self, "peer_request"):
            await self.take()
        await self.begin()
        await self.say(*frames)
        await self.end()

    def die(self) -> None:
        raise ConnectionResetError


Script = Callable[[Asked], Awaitable[None]]


def tells(*frames: Frame) -> Script:
    """Reply to each request with these frames."""

    async def script(asked: Asked) -> None:
        await asked.tell(*frames)

    return script


def tells_later(go: asyncio.Event, *frames: Frame) -> Script:
    """Take each request, and reply with these frames when the test says so."""

    async def script(asked: Asked) -> None:
        await asked.take()
        await go.wait()
        await asked.tell(*frames)

    return script


class FakePeer(FakeHttp):
    """A process where a replica is expected; `script` answers each request.

    A `mortal` one accepts nobody after its first request: it dies of that.
    """

    def __init__(self, script: Script, *, mortal: bool = False) -> None:
        super().__init__(self._attend)
        self.answer = script
        self._mortal = mortal
        self.asked: list[Asked] = []

    @property
    def kinds(self) -> list[str]:
        """The accepted requests."""
        return [asked.peer_request.kind for asked in self.asked if hasattr(asked, "peer_request")]

    async def _attend(self, wire: Wire) -> None:
        while True:
            asked = Asked(wire, await wire.head())
            self.asked.append(asked)
            if self._mortal:
                self.stop_listening()
            await self.answer(asked)


class Silent(FakeHttp):
    """Accepts connections and stays silent, as a stopped process does; records all bytes."""

    def __init__(self) -> None:
        super().__init__(self._record)
        self.received: list[bytearray] = []
        """By connection."""

    async def _record(self, wire: Wire) -> None:
        received = bytearray()
        self.received.append(received)
        while data := await wire.reader.read(65_536):
            received += data

"""The network between simulated processes: hosts, links, TCP connections, names.

Bytes of one direction of a connection arrive in order, in segments that the seed cuts, after delays that it draws; so
connections overtake each other. A link that is down loses nothing that TCP would repeat: what was sent waits until it
is up again.
"""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Self

from gateway.world import STREAM, AddressInfo, LookupFailed
from tests.simulation.kernel import Handle, Kernel, Loop, Process

_KERNEL_BYTES: Final = 262_144
"""What the kernels of both hosts keep of one direction that the receiver has not read."""
_READ_BYTES: Final = 65_536
_SYN_SECONDS: Final = (1.0, 3.0, 7.0, 15.0, 31.0, 63.0)
"""When the first packet of a connection is sent again."""
_GIVE_UP_SECONDS: Final = 127.0
_INET: Final = 2


class Network:
    """All hosts and what connects them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.names: dict[str, list[str]] = {}
        self.dns_seconds = 0.0
        self.is_dns_down = False
        self.dark: dict[str, None] = {}
        """Hosts without power."""
        self.blocked = Counter[tuple[str, str]]()
        """Directions in which nothing passes, and for how many reasons."""
        self.extra_seconds = 0.0
        """How much slower than usual everything is, at most."""
        self.cut_segments = 0.0
        """How likely what is written at once arrives in parts."""
        self.connections: dict[Connection, None] = {}
        self.opened = 0
        """Connections so far."""
        self._ports = 40_000
        self.watchers: list[Callable[[Connection, bool, bytes], None]] = []
        """See what arrives: the connection, whether from its client, the bytes."""

    def new_port(self) -> int:
        self._ports += 1
        return self._ports

    def delay(self) -> float:
        random = self.kernel.random.random
        seconds = 0.0002 + 0.0008 * random()
        if self.extra_seconds and random() < 0.2:
            seconds += self.extra_seconds * random()
        return seconds

    def is_blocked(self, source: str, target: str) -> bool:
        if not self.blocked and not self.dark:
            return False
        return (source, target) in self.blocked or source in self.dark or target in self.dark

    def block(self, source: str, target: str) -> None:
        self.blocked[source, target] += 1

    def unblock(self, source: str, target: str) -> None:
        """Let a direction pass again, unless there is another reason; what waited is sent again after a while."""
        self.blocked[source, target] -= 1
        if not self.blocked[source, target]:
            del self.blocked[source, target]
            self._send_again()

    def _send_again(self) -> None:
        for connection in list(self.connections):
            for way in connection.ways:
                way.send_again()

    def cut_power(self, host: str) -> None:
        self.dark[host] = None

    def restore_power(self, host: str) -> None:
        self.dark.pop(host, None)
        self._send_again()

    # -- for the loops ------------------------------------------------------------------------------------------

    async def look_up(self, loop: Loop, host: str, port: int) -> list[AddressInfo]:
        if host[:1].isdigit():
            return [(_INET, STREAM, 6, "", (host, port))]
        await asyncio.sleep(self.dns_seconds)
        found = self.names.get(host, [])
        if self.is_dns_down or not found:
            raise LookupFailed(-2, "Name or service not known")
        return [(_INET, STREAM, 6, "", (address, port)) for address in found]

    def new_socket(self, to: AddressInfo) -> "Socket":
        return Socket(self)

    def listen(self, loop: Loop, factory: Callable[[], Any], host: str | None, port: int | None) -> "Listener":
        own = loop.process.host
        assert host in {own, "0.0.0.0"}, f"{loop.process.name} cannot listen at {host}"
        place = own, port or self.new_port()
        if place in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = self.listeners[place] = Listener(self, loop, factory, place)
        return listener


class Socket:
    """A socket, as far as the program uses it itself."""

    __slots__ = ("_answered", "_began", "_loop", "_network", "_target", "end", "place")
    family, type, proto = _INET, STREAM, 6

    def __init__(self, network: Network) -> None:
        self._network = network
        self.end: End | None = None
        self.place: tuple[str, int] = ("", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setblocking(self, _: bool) -> None:  # noqa: FBT001
        pass

    def setsockopt(self, *_: object) -> None:
        pass

    def bind(self, address: tuple[str, int]) -> None:
        pass

    def dup(self) -> "Socket":
        """Of a socket that listens: there, the event loop hears of each connection in its next turn."""
        return Socket(self._network)

    def accept(self) -> None:
        raise BlockingIOError

    def getsockname(self) -> tuple[str, int]:
        return self.place

    def close(self) -> None:
        if self.end is not None and self.end.transport is None:
            self.end.reset_by_host()

    async def connect_from(self, loop: Loop, address: tuple[str, int]) -> None:
        """Open a connection; the host of the other end accepts it, whatever its process does."""
        network, kernel, source, target = self._network, self._network.kernel, loop.process.host, address[0]
        self._loop, self._began, self._target = loop, kernel.now, tuple(address)
        self._answered: asyncio.Future[None] = loop.create_future()
        self.place = source, network.new_port()
        kernel.call_later(network.delay(), self._arrive)
        if network.is_blocked(source, target) or network.is_blocked(target, source):
            for seconds in _SYN_SECONDS:
                kernel.call_later(seconds, self._arrive)
        try:
            await self._answered
        except BaseException:
            if self.end is not None:
                self.end.reset_by_host()
            raise

    def _arrive(self) -> None:
        """The first packet has arrived at the other host."""
        network, target = self._network, self._target
        if self._answered.done() or network.is_blocked(self.place[0], target[0]):
            self._wait()
        else:
            network.kernel.call_later(network.delay(), self._reply, network.listeners.get(target))

    def _reply(self, listener: "Listener | None") -> None:
        """The reply of the other host has arrived."""
        network, place, target, answered = self._network, self.place, self._target, self._answered
        if answered.done() or network.is_blocked(target[0], place[0]):
            self._wait()
        elif listener is None or not listener.is_open:
            answered.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED)))
        else:
            connection = Connection(network, self._loop.process, place, listener.loop.process, target)
            self.end = connection.ends[0]
            self.end.socket = self
            listener.accept(connection.ends[1])
            answered.set_result(None)

    def _wait(self) -> None:
        """A packet is lost, so there may never be an answer."""
        self._network.kernel.call_at(self._began + _GIVE_UP_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self._answered.done():
            self._answered.set_exception(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def transport(self, protocol: Any, loop: Loop) -> "Transport":
        if self.end is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return Transport(self.end, protocol, loop)


def poll(of: Socket) -> Callable[[], bool]:
    """See `gateway.world.poll`."""
    end = of.end
    assert end is not None
    return lambda: bool(end.unread) or end.is_ended or end.is_reset


class Listener:
    """An open port; what `create_server` returns."""

    def __init__(self, network: Network, loop: Loop, factory: Callable[[], Any], place: tuple[str, int]) -> None:
        self._network, self.loop, self._factory, self.place = network, loop, factory, place
        self.is_open = True
        self.socket = Socket(network)
        self.socket.place = place
        loop.process.resources[self] = None

    @property
    def sockets(self) -> tuple[Socket, ...]:
        return (self.socket,) if self.is_open else ()

    def accept(self, end: "End") -> None:
        """The host has accepted a connection; its process hears of it in its next turn."""
        self.loop.call_soon(self._hand_over, end)

    def _hand_over(self, end: "End") -> None:
        if not self.is_open:
            end.reset_by_host()
            return
        transport = Transport(end, self._factory(), self.loop)
        transport.begin(None)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            del self._network.listeners[self.place]
            self.loop.process.resources.pop(self, None)

    def process_ended(self) -> None:
        self.close()

    async def wait_closed(self) -> None:
        pass


class Connection:
    """One TCP connection: two ends, and a way in each direction."""

    __slots__ = ("ends", "network", "number", "ways")

    def __init__(
        self, network: Network, one: Process, place: tuple[str, int], other: Process, other_place: tuple[str, int]
    ) -> None:
        self.network = network
        self.ends = End(self, one, place), End(self, other, other_place)
        self.ways = Way(network, *self.ends), Way(network, *self.ends[::-1])
        (one_end, other_end), (there, back) = self.ends, self.ways
        one_end.peer, one_end.out = other_end, there
        other_end.peer, other_end.out = one_end, back
        network.connections[self] = None
        network.opened += 1
        self.number = network.opened

    def cut(self) -> None:
        """Something between the hosts resets both ends; what is under way is lost."""
        for way in self.ways:
            way.drop()
        for end in self.ends:
            end.heard_reset()

    @property
    def is_local(self) -> bool:
        """Whether it is a pipe, or the like."""
        one, other = self.ends
        return one.process.host == other.process.host

    def forget_if_over(self) -> None:
        one, other = self.ends
        if one.is_closed and other.is_closed:
            self.network.connections.pop(self, None)


_FIN: Final = b""
"""In a way: its sender has ended it."""


class Way:
    """What one end sends to the other."""

    __slots__ = ("_is_resent", "_network", "_sender", "_stuck", "count", "is_dropped", "last", "receiver", "room")

    def __init__(self, network: Network, sender: "End", receiver: "End") -> None:
        self._network, self._sender, self.receiver = network, sender, receiver
        self.last = 0.0
        self._stuck: list[bytes | None] = []
        """What a link that is down holds back: bytes, an end, None for a reset; and what comes after it, in order."""
        self._is_resent = False
        """Whether what was held back is under way again."""
        self.is_dropped = False
        self.count = 0
        """Bytes that the kernels keep: under way, or not read."""
        self.room = _KERNEL_BYTES
        """How many they keep at most."""

    def push(self, data: bytes | None) -> None:
        """Send bytes, an end (`b""`) or a reset (None)."""
        network = self._network
        kernel = network.kernel
        for part in self._parts(data) if network.cut_segments else (data,):
            at = kernel.now + network.delay()
            self.last = max(self.last, at)
            kernel.call_at(self.last, self._arrive, part)

    def _parts(self, data: bytes | None) -> list[bytes | None]:
        network, random = self._network, self._network.kernel.random
        if not data or len(data) < 2 or random.random() >= network.cut_segments:
            return [data]
        cuts = sorted({random.randrange(1, len(data)) for _ in range(random.randrange(1, 4))})
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def _arrive(self, part: bytes | None) -> None:
        if self.is_dropped:
            return
        network = self._network
        if self._stuck or ((network.blocked or network.dark) and self._is_blocked()):
            self._stuck.append(part)
        else:
            self.receiver.take(part)

    def _is_blocked(self) -> bool:
        return self._network.is_blocked(self._sender.process.host, self.receiver.process.host)

    def send_again(self) -> None:
        """The link may be up again."""
        if self._stuck and not (self._is_resent or self._is_blocked()):
            self._is_resent = True
            kernel = self._network.kernel
            self.last = max(self.last, kernel.now + 0.2 + kernel.random.random())
            kernel.call_at(self.last, self._arrive_again)

    def _arrive_again(self) -> None:
        self._is_resent = False
        if not self._is_blocked():
            stuck, self._stuck = self._stuck, []
            for part in stuck:
                self.receiver.take(part)

    def drop(self) -> None:
        self.is_dropped = True
        self._stuck.clear()


class End:
    """One end of a connection, as its host keeps it."""

    __slots__ = (
        "connection",
        "is_closed",
        "is_ended",
        "is_reset",
        "out",
        "peer",
        "place",
        "process",
        "socket",
        "transport",
        "unread",
    )

    def __init__(self, connection: Connection, process: Process, place: tuple[str, int]) -> None:
        self.connection, self.process, self.place = connection, process, place
        self.peer: End
        self.out: Way
        self.socket: Socket | None = None
        self.transport: Transport | None = None
        self.unread: list[bytes] = []
        self.is_ended = False
        """The other end has sent everything."""
        self.is_reset = False
        self.is_closed = False
        """The host keeps it no longer."""
        process.resources[self] = None

    def take(self, part: bytes | None) -> None:
        """A segment has arrived at this host."""
        if self.is_closed:
            if part is not None:
                self.out.push(None)  # nobody is here any more
            return
        if part is None:
            self.heard_reset()
            return
        if part:
            connection = self.connection
            for watch in connection.network.watchers:
                watch(connection, self is connection.ends[1], part)
            self.unread.append(part)
        else:
            self.is_ended = True
        if self.transport is not None:
            self.transport.readable()

    def heard_reset(self) -> None:
        if self.is_closed or self.is_reset:
            return
        self.is_reset = True
        self.close()
        if self.transport is not None:
            self.transport.readable()

    def reset_by_host(self) -> None:
        """Close it at once, and tell the other end."""
        if not self.is_closed:
            self.close()
            self.unread.clear()
            self.out.push(None)

    def close(self) -> None:
        self.is_closed = True
        self.process.resources.pop(self, None)
        self.connection.forget_if_over()

    def process_ended(self) -> None:
        """Its process has ended: the host sends a reset if something was not read, else an end."""
        if self.is_closed:
            return
        if self.transport is not None:
            self.transport.forget()
        was_unread = bool(self.unread)
        self.close()
        if self.process.host not in self.connection.network.dark:
            self.out.push(None if was_unread else _FIN)


class Transport(asyncio.Transport):
    """What a protocol has of its connection."""

    __slots__ = (
        "_buffer",
        "_buffered",
        "_end",
        "_eof_told",
        "_has_begun",
        "_high",
        "_is_closing",
        "_is_lost",
        "_is_read_due",
        "_is_reading_paused",
        "_is_writing_paused",
        "_loop",
        "_low",
        "_protocol",
        "_reading",
    )

    def __init__(self, end: End, protocol: Any, loop: Loop) -> None:
        self._end, self._protocol, self._loop = end, protocol, loop
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._high, self._low = 65_536, 16_384
        self._is_writing_paused = False
        self._is_reading_paused = False
        self._is_closing = False
        self._is_lost = False
        self._has_begun = False
        self._reading = Handle(self._read, ())
        self._is_read_due = False
        self._eof_told = False
        end.transport = self

    def begin(self, waiter: "asyncio.Future[Any] | None") -> None:
        self._has_begun = True
        self._protocol.connection_made(self)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self.readable()

    # -- reading ------------------------------------------------------------------------------------------------

    def readable(self) -> None:
        """There may be something to read; the loop finds it in its next turn."""
        end = self._end
        if self._is_read_due or not self._has_begun or self._is_lost:
            return
        if end.is_reset or ((end.unread or end.is_ended) and not self._is_reading_paused):
            self._is_read_due = True
            self._loop.ready(self._reading)

    def _read(self) -> None:
        self._is_read_due = False
        end = self._end
        if self._is_lost:
            return
        unread = end.unread
        if unread and not self._is_reading_paused and not self._is_closing:
            data = unread.pop(0)
            while unread and len(data) < _READ_BYTES:
                data += unread.pop(0)
            self._credit(len(data))
            self._protocol.data_received(data)
            if unread or end.is_ended or end.is_reset:
                self.readable()
            return
        if end.is_reset:
            self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        elif end.is_ended and not self._is_reading_paused and not self._eof_told and not self._is_closing:
            self._eof_told = True
            if not self._protocol.eof_received():
                self.close()

    def _credit(self, size: int) -> None:
        """The kernels have room for so much more of what the other end writes."""
        way = self._end.peer.out
        way.count -= size
        peer = self._end.peer.transport
        if peer is not None:
            peer.go_on()

    def go_on(self) -> None:
        """Write what waited for room."""
        if not self._is_lost and self._buffered:
            self._loop.call_soon(self._flush)

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self.readable()

    def stop_reading(self) -> None:
        """Read nothing, and have the kernels keep next to nothing, so that the other end notices."""
        self._end.peer.out.room = 64
        self.pause_reading()

    def read_on(self) -> None:
        """Read what came meanwhile, and all the rest."""
        self._end.peer.out.room = _KERNEL_BYTES
        self.resume_reading()

    # -- writing ------------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        data = bytes(data)
        if not data or self._is_lost:
            return
        way = self._end.out
        if not self._buffer and way.count + len(data) <= way.room and not self._is_closing:
            way.count += len(data)
            if not self._end.is_closed:
                way.push(data)
            return
        self._buffer.append(data)
        self._buffered += len(data)
        self._flush()
        if self._buffered > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def _flush(self) -> None:
        if self._is_lost:
            return
        way = self._end.out
        while self._buffer and way.count < way.room:
            room = way.room - way.count
            data = self._buffer.pop(0)
            if len(data) > room:
                self._buffer.insert(0, data[room:])
                data = data[:room]
            self._buffered -= len(data)
            way.count += len(data)
            if not self._end.is_closed:
                way.push(data)
        if self._is_writing_paused and self._buffered <= self._low:
            self._is_writing_paused = False
            self._protocol.resume_writing()
        if not self._buffered and self._is_closing:
            self._loop.call_soon(self._finish, None)

    @property
    def is_cut(self) -> bool:
        """Whether something between the hosts has reset it."""
        return self._end.out.is_dropped

    @property
    def is_read(self) -> bool:
        """Whether the other end has read everything that was written."""
        return not self._end.out.count

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 65_536 if low is None else 4 * low
        self._high, self._low = high, high // 4 if low is None else low

    # -- the end ------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._buffered:
            self._loop.call_soon(self._finish, None)

    def abort(self) -> None:
        self._lose(None)

    def _lose(self, exc: Exception | None) -> None:
        """Drop everything at once."""
        if self._is_lost:
            return
        self._is_closing = True
        self._buffer.clear()
        self._buffered = 0
        if not self._end.is_closed:
            self._end.reset_by_host()
        self._is_lost = True
        self._loop.call_soon(self._tell_lost, exc)

    def _tell_lost(self, exc: Exception | None) -> None:
        """The protocol hears nothing more. Without it and the handle, nothing is left that collects only garbage."""
        protocol = self._protocol
        del self._protocol, self._reading
        self._end.transport = None
        protocol.connection_lost(exc)

    def _finish(self, exc: Exception | None) -> None:
        """Everything is written: close it in order."""
        if self._is_lost:
            return
        self._is_lost = True
        end = self._end
        if not end.is_closed:
            has_unread = bool(end.unread)
            end.close()
            end.out.push(None if has_unread else _FIN)
        self._tell_lost(exc)

    def forget(self) -> None:
        """Its process is dead."""
        self._is_lost = self._is_closing = True

    # -- the rest -----------------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self._end.peer.place
        if name == "socket":
            return self._end.socket
        return default

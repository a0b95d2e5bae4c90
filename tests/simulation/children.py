"""SIMULATED pipes, and the servers over stdio that gateways start.

A server is a process of its own on the host of its gateway, as is the reaper that started it and reports its end.
Its tools are those of `server.LegacyServer`.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tests.simulation.kernel import Loop, Process
from tests.simulation.network import Connection, End, Network, Socket, Transport
from tests.simulation.server import Kind, Ledger, LegacyServer, Store

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

_FIRST_PID: Final = 5_000_000
"""No process has such a number: Linux gives at most 4,194,304."""
_RUNS: Final = 1000
"""The runs of each child have numbers of their own."""
_DIES_SECONDS: Final = 0.001
"""How long a reaper takes to kill."""


class PipeEnd:
    """One end of a pipe, until it is connected or given to a process."""

    def __init__(self, end: End) -> None:
        self._end: End | None = end

    def taken(self) -> End:
        """The end, which belongs to somebody else from now on."""
        end, self._end = self._end, None
        assert end is not None, "it was taken before"
        return end

    def close(self) -> None:
        if self._end is not None:
            self._end.reset_by_host()

    def transport(self, protocol: Any, loop: Loop) -> Transport:
        return Transport(self.taken(), protocol, loop)

    @staticmethod
    def writing(protocol: Any) -> "_Writing":
        return _Writing(protocol)


class _Paired(Socket):
    """One of two sockets that are connected to each other."""

    __slots__ = ("number",)

    def __init__(self, network: Network, end: End, number: int) -> None:
        super().__init__(network)
        self.end, self.number = end, number

    def fileno(self) -> int:
        return self.number


class _Writing(asyncio.Protocol):
    """The end of a pipe that is written to: its protocol hears that the other end was closed as the end of it all."""

    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol
        self.pause_writing, self.resume_writing = protocol.pause_writing, protocol.resume_writing
        self.connection_lost = protocol.connection_lost

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.protocol.connection_made(transport)

    def eof_received(self) -> bool:
        self._transport.abort()
        return True


class _Out(asyncio.Protocol):
    """The output of a server: it writes little, and ends if nobody reads."""


class Children:
    """What the hosts know of pipes and of processes that were started."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._sockets: dict[int, _Paired] = {}
        self._files = 10
        self._born = 0
        self.ledger: Ledger
        self.servers: dict[str, Process] = {}
        """The servers that run, by name."""

    def pipe(self) -> tuple[PipeEnd, PipeEnd]:
        """See `gateway.world.pipe`."""
        reading, writing = self._connected()
        return PipeEnd(reading), PipeEnd(writing)

    def socket_pair(self) -> tuple[_Paired, _Paired]:
        """See `gateway.world.socket_pair`."""
        found = []
        for end in self._connected():
            self._files += 1
            pair = _Paired(self._simulation.network, end, self._files)
            self._sockets[self._files] = pair
            found.append(pair)
        return found[0], found[1]

    def _connected(self) -> tuple[End, End]:
        process = self._simulation.running()
        assert process is not None
        place = process.host, 0
        return Connection(self._simulation.network, process, place, process, place).ends

    def start_process(
        self,
        argv: tuple[str, ...],
        *,
        stdin: PipeEnd,
        stdout: PipeEnd,
        stderr: PipeEnd,
        pass_fds: tuple[int],
        **_: Any,
    ) -> "_Waitable":
        """See `gateway.world.start_process`; the program is the reaper, which starts a server."""
        parent = self._simulation.running()
        assert parent is not None
        self._born += 1
        name = f"{parent.name} child {self._born}"
        server = self._simulation.process(name, parent.host)
        reaper = self._simulation.process(f"reaper of {name}", parent.host)
        ends = [_given(each.taken(), server) for each in (stdin, stdout, stderr)]
        socket = self._sockets.pop(pass_fds[0])
        control, socket.end = socket.end, None
        assert control is not None
        _ = _given(control, reaper)
        child = ChildServer(server, self.ledger, self._born)
        self.servers[name] = server
        server.when_ended.append(lambda: self._ended(name, child))
        server.start(child.serve_pipes(PipeEnd(ends[0]), PipeEnd(ends[1])))
        reaper.start(_reap(reaper, server, control, _FIRST_PID + self._born))
        return _Waitable()

    def _ended(self, name: str, child: "ChildServer") -> None:
        del self.servers[name]
        child.died()


class _Waitable:
    """What is left of a process for its parent."""

    def wait(self) -> int:
        return 0


def _given(end: End, process: Process) -> End:
    end.process.resources.pop(end, None)
    end.process = process
    process.resources[end] = None
    return end


async def _reap(reaper: Process, server: Process, control: End, pid: int) -> None:
    """The program of a reaper (`children.process_tree_reaper`)."""
    loop: Any = reaper.loop
    socket = Socket(reaper.loop.network)
    socket.end = control
    reader = asyncio.StreamReader(loop=loop)
    transport, _ = await loop.create_unix_connection(
        lambda: asyncio.StreamReaderProtocol(reader, loop=loop), sock=socket
    )
    transport.write(b"started %d\n" % pid)
    how, ended = [0], loop.create_future()

    def tell() -> None:
        if reaper.is_alive and not ended.done():
            reaper.loop.call_soon(ended.set_result, None)

    if server.is_alive:
        server.when_ended.append(tell)
    else:
        tell()
    reaper.keep(loop.create_task(_obey(reader, server, how)))
    await ended
    transport.write(b"ended %d\n" % how[0])
    transport.close()
    await asyncio.sleep(_DIES_SECONDS)


async def _obey(reader: asyncio.StreamReader, server: Process, how: list[int]) -> None:
    """Take orders; without anybody who gives them, everything is killed."""
    try:
        order = await reader.read(1)
    except ConnectionResetError:  # the gateway was killed, and had not read yet that the server was started
        order = b""
    how[0] = {b"t": -15}.get(order, -9)
    server.end()


class _Message:
    """A message on stdin, for a server that thinks it is a request."""

    method, is_done, is_reply_lost = "POST", False, False

    def __init__(self, server: "ChildServer", body: bytes, session: str) -> None:
        self._server, self.body = server, body
        self.headers = {"mcp-session-id": session}
        self.gone = asyncio.get_running_loop().create_future()

    def reply(self, _status: int, body: bytes = b"") -> None:
        if body:
            self._server.write(body)

    def reply_json(self, message: object, _headers: object = None) -> None:
        self._server.write(msgspec.json.encode(message))

    def event(self, message: object, _id: str | None = None) -> bool:
        if message is not None:
            self._server.write(msgspec.json.encode(message))
        return True

    def stream(self) -> None:
        pass

    end = cut = stream


class ChildServer(LegacyServer):
    """A server over stdio: one session, which ends with its process."""

    def __init__(self, process: Process, ledger: Ledger, number: int) -> None:
        store = Store(f"child {number} ", number * _RUNS)
        super().__init__(process, Kind(has_events=False), ledger, store, 0)
        self._out: Any = None

    def write(self, message: bytes) -> None:
        self._out.write(message + b"\n")

    async def serve_pipes(self, stdin: PipeEnd, stdout: PipeEnd) -> None:
        """The program: it exits when its input ends."""
        loop: Any = self._process.loop
        reader = asyncio.StreamReader(loop=loop)
        self._out, _ = await loop.connect_write_pipe(_Out, stdout)
        _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), stdin)
        while line := await reader.readline():
            await self._take(line)

    async def _take(self, line: bytes) -> None:
        name = next(iter(self._store.sessions), "")
        message = _Message(self, line, name)
        if name or b'"initialize"' in line:
            await self.serve(message)  # type: ignore[arg-type]
            for session in self._store.sessions.values():
                session.side.reader = message  # type: ignore[assignment]
        elif (id_ := msgspec.json.decode(line).get("id")) is not None:  # such as server/discover
            error = {"code": -32601, "message": "Method not found"}
            message.reply_json({"jsonrpc": "2.0", "id": id_, "error": error})

    def died(self) -> None:
        """Its process has ended, and what ran in it with that."""
        for session in self._store.sessions.values():
            for run, _, _ in session.running.values():
                run.ended, run.died = self.now(), True

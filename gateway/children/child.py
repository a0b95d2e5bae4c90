"""One child process that speaks MCP over its standard streams.

The process started here is a reaper (`children.process_tree_reaper`). It starts the server with the pipes made here,
and kills all descendants of the server when this side of its socket closes. So no child outlives the gateway.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, Final

from msgspec import Raw

from gateway import world
from gateway.children.stderr_log import StderrLog
from gateway.config import Route, Upstream
from gateway.config.programs import NotHere, environment, not_here
from gateway.http.upstream_client import Client
from gateway.protocol import jsonrpc
from gateway.protocol.errors import CallLost, Unheeded, clean
from gateway.protocol.stdio_framing import Lines, one_line
from gateway.runtime.arrivals import Arrivals
from gateway.runtime.pieces import PieceReader
from gateway.runtime.tasks import Tasks
from gateway.runtime.written_pipe import WrittenPipe
from gateway.telemetry import Event, get_logger, secret_arguments
from gateway.telemetry.upstream_health import UpstreamHealth

log = get_logger()

Hear = Callable[[bytes, jsonrpc.Message], object]
"""Takes a message of a child: its line, and what that says. Raises ValueError for one that is malformed."""

_JSONRPC: Final = "2.0"
_REAPER: Final = Path(__file__).with_name("process_tree_reaper.py")
_SIGNALS: Final = {each.value: each.name for each in signal.Signals}
_WHY_CHARACTERS: Final = 600
_EOF_SECONDS: Final = 1.5
"""How long a server may take to exit after its input is closed; server-everything ignores that."""
_TERM_SECONDS: Final = 1.5
_KILL_SECONDS: Final = 2.0
_LAST_OUTPUT_SECONDS: Final = 1.0
"""How long to wait for the output of a server that exited, or for the exit of a server that closed its output."""


def given_secrets(upstream: Upstream) -> list[str]:
    """Return the secrets that a child was given: its variables, and arguments that look like secrets."""
    command = upstream.command or ()
    return [*upstream.env.values(), *(command[index][start:] for index, start in secret_arguments(command).items())]


class Child(WrittenPipe):
    """A reaper, its server, and all processes that the server starts; the protocol of the pipe to that one."""

    def __init__(
        self, route: Route, client: Client, tasks: Tasks, health: UpstreamHealth, *, serves_host: bool = False
    ) -> None:
        """`serves_host`: its only client is the host that started this process (`wrap`)."""
        super().__init__()
        loop = asyncio.get_running_loop()
        self.pid = 0
        """The process id of the server, once it is known."""
        self.over: asyncio.Future[str] = loop.create_future()
        """Done when no more messages can be exchanged: the reason, worded to follow `route.where`."""
        self.gone: asyncio.Future[None] = loop.create_future()
        """Done when all its processes have ended."""
        self.asked = False
        """Whether the gateway asked it to end."""
        self.created = world.monotonic()
        self.health = health
        self._serves_host = serves_host
        self.route = route
        self._client = client
        self._tasks = tasks
        self._searched = ""
        """Where its program was looked up, as the log ends with it, unless `over` says that."""
        self._exit = ""
        """How the server exited, if that is known before its output ended."""
        self._output = _Output(Lines(client.limits.event_bytes), client.arriving, self)
        self.hear: Hear | None = None
        """What hears its messages, if anything does."""
        self.stderr_log = StderrLog(route.path, given_secrets(route.upstream))
        self._process: world.Started
        self._transports: list[asyncio.BaseTransport] = []
        """All but that of an input that is lost."""
        self._control: tuple[asyncio.StreamReader, asyncio.StreamWriter]
        self._last_output: asyncio.TimerHandle | None = None

    # -- start --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start it; `over` reports a failure of its command. Raises OSError if the reaper cannot start."""
        upstream = self.route.upstream
        assert upstream.command is not None
        ours, theirs = world.socket_pair()
        pipes: list[tuple[FileIO, FileIO]] = []
        try:
            with theirs:  # closed here, or the end of the reaper would never show
                ours.setblocking(False)
                pipes += (world.pipe(), world.pipe(), world.pipe())
                (stdin, _), (_, stdout), (_, stderr) = pipes
                # -I: PYTHONPATH and the like in `upstream.env` are meant for the server.
                program = (sys.executable, "-I", "-S", str(_REAPER), str(theirs.fileno()), upstream.cwd or "")
                # Not asyncio's subprocess: uvloop gives a child sockets, which cannot be reopened as /dev/stdin, and
                # leaks file descriptors to it.
                self._process = world.start_process(
                    (*program, *upstream.command),  # the operator configured it; no shell
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(theirs.fileno(),),
                    env=environment(upstream, os.environ),
                    start_new_session=True,  # Ctrl-C in a terminal must reach the gateway only
                )
        except BaseException:
            ours.close()
            for end in chain(*pipes):
                end.close()
            raise
        # uvloop closes a pipe whose connection is cancelled, but not the file object, which would close the number a
        # second time. So the connections are made even after a cancellation, and then the child is killed.
        connecting = asyncio.get_running_loop().create_task(self._connect(ours, pipes))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._abandon)
            raise
        self._tasks.spawn(self._supervise(), "child")

    def _abandon(self, connecting: asyncio.Task[None]) -> None:
        """Kill a child whose start was cancelled."""
        if not connecting.cancelled() and connecting.exception() is None:
            self._tasks.spawn(self._supervise(), "child")
            self.kill()

    async def _connect(self, control: world.Socket, pipes: list[tuple[FileIO, FileIO]]) -> None:
        """Connect our ends of the pipes. The child's ends are closed here, or the pipes would never end."""
        loop = asyncio.get_running_loop()
        (in_read, in_), (out, out_write), (err, err_write) = pipes
        for end in (err_write, out_write, in_read):
            end.close()
        ends = deque((err, out, in_))
        try:
            # A transport owns its end from here on, even if its connection fails.
            transport, _ = await loop.connect_read_pipe(lambda: self.stderr_log, ends.popleft())
            self._transports.append(transport)
            transport, _ = await loop.connect_read_pipe(lambda: self._output, ends.popleft())
            self._transports.append(transport)
            await loop.connect_write_pipe(lambda: self, ends.popleft())
            self._control = await asyncio.open_unix_connection(sock=control)
        except BaseException:
            control.close()
            for end in ends:
                end.close()
            for connected in self._transports:
                connected.close()
            raise

    # -- life ---------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Read the reports of the reaper until no process is left."""
        reader, writer = self._control
        with suppress(OSError):
            while line := await reader.readline():
                self._take_report(line.decode().split())
        writer.close()
        if self.pid:
            with suppress(OSError):  # the kernel killed the server with its reaper, but not the server's children
                os.killpg(self.pid, signal.SIGKILL)
        await self._output.taken()
        if self._exit:  # then a timer bounds the wait for the rest of its output
            _ = await asyncio.wait((self.over,))
        self._end("ended with its reaper, which was killed")
        # The kernel has closed the reaper's files, so the reaper exits within microseconds.
        _ = self._process.wait()
        _ = await asyncio.wait((self.stderr_log.ended,), timeout=_LAST_OUTPUT_SECONDS)
        if self.pipe in self._transports:  # asyncio's transports cannot be aborted once they are lost
            self.pipe.abort()  # a close would wait for unwritten data
        for transport in self._transports:
            transport.close()
        if self.asked:
            log.debug(Event.CHILD_ENDED, route=self.route.path)
        else:
            log.warning(
                Event.CHILD_ENDED,
                route=self.route.path,
                upstream=self.route.upstream.name,
                why=self.over.result(),
                stderr=list(self.stderr_log.last),
                fix="stderr has the server's own last words; run its command by hand, with upstream.env and cwd"
                if self.has_started
                # Not in the error, which clients see.
                else f"correct the command, or install the program{self._searched}",
            )
        self.gone.set_result(None)

    def _take_report(self, words: list[str]) -> None:
        match words:
            case ["started", pid]:
                self.pid = self.stderr_log.pid = int(pid)
            case ["failed", error, what]:
                name = self.route.upstream.cwd if what == "directory" else self.route.upstream.name
                missing = not_here(self.route.upstream) or NotHere("", f"{os.strerror(int(error))} ({what} {name})")
                why = missing.why
                if self._serves_host:  # clients see the error, too, and only the host gave the gateway its PATH
                    why = clean(missing.in_full, _WHY_CHARACTERS)
                elif missing.searched:
                    self._searched = f"; PATH is {missing.searched}"
                self._end(f"cannot be started: {why}")
            case ["ended", code]:
                self.pid = 0  # the kernel may reuse the number from now on
                number = -int(code)
                name = _SIGNALS.get(number, f"signal {number}")
                how = f"was ended by {name}" if number > 0 else f"ended (exit code {code})"
                if self._output.closed:
                    self._end(how)
                elif not self.over.done():  # its remaining output is still read
                    self._exit = how
                    self._output.read_on()
                    self._end_soon(how)
            case _:
                pass  # an incomplete line from a reaper that was killed

    def output_closed(self) -> None:
        """Its output ended: the server exited, or will never send anything again."""
        if self._exit:
            self._end(self._exit)
        elif not self.over.done():
            self._end_soon("closed its output")

    def _end_soon(self, why: str) -> None:
        if self._last_output is None:
            loop = asyncio.get_running_loop()
            # What was read by then is heard first: it may be the answer to a call.
            self._last_output = loop.call_later(_LAST_OUTPUT_SECONDS, self._output.then, partial(self._end, why))

    def give_up(self, why: str) -> None:
        """End the child, because the rest of its output cannot be parsed."""
        self._end(why)
        self.end()

    def _end(self, why: str) -> None:
        if self._last_output is not None:
            self._last_output.cancel()
        if not self.over.done():
            self.over.set_result(why)
            self._output.ignore()

    @property
    def has_started(self) -> bool:
        """Whether its program ever ran."""
        return self.stderr_log.pid != 0

    # -- its input ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pipe is open."""
        super().connection_made(transport)
        self._transports.append(self.pipe)

    def connection_lost(self, exc: Exception | None) -> None:
        """The pipe is closed."""
        self._transports.remove(self.pipe)
        super().connection_lost(exc)

    # -- messages -----------------------------------------------------------------------------------------------

    def hear_with(self, hear: Hear | None) -> None:
        """Hand each message of its output to `hear` from now on; what comes while nothing hears is dropped."""
        self.hear = hear

    def write(self, message: bytes) -> None:
        """Write one message without waiting."""
        if not self.over.done() and not self.pipe.is_closing():  # uvloop raises on a write to a closed pipe
            self.pipe.write(one_line(message))

    async def send(self, message: bytes) -> None:
        """Write one message and wait until the pipe holds all of it. Raises CallLost."""
        self.write(message)
        if self.free is not None:
            seconds = self._client.timeouts.answer_seconds
            _ = await asyncio.wait((self.free, self.over), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.pipe.is_closing():  # it closed its input, so it is probably about to exit
            _ = await asyncio.wait((self.over,), timeout=_LAST_OUTPUT_SECONDS)
            self._end("closed its input")
        if self.over.done():
            raise CallLost.by(self.route.where, self.over.result())
        if self.free is not None:
            raise Unheeded.by(self.route.where, "did not read its input within timeouts.answer_seconds")

    async def probe(self, request: bytes, id_: bytes, seconds: float) -> bytes | None:
        """Send a request to it before it is used; return the line of its response, None if it ends or takes longer."""
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def hear(line: bytes, message: jsonrpc.Message) -> None:
            if not answered.done() and message.method is None and message.id == Raw(id_):
                answered.set_result(line)

        self.hear = hear
        self.asked = True  # a server that ends because of the probe is not a failure
        with suppress(CallLost):
            await self.send(request)
            _ = await self.answers(answered, seconds)
        self.asked = not answered.done()
        return answered.result() if answered.done() else None

    async def answers(self, answered: asyncio.Future[Any], seconds: float | None = None) -> bool:
        """Wait for the answer to what was sent; False if it takes longer. Raises CallLost if the child ends first."""
        _ = await asyncio.wait((answered, self.over), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.over.done() and not answered.done():
            raise CallLost.by(self.route.where, f"{self.over.result()} in a call")
        return answered.done()

    # -- end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close it in the background."""
        self._tasks.spawn(self.close(), "close session")

    async def close(self) -> None:
        """Close its input, then send SIGTERM, then SIGKILL to all that is left. If cancelled, kill at once."""
        self._ask_to_end()
        control = self._control[1]
        try:
            self.pipe.close()
            if await self._is_gone(_EOF_SECONDS):
                return
            self._order(b"t")
            if await self._is_gone(_TERM_SECONDS):
                return
            self._order(b"k")
            _ = await self._is_gone(_KILL_SECONDS)
        finally:
            control.close()

    def kill(self) -> None:
        """Kill it and all processes that it started; `gone` is done when none is left."""
        self._ask_to_end()
        self._order(b"k")

    def _order(self, order: bytes) -> None:
        if not self._control[1].is_closing():  # it is closing if the reaper has exited
            self._control[1].write(order)

    def _ask_to_end(self) -> None:
        if not self.over.done():
            self.asked = True
            self._end("is being ended")

    async def _is_gone(self, seconds: float) -> bool:
        _ = await asyncio.wait((self.gone,), timeout=seconds)
        return self.gone.done()


class _Output(PieceReader):
    """The pipe from the child's stdout."""

    def __init__(self, lines: Lines, arriving: Arrivals, child: Child) -> None:
        """`arriving` limits the unfinished lines of all children of the route."""
        super().__init__()
        self.closed = False
        self._lines = lines
        self._arriving = arriving
        self._waits_for_others = False
        """Whether reading is paused until there is room for more of a large line."""
        self._never_waits = False
        self._child = child

    def take(self, data: bytes) -> None:
        if self._child.over.done():
            return
        self._hear(self._lines.feed(data))
        if not self._never_waits:
            _ = self._arriving.hold(self, self._lines.unfinished_bytes)

    def pause_reading(self) -> None:
        """See `arrivals.Reader`."""
        self._waits_for_others = True
        self._pause()

    def resume_reading(self) -> None:
        """See `arrivals.Reader`."""
        self._waits_for_others = False
        if not self._pieces.is_waiting:
            self._read_on()

    def _read_on(self) -> None:
        if not self._waits_for_others:
            super()._read_on()

    def read_on(self) -> None:
        """Wait for no other line any more: the child has exited, so only what is in the pipe can come."""
        self._never_waits = True
        self._arriving.release(self)
        self.resume_reading()

    def ignore(self) -> None:
        """Take nothing more, but read it, so that a child which writes can hear that it should end."""
        self._lines.drop()
        self.read_on()

    def _hear(self, lines: Iterable[bytes | None]) -> None:
        child = self._child
        for line in lines:
            if child.over.done():
                return
            if line is None:
                child.give_up("sent a message larger than limits.event_bytes")
            elif child.hear is not None:
                try:
                    child.hear(line, _opened(line))
                except ValueError:
                    child.health.malformed()

    def finish(self) -> None:
        self.closed = True
        self._arriving.release(self)
        try:
            self._hear(self._lines.end())
        finally:
            self._child.output_closed()


def _opened(line: bytes) -> jsonrpc.Message:
    """What a line says. Raises ValueError if it is not JSON-RPC: many servers print log records in JSON."""
    if line.lstrip()[:1] == b"{" and (message := jsonrpc.message(line)).jsonrpc == _JSONRPC:
        return message
    raise ValueError("a line is not JSON-RPC")

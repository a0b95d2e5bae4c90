"""Start several real gateways behind a real balancer, with the configuration files that deploy/ ships.

    async with cluster(server.url, replicas=3, balancer="nginx", hold={"ttl_seconds": 1}) as c:
        ...  # talk to c.url: each request goes to the next replica
        await c.replicas[0].kill()
        assert await c.metric("mcp_gateway_held_calls") == 1  # of the living replicas
        await c.settled()

A cluster can stand wherever a test only looks at a `Front`. What must be true of a gateway at the end must be true of
each replica; one that the test killed is excused its exit code.
"""

import asyncio
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from tests.parts.launch import REPOSITORY, die_with_parent, free_port
from tests.support.gateway_process import PATIENCE_SECONDS, Front, Gateway, GatewayError, gateway

BalancerName = Literal["nginx", "haproxy"]

DEPLOY: Final = REPOSITORY / "deploy"
FILES: Final[dict[BalancerName, Path]] = {
    "nginx": DEPLOY / "nginx" / "nginx.conf",
    "haproxy": DEPLOY / "haproxy" / "haproxy.cfg",
}
PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
"""Debian installs both outside of a user's PATH."""
TEMPORARY: Final = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 5.0
SHOWN_LINES: Final = 40


@dataclass(frozen=True)
class Place:
    """The addresses of one replica, for a balancer."""

    id: str
    listen: str
    admin: str


def program(name: BalancerName) -> str | None:
    return shutil.which(name, path=PATH)


def needs(*names: BalancerName) -> pytest.MarkDecorator:
    """Skips a test where one of these is not installed."""
    missing = [name for name in names if program(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"apt install {' '.join(missing)}")


# --- the shipped files with other addresses ---


def replaced(text: str, old: str, new: str) -> str:
    """Replace a text that must occur exactly once."""
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the file of deploy/"
    return text.replace(old, new)


def servers(text: str, line: re.Pattern[str], write: Callable[[str, Place], str], places: Sequence[Place]) -> str:
    """Replace the replicas' lines by one per replica, each like the first."""
    found = list(line.finditer(text))
    assert len(found) == 3, "the file of deploy/ has three replicas"
    block = "".join(write(found[0].group(), place) for place in places)
    return text[: found[0].start()] + block + text[found[-1].end() :]


def nginx_configuration(text: str, directory: Path, listen: str, places: Sequence[Place]) -> str:
    """Only addresses and paths differ from the file."""

    def write(line: str, place: Place) -> str:
        return replaced(line, "10.0.0.11:8080", place.listen)

    text = servers(text, re.compile(r"^ *server 10\..*\n", re.MULTILINE), write, places)
    text = replaced(text, "listen 80;", f"listen {listen};")
    for path in ("/run/nginx.pid", "/var/log/nginx/error.log", "/var/log/nginx/access.log"):
        text = replaced(text, path, str(directory / Path(path).name))
    # Compiled in, and below /var/lib.
    temporary = "".join(f"    {name}_temp_path {directory / name};\n" for name in TEMPORARY)
    return replaced(text, "\nhttp {\n", f"\nhttp {{\n{temporary}")


def haproxy_configuration(text: str, directory: Path, listen: str, places: Sequence[Place]) -> str:
    """Only addresses and paths differ from the file; without root, the user cannot be changed."""

    def write(line: str, place: Place) -> str:
        line = replaced(replaced(line, "gw-1", place.id), "10.0.0.11:8080", place.listen)
        return f"{line.rstrip()} port {place.admin.rpartition(':')[2]}\n"

    text = servers(text, re.compile(r"^ *server gw-.*\n", re.MULTILINE), write, places)
    text = replaced(text, "bind :80\n", f"bind {listen}\n")
    text = replaced(text, "/run/haproxy/admin.sock", str(directory / "admin.sock"))
    if os.geteuid() != 0:
        text = re.sub(r"^ *(user|group|chroot) .*\n", "", text, flags=re.MULTILINE)
    return text


CONFIGURATIONS: Final = {"nginx": nginx_configuration, "haproxy": haproxy_configuration}


# --- the balancer's process ---


@dataclass
class Balancer:
    """A real nginx or HAProxy in a process group of its own."""

    name: BalancerName
    directory: Path
    address: str
    process: asyncio.subprocess.Process | None = None
    _leash: asyncio.subprocess.Process | None = None

    @property
    def configuration(self) -> Path:
        return self.directory / FILES[self.name].name

    @property
    def log(self) -> str:
        """The access and error logs, unordered."""
        paths = [self.directory / name for name in ("output", "error.log", "access.log")]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    def tail(self) -> str:
        return "\n".join(self.log.splitlines()[-SHOWN_LINES:]) or "(nothing)"

    def configure(self, places: Sequence[Place], text: str | None = None) -> None:
        """Write the shipped file, or another `text` of its form, with these addresses."""
        self.directory.chmod(0o755)  # nginx's workers are another user
        text = FILES[self.name].read_text() if text is None else text
        self.configuration.write_text(CONFIGURATIONS[self.name](text, self.directory, self.address, places))

    def command(self, *, check: bool = False) -> list[str]:
        """Run in the foreground, or only check the configuration."""
        found = program(self.name)
        if found is None:
            raise GatewayError(f"{self.name} is not installed: apt install {self.name}")
        if self.name == "haproxy":
            return [found, "-c" if check else "-db", "-f", str(self.configuration)]
        errors = str(self.directory / "error.log")
        mode = ["-t"] if check else ["-g", "daemon off;"]
        return [found, "-p", str(self.directory), "-e", errors, *mode, "-c", str(self.configuration)]

    async def start(self) -> None:
        """Start it, and return when it accepts connections."""
        with (self.directory / "output").open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        # A process that changes its user loses its parent-death signal, and nginx's workers outlive their master.
        # The pipe closes when this process ends, for any reason.
        self._leash = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'read _; kill -KILL -- "-$1"', "leash", str(self.process.pid)),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not await self._accepts():
            if self.process.returncode is not None or time.monotonic() > deadline:
                raise GatewayError(f"{self.name} does not accept at {self.address}; it says:\n{self.tail()}")
            await asyncio.sleep(0.02)

    async def _accepts(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with socket.socket() as attempt:
            attempt.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(attempt, (host, int(port)))
            except OSError:
                return False
            return True

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and all its workers."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    async def kill(self) -> None:
        """End it with all its workers."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()  # at once for both, and it reaps its workers
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self.process.wait()
        for process in (self.process, self._leash):
            if process is not None:
                # The group may live on without its leader.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


@dataclass
class Cluster(Front):
    """Several gateways behind a balancer, whose figures are those of the living replicas together."""

    replicas: tuple[Gateway, ...]
    balancer: Balancer

    @property
    def config(self) -> dict[str, Any]:
        return self.replicas[0].config

    @property
    def base(self) -> str:
        return f"http://{self.balancer.address}"

    @property
    def living(self) -> list[Gateway]:
        return [replica for replica in self.replicas if replica.alive]

    def replica(self, name: str) -> Gateway:
        return next(replica for replica in self.replicas if replica.config["replica"]["id"] == name)

    async def metric(self, name: str, **labels: str) -> float:
        return sum([await replica.metric(name, **labels) for replica in self.living])

    async def settled(self, seconds: float = PATIENCE_SECONDS) -> None:
        for replica in self.living:
            try:
                await replica.settled(seconds)
            except GatewayError as exc:
                raise self.explain(str(exc).partition(";")[0]) from None

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        return [line for replica in self.replicas for line in replica.log(event)]

    def tail(self) -> str:
        tails = [f"--- {replica.config['replica']['id']}\n{replica.tail()}" for replica in self.replicas]
        return "\n".join([*tails, f"--- {self.balancer.name}\n{self.balancer.tail()}"])


def memberships(count: int) -> list[dict[str, Any]]:
    """The section `replica` of each replica."""
    peers = {f"gw-{number}": f"127.0.0.1:{free_port()}" for number in range(1, count + 1)}
    return [{"id": name, "listen": address, "peers": peers} for name, address in peers.items()]


@asynccontextmanager
async def together(contexts: Sequence[AbstractAsyncContextManager[Gateway]]) -> AsyncIterator[list[Gateway]]:
    """Enter all contexts at the same time, and leave them so; raises the first exception of any."""

    def unless_wrong(results: Sequence[Any]) -> None:
        for result in results:
            if isinstance(result, BaseException):
                raise result

    entered = await asyncio.gather(*(context.__aenter__() for context in contexts), return_exceptions=True)
    inside = [found for found in zip(contexts, entered, strict=True) if not isinstance(found[1], BaseException)]
    try:
        unless_wrong(entered)
        yield [gw for _, gw in inside]
    except BaseException as exc:
        leaving = (context.__aexit__(type(exc), exc, exc.__traceback__) for context, _ in inside)
        _ = await asyncio.gather(*leaving, return_exceptions=True)
        raise
    unless_wrong(
        await asyncio.gather(*(context.__aexit__(None, None, None) for context, _ in inside), return_exceptions=True)
    )


@asynccontextmanager
async def cluster(
    upstream_url: str,
    *,
    replicas: int = 3,
    balancer: BalancerName = "nginx",
    check: bool = True,
    **overrides: Any,
) -> AsyncIterator[Cluster]:
    """Run gateways in front of `upstream_url`, and a balancer in front of them."""
    async with AsyncExitStack() as stack:
        starting = [
            gateway(upstream_url, check=check, replica=membership, **overrides) for membership in memberships(replicas)
        ]
        gateways = await stack.enter_async_context(together(starting))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"mrtr-{balancer}-"))
        front = Balancer(balancer, Path(directory), f"127.0.0.1:{free_port()}")
        front.configure(
            [Place(gw.config["replica"]["id"], gw.config["listen"], gw.config["admin"]) for gw in gateways]
        )
        stack.push_async_callback(front.kill)
        await front.start()
        try:
            yield Cluster(tuple(gateways), front)
        except BaseException as exc:
            exc.add_note(f"the log of {balancer} ends with:\n{front.tail()}")
            raise

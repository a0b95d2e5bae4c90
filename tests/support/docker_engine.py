"""A Docker Engine of the tests' own: Debian's dockerd with its own folders and socket, without a registry.

    with engine() as docker:
        docker.make_images()
        docker.run("stack", "deploy", ...)

It needs root. Networks of containers are bridges and overlays; nothing masquerades, so containers reach this machine
by its own address and nothing beyond it.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.parts.launch import PARTS, REPOSITORY, die_with_parent
from tests.support.cluster import PATH
from tests.support.container import LEAN, PACKAGES
from tests.support.programs import ProgramError, output

STORE: Final = PARTS / "docker"
"""Images stay here, so that a second run only checks them."""
START_SECONDS: Final = 30.0
GATEWAY: Final = "mrtr-gateway:docker-test"
BALANCERS: Final = "mrtr-balancers:docker-test"
BASE: Final = "mrtr-base:docker-test"
CLIENT: Final = "/usr/bin/docker"
"""Debian's own: another client may lack BuildKit."""


def missing() -> str | None:
    """Why no engine can be run here."""
    if os.geteuid() != 0:
        return "needs root"
    programs = ("dockerd", "runc", "mmdebstrap", "iptables")
    if absent := [name for name in programs if shutil.which(name, path=PATH) is None]:
        return f"apt install docker.io mmdebstrap iptables: there is no {', '.join(absent)}"
    return None if Path(CLIENT).exists() else f"apt install docker.io: there is no {CLIENT}"


def own_address() -> str:
    """An address of this machine that is not loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@dataclass
class Docker:
    """One engine that runs."""

    socket: str
    log: Path

    def run(self, *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> str:
        """Run a docker command, or another program that speaks to the engine; return its stdout."""
        words = command if str(command[0]).startswith(("/", "docker-")) else (CLIENT, *command)
        environment = {**os.environ, "PATH": f"/usr/bin:{PATH}", "DOCKER_HOST": self.socket, **(env or {})}
        return output(*words, cwd=cwd, env=environment)

    def has(self, image: str) -> bool:
        return bool(self.run("images", "--quiet", image).strip())

    def make_images(self) -> None:
        """Make the image of the gateway, as scripts/image does, and one with both balancers."""
        for name, extra in ((BASE, ""), (BALANCERS, ",nginx-light,haproxy")):
            if not self.has(name):
                with tempfile.TemporaryDirectory(dir=STORE) as folder:
                    archive = Path(folder) / "base.tar"
                    include = f"--include={PACKAGES}{extra}"
                    self.run(
                        "/usr/bin/mmdebstrap", "--quiet", "--variant=essential", *LEAN, include, "bookworm", archive
                    )
                    nginx = ["--change", 'CMD ["nginx", "-g", "daemon off;"]'] if extra else []
                    self.run("import", *nginx, archive, name)
        build = (REPOSITORY / "scripts" / "image", "--with", "docker", GATEWAY, "--", "--network", "host")
        self.run(str(build[0]), *map(str, build[1:]), "--build-arg", f"BASE={BASE}")


@contextmanager
def engine() -> Iterator[Docker]:
    """Start the daemon; afterwards it and its containers are gone."""
    STORE.mkdir(parents=True, exist_ok=True)
    for left in ("swarm", "containers", "network"):
        shutil.rmtree(STORE / left, ignore_errors=True)  # of a run that was killed
    with tempfile.TemporaryDirectory(prefix="mrtr-docker-") as name:
        folder = Path(name)
        docker = Docker(f"unix://{folder}/engine.sock", folder / "log")
        with docker.log.open("wb") as log:
            daemon = subprocess.Popen(
                [
                    shutil.which("dockerd", path=PATH) or "dockerd",
                    *("--host", docker.socket, "--data-root", str(STORE), "--exec-root", str(folder / "exec")),
                    *("--pidfile", str(folder / "pid"), "--storage-driver", "vfs"),
                    # The rules of this machine stay as they are. Without a default bridge, nothing needs them.
                    *("--iptables=false", "--bridge=none", "--host-gateway-ip", own_address()),
                ],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread runs yet
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                try:
                    docker.run("version")
                    break
                except ProgramError:
                    if daemon.poll() is not None or time.monotonic() > deadline:
                        raise ProgramError(docker.log.read_text(errors="replace")[-4000:]) from None
                    time.sleep(0.2)
            yield docker
        finally:
            if daemon.poll() is None:
                _end(docker)
            daemon.terminate()
            try:
                _ = daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                _ = daemon.wait()


def _end(docker: Docker) -> None:
    """Remove every container: one that runs would outlive the daemon."""
    with suppress(ProgramError):
        docker.run("swarm", "leave", "--force")
    deadline = time.monotonic() + START_SECONDS
    while (left := docker.run("ps", "--all", "--quiet").split()) and time.monotonic() < deadline:
        with suppress(ProgramError):
            docker.run("rm", "--force", *left)

"""Build the image with buildah and run it with podman, as root and without a daemon or a registry.

    build()  # some seconds; the base, once, some more
    async with container("main", {"listen": ..., "admin": ..., "routes": [...]}, *HARDENED, "--env=...") as box:
        ...  # a `Gateway` like any other, but its process is in a container
        assert box.is_healthy()

The base is a Debian that mmdebstrap makes, since no registry can be asked for the default one. All that is made stays
in .parts/containers, in a store of its own. Containers have the host's network: nobody here can make them another.
"""

import asyncio
import hashlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.parts.launch import PARTS, REPOSITORY, die_with_parent
from tests.support.cluster import PATH
from tests.support.gateway_process import START_SECONDS, Gateway
from tests.support.programs import output

PROGRAMS: Final = ("buildah", "podman", "runc", "mmdebstrap")
STORE: Final = PARTS / "containers"
BASE: Final = "localhost/mrtr-base"
IGNORE: Final = REPOSITORY / ".dockerignore"
IMAGE: Final = "localhost/mrtr-gateway:test"
AGAIN: Final = "localhost/mrtr-gateway:again"
LEAN: Final = (
    "--dpkgopt=force-unsafe-io",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
)
PACKAGES: Final = "ca-certificates,python3,python3-venv"
STORAGE: Final = ("--root", str(STORE / "storage"), "--runroot", str(STORE / "run"), "--storage-driver", "overlay")
ENGINE: Final = (
    *(*STORAGE, "--tmpdir", str(STORE / "tmp"), "--runtime", "runc", "--cgroup-manager", "cgroupfs"),
    "--log-level=fatal",  # its warnings about missing cgroups and systemd would be in the gateway's log
)
ENVIRONMENT: Final = {**os.environ, "DISABLE_HC_SYSTEMD": "true"}
"""No timers for health checks: the tests run them."""
PROCESSES: Final = 4000
HARDENED: Final = ("--read-only", "--read-only-tmpfs=false", "--cap-drop", "ALL")
"""The options that deploy/ uses, without a writable /tmp."""


def installed() -> bool:
    """Whether images can be built here: needs the programs and root."""
    return os.geteuid() == 0 and all(shutil.which(name, path=PATH) for name in PROGRAMS)


def podman_command(*arguments: str) -> list[str]:
    return ["podman", *ENGINE, *arguments]


def limits() -> list[str]:
    """The limits of this machine: podman's own defaults are higher, and fail."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={PROCESSES}:{PROCESSES}"]


def podman(*arguments: str) -> str:
    return output(*podman_command(*arguments))


def inspected(what: str) -> dict[str, Any]:
    (found,) = json.loads(podman("inspect", what))
    assert isinstance(found, dict)
    return found


def _move_in() -> None:
    """Prepare the store; podman refuses one that was made in another folder."""
    place = STORE / "place"
    if not place.exists() or place.read_text() != str(STORE):
        shutil.rmtree(STORE, ignore_errors=True)  # it does not exist, or was copied from elsewhere
        STORE.mkdir(parents=True)
        place.write_text(str(STORE))


def leave() -> None:
    """Remove the mounts that podman leaves in its store, because they keep the folder from being removed."""
    subprocess.run(["umount", "--recursive", "--quiet", STORE / "storage" / "overlay"], check=False)


def _sources() -> str:
    """A digest of everything that goes into the image, including its labels."""
    digest = hashlib.sha256(output("git", "rev-parse", "HEAD", cwd=REPOSITORY).encode())
    named = [REPOSITORY / line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")]
    files = [file for path in named for file in (path.rglob("*") if path.is_dir() else [path])]
    for file in sorted([*files, IGNORE, REPOSITORY / "Dockerfile"]):
        if file.is_dir() or "__pycache__" in file.parts:
            continue
        digest.update(f"{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _has(image: str) -> bool:
    return subprocess.run(podman_command("image", "exists", image), check=False).returncode == 0


def build() -> None:
    """Make the base and the image, unless they exist."""
    _move_in()
    podman("rm", "--all", "--force", "--time", "0")  # of a run that was killed
    stamp, sources = STORE / "built", _sources()
    if _has(IMAGE) and stamp.exists() and stamp.read_text() == sources:
        return
    if not _has(BASE):
        with tempfile.TemporaryDirectory(dir=STORE) as folder:
            archive = Path(folder) / "base.tar"
            output("mmdebstrap", "--quiet", "--variant=essential", *LEAN, f"--include={PACKAGES}", "bookworm", archive)
            podman("import", str(archive), BASE)
    _build(IMAGE)
    stamp.write_text(sources)


def build_again() -> None:
    """Make the image a second time, from the base up, as AGAIN."""
    _build(AGAIN, "--no-cache")


def _build(tag: str, *options: str) -> None:
    epoch = output("git", "log", "-1", "--format=%ct", cwd=REPOSITORY).strip()
    where = (*STORAGE, "--isolation", "chroot", "--pull-never", "--build-arg", f"BASE={BASE}", "--timestamp", epoch)
    output(REPOSITORY / "scripts" / "image", "--with", "buildah", tag, "--", *where, *options)


@dataclass
class Container(Gateway):
    """One gateway in a container; `config` only has its addresses and routes."""

    name: str = ""
    options: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    async def start(self) -> None:
        """Run it attached: its log is this process's, it gets SIGTERM, and `podman run` returns its exit code."""
        with (self.directory / "stderr").open("ab") as err:
            self.process = await asyncio.create_subprocess_exec(
                *podman_command("run", "--name", self.name, "--network", "host"),
                *(*limits(), *self.options, IMAGE, *self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                env=ENVIRONMENT,
                preexec_fn=die_with_parent,
            )
        await self.until(self.is_ready, "became ready", START_SECONDS)

    def is_healthy(self) -> bool:
        """Have podman run the image's own health check, once."""
        return subprocess.run(podman_command("healthcheck", "run", self.name), check=False).returncode == 0

    def stop(self) -> None:
        """Not possible here: the signal would reach podman, not the gateway."""
        raise NotImplementedError

    def remove(self) -> None:
        """End it in any state, and remove it."""
        subprocess.run(podman_command("rm", "--force", "--time", "0", self.name), capture_output=True, check=False)


@asynccontextmanager
async def container(
    name: str, config: dict[str, Any], *options: str, command: tuple[str, ...] = (), check: bool = True
) -> AsyncIterator[Container]:
    """Run the image with these options of `podman run`."""
    with tempfile.TemporaryDirectory(prefix="mrtr-container-") as directory:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            box = Container(
                config,
                Path(directory),
                http,
                name=f"mrtr-{os.getpid()}-{name}",
                options=[*options],
                command=[*command],
            )
            try:
                await box.start()
                yield box
                if check:
                    await box.end()
            except BaseException as exc:
                exc.add_note(f"the container's log ends with:\n{box.tail()}")
                raise
            finally:
                box.remove()
                await box.kill()

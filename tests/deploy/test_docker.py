"""A real Docker Engine: the image, the Compose files and the Swarm stack, updated under load.

The balancers run from an image with Debian's nginx and HAProxy, since there is no registry to take theirs from.
"""

import asyncio
import resource
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.e2e.wire import wire
from tests.parts.launch import OldServer, free_port, old_server
from tests.support.cluster import DEPLOY, needs, program, replaced
from tests.support.docker_engine import BALANCERS, GATEWAY, Docker, engine, missing, own_address
from tests.support.programs import output
from tests.support.steady_load import Load, serves
from tests.support.workbench import eventually

KEY = "0f" * 32

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    with engine() as found:
        found.make_images()
        yield found


@asynccontextmanager
async def legacy() -> AsyncIterator[OldServer]:
    """A legacy server that containers can reach."""
    async with old_server("py130", host=own_address()) as server:
        yield server


until = partial(eventually, seconds=150.0)


def published(path: Path, theirs: str, ours: str) -> str:
    """Publish a free port, not 8080, which may be in use, and let files be as many as here; return the address."""
    port = free_port()
    text = replaced(path.read_text(), theirs, ours.format(port))
    path.write_text(replaced(text, "nofile: 65536", f"nofile: {resource.getrlimit(resource.RLIMIT_NOFILE)[1]}"))
    return f"127.0.0.1:{port}"


def think(number: int) -> float:
    """People think for up to four seconds, so that each replica holds calls at any time."""
    return number % 5


# -- Compose --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="apt install docker-compose")
async def test_an_update_of_the_compose_story_refuses_no_call_and_loses_none(docker: Docker, tmp_path: Path) -> None:
    folder = tmp_path / "replicas"
    shutil.copytree(DEPLOY / "compose" / "replicas", folder)
    listen = published(folder / "compose.yaml", "127.0.0.1:8080:80", "127.0.0.1:{}:80")
    docker.run("tag", BALANCERS, "nginx:1.28")
    async with legacy() as server:
        env = {
            "MRTR_IMAGE": GATEWAY,
            "MRTR_STATE_KEY": KEY,
            "MRTR_UPSTREAM": server.url.replace(own_address(), "host.docker.internal"),
        }

        async def compose(*words: str) -> str:
            command = ("docker-compose", *words)
            return await asyncio.to_thread(docker.run, *command, env=env, cwd=folder)

        try:
            await compose("up", "--detach", "--no-build")
            async with wire(f"http://{listen}/mcp") as client:
                await until(lambda: serves(client), "the story serves")
                load = Load(server, client, think)
                async with load.running():
                    for name in ("gw-1", "gw-2", "gw-3"):
                        await compose("up", "--detach", "--no-build", "--no-deps", "--force-recreate", name)
                        (container,) = (await compose("ps", "--quiet", name)).split()

                        async def healthy(container: str = container) -> bool:
                            state = ("inspect", "--format", "{{.State.Health.Status}}", container)
                            return (await asyncio.to_thread(docker.run, *state)).strip() == "healthy"

                        await until(healthy, f"{name} is healthy")
                        await compose("exec", "-T", "nginx", "nginx", "-s", "reload")
                load.assert_nothing_was_refused_or_lost(least=300)
        finally:
            await compose("down", "--timeout", "1")


# -- Swarm ----------------------------------------------------------------------------------------------------------


def stack_file(folder: Path) -> Path:
    """Copy the stack, with a key."""
    shutil.copytree(DEPLOY / "swarm", folder)
    key = folder / "state_keys"
    key.write_text(f"{KEY}\n")
    return folder / "stack.yaml"


@pytest.fixture(scope="module")
def swarm(docker: Docker) -> Docker:
    managers, overlays = f"127.0.0.1:{free_port()}", str(free_port())
    docker.run("swarm", "init", "--advertise-addr", managers, "--listen-addr", managers, "--data-path-port", overlays)
    return docker


async def test_an_update_of_the_swarm_stack_refuses_no_call_and_loses_none(swarm: Docker, tmp_path: Path) -> None:
    path = stack_file(tmp_path / "swarm")
    listen = published(path, "published: 8080", "published: {}")
    async with legacy() as server:
        env = {"MRTR_IMAGE": GATEWAY, "HAPROXY_IMAGE": BALANCERS, "MRTR_UPSTREAM": server.url}

        async def docker(*words: str | Path) -> str:
            return await asyncio.to_thread(swarm.run, *words, env=env, cwd=path.parent)

        async def tasks() -> list[str]:
            told = await docker("service", "ps", "--format", "{{.ID}} {{.CurrentState}}", "mrtr_gateway")
            return [line.split()[0] for line in told.splitlines() if line.split()[1] == "Running"]

        async def last_update() -> tuple[str, str]:
            """Return when the last update began, and its state."""
            shown = "{{if .UpdateStatus}}{{.UpdateStatus.StartedAt}}|{{.UpdateStatus.State}}{{else}}|{{end}}"
            began, _, state = (await docker("service", "inspect", "--format", shown, "mrtr_gateway")).partition("|")
            return began, state.strip()

        try:
            await docker("stack", "deploy", "--compose-file", path, "mrtr")
            async with wire(f"http://{listen}/mcp") as client:
                await until(lambda: serves(client), "the stack serves")

                async def all_run() -> bool:
                    return len(await tasks()) == 3

                await until(all_run, "three tasks run")
                for order in ("start-first", "stop-first"):
                    before, (began_before, _) = set(await tasks()), await last_update()
                    load = Load(server, client, think, order)
                    async with load.running():
                        update = ("--force", "--detach", "--update-order", order, "--update-delay", "2s")
                        await docker("service", "update", *update, "--update-monitor", "5s", "mrtr_gateway")

                        async def updated(began_before: str = began_before) -> bool:
                            began, state = await last_update()
                            return began != began_before and state == "completed"

                        await until(updated, f"the {order} update is complete")
                    load.assert_nothing_was_refused_or_lost(least=300)
                    assert not before & set(await tasks()), "every task is new"
        finally:
            await docker("stack", "rm", "mrtr")


# -- the files ------------------------------------------------------------------------------------------------------


def test_the_swarm_stack_gives_a_replica_time_to_drain() -> None:
    stack = yaml.safe_load((DEPLOY / "swarm" / "stack.yaml").read_text())["services"]["gateway"]
    assert float(stack["stop_grace_period"].removesuffix("s")) > 2 + 30 + 5
    assert stack["deploy"]["update_config"]["parallelism"] == 1


@needs("haproxy")
def test_haproxy_accepts_the_file_of_the_stack() -> None:
    _ = output(program("haproxy") or "haproxy", "-c", "-q", "-f", DEPLOY / "swarm" / "haproxy.cfg")

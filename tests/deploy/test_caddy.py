"""deploy/caddy in front of two gateways: calls with questions, and an update under load."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.wire import wire
from tests.parts.launch import free_port, old_server, running
from tests.support.cluster import DEPLOY, PATH, memberships, replaced
from tests.support.gateway_process import ROUNDS, Gateway, gateway
from tests.support.programs import output
from tests.support.steady_load import Load, serves

CADDY = shutil.which("caddy", path=PATH)
FILE = DEPLOY / "caddy" / "Caddyfile"
HOSTS = ("127.0.7.1", "127.0.7.2")
"""Each replica has an address of its own, because Caddy looks at one health port for all."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(CADDY is None, reason="apt install caddy"),
]


def configured(folder: Path, listen: int, port: int, admin: int) -> Path:
    """Write the file of deploy/ with other addresses and two replicas."""
    text = FILE.read_text()
    for number, host in enumerate(HOSTS, 1):
        text = replaced(text, f"to 10.0.0.1{number}:8080", f"to {host}:{port}")
    text = replaced(text, "\t\tto 10.0.0.13:8080\n", "")
    text = replaced(text, "health_port 9464", f"health_port {admin}")
    path = folder / "Caddyfile"
    path.write_text(replaced(text, "\n:80 {", f"\nhttp://127.0.0.1:{listen} {{"))
    return path


@asynccontextmanager
async def caddy(folder: Path, path: Path) -> AsyncIterator[None]:
    assert CADDY is not None
    quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
    folders = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder))
    async with running(CADDY, "run", "--config", path, "--adapter", "caddyfile", **quiet, env=folders):
        yield


async def test_an_update_behind_caddy_refuses_no_call_and_loses_none(tmp_path: Path) -> None:
    listen, port, admin = free_port(), free_port(), free_port()
    hold = {"drain_delay_seconds": 2, "drain_seconds": 10}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(old_server("py130"))
        gateways: list[Gateway] = []
        for host, membership in zip(HOSTS, memberships(2), strict=True):
            where = {"listen": f"{host}:{port}", "admin": f"{host}:{admin}"}
            started = gateway(server.url, replica=membership, hold=hold, **where)
            gateways.append(await stack.enter_async_context(started))
        await stack.enter_async_context(caddy(tmp_path, configured(tmp_path, listen, port, admin)))
        client = await stack.enter_async_context(wire(f"http://127.0.0.1:{listen}/mcp"))
        await gateways[0].until(lambda: serves(client), "Caddy serves", 20)
        load = Load(server, client, lambda number: number % 4)
        async with load.running():
            for each in gateways:
                each.terminate()
                assert await each.exited(20) == 0
                await each.start()
                await each.until_metric(ROUNDS, bool, method="tools/call")  # Caddy finds it healthy again
        load.assert_nothing_was_refused_or_lost()


def test_caddy_validates_the_file() -> None:
    _ = output(CADDY or "caddy", "validate", "--config", FILE, "--adapter", "caddyfile")

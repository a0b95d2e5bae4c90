"""A gateway that cannot listen names the key, the cause and the fix, as one line of its log."""

import asyncio
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import parse
from gateway.server.listen_errors import cannot_listen
from tests.parts.launch import REPOSITORY, free_port

CONFIG = parse(
    json.dumps(
        {
            "listen": "127.0.0.1:80",
            "admin": "127.0.0.1:81",
            "replica": {"id": "a", "listen": "127.0.0.1:82"},
            "routes": [{"upstream": {"url": "http://127.0.0.1:9/mcp"}}],
        }
    ),
    "test",
    {},
)


@pytest.mark.parametrize(
    ("exc", "cause", "fix"),
    [
        (OSError(errno.EADDRINUSE, "x"), "another process uses it", "choose another port"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "this machine does not have the address", "0.0.0.0 for all of them"),
        (PermissionError(errno.EACCES, "x"), "permission denied", "CAP_NET_BIND_SERVICE"),
        (socket.gaierror(-2, "Name or service not known"), "the name cannot be resolved (Name", "write an IP address"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files", "choose another address"),
    ],
)
@pytest.mark.parametrize(("port", "key"), [(80, "listen"), (81, "admin"), (82, "replica.listen")])
def test_the_error_names_the_key_the_cause_and_the_fix(
    exc: OSError, cause: str, fix: str, port: int, key: str
) -> None:
    error = cannot_listen(CONFIG, f"127.0.0.1:{port}", exc)
    assert error.errno == exc.errno
    assert error.strerror is not None
    assert error.strerror.startswith(f"cannot listen at 127.0.0.1:{port} ({key}): {cause}")
    assert fix in error.strerror


def test_a_socket_between_workers_has_no_key() -> None:
    error = cannot_listen(CONFIG, "unix:/tmp/peer.sock", OSError(errno.EADDRINUSE, "x"))
    assert error.strerror is not None
    assert error.strerror.startswith("cannot listen at unix:/tmp/peer.sock: another process uses it")


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def failed(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """Run the gateway, which must fail; return the last line of its log, of which every line is JSON."""
    tree = {
        "listen": f"127.0.0.1:{free_port()}",
        "admin": None,
        "log": {"format": "json"},
        "routes": [{"upstream": {"url": "http://127.0.0.1:9/mcp"}}],
        **sections,
    }
    file = tmp_path / "gateway.yaml"
    file.write_text(json.dumps(tree))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--config", str(file)),
        cwd=REPOSITORY,
        env=dict(os.environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    last: dict[str, Any] = [json.loads(line) for line in err.splitlines()][-1]
    return last


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("key", ["listen", "admin", "replica.listen"])
async def test_a_taken_address_ends_the_program_with_one_line_of_the_log(
    key: str, workers: int, taken: str, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"replica": {"listen": taken}} if key == "replica.listen" else {key: taken}
    line = await failed(tmp_path, workers=workers, **sections)
    assert (line["event"], line["level"]) == ("server.failed", "error")
    assert line["cause"].startswith(f"cannot listen at {taken} ({key}): another process uses it")


@pytest.mark.processes
async def test_an_address_of_another_machine_is_told_as_that(tmp_path: Path) -> None:
    line = await failed(tmp_path, admin="192.0.2.1:9")
    assert line["cause"].startswith("cannot listen at 192.0.2.1:9 (admin): this machine does not have the address")

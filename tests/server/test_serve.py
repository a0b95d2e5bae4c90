"""A signal that arrives before the gateway is ready is not lost, and does not end it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parts.launch import REPOSITORY, free_port

PROGRAMS = {
    "installed": ("-c", "import sys; from gateway.entry import main; sys.exit(main())"),
    "module": ("-m", "gateway"),
}


def tree(port: int, workers: int, **sections: Any) -> bytes:
    routes = [{"upstream": {"url": "http://127.0.0.1:9/mcp"}}]
    given = {"listen": f"127.0.0.1:{port}", "admin": None, "workers": workers, "routes": routes, **sections}
    return json.dumps({"log": {"format": "json"}, "state": {"keys": ["0f" * 32]}, **given}).encode()


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_reload_during_the_start_is_made_once_the_gateway_is_ready(
    program: str, workers: int, tmp_path: Path
) -> None:
    """The configuration is a pipe, so the signal arrives while the program reads it."""
    fifo, port = tmp_path / "gateway.yaml", free_port()
    os.mkfifo(fifo)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *PROGRAMS[program], "serve", "--config", str(fifo)),
        cwd=REPOSITORY,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None

    def hand_over() -> None:
        with fifo.open("wb") as file:  # waits for the program to open it
            process.send_signal(signal.SIGHUP)
            new = tmp_path / "new.yaml"
            new.write_bytes(tree(port, workers, hold={"ttl_seconds": 7, "drain_delay_seconds": 0, "drain_seconds": 0}))
            _ = new.replace(fifo)
            file.write(tree(port, workers))

    wanted = 1 if workers == 1 else workers + 1  # the supervisor reloads, then each worker
    async with asyncio.timeout(30):
        await asyncio.to_thread(hand_over)
        while wanted:
            text = await process.stderr.readline()
            assert text, f"the process ended with {await process.wait()}"
            line = json.loads(text)
            wanted -= line["event"] == "config.loaded" and "hold.ttl_seconds" in line.get("changed", ())
        process.send_signal(signal.SIGINT)
        _ = await process.communicate()
    assert process.returncode == 0

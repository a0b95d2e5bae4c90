"""The start and the end of the program: signals at any time, and addresses that are in use."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.parts.launch import REPOSITORY, free_port, ran, running
from tests.support.gateway_process import gateway
from tests.support.legacy_client import LegacyClient
from tests.support.programs import output

START_SECONDS = 60.0
"""For a start on a busy machine."""
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
    async with asyncio.timeout(START_SECONDS):
        await asyncio.to_thread(hand_over)
        while wanted:
            text = await process.stderr.readline()
            assert text, f"the process ended with {await process.wait()}"
            line = json.loads(text)
            wanted -= line["event"] == "config.loaded" and "hold.ttl_seconds" in line.get("changed", ())
        process.send_signal(signal.SIGINT)
        _ = await process.communicate()
    assert process.returncode == 0


# The start and the end.

FAKE = (sys.executable, "-I", "-S", str(REPOSITORY / "tests" / "support" / "fake_stdio.py"))
PROMPT_SECONDS = 10.0
"""Enough for a busy machine, and less than anything that the gateway would wait for."""


@asynccontextmanager
async def program(given: bytes, directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the program with this configuration, and kill it at the end if it still runs."""
    path = directory / "gateway.yaml"
    path.write_bytes(given)
    command = (sys.executable, "-m", "gateway", "serve", "--config", path)
    async with running(*command, cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE) as process:
        yield process


async def failed(given: bytes, directory: Path) -> tuple[str, str]:
    """Run the program, which must fail; return why, from the last line of its log, and the whole of it."""
    path = directory / "gateway.yaml"
    path.write_bytes(given)
    done = await ran(sys.executable, "-m", "gateway", "serve", "--config", path, seconds=START_SECONDS)
    assert done.code == 1
    last = [json.loads(line) for line in done.err.splitlines()][-1]
    assert (last["event"], last["level"]) == ("server.failed", "error")
    return last["cause"], done.err


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "shared"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", ["listen", "admin", "replica.listen"])
async def test_a_gateway_with_a_command_ends_when_it_cannot_listen(
    name: str, workers: int, tmp_path: Path, *, shared: bool
) -> None:
    """The command marks its start: nothing is started that would have to be ended at once."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)  # as the workers of another gateway do
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        address = {"replica": {"listen": taken}} if name == "replica.listen" else {name: taken}
        started = tmp_path / "started"
        route = {"upstream": {"command": ["sh", "-c", f"touch {started}; cat"], "warm": 2}}
        why, said = await failed(tree(free_port(), workers, **{"routes": [route], **address}), tmp_path)
    assert why.startswith(f"cannot listen at {taken} ({name}): another process uses it; stop that process")
    assert said.count("cannot listen") == 1
    assert not started.exists()


@pytest.mark.processes
async def test_an_address_of_another_machine_is_told_as_that(tmp_path: Path) -> None:
    why, _ = await failed(tree(free_port(), 1, admin="192.0.2.1:9"), tmp_path)
    assert why.startswith("cannot listen at 192.0.2.1:9 (admin): this machine does not have the address")


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_during_the_start_ends_the_program(number: signal.Signals, tmp_path: Path) -> None:
    """The start asks the other replicas for their ids, and one of them is silent."""
    asked: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    silent = await asyncio.start_server(lambda _, writer: asked.put_nowait(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    replica = {"id": "gw-1", "listen": f"127.0.0.1:{free_port()}", "peers_dns": f"127.0.0.1:{port}"}
    given = tree(free_port(), 1, replica=replica, timeouts={"peer_accept_seconds": 3600})
    async with silent, program(given, tmp_path) as process:
        async with asyncio.timeout(START_SECONDS):
            connection = await asked.get()
        process.send_signal(number)
        async with asyncio.timeout(PROMPT_SECONDS):
            _, said = await process.communicate()
        connection.close()
        await connection.wait_closed()
    assert process.returncode == 0
    assert b"server.started" not in said
    assert b"server.stopped" in said
    assert b"Traceback" not in said


@pytest.mark.processes
async def test_a_second_signal_during_a_drain_fails_nothing() -> None:
    """The end of the call lets the drain go on, while the listener waits for the rest of a request."""
    peer = f"127.0.0.1:{free_port()}"
    replica = {"id": "one", "listen": peer, "peers": {"one": peer, "two": f"127.0.0.1:{free_port()}"}}
    hold = {"drain_delay_seconds": 0, "drain_seconds": 60}
    async with gateway({"command": FAKE, "warm": 0}, replica=replica, hold=hold) as gw:
        client = await LegacyClient(gw).initialize()
        call = await client.call("ask")
        _ = await call.message()
        _, writer = await asyncio.open_connection(*gw.config["listen"].split(":"))
        writer.write(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        gw.terminate()
        await gw.until_logged("server.draining")
        gw.terminate()
        assert await gw.exited(PROMPT_SECONDS) == 0
        assert not gw.errors(), gw.tail()
        assert "Traceback" not in gw.stderr
        (stopped,) = gw.log("server.stopped")
        assert stopped["lost"] == 1
        call.close()
        writer.close()


ENDING = """
import asyncio, signal

done, replace = [], signal.signal
signal.signal = lambda number, handler: (done.append((number, handler)), replace(number, handler))[1]

from gateway.runtime import event_loop
from gateway.server.serve import ignore_signals, on_signal

async def main():
    heard = asyncio.Queue()
    on_signal(signal.SIGTERM, heard.put_nowait, signal.SIGTERM)
    on_signal(signal.SIGINT, heard.put_nowait, signal.SIGINT)
    on_signal(signal.SIGHUP, heard.put_nowait, signal.SIGHUP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.raise_signal(number)
        assert await heard.get() is number
    done.clear()
    ignore_signals()

event_loop.run(main())
done += [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
print(sorted({(number.name, handler.name) for number, handler in done}))
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_signal_that_ends_the_process_never_has_its_default_action_again(loop: str) -> None:
    """Another thread might take it in that moment, whatever the main thread blocks."""
    program = ENDING if loop == "uvloop" else f"import sys; sys.modules['uvloop'] = None\n{ENDING}"
    said = output(sys.executable, "-c", program, cwd=REPOSITORY)
    assert said.strip() == "[('SIGHUP', 'SIG_IGN'), ('SIGINT', 'SIG_IGN'), ('SIGTERM', 'SIG_IGN')]"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
async def test_signals_until_the_very_end_do_not_change_the_exit_code(workers: int) -> None:
    async with gateway("http://127.0.0.1:9/mcp", workers=workers) as gw:
        assert gw.process is not None
        while gw.process.returncode is None:
            with suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGHUP):
                    os.kill(gw.process.pid, number)  # not `send_signal`, which would collect the exit code itself
            await asyncio.sleep(0.001)
        assert gw.process.returncode == 0, gw.tail()
        assert "Traceback" not in gw.stderr

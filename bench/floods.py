"""`python -m bench.floods`: upstreams that flood, ten calls at once: how long does the gateway answer nothing else?

Each call gets an event stream that never has its answer, as fast as the gateway reads. Meanwhile GETs of /healthz
follow each other. `worst` is the longest of them. `held` is the most CPU time of the gateway between two of their
replies, which is how long nothing else was served, however busy the machine is.
"""

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from bench import modern
from bench.hostile import PING
from bench.load import Connection
from bench.processes import Fleet, Process, ProcessError, free_port
from bench.report import layout

FLOODS = 10
SECONDS = 5.0
TARGET_SECONDS = 0.25
PAUSE_SECONDS = 0.005
BLOCK_BYTES = 65_536
SAID = b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nMcp-Session-Id: flood\r\nContent-Length: %d\r\n\r\n%b"
INITIALIZED = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"tools": {}, "logging": {}},
    "serverInfo": {"name": "flood", "version": "1"},
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BLOCKS = {
    "chunks of 1 byte": b"".join(map(chunk, (b":", b"\n", b"\n"))) * (BLOCK_BYTES // 18),
    "event ids": chunk(b"id: 1\n" * 100 + b"\n") * (BLOCK_BYTES // 608),
    "comments": chunk(b":\n" * 300 + b"\n") * (BLOCK_BYTES // 608),
    "log messages": chunk(SAID) * (BLOCK_BYTES // len(chunk(SAID))),
}


# -- the upstream, which is a FAKE ------------------------------------------------------------------------------------


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection of a fake legacy server."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
            body = await reader.readexactly(int(length or 0))
            message = msgspec.json.decode(body) if body else {}
            method, id_ = message.get("method"), message.get("id")
            if method == "tools/call":
                block = BLOCKS[message["params"]["name"]]
                writer.write(HEAD)
                while True:
                    writer.write(block)
                    await writer.drain()
            if method == "initialize":
                said = msgspec.json.encode({"jsonrpc": "2.0", "id": id_, "result": INITIALIZED})
                writer.write(JSON % (b"200 OK", len(said), said))
            elif method == "server/discover":
                error = {"code": -32601, "message": "Method not found"}
                said = msgspec.json.encode({"jsonrpc": "2.0", "id": id_, "error": error})
                writer.write(JSON % (b"400 Bad Request", len(said), said))
            elif id_ is not None:
                said = msgspec.json.encode({"jsonrpc": "2.0", "id": id_, "result": {"tools": []}})
                writer.write(JSON % (b"200 OK", len(said), said))
            else:
                writer.write(JSON % (b"202 Accepted" if body else b"405 Method Not Allowed", 0, b""))
    writer.close()


async def serve(port: int) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


# -- the clients ------------------------------------------------------------------------------------------------------


async def read(gateway: Process, request: bytes) -> bytes:
    """Send a request, and read the flood until this is cancelled; returns what else came."""
    host, _, port = gateway.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        while (data := await reader.read(BLOCK_BYTES)) and b"application/json" not in data:
            pass
    finally:
        writer.close()
    return data


def bridged(kind: str) -> bytes:
    """A modern client's call, which wants log messages."""
    meta = {**modern.META, "io.modelcontextprotocol/logLevel": "debug"}
    return modern.call(next(modern.ids), kind, "m", _meta=meta)


def passed(kind: str) -> bytes:
    """A legacy client's call, which passes through."""
    params = {"name": kind, "arguments": {}}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": next(modern.ids), "method": "tools/call", "params": params})
    head = "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json, text/event-stream\r\n"
    head += "Content-Type: application/json\r\nMCP-Protocol-Version: 2025-11-25\r\nMcp-Session-Id: flood\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def measure(gateway: Process, requests: Sequence[bytes], seconds: float) -> tuple[float, float, int]:
    """The worst time of a ping, the most CPU time between two of them, and how many there were."""
    connection = Connection(gateway.admin)
    loop = asyncio.get_running_loop()
    floods = [loop.create_task(read(gateway, request)) for request in requests]
    worst = held = 0.0
    pings, ends = 0, time.monotonic() + seconds
    cpu = gateway.cpu_seconds()
    while time.monotonic() < ends:
        began = time.monotonic()
        await connection.request(PING)
        worst = max(worst, time.monotonic() - began)
        before, cpu = cpu, gateway.cpu_seconds()
        held = max(held, cpu - before)
        pings += 1
        await asyncio.sleep(PAUSE_SECONDS)
    over = [flood for flood in floods if flood.done()]
    for flood in floods:
        flood.cancel()
    _ = await asyncio.gather(*floods, return_exceptions=True)
    connection.close()
    if over:
        raise ProcessError(f"{len(over)} of {len(floods)} floods ended early: {over[0]}")
    return worst, held, pings


async def measure_all(fleet: Fleet, command: str, seconds: float) -> list[tuple[str, float, float, int]]:
    port = free_port()
    own = [sys.executable, "-m", "bench.floods", "--serve", str(port)]
    upstream = fleet.start("upstream", own, f"127.0.0.1:{port}")
    found = []
    for name, request in (("bridged", bridged), ("passed through", passed)):
        for kind in BLOCKS:
            gateway = fleet.gateway(command, upstream)
            measured = await measure(gateway, [request(kind) for _ in range(FLOODS)], seconds)
            found.append((f"{kind}, {name}", *measured))
            gateway.stop()
    return found


def main() -> int:
    default = shlex.join([sys.executable, "-m", "gateway"])
    parser = argparse.ArgumentParser(prog="python -m bench.floods", description=__doc__)
    parser.add_argument("--gateway", default=default, metavar="CMD", help="how to run it (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each kind of flood (default: %(default)s)")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), start_seconds=60)
        try:
            rows = uvloop.run(measure_all(fleet, options.gateway, options.seconds))
        finally:
            fleet.stop()
    body = [[name, f"{worst * 1e3:.0f}", f"{held * 1e3:.0f}", str(pings)] for name, worst, held, pings in rows]
    print(layout(["flood", "worst ms", "held ms", "pings"], body, markdown=False))
    print(f"held ms should be below {TARGET_SECONDS * 1e3:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

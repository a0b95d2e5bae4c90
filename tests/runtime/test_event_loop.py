"""Does the event loop connect to an address without a thread?"""

import subprocess
import sys

PROGRAM = """
import asyncio, os, socket
from gateway.runtime import event_loop

async def main():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setblocking(False)
        before = len(os.listdir("/proc/self/task"))
        await asyncio.get_running_loop().sock_connect(client, server.getsockname())
        print(client.getpeername() == server.getsockname(), len(os.listdir("/proc/self/task")) - before)

event_loop.run(main())
"""


def test_an_address_is_connected_to_without_a_thread_that_looks_it_up() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0"]

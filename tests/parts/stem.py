"""Runs Python programs in processes of their own, forked from this one, which has imported their libraries before.

    python stem.py

Importing an SDK takes a second or two of a core, and a test run starts hundreds of servers. Each line of stdin is a
request in JSON, each line of stdout its response. `forked.py` speaks the other side. A program differs in nothing else
from one that was started by its command: it has its own session, arguments, environment, standard streams and random
values. All of them die with this process, which ends with its stdin.
"""

import ast
import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
LATE = (
    "import anyio._backends._asyncio",
    "import uvicorn.lifespan.on, uvicorn.loops.auto, uvicorn.protocols.http.auto, uvicorn.protocols.websockets.auto",
)
"""What the libraries themselves import only when a program runs."""
KNOWN: set[str] = set()
"""Programs whose imports are done."""


def prepare(script: str) -> None:
    """Import what a program imports at its top, and also what it imports there only under a condition."""
    if script in KNOWN:
        return
    KNOWN.add(script)
    sys.path[0] = str(Path(script).parent)
    statements = [node for node in imports(ast.parse(Path(script).read_text()).body) if not is_future(node)]
    for statement in [*map(ast.unparse, statements), *LATE]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(statement, {})
            except ImportError:
                continue  # it is for another version of a library; the program itself would say so
    gc.collect()
    gc.freeze()  # as little as possible of the memory that is shared is written to


def imports(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If):
            found += imports(node.body) + imports(node.orelse)
    return found


def is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def become(request: dict[str, Any]) -> list[str]:
    """In the child: take over the streams, folder, environment and arguments that were asked for."""
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != request["stem"]:
        sys.exit(1)  # it died before we asked to die with it
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    words: list[str] = request["command"]
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)
    return words


def start(request: dict[str, Any]) -> int | None:
    """Fork; the pid of the child, which is None in the child."""
    request["stem"] = os.getpid()
    prepare(request["command"][0])
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        become(request)
        os.close(reading)
        os.write(writing, b"!")
        os.close(writing)
        return None
    os.close(writing)
    os.read(reading, 1)  # its session is its own now, and its files are open
    os.close(reading)
    return pid


def serve() -> str:
    """Obey until stdin ends; in each child, return the program that it is to run."""
    given = b""
    while True:
        while b"\n" not in given:
            more = os.read(0, 65536)
            if not more:
                sys.exit(0)
            given += more
        line, _, given = given.partition(b"\n")
        request = json.loads(line)
        if "reap" in request:
            response = {"code": os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])}
        else:
            pid = start(request)
            if pid is None:
                return sys.argv[0]
            response = {"pid": pid}
        os.write(1, json.dumps(response).encode() + b"\n")


if __name__ == "__main__":
    runpy.run_path(serve(), run_name="__main__")

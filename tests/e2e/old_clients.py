"""Legacy clients in programs of their own: each plays calls in one connection, answers Ann, and gives the texts."""

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.parts.clients.drive import HERE
from tests.parts.launch import NODE, NODE_MODULES, PARTS

Calls = list[tuple[str, dict[str, Any]]]
ANN: Final = 'accept:{"name":"Ann"}'
ECHO: Final = ("echo", {"text": "hi"})
ASK: Final = ("ask", {"question": "Who?"})
DEADLINE_SECONDS: Final = 45.0


async def _program(command: tuple[str | Path, ...], url: str, calls: Calls) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "MRTR_NODE_MODULES": str(NODE_MODULES)},
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, err = await process.communicate(json.dumps(calls).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out + err
    texts: list[str] = json.loads(out)
    return texts


_PYTHON: Final = HERE / "old_py_client.py"
OLD_CLIENTS: Final = {
    "mcp 1.10": partial(_program, (PARTS / "py110" / "bin" / "python", _PYTHON)),
    "mcp 1.30": partial(_program, (PARTS / "py130" / "bin" / "python", _PYTHON)),
    "sdk 1.32": partial(_program, (NODE, HERE / "old_ts_client.mjs")),
    "mcp 1.30, HTTP+SSE": partial(_program, (PARTS / "py130" / "bin" / "python", _PYTHON, "--sse")),
}

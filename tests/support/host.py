"""A host for the tests: it starts `mrtr-gateway wrap`, and speaks to it line by line."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.parts.launch import REPOSITORY, running
from tests.support.gateway_process import log_lines

JSON = dict[str, Any]
META = "io.modelcontextprotocol/"
SECONDS = 60.0
LINE_BYTES = 1 << 26
FAKES = REPOSITORY / "tests" / "support"


def fake(name: str, *flags: str) -> list[str]:
    """The command of a fake server."""
    return [sys.executable, "-I", "-S", str(FAKES / name), *flags]


def modern(method: str, id_: object = 1, *, meta: JSON | None = None, **params: Any) -> JSON:
    """A request of 2026-07-28 from a client that can answer forms."""
    own = {
        META + "protocolVersion": "2026-07-28",
        META + "clientInfo": {"name": "host", "version": "1"},
        META + "clientCapabilities": {"elicitation": {"form": {}}},
        **(meta or {}),
    }
    return {"jsonrpc": "2.0", "id": id_, "method": method, "params": {**params, "_meta": own}}


def call(name: str, id_: object = 1, *, meta: JSON | None = None, more: JSON | None = None, **arguments: Any) -> JSON:
    """A modern tool call; `more` are further params."""
    return modern("tools/call", id_, meta=meta, name=name, arguments=arguments, **(more or {}))


def initialize(id_: object = 0) -> JSON:
    """The first message of a legacy host."""
    params = {
        "protocolVersion": "2025-11-25",
        "capabilities": {"elicitation": {"form": {}}},
        "clientInfo": {"name": "host", "version": "1"},
    }
    return {"jsonrpc": "2.0", "id": id_, "method": "initialize", "params": params}


def legacy(method: str, id_: object = 1, **params: Any) -> JSON:
    return {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}


class Host:
    """The host's end of the pipes."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.stdin, self.stdout = process.stdin, process.stdout
        self._log = log
        self._heard: list[JSON] = []

    @property
    def log(self) -> list[JSON]:
        """The lines of its log; a line that is not JSON came from elsewhere."""
        return log_lines(self._log.read_text(errors="replace"))

    @property
    def unread(self) -> list[JSON]:
        """What was heard while something else was waited for."""
        return list(self._heard)

    def events(self, name: str) -> list[JSON]:
        return [line for line in self.log if line.get("event") == name]

    def write(self, *messages: JSON | list[JSON]) -> None:
        for message in messages:
            self.stdin.write(json.dumps(message).encode() + b"\n")

    async def read(self) -> JSON:
        """The next message that was not heard before."""
        if self._heard:
            return self._heard.pop(0)
        async with asyncio.timeout(SECONDS):
            line = await self.stdout.readline()
        assert line, f"the gateway closed its output; its log: {self.log}"
        message: JSON = json.loads(line)
        assert message["jsonrpc"] == "2.0"
        return message

    async def until(self, **wanted: Any) -> JSON:
        """The next message with these members; others are heard later."""
        passed: list[JSON] = []
        while True:
            message = await self.read()
            if all(message.get(key) == value for key, value in wanted.items()):
                self._heard[:0] = passed
                return message
            passed.append(message)

    async def ask(self, message: JSON) -> JSON:
        """Send a request and wait for its response."""
        self.write(message)
        while "method" in (answer := await self.until(id=message["id"])):
            pass
        return answer

    async def text(self, message: JSON) -> Any:
        """The text of the answer to a call."""
        answer = await self.ask(message)
        assert "result" in answer, answer
        return answer["result"]["content"][0]["text"]

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()


@asynccontextmanager
async def host(
    command: Sequence[str] = (),
    *options: str,
    config: JSON | None = None,
    environment: JSON | None = None,
    expects: int = 0,
) -> AsyncIterator[Host]:
    """Run `wrap` before a command, or with a configuration; when its input ends, it must end as expected."""
    with tempfile.TemporaryDirectory(prefix="mrtr-host-") as directory:
        if config is not None:
            file = Path(directory) / "wrap.yaml"
            file.write_text(json.dumps(config))
            options = ("--config", str(file), *options)
        log = Path(directory) / "stderr"
        with log.open("wb") as stderr:
            async with running(
                *(sys.executable, "-m", "gateway", "wrap", *options, *(("--", *command) if command else ())),
                cwd=REPOSITORY,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=LINE_BYTES,
                env={**os.environ, **(environment or {})},
            ) as process:
                found = Host(process, log)
                yield found
                found.stdin.close()
                assert await found.ended() == expects, found.log
                assert not [line for line in found.log if line.get("level") == "error"]

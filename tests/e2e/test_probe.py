"""`mrtr-gateway probe` before real old servers, in their modes."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from gateway.__main__ import main
from gateway.config import for_upstream
from gateway.net.probe import probe, report
from tests.parts.launch import NODE, PARTS, REPOSITORY, OldServer, old_server

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not all((PARTS / name).exists() for name in ("py130", "py110")) or not NODE.exists(),
        reason="scripts/parts has not been run",
    ),
]

HELD = "Tools that ask the user work"
NO_STORE = "If the replica that holds a call dies, the call is lost"
ALL = "2025-11-25, 2025-06-18, 2025-03-26, 2024-11-05"
FOUND = {
    "py130": ("streamable HTTP", ALL, "yes", "event streams", "no"),
    "py110": ("streamable HTTP", ALL.partition(", ")[2], "yes", "event streams", "no"),
    "ts132-store": ("streamable HTTP", ALL, "yes", "event streams", "yes"),
    "py130 --stateless": ("streamable HTTP", ALL, "no: stateless", "event streams", "no"),
    "ts132 --json": ("streamable HTTP", ALL, "yes", "JSON bodies", "no"),
    "everything-sse": ("HTTP+SSE (2024-11-05)", ALL, "yes", None, "no"),
}
MEANING = {
    "py130": (HELD, NO_STORE),
    "py110": (HELD, NO_STORE),
    "ts132-store": (HELD, "another one resumes the call"),
    "py130 --stateless": ("without sessions no answer can reach the server",),
    "ts132 --json": ("is swallowed by the server", "enableJsonResponse"),
    "everything-sse": (HELD, "HTTP+SSE cannot resume"),
}


@pytest.mark.parametrize("name", ["modern-py", "modern-ts"])
async def test_a_probe_tells_a_modern_server(name: str) -> None:
    async with old_server(name) as server:
        text = "\n".join(report(await probe(for_upstream(server.url, env={}), {})))
    assert text.startswith("versions     2026-07-28\n")
    assert "a modern server" in text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[dict[str, OldServer]]:
    async with AsyncExitStack() as stack:
        entering = [stack.enter_async_context(old_server(*name.split())) for name in FOUND]
        yield dict(zip(FOUND, await asyncio.gather(*entering), strict=True))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", FOUND)
async def test_a_probe_says_what_a_server_speaks_and_what_that_means(servers: dict[str, OldServer], name: str) -> None:
    server = servers[name]
    text = "\n".join(report(await probe(for_upstream(server.url, env={}), {"X-Tenant": "red"})))
    said = dict(re.findall(r"^([a-z]+(?: [a-z]+)?) {2,}(.+)$", text, re.MULTILINE))
    keys = ("transport", "versions", "sessions", "replies", "event store")
    assert tuple(said.get(key) for key in keys) == FOUND[name]
    assert re.fullmatch(r"[1-9]\d*, of which \d+ say that they may run twice", said["tools"])
    for sentence in MEANING[name]:
        assert sentence in text
    assert (HELD in text) == (HELD in MEANING[name])
    assert server.ledger("run") == [], "nothing ran"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_command_prints_the_findings(servers: dict[str, OldServer]) -> None:
    url = servers["py130"].url
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "probe", url, "--header", "X-Tenant: red"),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert b"server       old-py 1.30.0\n" in out
    assert HELD.encode() in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("http://127.0.0.1:9/mcp",), "cannot be reached"),
        (("not a url",), "(from URL) is not an http(s) URL"),
        (("http://127.0.0.1:9/mcp", "--header", "secret"), "write it as 'Name: value'"),
    ],
)
def test_a_probe_that_cannot_be_says_why(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err

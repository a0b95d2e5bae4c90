"""docs/authorization.md, with its own files: from a provider and a server to a signed-in call with a question."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

import aiohttp
import pytest
import yaml

from tests.docs.pages import blocks
from tests.docs.shell import agrees
from tests.parts.launch import NODE, PARTS, REPOSITORY, free_port, running
from tests.support.gateway_process import Gateway, gateway

PYTHON: Final = PARTS / "py130" / "bin" / "python"
MODULES: Final = PARTS / "oidc" / "node_modules"
BLOCKS: Final = blocks(REPOSITORY / "docs" / "authorization.md")
PORTS: Final = ("9100", "9000", "8080", "8765")
SECONDS: Final = 30

pytestmark = pytest.mark.real


class Walk:
    """The page's files in a folder, on ports of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = {port: str(free_port()) for port in PORTS}
        (folder / "node_modules").symlink_to(MODULES)
        for block in BLOCKS:
            named = re.match(r"(?://|#) ([\w.]+)\n", block.text)
            if named is not None:
                (folder / named[1]).write_text(self.moved(block.text))

    def moved(self, text: str) -> str:
        return re.sub(rf"\b(?:{'|'.join(PORTS)})\b", lambda found: self._ports[found[0]], text)

    def original(self, text: str) -> str:
        for theirs, ours in self._ports.items():
            text = text.replace(ours, theirs)
        return text

    @asynccontextmanager
    async def program(self, *command: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with (self.folder / "stderr").open("ab") as err:
            async with running(*command, cwd=self.folder, **pipes, stderr=err, env=environment) as process:
                yield process

    @asynccontextmanager
    async def everything(self) -> AsyncIterator[Gateway]:
        """The authorization server, the legacy server and the gateway of the page."""
        settings = yaml.safe_load((self.folder / "gateway.yaml").read_text())
        async with self.program(NODE, "provider.mjs"), self.program(PYTHON, "server.py"):
            for port in ("9100", "9000"):
                await self.accepts(port)
            async with gateway("", **settings) as gw:
                yield gw

    async def accepts(self, port: str) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", int(self._ports[port]))
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return


@pytest.fixture
def walk(tmp_path: Path) -> Walk:
    return Walk(tmp_path)


async def sign_in(url: str, name: str) -> None:
    """What a user's browser does: it follows redirects, keeps cookies, and sends the forms of the provider."""
    jar = aiohttp.CookieJar(unsafe=True)  # cookies of an IP address
    async with aiohttp.ClientSession(cookie_jar=jar) as browser:
        response = await browser.get(url)
        for form in ({"prompt": "login", "login": name, "password": "any"}, {"prompt": "consent"}):
            page = await response.text()
            assert f'name="prompt" value="{form["prompt"]}"' in page, page
            action = re.search(r'action="([^"]+)"', page)
            assert action is not None
            response = await browser.post(urljoin(str(response.url), action[1]), data=form)
        assert "You are signed in" in await response.text()


def told(program: str) -> str:
    """What the page says that a program prints."""
    (text,) = (block.text for block in BLOCKS if block.kind == "console" and program in block.text)
    return text.partition("\n")[2]


async def test_the_page_leads_from_zero_to_a_signed_in_call_with_a_question(walk: Walk) -> None:
    async with asyncio.timeout(2 * SECONDS), walk.everything() as gw:
        async with gw.http.get(f"{gw.base}/.well-known/oauth-protected-resource/mcp") as response:
            assert agrees(walk.original(await response.text()), told("curl"))

        async with walk.program(sys.executable, "client.py") as client:
            assert client.stdout is not None
            assert client.stdin is not None
            first, second = (await client.stdout.readline()).decode(), (await client.stdout.readline()).decode()
            assert second.startswith("sign in at: "), (first, second, (walk.folder / "stderr").read_text())
            await sign_in(second.removeprefix("sign in at: ").strip(), "ada")
            rest, _ = await client.communicate(b"4\n")
            assert client.returncode == 0, (walk.folder / "stderr").read_text()
        # A terminal shows the typed answer, and a pipe does not.
        printed = walk.original(first + second + rest.decode()).replace("guests? ", "guests? 4\n")
        assert agrees(printed, told("client.py"))
        await gw.settled()


@pytest.mark.parametrize("token", [None, "not-a-token"])
async def test_a_call_that_is_not_signed_in_gets_the_challenge_that_leads_to_the_metadata(
    walk: Walk, token: str | None
) -> None:
    async with asyncio.timeout(2 * SECONDS), walk.everything() as gw:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "walkthrough", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}}
        headers |= {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/list"}
        async with gw.http.post(gw.url, json=body, headers=headers) as response:
            assert response.status == 401
            challenge = response.headers["WWW-Authenticate"]
        found = re.search(r'resource_metadata="([^"]+)"', challenge)
        assert found is not None, challenge
        assert found[1] == f"{gw.base}/.well-known/oauth-protected-resource/mcp"
        async with gw.http.get(found[1]) as response:
            assert (await response.json())["resource"] == gw.url

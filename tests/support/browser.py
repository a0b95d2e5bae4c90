"""A real Chromium without a window, by the DevTools protocol.

    async with chromium() as browser:
        tab = await browser.tab(width=390, height=844, dark=True)
        await tab.go(url)
        assert await tab.run("document.title") == "..."

Source: https://chromedevtools.github.io/devtools-protocol/. What a tab asks the network for, and what it complains of,
is kept: `requests` and `complaints`.
"""

import asyncio
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp

from tests.parts.launch import die_with_parent

START_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 30.0
PROGRAM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS: Final = (
    "--headless",
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
_MESSAGE_BYTES: Final = 64 * 1024 * 1024


class BrowserError(AssertionError):
    """The browser refused a command; the message is its own."""


class Tab:
    """One page, with all its requests and its console messages."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        return await self._browser.send(method, params, self._session)

    def hear(self, method: str, params: Any) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))

    async def go(self, url: str) -> None:
        """Load a page to its end."""
        await self.reload_after(self.send("Page.navigate", url=url))

    async def reload_after(self, doing: Any = None) -> None:
        """Wait until `doing` has loaded another page."""
        self._loaded.clear()
        if doing is not None:
            await doing
        async with asyncio.timeout(ANSWER_SECONDS):
            await self._loaded.wait()

    async def look(self, width: int, height: int, *, dark: bool) -> None:
        """Emulate a screen of that size and colour scheme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def run(self, expression: str) -> Any:
        """Evaluate JavaScript; a promise's value, when it has one."""
        done = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise BrowserError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until JavaScript is true of the page, or of the one that it leads to."""
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                with suppress(BrowserError):  # one page goes, and the next one is not there yet
                    if await self.run(expression) is True:
                        return
                await asyncio.sleep(0.02)

    async def roles(self) -> list[str]:
        """The roles that assistive technology sees, of all nodes that are not ignored."""
        tree = await self.send("Accessibility.getFullAXTree")
        return [node["role"]["value"] for node in tree["nodes"] if not node["ignored"]]


class Browser:
    """One process with any number of tabs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}

    async def send(self, method: str, params: Any, session: str | None = None) -> Any:
        """Send one command and return its result; raises BrowserError."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message if session is None else {**message, "sessionId": session})
        async with asyncio.timeout(ANSWER_SECONDS):
            return await answer

    async def listen(self) -> None:
        """Dispatch the browser's messages until it ends."""
        async for frame in self._socket:
            message = frame.json()
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(BrowserError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                tab.hear(message["method"], message["params"])

    async def tab(self, width: int = 1440, height: int = 900, *, dark: bool = False) -> Tab:
        """Open an empty tab."""
        target = await self.send("Target.createTarget", {"url": "about:blank"})
        attached = await self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Network", "Log", "Runtime"):
            await tab.send(f"{domain}.enable")
        await tab.look(width, height, dark=dark)
        return tab


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a browser with an empty profile."""
    assert PROGRAM is not None, "apt install chromium"
    with tempfile.TemporaryDirectory(prefix="mrtr-chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            address = await _address(process, Path(profile) / "DevToolsActivePort")
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(address, max_msg_size=_MESSAGE_BYTES) as socket,
            ):
                browser = Browser(socket)
                listening = asyncio.get_running_loop().create_task(browser.listen())
                try:
                    yield browser
                finally:
                    listening.cancel()
                    _ = await asyncio.gather(listening, return_exceptions=True)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _ = await process.wait()


async def _address(process: asyncio.subprocess.Process, file: Path) -> str:
    """The address on which it listens, which it writes to a file."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            if process.returncode is not None:
                raise BrowserError(f"{PROGRAM} ended with {process.returncode}")
            with suppress(OSError, ValueError):  # half written
                port, path = file.read_text().split()  # noqa: ASYNC240
                return f"ws://127.0.0.1:{port}{path}"
            await asyncio.sleep(0.02)

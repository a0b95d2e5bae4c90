"""The status page in a real Chromium, of real gateways that hold calls of a real legacy server."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import pytest
import pytest_asyncio

from gateway.plugins.status_page.documents import TITLES
from tests.e2e.wire import wire
from tests.parts.launch import NODE_MODULES, free_port, old_server
from tests.support.browser import PROGRAM, Browser, Tab, chromium
from tests.support.fake_upstream import FakeUpstream, Turn
from tests.support.gateway_process import Gateway, gateway

AXE: Final = NODE_MODULES / "axe-core" / "axe.min.js"

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROGRAM is None, reason="apt install chromium"),
]

EVIL: Final = '<script>document.title="owned"</script><img src=//example.com/x onerror=alert(1)>'
SCREENS: Final = {"phone": (390, 844), "desk": (1440, 900)}
LOOKS: Final = [(screen, dark) for screen, dark in product(SCREENS, (False, True))]


@dataclass
class Stage:
    """A gateway with every kind of problem, a healthy one, and a browser."""

    troubled: Gateway
    well: Gateway
    browser: Browser


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Two workers before a real, a dead and a hostile server; and one process that only has a parked call."""

    async def ask(turn: Turn) -> None:
        if turn.seen.body["params"]["name"] == "hang":
            await turn.for_ever()
        _ = await turn.elicit("q")

    fake = FakeUpstream()  # no real server has a name like this
    fake.tool(ask)
    evil = FakeUpstream()
    evil.on("initialize", lambda turn: turn.error(-32000, EVIL))
    async with fake, evil, old_server("py130") as server, chromium() as browser:
        urls = {"/mcp": server.url, "/dead": f"http://127.0.0.1:{free_port()}/mcp", "/named": fake.url}
        urls["/evil"] = evil.url
        routes = [{"path": path, "upstream": {"url": url}} for path, url in urls.items()]
        hold = {"max_calls": 10}
        async with (
            gateway("unused", routes=routes, workers=2, hold=hold, replica={"id": "gw-1"}) as troubled,
            gateway(server.url, replica={"id": "gw-2"}) as well,
            wire(troubled.url) as client,
        ):
            for _ in range(3):
                assert (await client.call("ask", {"question": "Who?"})).asks
            assert (await client.on(troubled.base + "/named").call(EVIL)).asks
            for path in ("/dead", "/evil"):
                assert (await client.on(troubled.base + path).call("echo")).error
            assert (await client.on(well.url).call("ask", {"question": "Who?"})).asks
            hanging = asyncio.ensure_future(client.on(troubled.base + "/named").call("hang"))

            async def hangs() -> bool:
                async with client.http.get(f"{troubled.admin}/status.json") as response:
                    return bool((await response.json())["running"])

            await troubled.until(hangs, "a running call is listed", 30)
            yield Stage(troubled, well, browser)
            hanging.cancel()


async def opened(stage: Stage, path: str, screen: str = "desk", *, dark: bool = False) -> Tab:
    """Open a page of the documentation in a tab of its own."""
    tab = await stage.browser.tab(*SCREENS[screen], dark=dark)
    await tab.go(f"{stage.well.admin}/docs/{path}")
    return tab


async def shown(stage: Stage, gw: Gateway, screen: str = "desk", *, dark: bool = False, query: str = "") -> Tab:
    """Open the page in a tab of its own; on a busy machine, a worker may take more than its second to be on it."""
    tabs: list[Tab] = []

    async def whole() -> bool:
        tabs.append(await stage.browser.tab(*SCREENS[screen], dark=dark))
        await tabs[-1].go(f"{gw.admin}/status{query}")
        return all(row[1].split("\n")[0] == "ready" for row in await cells(tabs[-1], "processes"))

    await gw.until(whole, "the page shows all processes", 30)
    return tabs[-1]


async def cells(tab: Tab, section: str) -> list[list[str]]:
    """The rows of a section's table, as text."""
    rows: list[list[str]] = await tab.run(
        f"[...document.querySelectorAll('section[aria-labelledby={section}] tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.innerText.trim()))"
    )
    return rows


async def test_the_call_that_hangs_and_what_would_be_lost_are_shown(stage: Stage) -> None:
    tab = await shown(stage, stage.troubled, query="?replica=gw-1")
    ((call, path, waits, *_, replica, _),) = await cells(tab, "running")
    assert (call, path) == ("tools/call hang", "/named")
    assert waits.startswith("the server's response")
    assert replica.startswith("gw-1#")
    assert any("1 running call" in row[2] for row in await cells(tab, "routes"))
    assert any("if it ends: lost" in cell for row in await cells(tab, "held") for cell in row)
    assert any("lost if it ends" in row[1] for row in await cells(tab, "processes"))


# Safety.


async def test_the_page_loads_nothing_and_logs_no_error_in_the_browser(stage: Stage) -> None:
    before = [len(gw.log()) for gw in (stage.troubled, stage.well)]
    for gw in (stage.troubled, stage.well):
        tab = await shown(stage, gw)
        outside = [url for url in tab.requests if not url.startswith("data:")]
        assert outside == [f"{gw.admin}/status"]
        assert tab.complaints == []
    assert [len(gw.log()) for gw in (stage.troubled, stage.well)] == before


async def test_the_browser_enforces_the_content_security_policy(stage: Stage) -> None:
    """A script and a style that are injected into the page have no effect."""
    tab = await shown(stage, stage.well)
    await tab.run(
        "document.body.insertAdjacentHTML('beforeend', '<style>body { display: none }</style>"
        '<img id=planted src="https://example.com/x.png">\'); '
        "const s = document.createElement('script'); s.textContent = 'window.owned = 1'; document.body.append(s);"
    )
    assert await tab.run("[window.owned, getComputedStyle(document.body).display]") == [None, "block"]
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


async def test_the_runbook_of_an_alert_opens_at_its_section_and_loads_nothing(stage: Stage) -> None:
    tab = await opened(stage, "monitoring.md#mrtrgatewaykeysdiffer")
    assert tab.requests == [f"{stage.well.admin}/docs/monitoring.md"]
    assert tab.complaints == []
    assert await tab.run("document.querySelector(':target').innerText") == "MrtrGatewayKeysDiffer"
    assert await tab.run("scrollY") > 1000
    await tab.run("document.querySelector('nav a').click()")
    await tab.until("location.pathname === '/status'")


# Readability.


@pytest.mark.parametrize(("screen", "dark"), LOOKS, ids=str)
async def test_axe_reports_no_violation_and_nothing_overflows(stage: Stage, screen: str, dark: bool) -> None:  # noqa: FBT001
    """https://github.com/dequelabs/axe-core: the rules of WCAG 2.2 A and AA, contrast too, and its best practices."""
    width = SCREENS[screen][0]
    for tab in (
        *[await shown(stage, gw, screen, dark=dark) for gw in (stage.troubled, stage.well)],
        *[await opened(stage, name, screen, dark=dark) for name in TITLES],
    ):
        assert await tab.run("document.documentElement.scrollWidth") <= width
        over = await tab.run(
            "[...document.body.querySelectorAll('*')].filter(e => !e.closest('thead, .scrolled > table'))"
            f".filter(e => e.getBoundingClientRect().right > {width + 1}).map(e => e.outerHTML)"
        )
        assert over == []
        await tab.run(AXE.read_text())
        found: dict[str, Any] = await tab.run(
            "axe.run().then(r => ({bad: r.violations, good: r.passes.map(each => each.id)}))"
        )
        assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found["bad"]] == []
        assert len(found["good"]) > 15
        assert "color-contrast" in found["good"]


async def test_the_page_follows_the_dark_and_light_setting(stage: Stage) -> None:
    backs = []
    for dark in (False, True):
        tab = await shown(stage, stage.well, dark=dark)
        colour = await tab.run("getComputedStyle(document.body).backgroundColor")
        backs.append(sum(map(int, re.findall(r"\d+", colour))))
    assert backs[0] > 600
    assert backs[1] < 150


async def test_a_narrow_screen_changes_the_layout_and_keeps_the_table_semantics(stage: Stage) -> None:
    wide, narrow = await shown(stage, stage.troubled), await shown(stage, stage.troubled, "phone")
    assert await wide.run("getComputedStyle(document.querySelector('td')).display") == "table-cell"
    assert await narrow.run("getComputedStyle(document.querySelector('td')).display") != "table-cell"
    for role in ("table", "row", "columnheader", "rowheader"):
        assert (await wide.roles()).count(role) == (await narrow.roles()).count(role) > 3, role
    assert await narrow.run(
        "[...document.querySelectorAll('table')].every(each => each.caption.innerText.length > 10)"
    )


async def test_every_control_works_by_keyboard(stage: Stage) -> None:
    tab = await shown(stage, stage.well)
    reached = []
    for _ in range(3):
        for kind in ("keyDown", "keyUp"):
            await tab.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(await tab.run("document.activeElement.textContent"))
        assert await tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached == ["Reload every 10 s", "as JSON", "metrics"]


async def test_the_page_reloads_itself_if_requested(stage: Stage) -> None:
    tab = await shown(stage, stage.well, query="?refresh=2")
    assert "Reloads every 2 s" in await tab.run("document.querySelector('nav').innerText")
    await tab.reload_after()
    assert tab.requests[:2] == [f"{stage.well.admin}/status?refresh=2"] * 2
    await tab.run("document.querySelector('nav a').click()")
    await tab.until("location.search === ''")  # the page may reload itself once more before

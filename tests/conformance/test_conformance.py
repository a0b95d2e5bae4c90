"""The official conformance suite, strictly, against a legacy server behind the gateway.

`--strict` counts a warning as a failure; without it three scenarios pass against a dead address.
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.parts.launch import REPOSITORY, old_server, ran, stdio_upstream
from tests.support.cluster import cluster, needs
from tests.support.gateway_process import Front, gateway

pytestmark = [pytest.mark.real, pytest.mark.conformance, pytest.mark.timeout(240)]

PASSED = "mcp_gateway_passed_through_total"
SUITE_SECONDS = 240.0
RUNNER = REPOSITORY / "tests" / "parts" / "conformance"


ANY_FRONT = pytest.mark.parametrize(
    "front",
    [
        pytest.param(gateway, id="one gateway"),
        pytest.param(cluster, id="three replicas behind nginx", marks=needs("nginx")),
    ],
)


async def run_suite(url: str, *options: str) -> tuple[int, list[str]]:
    """The exit code of the suite's runner, and its lines."""
    done = await ran(sys.executable, RUNNER, url, "--strict", *options, seconds=SUITE_SECONDS)
    return done.code, done.out.splitlines()


async def passes(scenarios: int, url: str, *options: str) -> None:
    code, lines = await run_suite(url, *options)
    assert (code, lines[-1]) == (0, f"{scenarios} of {scenarios} scenarios passed"), "\n".join(lines)


WARM = 8
"""Start processes in advance: the suite waits half a second for an answer, and uses many sets of capabilities."""


@ANY_FRONT
async def test_a_legacy_server_behind_the_gateway_conforms_to_2026_07_28(
    front: Callable[[str], AbstractAsyncContextManager[Front]],
) -> None:
    async with old_server("conformance") as server, front(server.url) as gw:
        await passes(40, gw.url)


async def test_the_scenarios_of_2025_11_25_pass_as_without_the_gateway() -> None:
    """The scenarios of 2025-11-25 pass through the gateway exactly as they do without it."""
    async with old_server("conformance") as direct, old_server("conformance") as server, gateway(server.url) as gw:
        old = ("--spec", "2025-11-25")
        without, through = await asyncio.gather(run_suite(direct.url, *old), run_suite(gw.url, *old))
    print("\n".join(through[1]))
    assert through == without
    assert without[1][-1] == "33 of 33 scenarios passed"


async def test_the_scenarios_of_2025_11_25_pass_through_the_mirror_before_a_modern_server() -> None:
    """The server would serve legacy clients too, but it could not ask them."""
    async with old_server("conformance-modern") as server, gateway(server.url, route={"era": "mirror"}) as gw:
        await passes(33, gw.url, "--spec", "2025-11-25")
        assert await gw.metric(PASSED, era="legacy") == await gw.metric(PASSED, outcome="mirrored") > 0


async def test_a_legacy_server_over_stdio_conforms_too() -> None:
    async with gateway({**stdio_upstream("conformance"), "warm": WARM}) as gw:
        await gw.until_logged("child.stderr", WARM)
        await passes(40, gw.url)


async def test_a_legacy_server_without_the_gateway_does_not_conform() -> None:
    """The counter-check: the runner can fail."""
    async with old_server("conformance") as server:
        code, lines = await run_suite(server.url, "--only", "input-required-result-basic-elicitation")
    assert code != 0
    assert lines[-1] == "0 of 1 scenarios passed"

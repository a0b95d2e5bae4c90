"""The official suite's client scenarios of 2025-11-25, except those about authorization, check the upstream side."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.client import SCENARIOS
from tests.parts.launch import NODE, NODE_MODULES, ran

pytestmark = [
    pytest.mark.real,
    pytest.mark.conformance,
]

SUITE = NODE_MODULES / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
SPEC = ("--spec-version", "2025-11-25")
FROM_2026 = {
    "sep-2106-client-composition-keywords-preserved",
    "sep-2106-client-conditional-keywords-preserved",
    "sep-2106-client-anchor-keyword-preserved",
}
"""Scenarios that the suite may leave out for this version."""
LATE = "client-sse-retry-timing"
"""A warning for a reconnection 200 ms later than `retry`, as on a busy machine. Too early or twice as late fails."""


async def suite(*arguments: str | Path) -> tuple[int, str]:
    """Run the suite; return its exit code and its output."""
    done = await ran(NODE, SUITE, *arguments)
    return done.code, done.out + done.err


async def judged(name: str, client: str, folder: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """Run one scenario; return its exit code, output and checks."""
    code, printed = await suite(
        "client", "--command", client, "--scenario", name, *SPEC, "--timeout", "20000", "-o", folder
    )
    (found,) = folder.rglob("checks.json")  # noqa: ASYNC240 - nothing else runs
    return code, printed, json.loads(found.read_text())


@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_upstream_side_conforms_to_2025_11_25(name: str, tmp_path: Path) -> None:
    code, printed, checks = await judged(name, f"{sys.executable} -m tests.conformance.client", tmp_path)
    failed = [check["id"] for check in checks if check["status"] == "FAILURE"]
    warned = [check["id"] for check in checks if check["status"] == "WARNING"]
    assert failed == [], printed
    assert set(warned) <= {LATE}, printed
    assert {check["id"] for check in checks if check["status"] == "SKIPPED"} <= FROM_2026
    assert any(check["status"] == "SUCCESS" for check in checks)
    assert code == 0 or warned, printed


async def test_every_scenario_of_the_suite_is_run() -> None:
    _, printed = await suite("list", "--client", *SPEC)
    named = {line.split()[1] for line in printed.splitlines() if line.startswith("  - ")}
    assert {name for name in named if not name.startswith("auth/")} == set(SCENARIOS)


async def test_a_client_that_does_nothing_fails_the_suite(tmp_path: Path) -> None:
    """The counter-check: the suite can fail."""
    code, _, checks = await judged("tools_call", "true", tmp_path)
    assert code != 0
    assert any(check["status"] == "FAILURE" for check in checks)

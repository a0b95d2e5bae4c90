"""Real HTTP+SSE servers (2024-11-05) behind the gateway: the cases in which servers differ by their streams."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cases import CASES, Case, Drivers
from tests.e2e.matrix import HTTP_SSE, KINDS, Pair, judge, pair_behind, reason
from tests.parts.clients.drive import Kind, available
from tests.support import tables
from tests.support.gateway_process import gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]

CLIENT: dict[str, Kind] = {"py130-sse": "py", "ts132-sse": "ts"}
"""The matrix compares clients; here only the transport differs."""
TELLING = {
    "discover",
    "lists are complete",
    "result of 2 MB",
    "form on the POST stream: accept",
    "form on the GET stream",
    "three questions at once",
    "sampling on the POST stream",
    "roots",
    "-32042 accepted",
    "progress across a question",
    "client cancels a running call",
    "client abandons a question",
    "calls at once never mix",
    "sessions are used again",
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """`transport` is not configured: it is found out."""
    async with pair_behind(request.param, gateway) as found:
        yield found


@pytest.mark.parametrize("pair", HTTP_SSE, indirect=True)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in TELLING], ids=lambda case: case.name)
async def test_a_real_client_plays_telling_cases_with_an_http_sse_server(
    case: Case, pair: Pair, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    name = pair.server.name
    found = tables.words(request.config, tables.SERVERS, case.name, name)
    await judge(case, CLIENT[name], pair, drivers, reason(name.removesuffix("-sse"), CLIENT[name], case.name), found)


async def test_every_telling_case_exists() -> None:
    assert {case.name for case in CASES} >= TELLING

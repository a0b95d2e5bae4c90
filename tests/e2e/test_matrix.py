"""Every real modern client with every real legacy server through the real gateway: the cases of cases.py.

A pair that cannot play a case is in NOT_APPLICABLE (matrix.py) with its reason, is played all the same, and must fail.
The table is printed at the end of the run.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cases import CASES, Case, Drivers
from tests.e2e.matrix import KINDS, NOT_APPLICABLE, SERVERS, Pair, judge, pair_behind, reason
from tests.parts.clients.drive import Kind, available
from tests.support import tables
from tests.support.gateway_process import gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=SERVERS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with pair_behind(request.param, gateway) as found:
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_real_client_plays_each_case_with_a_real_server(
    case: Case, kind: Kind, pair: Pair, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    found = tables.words(request.config, tables.SERVERS, case.name, pair.server.name)
    await judge(case, kind, pair, drivers, reason(pair.server.name, kind, case.name), found)


async def test_every_reason_names_a_server_a_client_and_a_case() -> None:
    names = {case.name for case in CASES}
    for server, kind, case in NOT_APPLICABLE:
        assert server in {*SERVERS, "*"}
        assert kind in {*KINDS, "*"}
        assert case in names


async def test_each_case_has_its_own_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES)

"""Every real modern client with every real legacy server through the real gateway: the cases of cases.py.

A pair that cannot play a case is in NOT_APPLICABLE (matrix.py) with its reason, is played all the same, and must fail.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.cases import CASES, Case, Drivers
from tests.e2e.matrix import KINDS, NOT_APPLICABLE, OTHERS, SERVERS, TELLING, Pair, judge, pair_behind, reason
from tests.parts.clients.drive import Kind
from tests.support.cluster import FILES, needs

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Pair]]:
    """The name of a server of matrix.py, and the server behind a gateway."""
    async with pair_behind(request.param) as found:
        yield request.param, found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", SERVERS, indirect=True)
async def test_a_real_client_plays_each_case_with_a_real_server(
    case: Case, kind: Kind, pair: tuple[str, Pair], drivers: Drivers
) -> None:
    name, found = pair
    await judge(case, kind, found, drivers, reason(name, kind, case.name))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in TELLING], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "pair",
    [pytest.param(name, marks=needs(*FILES) if name.split()[1] in FILES else ()) for name in OTHERS],
    indirect=True,
)
async def test_a_real_client_plays_telling_cases_over_other_links(
    case: Case, pair: tuple[str, Pair], drivers: Drivers
) -> None:
    name, found = pair
    await judge(case, OTHERS[name], found, drivers, reason(name, OTHERS[name], case.name))


async def test_each_case_has_its_own_name_and_every_other_name_is_one_of_them() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert TELLING | {case for _, _, case in NOT_APPLICABLE} <= set(names)

"""Real servers as children of the real gateway: the cases of cases.py again, over stdio."""

from typing import Final

import pytest

from tests.e2e.cases import CASES, Drivers
from tests.e2e.matrix import KINDS, NOT_APPLICABLE, judge, pair_behind, reason
from tests.parts.clients.drive import Kind, available
from tests.support import tables
from tests.support.gateway_process import gateway

KIND: Final[Kind] = "ts"
"""Differences between clients do not concern stdio, so one client plays."""
NOT_APPLICABLE_HERE = {**NOT_APPLICABLE, ("*", "*", "headers"): "a child has no headers"}
OTHERS: Final = {
    "ts132-stdio": {
        "discover",
        "result of 2 MB",
        "form on the GET stream",
        "three questions at once",
        "-32042 accepted",
        "progress across a question",
        "upstream gives up its question",
        "client cancels a running call",
        "client abandons a question",
        "calls at once never mix",
    },
}
"""Cases that the server's SDK could break."""
LIKE_OVER_HTTP: Final = {
    "lists come in pages",
    "completion",
    "resource",
    "unknown resource is -32602",
    "tool error",
    "structured output",
    "form on the POST stream: decline, cancel",
    "sampling as the SDK does it",
    "sampling with tools",
    "-32042 declined",
    "no logs unless asked",
    "calls at once never mix",
}
"""Cases that do not involve the transport, or that take long with Python and not with Node."""
PLAYED: Final = {
    "py130-stdio": [case for case in CASES if case.name not in LIKE_OVER_HTTP],
    **{server: [case for case in CASES if case.name in names] for server, names in OTHERS.items()},
}

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]


@pytest.mark.parametrize("name", PLAYED)
async def test_a_real_client_plays_each_case_with_a_stdio_server(
    name: str, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    async with pair_behind(name, gateway) as pair:
        for case in PLAYED[name]:
            found = tables.words(request.config, tables.SERVERS, case.name, name)
            why_not = reason(name.removesuffix("-stdio"), KIND, case.name, NOT_APPLICABLE_HERE)
            await judge(case, KIND, pair, drivers, why_not, found)


async def test_every_case_for_stdio_exists() -> None:
    assert {case.name for case in CASES} >= LIKE_OVER_HTTP.union(*OTHERS.values())

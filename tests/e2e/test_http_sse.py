"""Real HTTP+SSE servers (2024-11-05) behind the gateway: the cases of cases.py, and their special behaviour."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.cases import CASES, Case, Drivers
from tests.e2e.matrix import HTTP_SSE, KINDS, Pair, judge, pair_behind, reason
from tests.e2e.wire import ACCEPT, NAMED, wire
from tests.parts.clients.drive import Kind, available
from tests.parts.launch import old_server
from tests.support import tables
from tests.support.gateway_process import gateway

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not all(map(available, KINDS)), reason="scripts/parts has not been run"),
]

CLIENT: dict[str, Kind] = {"py130-sse": "py", "ts132-sse": "ts", "everything-sse": "fm"}
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
"""The cases in which servers differ by how they use their streams: the first server plays all, the others these."""
FIRST, *OTHERS = HTTP_SSE
ANSWERS = {"Name": ACCEPT}
PROMPT_SECONDS = 8.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """`transport` is not configured: it is found out."""
    async with pair_behind(request.param, gateway) as found:
        yield found


@pytest.mark.parametrize("pair", [FIRST], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_real_client_plays_each_case_with_a_real_http_sse_server(
    case: Case, pair: Pair, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    await played(case, pair, drivers, request)


@pytest.mark.parametrize("pair", OTHERS, indirect=True)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in TELLING], ids=lambda case: case.name)
async def test_a_real_client_plays_telling_cases_with_other_http_sse_servers(
    case: Case, pair: Pair, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    await played(case, pair, drivers, request)


async def played(case: Case, pair: Pair, drivers: Drivers, request: pytest.FixtureRequest) -> None:
    name = pair.server.name
    found = tables.words(request.config, tables.SERVERS, case.name, name)
    await judge(case, CLIENT[name], pair, drivers, reason(name.removesuffix("-sse"), CLIENT[name], case.name), found)


async def test_every_telling_case_exists() -> None:
    assert {case.name for case in CASES} >= TELLING


async def test_calls_of_a_dead_http_sse_server_run_again_only_if_they_may_run_twice() -> None:
    async with (
        old_server("py130-sse") as server,
        gateway(server.url, route={"upstream": {"url": server.url, "transport": "sse"}}) as gw,
        wire(gw.url, Authorization="Bearer ann") as client,
    ):
        assert (await client.send("tools/list")).result["tools"]
        asked, read = await client.call("ask"), await client.call("ask_read")
        await server.restart()
        lost = await asyncio.wait_for(client.call("ask", state=asked.state, answers=ANSWERS), PROMPT_SECONDS)
        assert lost.error["data"]["reason"] == "call_lost"
        assert "under a call; the call may have had effects" in lost.error["message"]
        assert (await client.call("ask_read", state=read.state, answers=ANSWERS)).text == NAMED
        assert (await client.call("echo", {"text": "x"})).text == "x"
        assert [len(server.ledger("run", tool)) for tool in ("ask", "ask_read")] == [1, 2]
        await gw.settled()


@pytest.mark.parametrize("name", HTTP_SSE)
async def test_a_post_to_a_lost_session_gets_the_known_refusal(name: str) -> None:
    """This is why every POST has a deadline: an unpatched server may never answer it."""
    async with old_server(name) as server, aiohttp.ClientSession() as http:
        async with http.get(server.url) as stream:
            named = (await stream.content.readuntil(b"\n\n" if name != "py130-sse" else b"\r\n\r\n")).decode()
            path = named.split("data: ")[1].strip()
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        said: int | None = 202
        while said == 202:  # the server has not noticed yet that the stream is closed
            try:
                async with asyncio.timeout(1), http.post(f"http://127.0.0.1:{server.port}{path}", json=ping) as gone:
                    said = gone.status
            except TimeoutError:
                said = None
            except aiohttp.ClientError:
                pass  # the Python server breaks the connection of a message that came while it was noticing
        assert said == {"py130-sse": 404, "ts132-sse": 400, "everything-sse": None}[name]

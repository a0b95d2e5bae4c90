"""Replies of a whole body: to a client that does not read it, and what is left of it."""

from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.garbage import cycles
from tests.support.raw_connection import raw_connection, request_head
from tests.support.stand import Start
from tests.support.workbench import eventually


async def test_a_client_that_does_not_read_is_let_go(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"send_seconds": 0.1})

    async def tool(turn: Turn) -> None:
        await turn.progress(1)
        await turn.result(text("x" * 15_000_000))

    upstream.tool(tool)
    headers, body = stand.client().build("tools/call", {"name": "tool"}, meta={"progressToken": 1})
    async with raw_connection(stand) as raw:
        await raw.send(request_head(stand, headers, body))
        assert b" 200 " in await raw.line()
        await eventually(lambda: stand.gateway.downstream.in_flight == 0)
        assert len(await raw.rest()) < 15_000_000, "the connection was cut, not drained"
    assert (await stand.client().post("server/discover")).status == 200


async def test_a_large_reply_is_freed_once_it_is_sent(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()

    upstream.tool(lambda turn: turn.result(text("x" * 200_000)))
    client = stand.client()
    with cycles() as found:
        assert len((await client.call("tool")).data) > 200_000
        _ = await client.post("server/discover")  # until the next request, aiohttp keeps the reply
    assert "gateway.http.server.response.WholeResponse" not in found

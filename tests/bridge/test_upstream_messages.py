"""The messages that the upstream gets beside a call: cancellations, and answers without the client."""

import asyncio

from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import later
from tests.support.workbench import Client, Stand, eventually, leave


async def test_leaving_in_the_first_round_cancels_at_once_and_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await ended.wait()
        await turn.error(0, "cancelled") if turn.response is None else await turn.result(text("too late"))

    upstream.tool(tool)
    call = later(client.call())
    await upstream.saw("tools/call")
    await leave(call)
    cancelled = (await upstream.saw(mcp.CANCELLED))[0]
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert cancelled.session == upstream.of("tools/call")[0].session
    assert stand.sessions("quarantined") == 1
    assert "DELETE" not in upstream.words, "never under a pending call"
    ended.set()
    await upstream.saw("DELETE")
    await eventually(lambda: stand.sessions("quarantined") == 0)
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_a_request_that_no_client_knows_is_method_not_found(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        answer = await turn.ask("tasks/list")
        await turn.result(text(str(answer["error"]["code"])))

    upstream.tool(tool)
    assert (await client.call()).text == "-32601"

"""The upstream call of one exchange: what becomes of it when the upstream does not take a message."""

import asyncio

from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import ACCEPT


async def _ask(turn: Turn) -> None:
    answer = await turn.elicit("name")
    await turn.result(text(answer["action"]))


async def _without_keep_alive(turn: Turn) -> None:
    await turn.upstream._plain(turn)
    assert turn.response is not None
    turn.response.force_close()


async def test_answers_to_an_upstream_that_cannot_be_reached_may_be_given_again(
    upstream: FakeUpstream, begin: Start
) -> None:
    for word in ("server/discover", "initialize", mcp.INITIALIZED, "tools/list"):
        upstream.on(word, _without_keep_alive)
    upstream.tool(_ask)
    stand = await begin()
    client = stand.client()
    asked = await client.call()
    async with upstream.refusing_connections():
        for _ in range(2):
            assert (await client.answer(asked)).outcome == (200, -32603, "upstream_unreachable")
            assert stand.held == 1
    assert (await client.answer(asked)).text == "accept"
    assert len(upstream.of("answer")) == 1, "the answer reached the upstream once"
    assert len(upstream.of("tools/call")) == 1
    assert upstream.of(mcp.CANCELLED) == []


async def test_an_answer_given_in_advance_that_cannot_be_sent_ends_the_call(
    upstream: FakeUpstream, begin: Start
) -> None:
    for word in ("server/discover", "initialize", mcp.INITIALIZED, "tools/list"):
        upstream.on(word, _without_keep_alive)
    asking = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b"")
        await asking.wait()
        await _ask(turn)

    upstream.tool(tool)
    stand = await begin()
    call = asyncio.get_running_loop().create_task(stand.client().call(answers={"name": ACCEPT}))
    _ = await upstream.saw("tools/call")
    async with upstream.refusing_connections():
        asking.set()
        ended = await call
    assert ended.outcome == (200, -32603, "call_lost")
    assert "may have had effects" in ended.error["message"]
    assert stand.held == 0

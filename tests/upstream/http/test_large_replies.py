"""Large messages that arrive from one upstream at the same time."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from gateway.runtime.arrivals import Arrivals
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Stand, eventually, later

LIMIT = 200_000
LARGE = 1_000_000
Send = Callable[[Turn, str, asyncio.Event], Awaitable[None]]


def arrivals(stand: Stand) -> Arrivals:
    return stand.gateway.routes.live["/mcp"].upstream.client.arriving


async def event_in_two(turn: Turn, words: str, go: asyncio.Event, *, side: bool = False) -> None:
    """One event, of which only the first half comes before `go`."""
    message = json.dumps({"jsonrpc": "2.0", "id": turn.id, "result": text(words)}).encode()
    whole, half = b"data: " + message + b"\n\n", len(message) // 2
    if side:
        for part in (whole[:half], whole[half:]):
            turn.upstream.side(turn.session).put_nowait(part)
            await go.wait()
        return
    await turn.raw(whole[:half])
    await go.wait()
    await turn.raw(whole[half:])


@pytest.fixture
def little_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.upstream_client.ARRIVING_BYTES", LIMIT)


async def after_a_notification(turn: Turn, words: str, go: asyncio.Event) -> None:
    await turn.progress(1)
    await event_in_two(turn, words, go)


async def on_the_standalone_stream(turn: Turn, words: str, go: asyncio.Event) -> None:
    await turn.raw(b": hello\n\n")
    await event_in_two(turn, words, go, side=True)
    await turn.for_ever()


@pytest.mark.parametrize("send", [event_in_two, after_a_notification, on_the_standalone_stream])
@pytest.mark.usefixtures("little_arrives")
async def test_past_the_limit_only_the_oldest_message_is_read_on(
    upstream: FakeUpstream, begin: Start, send: Send
) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 60})
    gates = [asyncio.Event() for _ in range(4)]

    async def tool(turn: Turn) -> None:
        number = int(turn.body["params"]["arguments"]["number"])
        await send(turn, str(number) * LARGE, gates[number])

    upstream.tool(tool)
    client, arriving = stand.client(), arrivals(stand)
    calls = []
    for number in range(4):
        calls.append(later(client.call("tool", {"number": number}, meta={"progressToken": number})))
        before = arriving.used + 1 if number else LARGE // 2
        await eventually(lambda before=before: arriving.used >= before, "the oldest is here, or the next one arrives")
    assert arriving.used < LARGE // 2 + LIMIT + 3 * 400_000, "the others stopped soon"
    for gate in gates:
        gate.set()
    replies = await asyncio.gather(*calls)
    assert [reply.text for reply in replies] == [str(number) * LARGE for number in range(4)]
    await eventually(lambda: not arriving.used)


@pytest.mark.usefixtures("little_arrives")
async def test_a_large_message_whose_call_is_given_up_makes_room(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await event_in_two(turn, "x" * LARGE, go)

    upstream.tool(tool)
    call = later(stand.client().call())
    arriving = arrivals(stand)
    await eventually(lambda: arriving.used > LIMIT)
    call.cancel()
    await eventually(lambda: not arriving.used)
    go.set()

"""An event stream that floods: others run meanwhile, and the answer behind the flood counts."""

from collections.abc import AsyncIterator

import pytest

from gateway.protocol import sse
from gateway.runtime.pieces import PIECE_BYTES
from tests.support.fake_sse import FakeSse, Message, Stream
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.turns import FLOODS, SIZE, Turns
from tests.support.workbench import eventually

pytestmark = pytest.mark.usefixtures("busy_clock")


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    """Counts the turns in which an event stream is parsed."""
    turns, feed = Turns(), sse.Parser.feed

    def noted(parser: sse.Parser, chunk: bytes) -> list[sse.Event]:
        turns.note()
        return feed(parser, chunk)

    monkeypatch.setattr(sse.Parser, "feed", noted)
    with turns:
        yield turns


MANY = 2 * SIZE // PIECE_BYTES // 2
"""In how many turns two floods are parsed at least; aiohttp writes each of them at once."""


@pytest.mark.parametrize("kind", FLOODS)
async def test_the_reply_to_a_call(upstream: FakeUpstream, begin: Start, turns: Turns, kind: str) -> None:
    async def flood(turn: Turn) -> None:
        await turn.raw(FLOODS[kind] * 2 + b"\n")
        await turn.result(text("done"))

    upstream.tool(flood)
    assert (await (await begin()).client().call()).text == "done"
    assert len(turns.noted) >= MANY


@pytest.mark.parametrize("kind", FLOODS)
async def test_the_standalone_stream(upstream: FakeUpstream, begin: Start, turns: Turns, kind: str) -> None:
    async def flood(turn: Turn) -> None:
        upstream.side(turn.session).put_nowait(FLOODS[kind] * 2 + b"\n")
        await turn.result(text("done"))

    upstream.tool(flood)
    assert (await (await begin()).client().call()).text == "done"
    await eventually(lambda: len(turns.noted) >= MANY)


@pytest.mark.parametrize("kind", FLOODS)
async def test_the_stream_of_http_and_sse(begin: Start, turns: Turns, kind: str) -> None:
    old = FakeSse()
    await old.start()

    async def flood(_: FakeSse, stream: Stream, message: Message) -> None:
        stream.raw(FLOODS[kind] * 2 + b"\n")
        stream.say(id=message["id"], result=text("done"))

    old.tool = flood
    try:
        stand = await begin(route={"upstream": {"url": old.url, "transport": "sse"}})
        assert (await stand.client().call()).text == "done"
    finally:
        await old.close()
    assert len(turns.noted) >= MANY

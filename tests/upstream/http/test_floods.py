"""An event stream that floods: others run meanwhile, and the answer behind the flood counts."""

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.config import InForce
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.reply_head import ReplyHead
from gateway.protocol import mcp, sse
from gateway.runtime.pieces import PIECE_BYTES
from gateway.runtime.throttle import Throttle
from gateway.upstream.http.era_probe import _verdict
from gateway.upstream.http.resumable_channel import ResumableChannel
from gateway.upstream.http.streamable_http import StreamableChannel
from tests.support.fake_carrier import FakeCarrier
from tests.support.fake_sse import FakeSse, Message, Stream
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.turns import FLOODS, SIZE, Turns, work_gives_way
from tests.support.workbench import eventually

pytestmark = pytest.mark.usefixtures("busy_clock")

PROBE = b'"probe"'
ANSWER = b'{"jsonrpc":"2.0","id":%b,"result":{"supportedVersions":["%b"]}}' % (PROBE, mcp.MODERN.encode())


@pytest.fixture(params=FLOODS)
def reply(request: pytest.FixtureRequest) -> AwaitedReply:
    """A reply that is here, with its answer behind a flood."""
    carrier = FakeCarrier()
    reply = AwaitedReply(carrier.begin)
    reply.on_head(ReplyHead(200, "1.1", [(b"Content-Type", b"text/event-stream")]))
    reply.on_body(FLOODS[request.param] + b"\ndata: " + ANSWER + b"\n\n")
    carrier.end()
    return reply


async def test_the_stream_of_a_call(reply: AwaitedReply) -> None:
    channel: Any = Mock(max_event_bytes=1 << 20, arriving=Throttle(InForce(1 << 20)))
    heard: list[bytes] = []

    def receive(data: bytes) -> bool:
        heard.append(data)
        return data == ANSWER

    assert await work_gives_way(ResumableChannel._read_events(channel, reply, receive, again=True))
    assert heard[-1] == ANSWER


async def test_the_answer_to_a_ping(reply: AwaitedReply) -> None:
    assert await work_gives_way(StreamableChannel._read_ping_answer(Mock(), reply, PROBE))


async def test_the_answer_to_a_probe(reply: AwaitedReply) -> None:
    found: list[bool | None] = []

    async def probe() -> None:
        found.append(await _verdict(reply, PROBE))

    assert await work_gives_way(probe())
    assert found == [True]


# -- streams that are read by callback --------------------------------------------------------------------------------


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

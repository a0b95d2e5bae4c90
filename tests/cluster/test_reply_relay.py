"""A reply of another replica reaches the client whole, or the client learns that it broke off."""

import asyncio
import json
from unittest.mock import AsyncMock, Mock

import pytest

from gateway import world
from gateway.cluster.peer_errors import PeerStuck
from gateway.cluster.peer_exchange import PeerExchange
from gateway.config import Timeouts
from gateway.protocol import mcp
from gateway.seal.keyring import Keyring
from gateway.seal.peer_messages import Data, End, Frame, Frames, Head, Identity, PeerRequest, Whole
from tests.support.fake_carrier import FakeCarrier
from tests.support.fake_peer import KEY, Asked, Script, tells
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, event, text
from tests.support.replicas import (
    TOKEN,
    TWICE,
    Cluster,
    Gate,
    asked_peers,
    dies_after_the_body,
    facing,
    operations,
    orphan,
    progress,
    retry_params,
    steps,
)
from tests.support.turns import work_gives_way
from tests.support.workbench import ACCEPT, Reply


async def test_a_stream_is_relayed_while_it_runs(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.progress(1)
        await go.wait()
        await turn.progress(2)
        await turn.result(text("done"))

    upstream.tool(tool)
    asked = await one.client().call(meta=TOKEN)
    retry = two.client().open("tools/call", retry_params(asked), meta=TOKEN)
    async with asyncio.timeout(DEADLINE), retry as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        first = await response.content.readuntil(b"\n\n")
        assert b'"progress":1' in first.replace(b" ", b"")
        assert not go.is_set(), "it came before the tool went on"
        go.set()
        rest = await response.read()
    reply = Reply(response, first + rest, "tools/call")
    assert [each["params"]["progress"] for each in reply.notifications] == [1, 2]
    assert reply.text == "done"
    assert (await asyncio.wait_for(upstream.saw("tools/call"), DEADLINE))[0].cut.is_set() is False


async def test_keep_alives_of_a_silent_call_are_relayed(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", timeouts={"keepalive_seconds": 0.05})
    gate = Gate(upstream)
    asked = await one.client().call()
    async with asyncio.timeout(DEADLINE), two.client().open("tools/call", retry_params(asked)) as response:
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b":\n\n"
        gate.go.set()
        assert b"done" in await response.read()


@pytest.mark.parametrize(
    ("status", "headers"), [(429, {"Retry-After": "7"}), (401, {"WWW-Authenticate": "X"}), (200, {})]
)
async def test_every_reply_of_a_replica_is_relayed(cluster: Cluster, status: int, headers: dict[str, str]) -> None:
    result = {"resultType": "complete", **text("é")}
    body = json.dumps({"jsonrpc": "2.0", "id": "c2", "result": result}, ensure_ascii=False).encode()

    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.reply(body, status, headers)

    one, peer = await facing(cluster, script)
    asked = await orphan(one, "gw-2")
    client = one.client()
    sent, retry = client.build("tools/call", retry_params(asked))
    async with asyncio.timeout(DEADLINE), client.http.post(client.url, headers=sent, data=retry) as response:
        assert (response.status, await response.read()) == (status, body)
        for name, value in headers.items():
            assert response.headers.getall(name) == [value]
    taken = peer.asked[0].peer_request
    assert (taken.kind, taken.to, taken.path, taken.body) == ("owner", "gw-2", "/mcp", retry)
    assert len(peer.asked) == 1


async def test_a_large_result_is_relayed_completely(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    large = "x" * 3_000_000 + "é"

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        token = turn.body["params"].get("_meta", {}).get("progressToken")
        if token is not None:
            await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 1})
        await turn.result(text(large))

    upstream.tool(tool)
    for meta in ({}, TOKEN):
        asked = await one.client().call(meta=meta)
        reply = await two.client().answer(asked, meta=meta)
        assert reply.text == large
        assert reply.is_stream == bool(meta)


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_owner_that_stops_during_its_reply_is_stalled_and_the_stream_ends_with_an_error(
    cluster: Cluster, *, streamed: bool
) -> None:
    times, said = {"keepalive_seconds": 0.1}, [Data(event(progress(1)))] if streamed else []
    script = breaks_off(Head(200, (), streamed=streamed), *said)
    one, peer = await facing(cluster, script, timeouts=times, **TWICE)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.status == (200 if streamed else 503)
    assert reply.is_stream is streamed
    assert reply.error["data"]["reason"] == "owner_stalled"
    assert len(reply.notifications) == streamed
    assert peer.kinds == ["owner"]


async def dies_after_continue(asked: Asked) -> None:
    await asked.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
    asked.die()


async def dies_within_a_frame(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.send(asked.frames.seal(HEAD)[:-1])
    asked.die()


async def says_it_in_the_clear(asked: Asked) -> None:
    await asked.take()
    await asked.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    await asked.silence()


async def repeats_a_frame(asked: Asked) -> None:
    await asked.take()
    await asked.begin()
    await asked.send(2 * asked.frames.seal(HEAD))
    await asked.silence()


async def answers_another_request(asked: Asked) -> None:
    await asked.take()
    asked.frames = Frames(Keyring((KEY,), "peer"), bytes(16))
    await asked.reply(b"{}")
    await asked.silence()


def breaks_off(*parts: Frame | bytes, last: str = "silence") -> Script:
    """Reply with frames, or with bytes that are none, and come to no proper end."""

    async def script(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        for part in parts:
            await (asked.send(part) if isinstance(part, bytes) else asked.say(part))
        if last == "death":
            asked.die()
        await (asked.end() if last == "end" else asked.silence())

    return script


HEAD = Head(200, (), streamed=False)
BROKEN: dict[str, Script] = {
    "death after continue": dies_after_continue,
    "death after the body": dies_after_the_body,
    "death after the head": breaks_off(last="death"),
    "death within a frame": dies_within_a_frame,
    "an early end": breaks_off(HEAD, Data(b"{}"), last="end"),
    "garbage": breaks_off(b"\0\0\0\x50" + b"garbage " * 10),
    "too much": breaks_off(b"\xff" * 100),
    "a reply in the clear": says_it_in_the_clear,
    "a frame twice": repeats_a_frame,
    "the reply to another request": answers_another_request,
    "the answer to a question": breaks_off(Identity("gw-2")),
    "no head": breaks_off(Data(b"{}"), End("complete")),
}


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
async def test_a_call_fails_over_if_its_owner_dies_during_the_reply(cluster: Cluster, script: Script) -> None:
    one, peer = await facing(cluster, script, mortal=True, **TWICE)
    asked = await orphan(one, "gw-2", "gw-1")
    reply = await one.client().answer(asked)
    assert reply.json == ACCEPT
    assert (reply.status, reply.is_stream) == (200, False)
    assert asked_peers(one) == {"broke": 1, "dead": 1}
    assert steps(one) == {"replayed": 1}
    assert len(peer.asked) == 1, "it was sent once"


@pytest.mark.parametrize("script", BROKEN.values(), ids=BROKEN)
async def test_an_owner_that_breaks_off_its_reply_and_is_alive_keeps_its_call(
    cluster: Cluster, script: Script
) -> None:
    """It is asked once more, in case only the connection died; then the client is told to retry."""
    one, peer = await facing(cluster, script, **TWICE)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-1"))
    assert reply.outcome == (503, -32603, "owner_stalled")
    assert steps(one) == {}
    assert len(peer.asked) == 2


def response(words: str) -> bytes:
    return event({"jsonrpc": "2.0", "id": "c2", "result": {"resultType": "complete", **text(words)}})


@pytest.mark.parametrize("last", ["death", "end", "silence"])
async def test_nothing_follows_the_response_in_a_stream_if_only_the_end_of_the_reply_is_missing(
    cluster: Cluster, last: str
) -> None:
    """The peer, asked again, would send the response again."""
    said = response("done")
    script = breaks_off(Head(200, (), streamed=True), Data(said[:-1]), Data(said[-1:]), last=last)
    one, peer = await facing(cluster, script, timeouts={"keepalive_seconds": 0.1})
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.text == "done"
    assert peer.kinds == ["owner"]


async def test_a_part_of_an_event_is_not_relayed(cluster: Cluster) -> None:
    """It would spoil the event behind it, which comes from another try."""
    head, said = Head(200, (), streamed=True), response("done")
    tries = iter([breaks_off(head, Data(said[:-9]), last="death"), tells(head, Data(said), End("complete"))])

    async def script(asked: Asked) -> None:
        await next(tries)(asked)

    one, peer = await facing(cluster, script)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.text == "done"
    assert (reply.is_stream, peer.kinds) == (True, ["owner", "owner"])


async def test_a_reply_with_an_outcome_of_another_version_is_complete(cluster: Cluster) -> None:
    body = b'{"jsonrpc":"2.0","id":"c2","error":{"code":-32603,"message":"no"}}'
    frames = Head(503, (), streamed=False), Data(body[:20]), Data(body[20:]), End("splendid")
    one, _ = await facing(cluster, tells(*frames))
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert (reply.status, reply.error["message"]) == (503, "no")
    assert operations(one, "error") == 1


@pytest.mark.usefixtures("busy_clock")
async def test_many_frames_at_once_let_others_run() -> None:
    nonce, keyring = bytes(16), Keyring((bytes(32),), "peer")
    sealing = Frames(keyring, nonce)
    frames = [Head(200, (), streamed=True), *[Data(b":\n\n")] * 500, End("complete", "")]
    chunk = b"".join(map(sealing.seal, frames))
    request = PeerRequest(kind="owner", to="gw-2", issued=0, nonce=nonce)
    arriving = PeerExchange(request, Frames(keyring, nonce), Timeouts())
    arriving.reply.pending = FakeCarrier().begin(arriving.reply)
    arriving.reply.on_body(chunk)
    arriving.reply.on_end()
    reply = Mock(started=False, start=AsyncMock(), write=AsyncMock(), end=AsyncMock())
    assert await work_gives_way(arriving.relay(reply, None))
    assert reply.write.await_count == 500
    reply.end.assert_awaited_once()


@pytest.mark.parametrize("frames", [(Whole(200, (), b"{}", "complete"),), (Head(200, (), streamed=True),), ()])
async def test_what_came_while_the_process_stood_still_is_read_before_it_is_late(
    frames: tuple[Head | Whole, ...],
) -> None:
    nonce, keyring = bytes(16), Keyring((bytes(32),), "peer")
    sealing = Frames(keyring, nonce)
    request = PeerRequest(kind="new", to="gw-2", issued=0, nonce=nonce)
    arriving = PeerExchange(request, Frames(keyring, nonce), Timeouts())
    arriving.reply.pending = FakeCarrier().begin(arriving.reply)
    for frame in frames:  # in the turn of the event loop in which the deadline is noticed, which is long over
        _ = asyncio.get_running_loop().call_soon(arriving.reply.on_body, sealing.seal(frame))
    reply = Mock(started=False, start=AsyncMock(), whole=AsyncMock())
    relayed = arriving.relay(reply, world.monotonic() - 10.0)
    if frames and isinstance(frames[0], Whole):
        _ = await relayed
        reply.whole.assert_awaited_once()
    else:
        with pytest.raises(PeerStuck):
            _ = await relayed
        assert reply.start.await_count == len(frames)

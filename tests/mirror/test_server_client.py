"""The replies of a modern server over HTTP: whose response it is, and how much of it, and how long, is waited for."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.mirror.call_rounds import Rounds
from gateway.mirror.client_requests import Profile
from gateway.mirror.server_client import ModernRequest, RouteServer, _ModernReply, ask
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidParams
from gateway.runtime.arrivals import SMALL_BYTES, Arrivals
from gateway.runtime.pieces import PIECE_BYTES
from gateway.upstream.channel import Hearer
from tests.mirror.conftest import Begin
from tests.support.fake_carrier import FakeCarrier
from tests.support.fake_modern import Call, FakeModern, Json
from tests.support.legacy_client import LegacyClient
from tests.support.turns import Turns
from tests.support.workbench import eventually, later

LIMIT = 1 << 20
LARGE = 3 << 20
MESSAGES = 1500
READ = 300_000
"""What a socket may bring before reading is paused."""

FOREIGN: tuple[Json, ...] = (
    {"id": 1, "result": {"content": [], "resultType": "complete"}},
    {"id": "1", "result": {"content": [], "resultType": "complete"}},
    {"id": "another", "error": {"code": -32000, "message": "for another caller"}},
)


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_the_response_to_another_request_is_skipped_in_a_stream(
    client: LegacyClient, server: FakeModern, foreign: Json
) -> None:
    async def tool(call: Call) -> Json:
        await call.send({"jsonrpc": "2.0", **foreign})
        return call.text("mine")

    server.tools["t"] = tool
    async with client.call("t") as stream:
        assert "mine" in str(await stream.message())


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_the_response_to_another_request_as_the_body_ends_its_connection(
    client: LegacyClient, server: FakeModern, foreign: Json
) -> None:
    server.tools["t"] = lambda _: foreign
    server.tools["good"] = lambda call: call.text("good")
    async with client.call("t") as stream:
        error = (await stream.message())["error"]
    assert error["data"]["reason"] == "call_lost"
    assert "without the JSON-RPC response to this request" in error["message"]
    async with client.call("good") as stream:
        assert "good" in str(await stream.message())
    assert server.peers[-1] != server.peers[-2], "the next response on it could be foreign too"


async def test_a_server_that_answers_as_it_should_keeps_its_connection(
    client: LegacyClient, server: FakeModern
) -> None:
    server.tools["t"] = lambda call: call.text("good")
    for _ in range(2):
        async with client.call("t") as stream:
            assert "good" in str(await stream.message())
    assert server.peers[-1] == server.peers[-2]


@pytest.mark.parametrize("id_", [None, "server-error"])
async def test_an_error_without_an_id_answers_the_request_that_it_comes_for(
    client: LegacyClient, server: FakeModern, id_: Any
) -> None:
    server.tools["t"] = lambda call: {"id": id_, **call.error(-32602, "unreadable")}
    async with client.call("t") as stream:
        assert (await stream.message())["error"]["message"] == "unreadable"


async def test_a_stream_that_stays_open_after_the_response_is_closed_soon(
    client: LegacyClient, server: FakeModern
) -> None:
    async def tool(call: Call) -> Json:
        await call.send({"jsonrpc": "2.0", "id": call.body["id"], **call.text("done")})
        await asyncio.Event().wait()
        raise AssertionError

    server.tools["t"] = tool
    async with client.call("t") as stream:
        assert "done" in str(await stream.message())
    await eventually(lambda: server.left == 1, "with an idle timeout of five minutes")


async def test_a_server_that_is_silent_for_too_long_loses_the_call_and_no_subscription(
    begin: Begin, server: FakeModern
) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.1})

    async def tool(call: Call) -> Json:
        await call.notify(mcp.LOG, {"level": "error", "data": "x"})
        await asyncio.Event().wait()
        raise AssertionError

    server.tools["t"] = tool
    client = await LegacyClient(stand).initialize()
    async with client.listen() as changes:
        async with client.call("t") as stream:
            assert (await stream.message())["method"] == mcp.LOG
            assert "was silent for timeouts.idle_seconds" in (await stream.message())["error"]["message"]
        await eventually(lambda: server.left == 1, "the request is given up")
        await server.listeners[0]({"jsonrpc": "2.0", "method": mcp.TOOLS_CHANGED})
        assert (await changes.message())["method"] == mcp.TOOLS_CHANGED
    assert len(server.of(mcp.LISTEN)) == 1, "a subscription may be silent"


async def test_a_server_that_has_moved_is_followed(client: LegacyClient, server: FakeModern) -> None:
    server.tools["t"] = lambda call: call.text("good")
    server.moved = "/moved"
    async with client.call("t") as stream:
        assert "good" in str(await stream.message())
    assert len(server.of(mcp.TOOLS_CALL)) == 1


async def test_unfinished_replies_of_many_calls_wait_for_each_other(
    begin: Begin, server: FakeModern, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.upstream_client.ARRIVING_BYTES", LIMIT)
    stand = await begin()
    go_on = asyncio.Event()

    async def tool(call: Call) -> Json:
        response = json.dumps({"jsonrpc": "2.0", "id": call.body["id"], **call.text("x" * LARGE)}).encode()
        await call.write(b"data: " + response[:-1])
        await go_on.wait()
        await call.write(b"}\n\n")
        await asyncio.Event().wait()
        raise AssertionError

    server.tools["t"] = tool
    client = await LegacyClient(stand).initialize()
    _ = await client.ask(mcp.TOOLS_LIST)
    arriving = stand.gateway.routes.live["/mcp"].upstream.client.arriving
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_result(client)) for _ in range(8)]
        await eventually(lambda: arriving.used >= LARGE + 7 * SMALL_BYTES, "a part of each is here")
        assert arriving.used < LARGE + LIMIT + len(calls) * READ
        go_on.set()
    assert {len(each.result()) for each in calls} == {LARGE + 2}
    assert arriving.used == 0


async def _result(client: LegacyClient) -> str:
    async with client.call("t") as stream:
        text: str = (await stream.message())["result"]["content"][0]["text"]
        return text


@pytest.mark.usefixtures("busy_clock")
async def test_a_flood_of_log_messages_lets_others_run(
    client: LegacyClient, server: FakeModern, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flood(call: Call) -> Json:
        for _ in range(MESSAGES):
            await call.notify(mcp.LOG, {"level": "info", "data": "x"})
        return call.text("done")

    server.tools["flood"] = flood
    turns, received = Turns(), Rounds.received

    def noted(rounds: Rounds, data: bytes) -> object:
        turns.note()
        return received(rounds, data)

    monkeypatch.setattr(Rounds, "received", noted)
    with turns:
        async with client.call("flood") as stream:
            while "result" not in await stream.message():
                pass
    assert len(turns.noted) >= MESSAGES * 100 // PIECE_BYTES // 2


class Rings:
    """A FAKE timer, which rings when the test says so."""

    def __init__(self) -> None:
        self.ring: Callable[[], None] = lambda: None

    def arm(self, _key: object, ring: Callable[[], None]) -> None:
        self.ring = ring

    def disarm(self, _key: object) -> None:
        self.ring = lambda: None


async def test_a_reply_that_waits_for_others_is_not_silent() -> None:
    carrier, timer = FakeCarrier(), Rings()
    reply = _ModernReply(
        Hearer(),
        LARGE,
        Arrivals(LIMIT),
        0.0,
        request=None,
        idle=timer,  # type: ignore[arg-type]
    )
    over = later(reply.over(carrier.begin(reply)))
    await asyncio.sleep(0)
    reply.pending.pause_reading()
    timer.ring()
    assert not reply.is_over
    reply.pending.resume_reading()
    timer.ring()
    assert isinstance((await over).failure, TimeoutError)
    assert carrier.asked[-1] == "abort"


async def test_a_header_that_cannot_be_sent_refuses_the_request(begin: Begin) -> None:
    server = RouteServer((await begin()).gateway.routes.live["/mcp"], b"")
    profile = Profile(mcp.LEGACY, b'{"name":"c","version":"1"}', b"{}")
    with pytest.raises(InvalidParams, match="control character"):
        _ = await ask(server, ModernRequest.new(mcp.TOOLS_LIST, {}, profile, {"X": "a\x01b"}))

"""The rounds of a call that asks, while their clients wait."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.seal.claims import Claims
from tests.downstream.test_known_heads import known, reply, request
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Stand, eventually


async def parked(stand: Stand, raw: RawConnection, **meta: Any) -> dict[str, Any]:
    """Make a call that asks; return the params of its retry."""
    await raw.send(request(stand, body=stand.client().build("tools/call", {"name": "tool"}, meta)[1]))
    asked = json.loads((await reply(raw))[1])["result"]
    assert asked["resultType"] == "input_required"
    answers = dict.fromkeys(asked["inputRequests"], ACCEPT)
    return {"name": "tool", "requestState": asked["requestState"], "inputResponses": answers}


def retry(stand: Stand, params: dict[str, Any]) -> bytes:
    return request(stand, body=stand.client().build("tools/call", params)[1])


@asynccontextmanager
async def answered(stand: Stand, upstream: FakeUpstream) -> AsyncIterator[tuple[RawConnection, dict[str, Any], Gate]]:
    """A held call whose answer has been sent upstream by a retry."""
    gate = Gate(upstream)
    async with raw_connection(stand) as raw:
        params = await parked(stand, raw)
        await raw.send(retry(stand, params))
        await asyncio.wait_for(gate.answered.wait(), 5)
        yield raw, params, gate


async def test_a_retry_whose_client_leaves_goes_on_for_the_grace_period(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"grace_seconds": 30})
    async with answered(stand, upstream) as (_, params, gate):
        (driver,) = [each for each in stand.gateway.lot if each.glance(0.0).state == State.RUNNING]
    await eventually(lambda: driver.glance(0.0).state == State.DETACHED)
    assert stand.gateway.downstream.in_flight == 0
    async with raw_connection(stand) as raw:
        await raw.send(retry(stand, params))
        await eventually(lambda: driver.glance(0.0).state == State.RUNNING)
        gate.go.set()
        assert json.loads((await reply(raw))[1])["result"]["content"] == text("done")["content"]
    assert len(upstream.of("answer")) == len(upstream.of("tools/call"))
    assert mcp.CANCELLED not in upstream.words


async def test_a_notification_before_the_result_of_a_retry_makes_a_stream(
    upstream: FakeUpstream, stand: Stand
) -> None:
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.progress(1)
        await go.wait()
        await turn.result(text("done"))

    upstream.tool(tool)
    async with raw_connection(stand) as raw:
        params = await parked(stand, raw, progressToken="p")
        for _ in range(2):  # the head is known when it comes again
            body = stand.client().build("tools/call", params, {"progressToken": "p"})[1]
            await raw.send(request(stand, body=body))
            if not go.is_set():
                assert b"event-stream" in await raw.until(b"\r\n\r\n")
                assert b"notifications/progress" in await raw.until(b"\n\n")
                go.set()
                assert b"done" in await raw.until(b"0\r\n\r\n")
        assert b"done" in (await reply(raw))[1], "the kept result needs no notification"


async def test_a_retry_that_is_refused_leaves_the_call_as_it_was(upstream: FakeUpstream, stand: Stand) -> None:
    gate = Gate(upstream)
    async with raw_connection(stand) as raw:
        params = await parked(stand, raw)
        bad = {**params, "inputResponses": {key: {"action": "perhaps"} for key in params["inputResponses"]}}
        for _ in range(3):  # its head is known when it comes again
            await raw.send(retry(stand, bad))
            head, body = await reply(raw)
            assert b" 400 " in head
            assert json.loads(body)["error"]["code"] == -32602
        assert stand.held == 1
        await raw.send(retry(stand, params))
        await gate.answered.wait()
        gate.go.set()
        assert b" 200 OK" in (await reply(raw))[0]
    assert len(stand.gateway.routes.live["/mcp"].deadlines.silence) == 0, "nobody waits for a keep-alive"


async def test_a_retry_gets_a_keep_alive_while_it_waits(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.1})
    async with answered(stand, upstream) as (raw, _, gate):
        assert b":\n\n" in await raw.until(b":\n\n")
        gate.go.set()
        assert b"done" in await raw.until(b"0\r\n\r\n")


async def test_a_drain_sees_the_leg_of_a_retry(upstream: FakeUpstream, stand: Stand) -> None:
    async with answered(stand, upstream) as (raw, _, gate):
        (driver,) = stand.gateway.downstream.legs.running
        assert driver.glance(0.0).state == State.RUNNING
        gate.go.set()
        assert json.loads((await reply(raw))[1])["result"]["content"] == text("done")["content"]
    assert not stand.gateway.downstream.legs.running


async def test_a_client_that_leaves_while_questions_gather_cancels_its_call(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"quiet_seconds": 5})
    asks = asyncio.Event()

    async def tool(turn: Turn) -> None:
        if asks.is_set():
            await turn.elicit("q")
        await turn.result(text("done"))

    upstream.tool(tool)
    silence = stand.gateway.routes.live["/mcp"].deadlines.silence
    async with raw_connection(stand) as raw:
        await known(stand, raw, request(stand))
        asks.set()
        await raw.send(request(stand))
        await eventually(lambda: any(each.glance(0.0).asked for each in stand.gateway.downstream.legs.running))
        assert (stand.gateway.downstream.in_flight, len(silence)) == (1, 1)
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    assert len(silence) == 0, "nobody waits for a keep-alive"


async def test_the_state_of_a_retry_is_opened_once(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, states = Claims.open, list[str]()

    def spy(self: Claims[Any], sealed: str) -> Any:
        states.append(sealed)
        return open_(self, sealed)

    monkeypatch.setattr(Claims, "open", spy)
    async with answered(stand, upstream) as (raw, params, gate):
        gate.go.set()
        for _ in range(3):  # the repeated ones get the kept result
            assert json.loads((await reply(raw))[1])["result"]["content"] == text("done")["content"]
            await raw.send(retry(stand, params))
        _ = await reply(raw)
    assert states == [params["requestState"]] * 4

"""The rounds of a call that asks, while their clients wait."""

from typing import Any

import pytest

from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.seal.claims import Claims
from tests.support.fake_upstream import FakeUpstream, ask
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.workbench import Client, eventually, later, leave


async def test_a_retry_whose_client_leaves_goes_on_for_the_grace_period(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"grace_seconds": 30})
    client, gate = stand.client(), Gate(upstream)
    asked = await client.call()
    (driver,) = stand.gateway.lot
    first = later(client.answer(asked))
    await gate.answered.wait()
    await leave(first)
    await eventually(lambda: driver.glance(0.0).state == State.DETACHED)
    assert stand.gateway.downstream.in_flight == 0
    again = later(client.answer(asked))
    await eventually(lambda: driver.glance(0.0).state == State.RUNNING)
    gate.go.set()
    assert (await again).text == "done"
    assert len(upstream.of("answer")) == len(upstream.of("tools/call")) == 1
    assert mcp.CANCELLED not in upstream.words


async def test_a_client_that_leaves_while_questions_gather_cancels_its_call(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(hold={"quiet_seconds": 5})
    client, silence = stand.client(), stand.gateway.routes.live["/mcp"].deadlines.silence
    assert (await client.call()).text == "done"
    upstream.tool(ask)
    call = later(client.call())
    await eventually(lambda: any(each.glance(0.0).asked for each in stand.gateway.downstream.legs.running))
    assert (stand.gateway.downstream.in_flight, len(silence)) == (1, 1)
    await leave(call)
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    assert len(silence) == 0, "nobody waits for a keep-alive"


async def test_the_state_of_a_retry_is_opened_once(
    upstream: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, states = Claims.open, list[str]()

    def spy(self: Claims[Any], sealed: str) -> Any:
        states.append(sealed)
        return open_(self, sealed)

    monkeypatch.setattr(Claims, "open", spy)
    upstream.tool(ask)
    asked = await client.call()
    for _ in range(3):  # the repeated ones get the kept result
        assert (await client.answer(asked)).text
    assert states == [asked.state] * 3

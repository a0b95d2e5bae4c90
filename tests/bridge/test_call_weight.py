"""Calls of the bridge are weighed: what does not fit is refused before it begins, and what has begun never is."""

import asyncio
import json

import pytest

from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import Gate, ask, later
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import ACCEPT, DECLINE, Stand, eventually, leave

LARGE = {"text": "x" * 100_000}


def weighed(stand: Stand) -> int:
    return stand.gateway.calls.used


async def test_calls_that_do_not_fit_are_refused_and_retries_always_fit(upstream: FakeUpstream, begin: Start) -> None:
    # A call takes 200 KB when it begins, and 100 KB while it is parked.
    stand = await begin(limits={"calls_bytes": 550_000, "calls_bytes_per_principal": 350_000})
    upstream.tool(ask)
    ada, bob, eve = (stand.client(f"Bearer {name}") for name in ("ada", "bob", "eve"))
    of_ada = [await ada.call(arguments=LARGE) for _ in range(2)]
    assert 200_000 < weighed(stand) < 205_000
    refused = await ada.call(arguments=LARGE)
    assert refused.outcome == (429, -32603, "busy")
    assert "limits.calls_bytes_per_principal" in refused.error["message"]
    assert int(refused.headers["Retry-After"]) > 0
    assert (await ada.post("tools/list", {"cursor": LARGE["text"]})).status == 429, "whatever the method"
    of_bob = [await bob.call(arguments=LARGE) for _ in range(2)]
    full = await eve.call(arguments=LARGE)
    assert full.outcome == (503, -32603, "busy")
    assert "(limits.calls_bytes)" in full.error["message"]
    small = await eve.call()
    assert small.questions, "a small call fits"
    assert len(upstream.of("tools/call")) == 5, "what is refused was not run"
    budget = (await told(stand)).processes[0].budgets["limits.calls_bytes"]
    assert (budget.limit, budget.used) == (550_000, weighed(stand))
    for client, asked in ((ada, of_ada), (bob, of_bob)):
        for each in asked:
            assert json.loads((await client.answer(each, arguments=LARGE)).text) == ACCEPT, "a retry always fits"
    assert (await eve.answer(small)).status == 200
    assert weighed(stand) == 0
    assert (await eve.answer(await eve.call(arguments=LARGE), arguments=LARGE)).status == 200


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_call_that_runs_weighs_until_its_end(upstream: FakeUpstream, begin: Start, *, is_new: bool) -> None:
    stand = await begin(limits={"calls_bytes": 1_000_000, "calls_bytes_per_principal": 250_000})
    client = stand.client()
    if not is_new:
        upstream.tool(lambda turn: turn.result(text("warm")))
        assert (await client.call()).text == "warm"
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await go.wait()
        await turn.result(text("done"))

    upstream.tool(tool)
    running = later(client.call(arguments=LARGE))
    _ = await upstream.saw("tools/call", 1 if is_new else 2)
    assert weighed(stand) > 200_000
    assert (await client.call(arguments=LARGE)).status == 429
    go.set()
    assert (await running).text == "done"
    assert weighed(stand) == 0
    assert (await client.call(arguments=LARGE)).text == "done"


async def test_a_call_whose_client_leaves_weighs_nothing(upstream: FakeUpstream, stand: Stand) -> None:
    gate = Gate(upstream)
    client = stand.client()
    asked = await client.call(arguments=LARGE)
    retry = later(client.answer(asked, arguments=LARGE))
    await gate.answered.wait()
    await leave(retry)
    await eventually(lambda: weighed(stand) == 0, "the call was given up")
    gate.go.set()


async def test_questions_and_answers_are_weighed(upstream: FakeUpstream, stand: Stand) -> None:
    weights: list[int] = []

    async def tool(turn: Turn) -> None:
        for _ in range(2):
            await turn.elicit("q" * 30_000)
            weights.append(weighed(stand))
        await turn.result(text("done"))

    upstream.tool(tool)
    client = stand.client()
    one = await client.call()
    assert weighed(stand) > 30_000
    two = await client.answer(one, {"action": "accept", "content": {"name": "y" * 20_000}})
    assert weighed(stand) > 50_000
    assert (await client.answer(two, DECLINE)).text == "done"
    assert weighed(stand) == 0


async def test_a_result_that_waits_for_its_client_is_weighed(upstream: FakeUpstream, stand: Stand) -> None:
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        question = later(turn.elicit("q"))
        await go.wait()
        await turn.result(text("z" * 40_000))
        question.cancel()

    upstream.tool(tool)
    client = stand.client()
    asked = await client.call()
    go.set()
    await eventually(lambda: weighed(stand) > 40_000, "the result is here")
    assert len((await client.answer(asked)).text) == 40_000
    assert weighed(stand) == 0

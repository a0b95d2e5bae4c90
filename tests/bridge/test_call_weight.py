"""Calls of the bridge are weighed: what does not fit is refused before it begins, and what has begun never is."""

import asyncio
import json
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.support import copies
from tests.support.fake_sse import FakeSse, Message
from tests.support.fake_sse import Stream as Upstream
from tests.support.fake_upstream import FakeUpstream, Turn, ask, gives_up, text
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import ACCEPT, DECLINE, Client, Stand, eventually, later

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
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
    budgets = (await told(stand)).processes[0].budgets
    of_all, of_one = budgets["limits.calls_bytes"], budgets["limits.calls_bytes_per_principal"]
    assert (of_all.limit, of_all.used) == (550_000, weighed(stand))
    assert of_one.limit == 350_000
    assert 200_000 < of_one.used < 205_000, "of the caller that has most"
    for client, asked in ((ada, of_ada), (bob, of_bob)):
        for each in asked:
            assert json.loads((await client.answer(each)).text) == ACCEPT, "a retry always fits"
    assert (await eve.answer(small)).status == 200
    assert weighed(stand) == 0
    assert (await eve.answer(await eve.call(arguments=LARGE))).status == 200


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_call_that_runs_weighs_until_its_end(upstream: FakeUpstream, begin: Start, *, is_new: bool) -> None:
    stand = await begin(limits={"calls_bytes": 1_000_000, "calls_bytes_per_principal": 250_000})
    client = stand.client()
    if not is_new:
        upstream.tool(lambda turn: turn.result(text("warm")))
        assert (await client.call()).text == "warm"
    go = upstream.waiting_tool()
    running = later(client.call(arguments=LARGE))
    _ = await upstream.saw("tools/call", 1 if is_new else 2)
    assert weighed(stand) > 200_000
    assert (await client.call(arguments=LARGE)).status == 429
    (notice,) = (await told(stand)).notices
    assert notice.text.startswith("Bytes of calls of caller ")
    assert notice.text.endswith(" of 250,000 (limits.calls_bytes_per_principal)")
    assert notice.fix.endswith("see Callers")
    go.set()
    assert (await running).text == "done"
    assert weighed(stand) == 0
    assert (await client.call(arguments=LARGE)).text == "done"


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


async def test_of_a_parked_call_nothing_is_weighed_that_only_its_first_round_needs(
    upstream: FakeUpstream, stand: Stand
) -> None:
    upstream.tool(ask)
    client = stand.client()
    info = {"name": "n" * 10_000, "version": "1"}
    asked = await client.call(meta={mcp.META_CLIENT_INFO: info})
    assert 0 < weighed(stand) < 1_000
    assert (await client.answer(asked, meta={mcp.META_CLIENT_INFO: info})).status == 200
    assert weighed(stand) == 0


async def test_a_result_that_waits_for_its_client_is_weighed(upstream: FakeUpstream, stand: Stand) -> None:
    go = asyncio.Event()
    upstream.tool(gives_up(go, lambda turn: turn.result(text("z" * 40_000))))
    client = stand.client()
    asked = await client.call()
    go.set()
    await eventually(lambda: weighed(stand) > 40_000, "the result is here")
    assert len((await client.answer(asked)).text) == 40_000
    assert weighed(stand) == 0


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_a_call_that_waits_keeps_one_copy_of_its_request(
    upstream: FakeUpstream, old: FakeSse, begin: Start, transport: str
) -> None:
    is_sse = transport == "sse"
    url = old.url if is_sse else upstream.url
    stand = await begin(route={"upstream": {"url": url, "transport": transport}})
    client = stand.client()
    gate = Gate(upstream)

    async def tool(turn: Turn) -> None:
        turn.body["params"] = {}
        await gate.tool(turn)

    async def tool_over_sse(_fake: FakeSse, stream: Upstream, message: Message) -> None:
        message["params"] = {}
        stream.say(id="q", method="elicitation/create", params={"message": "q", "requestedSchema": SCHEMA})
        calls.append((stream, message["id"]))

    calls: list[tuple[Upstream, Any]] = []
    upstream.tool(tool)
    old.tool = tool_over_sse
    with copies.counted() as kept:
        asked = await client.call(arguments=copies.LARGE)
        assert asked.questions
        assert 1 <= kept() < 1.1
        retry = later(client.answer(asked))
        if is_sse:
            await eventually(lambda: stand.held == 0, "the retry was taken")
        else:
            await gate.answered.wait()
        assert 1 <= kept() < 1.1, "nothing of the retry's body is kept"
        if is_sse:
            ((stream, id_),) = calls
            stream.say(id=id_, result=text("done"))
        gate.go.set()
        assert (await retry).text == "done"


async def test_a_call_keeps_no_encoded_request_once_the_server_has_accepted_it(
    upstream: FakeUpstream, client: Client
) -> None:
    began, accept, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        turn.body["params"] = {}
        began.set()
        await accept.wait()
        await turn.raw(b"")
        await go.wait()
        await turn.result(text("done"))

    upstream.tool(tool)
    with copies.counted() as kept:
        running = later(client.call(arguments=copies.LARGE))
        await began.wait()
        assert 2 <= kept() < 2.1, "it may have to be sent again"
        accept.set()
        await eventually(lambda: 1 <= kept() < 1.1, "one copy is left")
        go.set()
        assert (await running).text == "done"

"""Mirrored calls are weighed: what does not fit is refused before it begins, and answers always fit."""

import asyncio

from gateway.protocol import mcp
from tests.mirror.conftest import Begin
from tests.mirror.streamable.test_front import ACCEPT, text
from tests.support import copies
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.legacy_client import LegacyClient
from tests.support.workbench import eventually

LARGE = {"text": "x" * 100_000}


async def test_calls_that_do_not_fit_are_refused_and_answers_always_fit(begin: Begin, server: FakeModern) -> None:
    # A call takes 200 KB while it is upstream, and 100 KB while its client is asked.
    stand = await begin(limits={"calls_bytes": 550_000, "calls_bytes_per_principal": 250_000})
    client, calls = await LegacyClient(stand).initialize(), stand.gateway.calls
    async with client.call("ask", LARGE) as stream:
        question = await stream.message()
        assert 100_000 < calls.used < 110_000
        async with client.call("ask", LARGE) as other:
            message = await other.message()
            assert message["error"]["data"]["reason"] == "busy"
            assert "limits.calls_bytes_per_principal" in message["error"]["message"]
        assert len(server.of("tools/call")) == 1, "what is refused was not run"
        assert await client.answer(question, {**ACCEPT, "content": {"name": "y" * 200_000}}) == 202
        assert text(await stream.message())
    await eventually(lambda: calls.used == 0, "the call is over")
    async with client.call("ask", LARGE) as stream:
        assert await client.answer(await stream.message(), ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_a_kept_response_counts_with_its_request(begin: Begin, server: FakeModern) -> None:
    stand = await begin(limits={"results_bytes": 250_000})
    client = await LegacyClient(stand).initialize()
    server.tools["echo"] = lambda call: call.text("done")
    for _ in range(3):
        async with client.call("echo", LARGE) as stream:
            assert text(await stream.message()) == "done"
    assert stand.gateway.lot.results.given_way == 1


async def test_a_mirrored_call_keeps_one_copy_of_its_request(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin()).initialize()
    began, accept, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(call: Call) -> Json:
        if call.answers:
            return call.text("done")
        server.requests.clear()
        call.params = call.body["params"] = {}
        began.set()
        await accept.wait()
        await call.notify(mcp.LOG, {"level": "error", "data": "it goes on"})
        await go.wait()
        return call.ask(name=FORM)

    server.tools["wait"] = wait
    with copies.counted() as kept:
        async with client.call("wait", copies.LARGE) as stream:
            await began.wait()
            assert 2 <= kept() < 2.1, "it may have to be sent again"
            accept.set()
            assert (await stream.message())["method"] == mcp.LOG
            assert 1 <= kept() < 1.1, "the server has accepted it"
            go.set()
            question = await stream.message()
            assert 1 <= kept() < 1.1, "the client is asked"
            assert await client.answer(question, ACCEPT) == 202
            assert text(await stream.message()) == "done"

"""The exchange of a legacy client before a modern server."""

from typing import Any

import pytest

from gateway.exchange import commands as do
from gateway.mirror.mirrored_call import MirroredCall
from gateway.protocol import mcp
from tests.mirror.conftest import Begin
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.legacy_client import LegacyClient
from tests.support.status import fetch
from tests.support.workbench import eventually

ACCEPT: Json = {"action": "accept", "content": {"name": "Ada"}}


async def ask(call: Call) -> Json:
    if call.answers:
        return call.text("done")
    await call.notify(mcp.LOG, {"level": "error", "data": "x"})
    return call.ask(name=FORM)


@pytest.mark.parametrize(
    "command", [each for each in MirroredCall.OBEY if each not in (do.CancelCall, do.Close, do.Fail)]
)
async def test_a_bug_ends_a_call_with_one_error_and_nothing_is_left_of_it(
    begin: Begin, server: FakeModern, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    stand = await begin()
    client = await LegacyClient(stand).initialize()
    server.tools["ask"] = ask
    planted: list[object] = []
    obey = MirroredCall.OBEY[command]

    def broken(call: MirroredCall, it: Any) -> None:
        if not planted:
            planted.append(it)
            raise ZeroDivisionError
        obey(call, it)

    monkeypatch.setitem(MirroredCall.OBEY, command, broken)
    ends: list[Json] = []
    async with client.request("tools/call", {"name": "ask", "arguments": {}}, id_=7) as stream:
        while not ends:
            message = await stream.message()
            if message.get("method") == mcp.ELICIT:
                _ = await client.answer(message, ACCEPT)
            elif "id" in message:
                ends.append(message)
    assert planted
    if command is do.ReleaseSession:
        assert "result" in ends[0], "the bug came when the client had its result"
    else:
        assert (ends[0]["error"]["code"], "ZeroDivision" in str(ends)) == (-32603, False)
    assert stand.metric("mcp_gateway_mirrored_calls") == 0
    await eventually(lambda: stand.gateway.calls.used == 0)
    stand.planted_bugs = int(stand.metric("mcp_gateway_task_failures_total"))
    async with client.request("tools/call", {"name": "ask", "arguments": {}}, id_=7) as stream:
        while (message := await stream.message()).get("method") != mcp.ELICIT:
            pass
        _ = await client.answer(message, ACCEPT)
        while "result" not in await stream.message():
            pass


async def test_a_call_that_asks_counts_as_held_for_its_caller(begin: Begin, server: FakeModern) -> None:
    stand = await begin()
    client = await LegacyClient(stand).initialize()
    server.tools["ask"] = ask
    async with client.request("tools/call", {"name": "ask", "arguments": {}}, id_=7) as stream:
        while (message := await stream.message()).get("method") != mcp.ELICIT:
            pass
        assert "\nmcp_gateway_held_calls_of_one_caller 1.0\n" in (await fetch(stand, "/metrics"))[1]
        _ = await client.answer(message, ACCEPT)
        while "result" not in await stream.message():
            pass

"""The replies of a modern server over HTTP, as the mirror reads them."""

import pytest

from gateway.mirror.modern_server import _Reply
from gateway.protocol import mcp
from gateway.runtime.pieces import PIECE_BYTES
from tests.support.fake_modern import Call, FakeModern, Json
from tests.support.mirrored_client import LegacyClient
from tests.support.turns import Turns

MESSAGES = 1500


@pytest.mark.usefixtures("busy_clock")
async def test_a_flood_of_log_messages_lets_others_run(
    client: LegacyClient, server: FakeModern, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def flood(call: Call) -> Json:
        for _ in range(MESSAGES):
            await call.notify(mcp.LOG, {"level": "info", "data": "x"})
        return call.text("done")

    server.tools["flood"] = flood
    turns, on_body = Turns(), _Reply.on_body

    def noted(reply: _Reply, data: bytes) -> None:
        turns.note()
        on_body(reply, data)

    monkeypatch.setattr(_Reply, "on_body", noted)
    with turns:
        async with client.call("flood") as stream:
            while "result" not in await stream.message():
                pass
    assert len(turns.noted) >= MESSAGES * 100 // PIECE_BYTES // 2

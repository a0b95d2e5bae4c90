"""A drain that reaches its deadline logs the calls that it left to others or cancelled, and no finished ones."""

import pytest

from gateway.server.drain import drain
from tests.support.fake_upstream import FakeUpstream, ask
from tests.support.logs import Lines
from tests.support.stand import Start

QUICK = {"drain_seconds": 0.05}


@pytest.mark.parametrize(
    ("ephemeral", "let_go", "cancelled"), [([], 0, 1), (["tool"], 1, 0)], ids=["cancelled", "let go"]
)
async def test_a_finished_call_is_not_counted_as_cancelled_or_let_go(
    upstream: FakeUpstream, begin: Start, log_lines: Lines, ephemeral: list[str], let_go: int, cancelled: int
) -> None:
    upstream.tool(ask)
    stand = await begin(hold=QUICK, route={"ephemeral": ephemeral})
    client = stand.client()
    for _ in range(3):
        assert (await client.answer(await client.call())).result["resultType"] == "complete"
    asked = await client.call()
    assert stand.held == 1
    await drain(stand.gateway, delay_seconds=0)
    (line,) = log_lines("server.parted")
    assert (line["let_go"], line["cancelled"]) == (let_go, cancelled)
    assert line["level"] == ("warning" if cancelled else "info")
    if cancelled:
        assert "shut down before the call ended" in (await client.answer(asked)).error["message"]


async def test_a_drain_after_which_only_kept_results_are_left_parted_with_nothing(
    upstream: FakeUpstream, begin: Start, log_lines: Lines
) -> None:
    upstream.tool(ask)
    stand = await begin(hold=QUICK)
    client = stand.client()
    assert (await client.answer(await client.call())).result["resultType"] == "complete"
    await drain(stand.gateway, delay_seconds=0)
    assert log_lines("server.parted") == []

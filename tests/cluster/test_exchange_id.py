"""One name for one exchange: in each line of the log about it, over all rounds and all replicas."""

from unittest.mock import AsyncMock

import pytest

from gateway.bridge.call_context import Context
from gateway.cluster.peer_errors import ReplyBroken
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.support.fake_store import SOON, FakeStore, cool
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.logs import Lines
from tests.support.replicas import Cluster, Gate, in_time, opened
from tests.support.stand import Start
from tests.support.workbench import Client, eventually, later


async def test_all_lines_of_a_call_that_two_replicas_serve_name_the_same_exchange(
    log_lines: Lines, upstream: FakeUpstream, cluster: Cluster
) -> None:
    Gate(upstream).go.set()
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    await cluster.crash(one)
    _ = await two.client().answer(asked, headers={"X-Request-Id": "second"})
    about = {"request_id": "second", "exchange_id": opened(asked.state).exchange}
    for event in ("call.taken_over", "exchange.finished"):
        (line,) = log_lines(event)
        assert about.items() <= line.items(), event


async def test_a_call_that_is_cold_for_a_while_keeps_its_name(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    stand, _ = await begin(hold=SOON), FakeStore(upstream)
    asked = await cool(stand, upstream)
    _ = await stand.client().answer(asked)
    (cooled,), (finished,) = log_lines("call.cooled"), log_lines("exchange.finished")
    assert cooled["exchange_id"] == finished["exchange_id"] == opened(asked.state).exchange


async def test_a_call_that_fails_in_its_first_round_has_a_name(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    upstream.tool(lambda turn: turn.result(text("x")))
    _ = await client.call()
    await upstream.close()
    _ = await client.call(), await client.call()
    names = [line["exchange_id"] for line in log_lines("exchange.finished")]
    assert ([len(name) for name in names], len(set(names))) == ([32, 32], 2)


async def test_a_call_that_logs_nothing_is_given_no_name(
    monkeypatch: pytest.MonkeyPatch, upstream: FakeUpstream, client: Client
) -> None:
    named: list[Context] = []
    monkeypatch.setattr(Context, "identify", named.append)

    async def tool(turn: Turn) -> None:
        await turn.notify("notifications/message", {"level": "info", "data": 1})
        await turn.result(text("x"))

    upstream.tool(tool)
    _ = await client.call(), await client.call()
    assert (await client.call(meta={mcp.META_LOG_LEVEL: "info"})).is_stream
    assert not named


async def test_a_state_that_is_refused_is_logged_with_its_exchange_if_it_opens(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    Gate(upstream).go.set()
    asked = await client.call()
    _ = await client.call("another tool", state=asked.state)
    _ = await client.call(state="mrtr1.no")
    _ = await client.answer(asked)
    mine, unknown = log_lines("state.rejected")
    assert (mine["reason"], mine["exchange_id"]) == ("other_target", opened(asked.state).exchange)
    assert "exchange_id" not in unknown


async def test_each_round_has_one_line_at_the_replica_that_it_reached(
    log_lines: Lines, upstream: FakeUpstream, cluster: Cluster
) -> None:
    Gate(upstream).go.set()
    asked, (_, two) = await cluster.asked("gw-1", "gw-2", log={"access": True})
    _ = await two.client().answer(asked)
    names = [line["exchange_id"] for line in log_lines("request.finished")]
    assert names == [opened(asked.state).exchange] * 2


async def test_both_replicas_name_a_call_that_one_does_not_serve_for_the_other(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines, upstream: FakeUpstream, cluster: Cluster
) -> None:
    Gate(upstream).go.set()
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    with monkeypatch.context() as patch:
        patch.setattr(one.gateway.downstream, "handle_hop", AsyncMock(side_effect=ReplyBroken))
        _ = await two.client().answer(asked)
    _ = await two.client().answer(asked)
    lines = log_lines("peer.failed")
    assert [line["exchange_id"] for line in lines] == [opened(asked.state).exchange] * len(lines)
    assert len(lines) == 3, "each try at the owner, and the end of them at the other replica"


async def test_a_call_that_another_replica_begins_has_one_name_on_both(log_lines: Lines, cluster: Cluster) -> None:
    one, _ = await cluster.begin("gw-1", "gw-2", log={"access": True})
    first = await one.client().call()
    ending = later(drain(one.gateway, delay_seconds=0))
    await eventually(lambda: one.gateway.draining.has_begun)
    sent_on = await one.client().call()
    for asked in (sent_on, first):  # the drain may be over as soon as the call that it waits for has ended
        _ = await one.client().answer(asked)
    await in_time(ending)
    held, begun_elsewhere = (opened(asked.state).exchange for asked in (first, sent_on))
    assert [line["exchange_id"] for line in log_lines("exchange.finished")] == [begun_elsewhere, held]
    lines = log_lines("request.finished")
    assert [line["exchange_id"] for line in lines] == [held, begun_elsewhere, begun_elsewhere, held]


async def test_messages_to_and_from_the_server_are_logged_with_their_exchange(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    Gate(upstream).go.set()
    client = (await begin(debug={"bodies": True})).client()
    asked = await client.call()
    _ = await client.answer(asked)
    await eventually(lambda: log_lines("exchange.finished"))
    named = {(line["direction"], line["exchange_id"]) for line in log_lines("debug.body") if "exchange_id" in line}
    exchange = opened(asked.state).exchange
    assert named == {("to_upstream", exchange), ("from_upstream", exchange)}

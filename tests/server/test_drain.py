"""A drain that reaches its deadline tells of each call that it left to others or cancelled."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.server.drain import drain
from tests.support.fake_sse import FakeSse
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import FakeUpstream, Turn, ask, gives_up, text
from tests.support.legacy_client import LegacyClient
from tests.support.logs import Lines
from tests.support.replicas import Gate, drop
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import Client, Reply, Stand, eventually, later, leave

QUICK = {"drain_seconds": 0.05, "grace_seconds": 30}
STOPPED = "The gateway shut down before the call ended; it was cancelled and may have had effects"
LEFT = "the process ends; another one continues the call as soon as its client comes back"
Begun = Callable[[FakeUpstream, Stand, Client], Awaitable[Reply]]
"""Brings a call about, and returns the reply of its newest round."""


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


@pytest.mark.parametrize("ephemeral", [[], ["tool"]], ids=["lost", "run again"])
@pytest.mark.parametrize("is_drained", [False, True])
async def test_what_a_second_signal_loses_is_counted_at_the_end(
    upstream: FakeUpstream,
    begin: Start,
    log_lines: Lines,
    ephemeral: list[str],
    is_drained: bool,  # noqa: FBT001
) -> None:
    upstream.tool(ask)
    stand = await begin(hold=QUICK, route={"ephemeral": ephemeral})
    client = stand.client()
    assert (await client.answer(await client.call())).result["resultType"] == "complete"
    _ = await client.call()
    if is_drained:
        await drain(stand.gateway, delay_seconds=0)
    await stand.gateway.close()
    (line,) = log_lines("server.stopped")
    assert line.get("lost") == (None if is_drained else 0 if ephemeral else 1)
    await drop(stand)


async def speaks_on(turn: Turn) -> None:
    await turn.notify(mcp.LOG, {"level": "info", "data": 1})
    await turn.for_ever()


async def relays_on(*_: object) -> None:
    """Never answer."""


@pytest.mark.parametrize("is_relayed", [False, True], ids=["passed through", "relayed"])
async def test_requests_that_no_call_of_the_gateway_serves_are_counted_when_they_are_cut(
    upstream: FakeUpstream,
    old: FakeSse,
    begin: Start,
    log_lines: Lines,
    is_relayed: bool,  # noqa: FBT001
) -> None:
    upstream.tool(speaks_on)
    old.tool = relays_on
    stand = await begin(hold=QUICK, log={"access": True}, url=old.url if is_relayed else upstream.url)
    client = await LegacyClient(stand).initialize()
    running = later(client.post(client.call_message()))
    process, sessions = stand.gateway.routes.process, stand.gateway.sessions
    await eventually(lambda: sessions.open_requests + len(process.passing) == 1)
    if not is_relayed:
        _ = await upstream.saw(mcp.TOOLS_CALL)
    assert (await told(stand)).processes[0].lost_at_end == 1
    await drain(stand.gateway, delay_seconds=0)
    (line,) = log_lines("server.parted")
    assert (line["level"], line["let_go"], line["cancelled"], line["cut"]) == ("warning", 0, 0, 1)
    await stand.gateway.close()
    assert ["lost" in line for line in log_lines("server.stopped")] == [False], "the drain has told it"
    _ = await asyncio.gather(running, return_exceptions=True)
    (finished,) = (each for each in log_lines("request.finished") if each["target"] == "tool")
    assert (finished["outcome"], finished["status"], finished["reason"]) == ("error", 200, "stopping")
    assert "shut down" in finished["cause"]


async def parked(upstream: FakeUpstream, _: Stand, client: Client) -> Reply:
    upstream.tool(ask)
    return await client.call()


async def left(upstream: FakeUpstream, stand: Stand, client: Client) -> Reply:
    gate = Gate(upstream)
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    answering = later(client.answer(asked))
    await gate.answered.wait()
    await leave(answering)
    await eventually(lambda: driver.glance(0.0).state == State.DETACHED)
    return asked


async def ended(
    ends: Callable[[Turn], Awaitable[None]], upstream: FakeUpstream, stand: Stand, client: Client
) -> Reply:
    over = asyncio.Event()
    upstream.tool(gives_up(over, ends))
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    over.set()
    await eventually(lambda: driver.glance(0.0).state != State.PARKED)
    return asked


async def lost(upstream: FakeUpstream, stand: Stand, client: Client) -> Reply:
    return await ended(Turn.reset, upstream, stand, client)


async def unread(upstream: FakeUpstream, stand: Stand, client: Client) -> Reply:
    return await ended(lambda turn: turn.result(text("late")), upstream, stand, client)


@pytest.mark.parametrize(
    ("bring", "ephemeral", "outcome", "cause", "reason"),
    [
        (parked, False, "error", STOPPED, "stopping"),
        (left, False, "error", STOPPED, "stopping"),
        (lost, False, "error", "broke the connection", "call_lost"),
        (unread, False, "cancelled", "the client did not come back", None),
        (parked, True, "cancelled", LEFT, None),
        (left, True, "cancelled", LEFT, None),
        (lost, True, "cancelled", LEFT, None),
    ],
)
async def test_each_call_without_a_result_is_told_once_with_its_cause(
    upstream: FakeUpstream,
    begin: Start,
    log_lines: Lines,
    bring: Begun,
    ephemeral: bool,  # noqa: FBT001
    outcome: str,
    cause: str,
    reason: str | None,
) -> None:
    stand = await begin(hold=QUICK, route={"ephemeral": ["tool"] if ephemeral else []})
    client = stand.client()
    asked = await bring(upstream, stand, client)
    before = await told(stand)
    assert before.processes[0].lost_at_end == (bring is unread or reason == "stopping")
    assert (before.held[0].at_end == "run again") == ephemeral
    await drain(stand.gateway, delay_seconds=0)
    (line,) = log_lines("exchange.finished")
    assert (line["outcome"], line.get("reason"), line["rounds"]) == (outcome, reason, 2 if bring is left else 1)
    assert cause in line["cause"]
    assert ("docs/continuity.md" in line.get("fix", "")) == (reason == "stopping")
    assert line["level"] == ("warning" if bring is lost and not ephemeral else "info")
    if not ephemeral and bring is not left:  # whose connection is closed
        _ = await client.answer(asked)  # in the last second
        assert log_lines("exchange.finished") == [line]
    await drop(stand)


async def test_a_running_call_is_told_whether_it_is_cut_or_left_to_others(
    upstream: FakeUpstream, begin: Start, log_lines: Lines
) -> None:
    stand = await begin(hold=QUICK)
    upstream.tool(lambda turn: turn.for_ever())
    running = later(stand.client().call())
    _ = await upstream.saw("tools/call")
    assert (await told(stand)).processes[0].lost_at_end == 1
    await drain(stand.gateway, delay_seconds=0)
    assert (await running).status == 503
    (line,) = log_lines("exchange.finished")
    assert (line["outcome"], line["cause"], line["reason"]) == ("error", STOPPED, "stopping")


async def test_a_call_that_another_process_resumes_is_told_as_left_to_it(
    upstream: FakeUpstream, begin: Start, log_lines: Lines
) -> None:
    _ = FakeStore(upstream)
    stand = await begin(hold=QUICK)
    _ = await stand.client().call()
    assert (await told(stand)).processes[0].lost_at_end == 0
    await drain(stand.gateway, delay_seconds=0)
    (line,) = log_lines("exchange.finished")
    assert (line["outcome"], line["cause"]) == ("cancelled", LEFT)

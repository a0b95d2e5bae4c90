"""What log, metrics, traces and the status page say of one exchange."""

import asyncio
import json
import time

import pytest

from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.telemetry import Event, Step
from tests.plugins.otel.test_traces import Spans, spans
from tests.support.fake_upstream import READ_ONLY, FakeUpstream, Turn, ask, breaks_when_answered, gives_up, text
from tests.support.logs import Lines
from tests.support.replicas import Gate, steps
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, Client, Stand, eventually, later, leave

__all__ = ["spans"]


async def test_a_plain_call_is_told_by_its_request_alone(log_lines: Lines, client: Client) -> None:
    assert (await client.call()).text == "done"
    assert log_lines(Event.EXCHANGE_FINISHED) == []


async def test_a_call_of_two_rounds_is_logged_and_counted(
    log_lines: Lines, upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(ask)
    _ = await client.answer(await client.call())
    (line,) = log_lines(Event.EXCHANGE_FINISHED)
    assert (line["level"], line["target"], line["rounds"], line["outcome"]) == ("info", "tool", 2, "complete")
    assert "cause" not in line
    assert stand.metric("mcp_gateway_rounds_per_exchange_count") == 1


async def test_a_call_whose_answer_was_refused_at_first_is_logged_as_it_ends(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    upstream.tool(ask)
    upstream.once("answer", lambda turn: turn.reply(401))
    asked = await client.call()
    assert (await client.answer(asked)).status == 401
    assert json.loads((await client.answer(asked)).text) == ACCEPT
    (line,) = log_lines(Event.EXCHANGE_FINISHED)
    assert (line["level"], line["rounds"], line["outcome"]) == ("info", 2, "complete")
    assert "cause" not in line


async def test_a_broken_call_is_a_warning_with_cause_and_fix(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    upstream.tool(lambda turn: turn.reset())
    _ = await client.call()
    (line,) = log_lines(Event.EXCHANGE_FINISHED)
    assert (line["level"], line["outcome"]) == ("warning", "error")
    assert "broke the connection" in line["cause"]
    assert line["fix"]


async def test_an_error_of_the_upstream_is_logged_by_its_code(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    upstream.tool(lambda turn: turn.error(-32000, "secret words"))
    _ = await client.call()
    (line,) = log_lines(Event.EXCHANGE_FINISHED)
    assert (line["level"], line["cause"]) == ("info", "the upstream answered with error -32000")


async def test_a_cancellation_that_the_upstream_refuses_is_logged(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    upstream.tool(lambda turn: turn.for_ever())
    error = {"code": -32600, "message": "not now"}
    upstream.on(mcp.CANCELLED, lambda turn: turn.reply(400, {"jsonrpc": "2.0", "id": None, "error": error}))
    call = later(client.call())
    _ = await upstream.saw("tools/call")
    await leave(call)
    await eventually(lambda: log_lines(Event.UPSTREAM_FAILED))
    assert "refused a message" in log_lines(Event.UPSTREAM_FAILED)[0]["cause"]


async def test_the_status_page_names_no_expiry_while_a_client_waits(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    gate = Gate(upstream)
    answer = later(client.answer(await client.call()))
    _ = await upstream.saw("answer")
    (driver,) = stand.gateway.lot
    assert driver.glance(time.monotonic()).expires_in_seconds is None
    gate.go.set()
    assert (await answer).text == "done"


async def test_the_span_of_the_upstream_call_ends_as_the_upstream_ended_it(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    stand = await begin(traces=spans.traces())

    async def unusable(turn: Turn) -> None:
        turn.reply(body={"jsonrpc": "2.0", "id": turn.id, "result": 7})

    async def failed(turn: Turn) -> None:
        await turn.result({**text("no"), "isError": True})

    upstream.each(
        "tools/call", lambda turn: turn.result(text("ok")), failed, lambda turn: turn.error(-7, ""), unusable
    )
    for _ in range(4):
        _ = await stand.client().call()
    await eventually(lambda: len(spans.calls) == 4)
    found = [(span.attributes or {}).get("error.type") for span in spans.calls]
    assert found == [None, "tool_error", "-7", "-32603"]


async def _run_again(upstream: FakeUpstream, client: Client) -> None:
    upstream.tools = [READ_ONLY]
    upstream.each("tools/call", breaks_when_answered, lambda turn: turn.result(text("ok")))
    assert (await client.answer(await client.call())).text == "ok"


async def test_the_span_of_a_lost_call_says_nothing_of_the_run_that_follows(
    upstream: FakeUpstream, begin: Start, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    stand = await begin(traces=spans.traces())
    client, lost = stand.client(), asyncio.Event()

    upstream.tools = [READ_ONLY]
    upstream.each("tools/call", gives_up(lost, Turn.reset), lambda turn: turn.result(text("ok")))
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    lost.set()
    await eventually(lambda: driver.glance(0.0).state == State.BROKEN)
    assert (await client.answer(asked)).text == "ok"
    assert "ended span" not in caplog.text


async def test_the_step_by_which_a_retry_continued_is_counted(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    await _run_again(upstream, client)
    assert steps(stand) == {"held": 1, "replayed": 1}


async def test_the_span_of_a_retry_names_the_step_by_which_it_continued(
    upstream: FakeUpstream, begin: Start, spans: Spans
) -> None:
    stand = await begin(traces=spans.traces())
    await _run_again(upstream, stand.client())
    assert any(Step.REPLAYED in map(str, (span.attributes or {}).values()) for span in spans.rounds)

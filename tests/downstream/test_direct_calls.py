"""Calls that a connection begins with the bytes of their requests, and what becomes of them if anything deviates."""

import json

import pytest

from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, Turn, asks, text
from tests.support.known_calls import LABELS, Gate, arguments, calling, known, reply, request, retry_of, said, status
from tests.support.noted_connections import NotedConnection
from tests.support.raw_connection import RawConnection, raw_connection
from tests.support.stand import Start
from tests.support.workbench import Stand, eventually, later


@pytest.fixture(autouse=True)
def _formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arguments, "arguments", {"a": 1})


def direct(stand: Stand) -> int:
    """How many such calls are in flight."""
    return stand.gateway.downstream.direct.in_flight


async def caught(stand: Stand, gate: Gate, raw: RawConnection, *lines: str) -> bytes:
    """Have a direct call wait at its tool; returns its request."""
    sent = request(stand, *lines)
    await known(stand, raw, sent)
    await gate.catch(stand, raw, sent)
    assert direct(stand) == 1
    return sent


async def two_sessions(stand: Stand, gate: Gate, raw: RawConnection, other: RawConnection) -> bytes:
    """Have two sessions idle; returns a request that is known."""
    sent = request(stand)
    await known(stand, raw, sent)
    gate.opened.clear()
    for each in (raw, other):
        await each.send(sent)
    await eventually(lambda: stand.gateway.downstream.in_flight == 2)
    gate.opened.set()
    for each in (raw, other):
        assert await status(each) == 200
    await eventually(lambda: stand.sessions("idle") == 2)
    return sent


async def test_it_takes_no_coroutine_and_counts_once(
    accepted: list[NotedConnection], stand: Stand, gate: Gate
) -> None:
    async with raw_connection(stand) as raw:
        _ = await caught(stand, gate, raw)
        assert stand.busy_tasks() == []
        gate.opened.set()
        head, body = await reply(raw)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert json.loads(body)["result"]["content"] == text("tool")["content"]
        await eventually(lambda: stand.gateway.downstream.in_flight == 0)
        assert not accepted[-1].is_serving
    assert stand.metric("mcp_server_operation_duration_seconds_count", **LABELS) == 4
    assert stand.sessions("idle") == 1


async def test_another_client_asks_at_the_same_time(stand: Stand, gate: Gate) -> None:
    async with raw_connection(stand) as raw, raw_connection(stand) as other:
        sent = await caught(stand, gate, raw)
        await other.send(sent)
        await eventually(lambda: stand.gateway.downstream.in_flight == 2)
        assert direct(stand) == 1, "no session is idle for the second one"
        gate.opened.set()
        for each in (raw, other):
            assert await status(each) == 200


async def test_a_question_makes_an_exchange_of_it(upstream: FakeUpstream, stand: Stand, gate: Gate) -> None:
    async def asking(turn: Turn) -> None:
        await gate.opened.wait()
        await turn.elicit("Name")
        await turn.result(text("done"))

    async with raw_connection(stand) as raw:
        await known(stand, raw, request(stand))
        upstream.tool(asking)
        await gate.catch(stand, raw, request(stand))
        assert direct(stand) == 1
        gate.opened.set()
        _, asked = await reply(raw)
        assert (direct(stand), stand.held) == (0, 1)
        await eventually(lambda: stand.gateway.downstream.in_flight == 0)
        await raw.send(retry_of(stand, asked))
        assert await said(raw) == "done"


async def test_a_client_gets_its_keep_alive(begin: Start, gate: Gate) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.2})
    async with raw_connection(stand) as raw:
        _ = await caught(stand, gate, raw)
        assert b"text/event-stream" in await raw.until(b"\r\n\r\n")
        assert b":\n" in await raw.until(b":\n")
        assert direct(stand) == 0
        gate.opened.set()
        assert b'"tool"' in await raw.until(b"0\r\n\r\n")


async def test_a_client_that_leaves_cancels_it_once(
    accepted: list[NotedConnection], upstream: FakeUpstream, stand: Stand, gate: Gate
) -> None:
    async with raw_connection(stand) as raw:
        _ = await caught(stand, gate, raw)
        assert len(stand.gateway.downstream.legs.running) == 1, "it is an exchange, which no task waits for yet"
        accepted[-1].wire.abort()
        await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    labels = LABELS | {"outcome": "cancelled"}
    assert stand.metric("mcp_server_operation_duration_seconds_count", **labels) == 1
    assert direct(stand) == 0


async def test_a_result_that_is_large_is_written_by_the_task(upstream: FakeUpstream, stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        upstream.tool(lambda turn: turn.result(text("x" * 200_000)))
        await raw.send(sent)
        assert await said(raw) == "x" * 200_000
        await raw.send(sent)
        assert await status(raw) == 200, "the connection goes on"
    assert stand.metric("mcp_server_operation_duration_seconds_count", **LABELS) == 5


async def test_an_error_of_the_server_reaches_the_client(upstream: FakeUpstream, stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        upstream.tool(lambda turn: turn.error(-32050, "odd"))
        await raw.send(sent)
        assert json.loads((await reply(raw))[1])["error"]["code"] == -32603
        upstream.tool(gate)
        await raw.send(sent)
        assert await status(raw) == 200, "the connection goes on"


async def test_a_client_that_does_not_read_its_reply_gets_the_next_one_later(
    accepted: list[NotedConnection], stand: Stand, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw_connection(stand) as raw:
        sent = await caught(stand, gate, raw)
        held = accepted[-1]
        write = held.transport.write

        def fills(data: bytes) -> None:
            """The kernel's buffers cannot be filled on command."""
            write(data)
            held.pause_writing()

        monkeypatch.setattr(held.transport, "write", fills)
        gate.opened.set()
        await eventually(lambda: held.wire.is_writing, "the task waits until the client reads")
        assert held.wire.is_writing
        await raw.send(sent)
        monkeypatch.setattr(held.transport, "write", write)
        held.resume_writing()
        for _ in range(2):
            assert await status(raw) == 200
        await eventually(lambda: not held.wire.is_writing)


@pytest.mark.parametrize("are_all", [False, True], ids=["its connection", "all connections"])
async def test_a_connection_that_is_to_close_closes_behind_its_reply(
    accepted: list[NotedConnection], stand: Stand, gate: Gate, *, are_all: bool
) -> None:
    async with raw_connection(stand) as raw:
        _ = await caught(stand, gate, raw)
        if are_all:
            stand.gateway.client_listener.send_away()
        else:
            accepted[-1].close()
        gate.opened.set()
        answer = await raw.rest()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\nConnection: close\r\n" in answer


async def test_none_begins_once_a_drain_has_begun(stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        stand.gateway.draining.begin(ends_at=None)
        await raw.send(sent)
        assert await status(raw) == 503


async def test_what_was_learnt_before_a_reload_counts_no_more(
    upstream: FakeUpstream, stand: Stand, gate: Gate
) -> None:
    async with calling(stand) as (raw, sent):
        stand.reload(upstream.url, limits={"body_bytes": 100})
        await raw.send(sent)
        assert await status(raw) == 413


async def test_a_tool_that_changes_is_looked_at_again(upstream: FakeUpstream, stand: Stand, gate: Gate) -> None:
    async with raw_connection(stand) as raw:
        sent = await caught(stand, gate, raw)
        gate.opened.set()
        assert await status(raw) == 200
        upstream.side(upstream.of("tools/call")[-1].session).put_nowait(
            b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n'
        )
        listed = len(upstream.of("tools/list"))
        await eventually(lambda: stand.group().tools.by_name is None, "the announcement is heard")
        await raw.send(sent)
        assert await status(raw) == 200
        assert len(upstream.of("tools/list")) == listed + 1


async def test_a_caller_with_too_many_held_calls_is_refused(upstream: FakeUpstream, begin: Start, gate: Gate) -> None:
    stand = await begin(hold={"max_calls_per_principal": 1})

    async with raw_connection(stand) as raw, raw_connection(stand) as other:
        sent = await two_sessions(stand, gate, raw, other)
        upstream.tool(asks("done", "Name"))
        await raw.send(sent)
        _, asked = await reply(raw)
        calls = len(upstream.of("tools/call"))
        await raw.send(sent)
        assert await status(raw) == 429
        assert len(upstream.of("tools/call")) == calls
        await raw.send(retry_of(stand, asked))
        assert await status(raw) == 200


async def test_bodies_that_are_to_be_logged_are_read_as_all_others(begin: Start, gate: Gate) -> None:
    stand = await begin(debug={"bodies": True})
    async with raw_connection(stand) as raw:
        await known(stand, raw, request(stand))
        await gate.catch(stand, raw, request(stand))
        assert direct(stand) == 0
        gate.opened.set()
        assert await status(raw) == 200


async def test_a_listener_that_closes_waits_for_it(accepted: list[NotedConnection], stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (_, sent):
        pass
    await eventually(lambda: not stand.gateway.client_listener.connections)
    async with raw_connection(stand) as raw:  # it has no task yet
        await gate.catch(stand, raw, sent)
        assert direct(stand) == 1
        closing = later(stand.gateway.client_listener.close())
        await eventually(lambda: accepted[-1].wire.is_last)
        gate.opened.set()
        assert await status(raw) == 200
        await closing


async def test_none_begins_while_the_server_may_be_modern(stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        era = stand.gateway.routes.live["/mcp"].upstream.era
        assert era is not None
        for speaks_sse in (True, False):
            era.note_transport(speaks_sse=speaks_sse)
        await gate.catch(stand, raw, sent)
        assert direct(stand) == 0
        gate.opened.set()
        assert await status(raw) == 200

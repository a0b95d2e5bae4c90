"""Requests whose heads are known, because the same bytes came before."""

import asyncio
import json

import pytest

from gateway.parking.lot import Lot
from gateway.server.drain import drain
from tests.support.fake_upstream import FakeUpstream, ask, asks, text
from tests.support.known_calls import LABELS, Gate, arguments, calling, known, reply, request, retry_of, said, status
from tests.support.noted_connections import NotedConnection
from tests.support.noted_timers import Timers
from tests.support.raw_connection import raw_connection
from tests.support.stand import Start
from tests.support.workbench import Stand, eventually, later


@pytest.fixture(params=["by the task", "directly"], autouse=True)
def _served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "directly":
        monkeypatch.setitem(arguments, "arguments", {"a": 1})


async def test_a_call_whose_head_is_known_is_answered_like_any_other(stand: Stand, gate: Gate) -> None:
    async with calling(stand, "X-Request-Id: mine") as (raw, sent):
        await raw.send(sent)
        head, body = await reply(raw)
    assert b"\r\nX-Request-Id: mine\r\n" in head
    assert b"\r\nContent-Type: application/json\r\n" in head
    assert b"connection" not in head.lower()
    assert json.loads(body)["result"]["content"] == text("tool")["content"]
    assert stand.metric("mcp_server_operation_duration_seconds_count", **LABELS) == 4


async def test_requests_sent_ahead_are_answered_in_order(stand: Stand, gate: Gate) -> None:
    first, second = request(stand), request(stand, name="later")
    async with raw_connection(stand) as raw:
        await known(stand, raw, first)
        await known(stand, raw, second)
        await gate.catch(stand, raw, first)
        await raw.send(second[:10])
        budget = stand.gateway.routes.process.traffic.receiving
        await eventually(lambda: budget.used == 20, "the part of a head is counted")
        for part in (second[10:], first + second):
            await raw.send(part)
        gate.opened.set()
        names = [await said(raw) for _ in range(4)]
    assert names == ["tool", "later", "tool", "later"]
    await eventually(lambda: not budget.used, "nothing is counted any more")


async def test_a_client_that_does_not_read_gets_no_second_reply_yet(
    stand: Stand, gate: Gate, accepted: list[NotedConnection]
) -> None:
    async with calling(stand) as (raw, sent):
        held = accepted[-1]
        held.pause_writing()
        await raw.send(sent)
        await eventually(lambda: held.wire.is_writing, "the reply waits until the client reads")
        assert stand.gateway.downstream.in_flight == 0
        held.resume_writing()
        assert await status(raw) == 200


async def test_what_a_client_sends_ahead_while_it_does_not_read_is_counted(
    stand: Stand, gate: Gate, accepted: list[NotedConnection]
) -> None:
    sent, padded = request(stand), request(stand, f"X-Padding: {'x' * 5_000}")
    budget = stand.gateway.routes.process.traffic.receiving
    async with raw_connection(stand) as raw:
        await known(stand, raw, sent)
        held = accepted[-1]
        held.pause_writing()
        held.data_received(padded)
        await eventually(lambda: held.wire.is_writing, "the reply waits until the client reads")
        held.data_received(padded * 2 + padded[:100])
        assert budget.used == 2 * (2 * len(padded) + 100), "it waits as long as the client does not read"
        held.resume_writing()
        held.data_received(padded[100:])
        for _ in range(4):
            assert await status(raw) == 200
    await eventually(lambda: not budget.used, "nothing is counted any more")


async def test_what_a_head_decided_is_decided_anew_after_a_reload(
    upstream: FakeUpstream, stand: Stand, gate: Gate
) -> None:
    async with calling(stand, "Authorization: Bearer a") as (raw, sent):
        stand.reload(upstream.url, security={"allowed_hosts": ["other.example"]})
        await raw.send(sent)
        assert await status(raw) == 403
    assert gate.ended == [True] * 3


async def test_a_request_that_waits_behind_another_one_is_decided_anew_after_a_reload(
    upstream: FakeUpstream, stand: Stand, gate: Gate, accepted: list[NotedConnection]
) -> None:
    async with calling(stand, "Authorization: Bearer a") as (raw, sent):
        await gate.catch(stand, raw, sent)
        accepted[-1].data_received(sent)
        stand.reload(upstream.url, security={"allowed_hosts": ["other.example"]})
        gate.opened.set()
        assert await status(raw) == 200, "it began before"
        assert await status(raw) == 403
    assert gate.ended == [True] * 4


async def test_a_client_may_leave_as_soon_as_its_request_is_here(
    stand: Stand, gate: Gate, accepted: list[NotedConnection]
) -> None:
    async with calling(stand) as (_, sent):
        held, gate.opened = accepted[-1], asyncio.Event()
        held.data_received(sent)
        held.wire.abort()
        await eventually(lambda: not stand.metric("mcp_gateway_connections"))
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    gate.opened.set()


async def test_a_question_in_such_a_call_reaches_the_client(upstream: FakeUpstream, stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        upstream.tool(asks("done", "Name"))
        await raw.send(sent)
        _, asked = await reply(raw)
        retry = retry_of(stand, asked)
        for _ in range(3):  # the repeated ones get the kept result
            await raw.send(retry)
            assert await said(raw) == "done"


@pytest.mark.parametrize("changed", [b"tools/call", b"jsonrpc", b"2026-07-28", b"tool"])
async def test_such_a_request_is_checked_like_any_other(stand: Stand, gate: Gate, changed: bytes) -> None:
    async with calling(stand) as (raw, sent):
        calls = len(gate.ended)
        await raw.send(sent.replace(b'"%b"' % changed, b'"%b"' % (b"x" * len(changed))))
        head, body = await reply(raw)
        assert b" 400 " in head
        assert "error" in json.loads(body)
        await raw.send(sent)
        assert await status(raw) == 200, "the connection goes on"
    assert len(gate.ended) == calls + 1
    assert stand.gateway.downstream.in_flight == 0


async def test_a_notification_under_a_known_head_is_202(stand: Stand, gate: Gate) -> None:
    sent = request(stand)
    head, end, body = sent.partition(b"\r\n\r\n")
    async with raw_connection(stand) as raw:
        await known(stand, raw, sent)
        await raw.send(head + end + b'{"jsonrpc":"2.0","method":"notifications/x"}'.ljust(len(body)))
        answer, nothing = await reply(raw)
        assert (b" 202 " in answer, nothing) == (True, b"")
        await raw.send(sent)
        assert await status(raw) == 200, "the connection goes on"
    assert len(gate.ended) == 4


@pytest.mark.parametrize(
    "more", [-5, 0, 40], ids=["a part of its body", "its body", "its body and a part of the next request"]
)
async def test_a_known_head_may_come_before_its_body(stand: Stand, gate: Gate, more: int) -> None:
    sent = request(stand)
    head, end, body = sent.partition(b"\r\n\r\n")
    async with raw_connection(stand) as raw:
        await known(stand, raw, sent)
        await raw.send(head + end)
        await eventually(lambda: stand.gateway.downstream.in_flight == 1, "it waits for the body")
        rest = body + sent
        await raw.send(rest[: len(body) + more])
        await asyncio.sleep(0.01)  # a packet of its own
        await raw.send(rest[len(body) + more :])
        for _ in range(2):
            assert await status(raw) == 200
    assert gate.ended == [True] * 5


async def test_a_client_may_leave_after_its_head(stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        await raw.send(sent.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        await eventually(lambda: stand.gateway.downstream.in_flight == 1, "it waits for the body")
    await eventually(lambda: not stand.metric("mcp_gateway_connections"))
    await eventually(lambda: stand.gateway.downstream.in_flight == 0)
    assert gate.ended == [True] * 3


IDLE_SECONDS = 75.0


async def test_a_connection_that_waits_for_a_body_is_not_idle(timers: Timers, stand: Stand, gate: Gate) -> None:
    head, end, body = request(stand).partition(b"\r\n\r\n")
    async with raw_connection(stand) as raw:
        await known(stand, raw, head + end + body)
        await raw.send(head + end)
        await eventually(lambda: stand.gateway.downstream.in_flight == 1, "it waits for the body")
        timers.ring(IDLE_SECONDS)
        await raw.send(body)
        assert await status(raw) == 200
        assert [each.cancelled() for each in timers.of(IDLE_SECONDS)] == [True, False], "its idle time begins anew"


async def test_a_body_in_pieces_is_waited_for(stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        for part in (sent[:-20], sent[-20:] + sent[:30], sent[30:]):
            await raw.send(part)
        for _ in range(2):
            assert await status(raw) == 200
    assert gate.ended == [True] * 5


async def test_a_known_head_may_ask_for_leave_to_send_its_body(stand: Stand, gate: Gate) -> None:
    head, end, body = request(stand, "Expect: 100-continue").partition(b"\r\n\r\n")
    async with raw_connection(stand) as raw:
        await known(stand, raw, head + end + body)  # leave is not needed for what is here
        await raw.send(head + end)
        assert await raw.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(body)
        assert await status(raw) == 200
    assert gate.ended == [True] * 4


async def test_the_last_request_of_a_connection_may_have_a_known_head(stand: Stand, gate: Gate) -> None:
    for _ in range(3):
        async with raw_connection(stand) as raw:
            await raw.send(request(stand, "Connection: close"))
            assert (await raw.rest()).startswith(b"HTTP/1.1 200 OK\r\n")
    assert gate.ended == [True] * 3


async def test_a_bug_before_the_call_ends_it(stand: Stand, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    async with calling(stand) as (raw, sent):
        calls = len(gate.ended)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Lot, "check", broken)
        await raw.send(sent)
        if arguments:
            assert await raw.rest() == b"", "nobody knows how far it came"
        else:
            assert json.loads((await reply(raw))[1])["error"]["code"] == -32603
    stand.planted_bugs += 1
    assert len(gate.ended) == calls
    assert stand.gateway.downstream.in_flight == 0


async def test_a_drain_waits_for_such_calls(begin: Start, gate: Gate) -> None:
    stand = await begin(hold={"drain_seconds": 5})
    async with calling(stand) as (raw, sent):
        await gate.catch(stand, raw, sent)
        draining = later(drain(stand.gateway, delay_seconds=0))
        await eventually(lambda: stand.gateway.draining.has_begun)
        gate.opened.set()
        assert await status(raw) == 200
        await draining


async def test_a_long_call_outlives_the_time_of_an_idle_connection(timers: Timers, stand: Stand, gate: Gate) -> None:
    async with calling(stand) as (raw, sent):
        await gate.catch(stand, raw, sent)
        timers.ring(IDLE_SECONDS)
        gate.opened.set()
        assert await status(raw) == 200
        await raw.send(sent)
        assert await status(raw) == 200
        timers.ring(IDLE_SECONDS)
        assert await raw.rest() == b"", "an idle connection ends with its time"


# -- the caller of a known head ---------------------------------------------------------------------------------------

PROXY, STRANGER = "127.0.0.2", "127.0.0.3"


async def test_a_known_head_in_which_a_proxy_names_a_user_names_nobody_from_elsewhere(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    stand = await begin(principal={"source": "header", "header": "X-User", "trusted_proxies": [PROXY]})
    async with raw_connection(stand, own=PROXY) as proxy:
        await proxy.send(request(stand, "X-User: ada"))
        retry = retry_of(stand, (await reply(proxy))[1], "X-User: ada")
        await known(stand, proxy, retry)
    async with raw_connection(stand, own=STRANGER) as stranger:
        await stranger.send(retry)
        assert await status(stranger) == 400
    assert stand.metric("mcp_gateway_state_rejected_total", reason="other_principal") == 1


# -- requests of legacy clients ---------------------------------------------------------------------------------------


def legacy_request(stand: Stand, *lines: str) -> bytes:
    """A call of a legacy client in a session of its server."""
    body = b'{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"tool"}}'
    head = [f"Host: {stand.gateway.listen}", "Accept: application/json, text/event-stream"]
    head += [
        "Content-Type: application/json",
        "MCP-Protocol-Version: 2025-06-18",
        *lines,
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(["POST /mcp HTTP/1.1", *head, "", ""]).encode() + body


@pytest.mark.parametrize("lines", [(), ("Mcp-Session-Id: theirs",), ("Mcp-Session-Id: mrtr1.none.of-ours",)])
async def test_a_legacy_request_whose_head_is_known_passes_like_any_other(
    upstream: FakeUpstream, stand: Stand, gate: Gate, lines: tuple[str, ...]
) -> None:
    sent = legacy_request(stand, "Authorization: Bearer a", "X-Request-Id: mine", *lines)
    async with raw_connection(stand) as raw:
        replies = []
        for _ in range(4):
            await raw.send(sent)
            replies.append(await reply(raw))
    assert len({head for head, _ in replies}) <= 2, "but for the date, they are the same"
    assert all(b"\r\nX-Request-Id: mine\r\n" in head for head, _ in replies)
    assert {json.loads(body)["result"]["content"][0]["text"] for _, body in replies} == {"tool"}
    first, *others = [dict(seen.headers) for seen in upstream.seen if seen.headers.get("Authorization") == "Bearer a"]
    assert others == [first] * 3


async def test_what_a_legacy_head_decided_is_decided_anew_after_a_reload(
    upstream: FakeUpstream, stand: Stand, gate: Gate
) -> None:
    sent = legacy_request(stand, "X-Dropped: a")
    async with raw_connection(stand) as raw:
        await known(stand, raw, sent)
        assert upstream.seen[-1].headers["X-Dropped"] == "a"
        stand.reload(upstream.url, route={"drop_headers": ["X-Dropped"]})
        await known(stand, raw, sent)
        assert "X-Dropped" not in upstream.seen[-1].headers
        stand.reload(upstream.url, security={"allowed_hosts": ["other.example"]})
        await raw.send(sent)
        assert await status(raw) == 403
    assert gate.ended == [True] * 6

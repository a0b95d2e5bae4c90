"""Connections whose clients do not read: what waits for them is in a budget, and has a deadline."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.config import InForce, Limits, Timeouts
from gateway.http.server.connection import Connection, Service
from gateway.http.server.listener import Listener
from gateway.http.server.request import HttpRequest, RequestBody
from gateway.http.server.response import WholeResponse
from gateway.http.server.traffic import Traffic
from gateway.telemetry import Metrics
from tests.support.authority import Authority
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.raw_connection import RawConnection, raw_connection, request_head
from tests.support.stand import Start
from tests.support.turns import TINY_CHUNKS, Turns
from tests.support.workbench import ACCEPT, Stand, eventually

LARGE = text("x" * 12_000_000)


async def large(turn: Turn) -> None:
    await turn.result(LARGE)


async def large_stream(turn: Turn) -> None:
    await turn.progress(1)
    await turn.result(LARGE)


async def chatty(turn: Turn) -> None:
    """Send 15 MB of notifications."""
    for number in range(300):
        await turn.progress(number, message="x" * 50_000)
    await turn.result(text("done"))


def fill(stand: Stand) -> None:
    """Use up the budget, as another client would that began to fall behind just now."""
    budget = stand.gateway.routes.process.traffic.sending
    share = budget.share(lambda: None)
    share.hold(budget.limit)
    share.release()


async def behind(stand: Stand, raw: RawConnection, params: dict[str, Any] | None = None) -> None:
    """Send a call, and wait until its client is far behind."""
    params = params or {"name": "tool"}
    headers, body = stand.client().build("tools/call", params, meta={"progressToken": 1})
    await raw.send(request_head(stand, headers, body))
    await eventually(lambda: stand.gateway.routes.process.traffic.sending.used > 500_000, "the client is behind")


@pytest.mark.parametrize("tool", [large, large_stream, chatty])
async def test_the_client_that_is_behind_longest_is_cut_off(
    upstream: FakeUpstream, begin: Start, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.outbox.BEHIND_BYTES", 10_000_000)
    stand = await begin()
    upstream.tool(tool)
    async with raw_connection(stand) as raw:
        await behind(stand, raw)
        fill(stand)
        await eventually(lambda: stand.gateway.downstream.in_flight == 0, "the call ends")
        assert not (await raw.rest()).endswith((b"}", b"\r\n0\r\n\r\n")), "the reply is cut, not complete"
    traffic = stand.gateway.routes.process.traffic
    await eventually(lambda: not traffic.sending.used, "nothing is counted any more")
    assert traffic.sending.used == 0
    assert traffic.sending.given_way == (2 if tool is chatty else 1), "the connection, and the notifications"


@pytest.mark.parametrize("tool", [large, large_stream, chatty])
async def test_a_client_that_reads_at_last_gets_everything(
    upstream: FakeUpstream, begin: Start, tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.outbox.BEHIND_BYTES", 20_000_000)
    stand = await begin()
    upstream.tool(tool)
    async with raw_connection(stand) as raw:
        await behind(stand, raw)
        reply = await raw.rest()
    assert reply.count(b"x") >= 12_000_000
    assert reply.endswith(b"}" if tool is large else b"\r\n0\r\n\r\n")
    await eventually(lambda: not stand.gateway.routes.process.traffic.sending.used, "nothing is counted any more")
    assert stand.gateway.routes.process.traffic.sending.used == 0


async def test_a_result_whose_reply_was_cut_is_there_for_a_repeated_retry(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin()

    async def tool(turn: Turn) -> None:
        await turn.elicit("Name")
        await turn.result(LARGE)

    upstream.tool(tool)
    client = stand.client()
    asked = await client.call()
    answers = dict.fromkeys(asked.questions, ACCEPT)
    retry = {"name": "tool", "arguments": {}, "requestState": asked.state, "inputResponses": answers}
    async with raw_connection(stand) as raw:
        await behind(stand, raw, retry)
        fill(stand)
        await eventually(lambda: stand.gateway.downstream.in_flight == 0, "the reply is cut")
    assert (await client.answer(asked)).result["content"] == LARGE["content"]
    assert len(upstream.of("tools/call")) == 1


async def test_the_rest_of_a_large_reply_is_counted_over_tls_too(
    upstream: FakeUpstream, begin: Start, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    stand = await begin(tls={"cert_file": str(authority.sign("server"))})
    upstream.tool(large)
    trusting = ssl.create_default_context(cafile=authority.file)
    headers, body = stand.client().build("tools/call", {"name": "tool"})
    host, port = stand.gateway.listen.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    writer.write(request_head(stand, headers, body))
    await eventually(lambda: stand.gateway.routes.process.traffic.sending.used > 5_000_000, "the client is behind")
    fill(stand)
    await eventually(lambda: stand.gateway.downstream.in_flight == 0, "the call ends")
    writer.transport.abort()
    _ = reader


@asynccontextmanager
async def listening(
    send_seconds: float, body: bytes, served: Callable[[], object] = lambda: None
) -> AsyncIterator[tuple[Listener, str]]:
    """A listener whose handler returns one whole body."""

    async def handle(http: HttpRequest) -> WholeResponse:
        _ = served()
        return WholeResponse(body)

    traffic = Traffic(InForce(Limits()), InForce(Timeouts(send_seconds=send_seconds)), Metrics("0"))
    listener = Listener(handle, "127.0.0.1:0", traffic)
    address = await listener.start()
    try:
        yield listener, address
    finally:
        await listener.close()


async def test_a_client_that_does_not_read_a_whole_body_is_cut_off(stand: Stand) -> None:
    async with listening(0.1, b"x" * 20_000_000) as (listener, address), raw_connection(stand, address) as raw:
        await raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await raw.line()
        await eventually(lambda: not listener.connections, "the connection is closed")
        assert len(await raw.rest()) < 20_000_000


@pytest.mark.usefixtures("busy_clock")
async def test_many_requests_at_once_let_others_run(stand: Stand) -> None:
    count = 30
    turns = Turns()
    async with listening(5, b"ok", turns.note) as (_, address), raw_connection(stand, address) as raw:
        with turns:
            await raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
            for _ in range(count):
                await raw.until(b"\r\n\r\nok")
        assert len(turns.noted) >= count // 2


@pytest.mark.usefixtures("busy_clock")
async def test_a_body_in_tiny_chunks_that_nobody_wants_lets_others_run(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, read = Turns(), RequestBody.read

    async def noted(body: RequestBody) -> bytes:
        turns.note()
        return await read(body)

    monkeypatch.setattr(RequestBody, "read", noted)
    async with listening(5, b"ok") as (_, address), raw_connection(stand, address) as raw:
        with turns:
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            await raw.send(head + TINY_CHUNKS * 8 + b"0\r\n\r\n")
            await raw.until(b"\r\n\r\nok")
            await eventually(lambda: len(turns.noted) > len(TINY_CHUNKS) * 8 // 6 // 4096 // 2)


async def test_a_client_that_does_not_read_that_its_request_failed_is_cut_off() -> None:
    async def fail(_: HttpRequest) -> WholeResponse:
        raise ZeroDivisionError

    traffic = Traffic(InForce(Limits()), InForce(Timeouts(send_seconds=0.01)), Metrics("0"))
    connection = Connection(Service(fail, traffic))
    known = {"is_closing.return_value": False, "get_write_buffer_size.return_value": 1}
    out = Mock(write=lambda _: connection.pause_writing(), **known)
    connection.connection_made(out)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await eventually(lambda: out.abort.called)
    connection.connection_lost(None)


BEHIND = b"GET /behind HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b" 200 "),
        (b"GET /last HTTP/1.0\r\nHost: x\r\n\r\n", b" 200 "),
        (b"GET  /last HTTP/1.1\r\nHost: x\r\n\r\n", b" 400 "),
    ],
)
@pytest.mark.parametrize("is_in_one", [True, False])
async def test_nothing_is_served_behind_the_last_request(last: bytes, status: bytes, *, is_in_one: bool) -> None:
    """TLS hands over what comes until the client closes its side too."""
    served: list[str] = []

    async def serve(http: HttpRequest) -> WholeResponse:
        served.append(http.head.path)
        return WholeResponse()

    connection = Connection(Service(serve, Traffic(InForce(Limits()), InForce(Timeouts()), Metrics("0"))))
    out = Mock()
    out.is_closing = lambda: out.close.called
    connection.connection_made(out)
    for sent in [last + BEHIND] if is_in_one else [last, BEHIND]:
        connection.data_received(sent)
    await eventually(lambda: out.close.called)
    connection.data_received(BEHIND)
    await asyncio.sleep(0)
    assert served == ([] if b"400" in status else ["/last"])
    assert status in out.write.call_args_list[0].args[0]
    assert len(out.write.call_args_list) == 1
    connection.connection_lost(None)

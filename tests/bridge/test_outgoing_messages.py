"""The messages that the upstream gets beside a call: cancellations, and answers without the client."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gateway.bridge.outgoing_messages import Outgoing
from gateway.protocol import mcp
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from gateway.upstream.channel import Sending
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import later
from tests.support.workbench import Client, Stand, eventually, leave


async def test_leaving_in_the_first_round_cancels_at_once_and_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await ended.wait()
        await turn.error(0, "cancelled") if turn.response is None else await turn.result(text("too late"))

    upstream.tool(tool)
    call = later(client.call())
    await upstream.saw("tools/call")
    await leave(call)
    cancelled = (await upstream.saw(mcp.CANCELLED))[0]
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert cancelled.session == upstream.of("tools/call")[0].session
    assert stand.sessions("quarantined") == 1
    assert "DELETE" not in upstream.words, "never under a pending call"
    ended.set()
    await upstream.saw("DELETE")
    await eventually(lambda: stand.sessions("quarantined") == 0)
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_a_request_that_no_client_knows_is_method_not_found(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        answer = await turn.ask("tasks/list")
        await turn.result(text(str(answer["error"]["code"])))

    upstream.tool(tool)
    assert (await client.call()).text == "-32601"


class Messages:
    """The messages beside one call, of which the test accepts those that are sent by callback."""

    def __init__(self) -> None:
        self.tasks = Tasks(Metrics("0"))
        process = SimpleNamespace(tasks=self.tasks)
        context: Any = SimpleNamespace(live=SimpleNamespace(process=process), headers={})
        self.outgoing = Outgoing(context, SimpleNamespace())  # type: ignore[arg-type]  (no message needs its report)
        self.begun: list[tuple[Callable[[], None], Callable[[Sending], None]]] = []
        self.sent: list[str] = []

    def begin(self, accepted: Callable[[], None], unusual: Callable[[Sending], None]) -> bool:
        self.begun.append((accepted, unusual))
        return True

    async def send(self, rest: Sending | None) -> None:
        if rest is not None:
            await rest
        self.sent.append("awaited" if rest is not None else "answer")

    async def other(self) -> None:
        self.sent.append("other")


async def test_messages_wait_for_an_answer_that_is_sent_by_callback() -> None:
    messages = Messages()
    messages.outgoing.put_begun(messages.begin, messages.send)
    messages.outgoing.put(messages.other)
    messages.outgoing.put_begun(messages.begin, messages.send)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (messages.sent, len(messages.begun), messages.outgoing.is_sending) == ([], 1, True)
    messages.begun[0][0]()
    await messages.tasks.settle(60)
    assert (messages.sent, messages.outgoing.is_sending) == (["other", "answer"], False)


async def test_messages_wait_for_an_answer_that_takes_a_coroutine() -> None:
    messages, go = Messages(), asyncio.Event()

    async def rest() -> None:
        _ = await go.wait()

    messages.outgoing.put_begun(messages.begin, messages.send)
    messages.outgoing.put(messages.other)
    messages.begun[0][1](rest())
    for _ in range(5):
        await asyncio.sleep(0)
    assert messages.sent == []
    go.set()
    await messages.tasks.settle(60)
    assert (messages.sent, messages.outgoing.is_sending) == (["awaited", "other"], False)


async def test_a_held_call_that_is_left_frees_its_session_at_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    closed = asyncio.Event()

    async def tool(turn: Turn) -> None:
        try:
            _ = await turn.elicit("name")
        finally:
            closed.set()

    upstream.tool(tool)
    _ = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    session = driver._upstream_call.session
    assert session is not None
    assert session.in_flight is not None
    session.leave(session.in_flight)
    assert not session.pending, "no task would notice later"
    await closed.wait()
    driver.expire()

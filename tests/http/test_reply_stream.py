"""The messages of a queue on their way to a reply."""

from typing import Any

import pytest

from gateway.config import InForce
from gateway.http.outbox import FinalMessage, Item
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response, WholeResponse
from gateway.protocol import sse
from gateway.runtime.budget import Budget, Share
from gateway.telemetry import Ending
from tests.support.turns import work_gives_way

EVENT, OWN = b"data: 1\n\n", b"id: 2\ndata: {}\n\n"


class FakeQueue:
    """A FAKE queue that has these items."""

    def __init__(self, *items: Item) -> None:
        self.items = list(items)
        self.is_written = False

    @property
    def is_ready(self) -> bool:
        return bool(self.items)

    async def take(self) -> Item:
        assert self.is_written
        return self.items.pop(0)

    def begin_writing(self, _: object) -> None:
        self.is_written = True

    def end_writing(self) -> None:
        self.is_written = False


class FakeReply(ReplyWriter):
    """A FAKE reply that writes down what its client gets."""

    def __init__(self) -> None:
        self.got: list[bytes | str] = []

    def share_unread(self) -> Share:
        return Budget("limits.sending_bytes", InForce(0)).share(lambda: None)

    async def start(self) -> None:
        assert not self.started
        self.started = True

    async def write(self, data: bytes) -> None:
        assert self.started
        self.got.append(data)

    async def end(self, _: Ending) -> Response:
        assert self.started
        self.got.append("end")
        return WholeResponse()

    async def only(self, final: FinalMessage) -> Response:
        self.got.append(f"only {final.body.decode()}")
        return WholeResponse()


@pytest.mark.parametrize(
    ("items", "keeps_alive", "event", "got"),
    [
        ((FinalMessage(b"{}"),), True, OWN, ["only {}"]),
        ((EVENT, FinalMessage(b"{}")), True, b"", [EVENT, sse.encode(b"{}"), "end"]),
        ((EVENT, FinalMessage(b"{}")), True, OWN, [EVENT, OWN, "end"]),
        ((FinalMessage(b""),), True, OWN, ["end"]),
        ((EVENT, FinalMessage(b"")), True, OWN, [EVENT, "end"]),
        ((None, FinalMessage(b"{}")), True, b"", [sse.KEEP_ALIVE, sse.encode(b"{}"), "end"]),
        ((None, FinalMessage(b"{}")), False, b"", ["only {}"]),
    ],
)
async def test_a_client_gets_one_body_or_a_stream(
    items: tuple[Item, ...], event: bytes, got: list[bytes | str], *, keeps_alive: bool
) -> None:
    queue: Any = FakeQueue(*items)
    reply = FakeReply()
    last = await reply.deliver(queue, keeps_alive=keeps_alive)
    assert not queue.is_written
    _ = await reply.finish(last, event)
    assert reply.got == got


async def test_the_first_item_may_come_after_something_else() -> None:
    queue: Any = FakeQueue(FinalMessage(b""))
    reply = FakeReply()

    async def first() -> Item:
        await reply.start()
        await reply.write(EVENT)
        return await queue.take()

    _ = await reply.deliver(queue, first())
    assert reply.got == [EVENT]


@pytest.mark.usefixtures("busy_clock")
async def test_many_messages_that_wait_let_others_run() -> None:
    queue: Any = FakeQueue(*[EVENT] * 100, FinalMessage(b"{}"))
    reply = FakeReply()
    assert await work_gives_way(reply.deliver(queue))
    assert reply.got == [EVENT] * 100

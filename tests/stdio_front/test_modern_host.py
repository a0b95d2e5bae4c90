"""The requests of a modern host, apart from what serves them."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import ReplyWriter
from gateway.http.server.response import Response, WholeResponse
from gateway.protocol.errors import IdInUse
from gateway.runtime.tasks import Tasks
from gateway.stdio_front.modern_host import ModernHost
from gateway.telemetry import Metrics
from tests.support.workbench import eventually


class Handler:
    """A FAKE request handler that notes what it is given, and answers when it is told to."""

    def __init__(self) -> None:
        self.served: list[Incoming] = []
        self.may_answer = asyncio.Event()

    async def handle_message(self, incoming: Incoming, reply: ReplyWriter, _live: object) -> Response:
        self.served.append(incoming)
        await self.may_answer.wait()
        await reply.start()
        await reply.write(b"event: message\ndata: {}\n\n: a comment\n\n")
        await reply.whole(FinalMessage(b"[]"))
        return WholeResponse()


def served_by(handler: Any, host: Any, tasks: Tasks | None = None) -> ModernHost:
    live = Mock()
    live.process.tasks = tasks or Tasks(Metrics("test"))
    live.config.limits.event_bytes = 1000
    live.route.path = "/mcp"
    return ModernHost(host, handler, live)


async def test_two_open_requests_cannot_have_the_same_id() -> None:
    handler = Handler()
    modern = served_by(handler, Mock())
    for id_ in (b'"a"', b"1", b'"1"'):
        modern.receive(b'{"jsonrpc":"2.0","id":%b,"method":"tools/list","params":{}}' % id_)
    with pytest.raises(IdInUse) as refused:
        modern.receive(b'{"jsonrpc":"2.0","id":"\\u0061","method":"tools/list","params":{}}')
    assert refused.value.request_id is None, "it would end the other request"
    await asyncio.sleep(0)
    assert len(handler.served) == 3
    modern.receive(b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"\\u0061"}}')
    modern.close()
    await eventually(lambda: not modern.is_busy)


async def test_a_host_that_is_gone_fails_no_task() -> None:
    async def write(_: bytes) -> None:
        raise ConnectionResetError

    handler, tasks = Handler(), Tasks(Metrics("test"))
    modern = served_by(handler, Mock(write=write), tasks)
    modern.receive(b'{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{}}')
    handler.may_answer.set()
    await eventually(lambda: not modern.is_busy)
    assert tasks.failures == 0

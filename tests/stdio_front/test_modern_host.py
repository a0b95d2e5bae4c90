"""The requests of a modern host, apart from the process that serves them."""

import asyncio
import json
from unittest.mock import Mock

from gateway.protocol.errors import CallLost
from gateway.protocol.request import ParsedBody
from gateway.runtime.tasks import Tasks
from gateway.stdio_front.modern_host import ModernHost
from gateway.telemetry import Metrics


async def test_an_error_of_the_gateway_keeps_its_reason() -> None:
    async def fails(_parsed: ParsedBody, _line: bytes) -> None:
        raise CallLost("gone")

    host, tasks = Mock(), Tasks(Metrics("test"))
    modern = ModernHost(host, fails, tasks)
    modern.receive(b'{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{}}')
    while modern.is_busy:
        await asyncio.sleep(0)
    answer = json.loads(host.send.call_args.args[0])
    assert answer["error"] == {"code": -32603, "message": "gone", "data": {"reason": "call_lost"}}


async def test_two_open_requests_cannot_have_the_same_id() -> None:
    served: list[bytes] = []

    async def waits(_: ParsedBody, line: bytes) -> None:
        served.append(line)
        await asyncio.Event().wait()

    host = Mock()
    modern = ModernHost(host, waits, Tasks(Metrics("test")))
    for id_ in (b'"a"', b'"\\u0061"', b"1", b'"1"'):
        modern.receive(b'{"jsonrpc":"2.0","id":%b,"method":"tools/list","params":{}}' % id_)
    await asyncio.sleep(0)
    answer = json.loads(host.send.call_args.args[0])
    assert ("id" in answer, answer["error"]["code"]) == (False, -32600)
    assert len(served) == 3
    modern.receive(b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"\\u0061"}}')
    modern.close()
    while modern.is_busy:
        await asyncio.sleep(0)


async def test_a_request_that_a_fault_of_the_gateway_ends_is_answered() -> None:
    async def fails(_parsed: ParsedBody, _line: bytes) -> None:
        raise ZeroDivisionError

    host, tasks = Mock(), Tasks(Metrics("test"))
    modern = ModernHost(host, fails, tasks)
    modern.receive(b'{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{}}')
    while modern.is_busy:
        await asyncio.sleep(0)
    host.send.assert_called_once()
    answer = json.loads(host.send.call_args.args[0])
    assert (answer["id"], answer["error"]["code"]) == (7, -32603)
    assert tasks.failures == 1

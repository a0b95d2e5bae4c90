"""The link between a legacy host and the backend of its session."""

import asyncio
import json
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest
from msgspec import Raw

from gateway.config import InForce
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc, mcp
from gateway.runtime.call_bytes import CallBytes
from gateway.stdio_front.front import StdioFront
from gateway.stdio_front.legacy_host import LegacyHost
from tests.support import host
from tests.support.fake_upstream import FakeUpstream
from tests.support.memory import left_by
from tests.support.stand import Start
from tests.support.workbench import eventually


def test_two_open_requests_cannot_have_the_same_id() -> None:
    host, backend = Mock(), Mock()
    legacy = LegacyHost(host, lambda _: backend, Mock(), CallBytes(InForce(1000), InForce(1000)))
    for id_ in ('"a"', '"\\u0061"', "1", '"1"'):
        line = f'{{"jsonrpc":"2.0","id":{id_},"method":"tools/list"}}'.encode()
        legacy.receive(ClientMessage(line, jsonrpc.message(line)))
    assert backend.receive.call_count == 3
    host.send.assert_called_once()
    refused = jsonrpc.message(host.send.call_args.args[0])
    assert isinstance(refused.error, Raw)
    assert jsonrpc.error(refused.error).code == mcp.INVALID_REQUEST
    assert not isinstance(refused.id, Raw), "it would end the other request"


class Bench:
    """A host of which the test knows one open request."""

    def __init__(self) -> None:
        self.calls = CallBytes(InForce(1000), InForce(1000))
        self.legacy = LegacyHost(Mock(send=lambda _: None), lambda _: Mock(), Mock(), self.calls)
        self.host_says('{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}')

    def host_says(self, line: str) -> None:
        self.legacy.receive(ClientMessage(line.encode(), jsonrpc.message(line.encode())))

    def server_asks(self, id_: str, about: bytes | None = b"1") -> None:
        self.legacy.send(f'{{"jsonrpc":"2.0","id":{id_},"method":"roots/list"}}'.encode(), about)


def test_a_request_that_waits_for_an_answer_of_the_host_is_not_worked_on() -> None:
    bench = Bench()
    assert bench.legacy.is_busy
    bench.server_asks('"caf\\u00e9"')
    assert not bench.legacy.is_busy
    bench.host_says('{"jsonrpc":"2.0","id":"caf\u00e9","result":{"roots":[]}}')
    assert bench.legacy.is_busy


def test_the_id_of_a_request_that_gets_no_response_is_free_again() -> None:
    bench = Bench()
    bench.server_asks("5")
    bench.host_says('{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}')
    bench.legacy.forget(b"1")
    assert bench.calls.used == 0
    bench.host_says('{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}')
    assert bench.legacy.is_busy, "its question is forgotten"
    assert bench.calls.used > 0


def test_questions_are_remembered_no_longer_than_their_request() -> None:
    bench = Bench()
    for number in range(300):
        bench.server_asks(str(number), b"2" if number % 2 else None)
    assert bench.legacy.is_busy, "they are about no open request"
    bench.server_asks("300")
    assert not bench.legacy.is_busy, "and need no room"
    assert left_by(lambda: [bench.server_asks(str(number)) for number in range(2000)]) < 100_000
    bench.legacy.send(b'{"jsonrpc":"2.0","id":1,"result":{}}', None)
    assert not bench.legacy.is_busy
    bench.host_says('{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{}}')
    assert bench.legacy.is_busy, "its questions are forgotten"


class Pipes:
    """A FAKE host whose lines are those of the test."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[host.JSON | None] = asyncio.Queue()
        self.heard: list[host.JSON] = []

    def send(self, message: bytes) -> None:
        self.heard.append(json.loads(message))

    async def lines(self) -> AsyncIterator[bytes]:
        while (message := await self.said.get()) is not None:
            yield json.dumps(message).encode()


@pytest.mark.parametrize("era", ["bridge", "auto"])
async def test_a_server_behind_a_url_gets_the_credential_and_the_headers_of_the_route(
    upstream: FakeUpstream, begin: Start, era: str
) -> None:
    credentials = {"mode": "replace", "token": "t"}
    stand = await begin(route={"era": era, "credentials": credentials, "set_headers": {"X-Key": "k"}})
    pipes = Pipes()
    front = StdioFront(pipes, Mock(), stand.gateway.routes.live["/mcp"], stand.gateway.lot)  # type: ignore[arg-type]
    running = asyncio.get_running_loop().create_task(front.run())
    for number, message in enumerate((host.initialize(0), host.legacy("tools/list", 1))):
        pipes.said.put_nowait(message)
        await eventually(lambda: len(pipes.heard) > number)  # noqa: B023  (it is awaited here)
    sent = [(seen.headers["Authorization"], seen.headers["X-Key"]) for seen in upstream.seen]
    assert sent == [("Bearer t", "k")] * 3, "initialize, the standalone stream, the request"
    pipes.said.put_nowait(None)
    await running
    await front.close()

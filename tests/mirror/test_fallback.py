"""A session whose server refuses `initialize`, at the first backend and at the mirror (both are fakes)."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config import Limits
from gateway.legacy_front.backend import Backend, ClientLink, ClientMessage
from gateway.mirror.fallback import FallbackBackend
from gateway.protocol import jsonrpc
from gateway.protocol.errors import Busy, GatewayError, InvalidParams, Refused, Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.mirror.test_linked_backend import FakeLink

GREETING = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}'
READY = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
LIST = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
REFUSAL = b'{"jsonrpc":"2.0","id":0,"error":{"code":-32022,"message":"no"}}'
ROOM = 5_000
ACCEPTED = b'{"jsonrpc":"2.0","id":0,"result":{}}'


class FakeBackend:
    """A FAKE backend, which remembers what it gets."""

    def __init__(self, link: ClientLink) -> None:
        self.link = link
        self.received: list[bytes] = []
        self.is_closed = False
        self.error: GatewayError | None = None

    def receive(self, message: ClientMessage) -> None:
        if self.error is not None:
            raise self.error
        self.received.append(message.data)

    async def close(self) -> None:
        self.is_closed = True


class Bench:
    """A session before a server of which the test decides what it is."""

    def __init__(self, tasks: Tasks) -> None:
        self.link = FakeLink()
        self.backends: list[FakeBackend] = []
        self.chosen: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.asked: list[bytes] = []
        live: Any = SimpleNamespace(
            process=SimpleNamespace(tasks=tasks),
            config=SimpleNamespace(limits=Limits(body_bytes=ROOM)),
            upstream=SimpleNamespace(stdio=SimpleNamespace(is_modern=lambda: self.chosen)),
        )
        self.mirror_error: GatewayError | None = None
        self.fallback = FallbackBackend(live, self._connect, self._mirror, self.link, self._tells_modern)

    def _connect(self, link: ClientLink) -> Backend:
        self.backends.append(FakeBackend(link))
        return self.backends[-1]

    def _mirror(self, link: ClientLink) -> Backend:
        backend = self._connect(link)
        self.backends[-1].error = self.mirror_error
        return backend

    def _tells_modern(self, refusing: Backend, greeting: ClientMessage, response: bytes) -> bool:
        assert (refusing, greeting.opened.method) == (self.backends[0], "initialize")
        self.asked.append(response)
        return False

    @property
    def sent(self) -> list[bytes]:
        """What the client has got."""
        return [json.dumps(message, separators=(",", ":")).encode() for message, _ in self.link.sent]

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.fallback.receive(ClientMessage(message, jsonrpc.message(message)))

    async def choose(self, *, is_modern: bool) -> None:
        self.chosen.set_result(is_modern)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tasks = Tasks(Metrics("test", []))
    yield Bench(tasks)
    await tasks.close()


async def test_a_server_that_accepts_keeps_the_session(bench: Bench) -> None:
    bench.say(GREETING, READY)
    (first,) = bench.backends
    assert (bench.fallback.is_undecided, first.received) == (True, [GREETING])
    first.link.send(ACCEPTED, b"0")
    assert not bench.fallback.is_undecided
    bench.say(LIST)
    first.link.send(b'{"jsonrpc":"2.0","id":1,"error":{"code":-32022,"message":"later"}}', b"1")
    assert len(bench.link.sent) == 2
    assert first.received == [GREETING, READY, LIST]
    assert bench.asked == []


async def test_a_refusal_leads_to_the_mirror_which_gets_everything_from_the_beginning(bench: Bench) -> None:
    bench.say(GREETING, READY)
    bench.backends[0].link.send(REFUSAL, b"0")
    bench.backends[0].link.ended()
    bench.say(LIST)
    await asyncio.sleep(0)
    await bench.choose(is_modern=True)
    first, mirror = bench.backends
    assert (first.received, first.is_closed) == ([GREETING], True)
    assert bench.asked == [REFUSAL]
    mirror.link.send(ACCEPTED, b"0")
    assert mirror.received == [GREETING, READY, LIST]
    assert bench.sent == [ACCEPTED]
    assert not bench.link.is_closed


async def test_an_answer_to_what_the_server_asks_before_it_accepts_does_not_wait(bench: Bench) -> None:
    pong = b'{"jsonrpc":"2.0","id":"ping","result":{}}'
    bench.say(GREETING, LIST, pong)
    assert bench.backends[0].received == [GREETING, pong]


async def test_what_comes_before_a_refused_credential_is_refused_too_and_the_client_may_greet_again(
    bench: Bench,
) -> None:
    bench.say(GREETING, LIST, READY)
    error = Refused("no", status=401)
    bench.backends[0].link.refuse(b"0", error)
    assert (bench.link.refused, bench.asked) == ([(b"0", error), (b"1", error)], [])
    bench.say(GREETING)
    assert bench.backends[0].received == [GREETING, GREETING]


async def test_what_the_server_does_not_take_after_it_has_accepted_is_answered(bench: Bench) -> None:
    bench.say(GREETING, LIST)
    (first,) = bench.backends
    first.error = Busy("full", status=503)
    first.link.send(ACCEPTED, b"0")
    assert bench.sent == [ACCEPTED]
    assert bench.link.refused == [(b"1", first.error)]


async def test_a_greeting_that_cannot_be_taken_may_be_repeated(bench: Bench) -> None:
    (first,) = bench.backends
    first.error = Busy("full", status=503)
    with pytest.raises(Busy):
        bench.say(GREETING)
    first.error = None
    bench.say(GREETING)
    assert first.received == [GREETING]


async def test_a_greeting_that_is_no_request_waits_for_no_answer(bench: Bench) -> None:
    notice = b'{"jsonrpc":"2.0","method":"initialize"}'
    bench.say(notice, GREETING)
    assert bench.backends[0].received == [notice, GREETING]


async def test_a_server_that_ends_before_it_answers_ends_the_session(bench: Bench) -> None:
    bench.say(GREETING, LIST)
    bench.backends[0].link.ended()
    assert bench.link.is_closed


@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b'"\\u0061"', b'"a"'), (b'"a"', b'"\\u0061"'), (b"0", b"null")],
    ids=["escaped", "answer escaped", "no id"],
)
async def test_a_refusal_is_recognised_however_its_id_is_written(bench: Bench, sent: bytes, answered: bytes) -> None:
    greeting = GREETING.replace(b'"id":0', b'"id":' + sent)
    bench.say(greeting)
    bench.backends[0].link.send(REFUSAL.replace(b'"id":0', b'"id":' + answered), None)
    assert bench.sent == []
    assert bench.fallback.is_undecided
    await bench.fallback.close()


async def test_a_refusal_of_a_server_that_is_not_modern_reaches_the_client(bench: Bench) -> None:
    bench.say(GREETING)
    bench.backends[0].link.send(REFUSAL, b"0")
    await asyncio.sleep(0)
    await bench.choose(is_modern=False)
    assert bench.sent == [REFUSAL]
    assert bench.link.is_closed
    assert len(bench.backends) == 1


async def test_a_backend_that_could_not_greet_the_server_counts_as_a_refusal(bench: Bench) -> None:
    bench.say(GREETING)
    error = Unreachable("refused `initialize`")
    bench.backends[0].link.refuse(b"0", error)
    await asyncio.sleep(0)
    await bench.choose(is_modern=False)
    assert bench.link.refused == [(b"0", error)]


async def test_what_waits_for_the_choice_has_a_limit_in_bytes(bench: Bench) -> None:
    bench.say(GREETING)
    bench.backends[0].link.send(REFUSAL, b"0")
    large = b'{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"x":"%b"}}' % (b"x" * ROOM)
    bench.say(large)  # one message is taken, whatever its size
    with pytest.raises(Busy):
        bench.say(READY)
    await asyncio.sleep(0)
    await bench.choose(is_modern=True)
    bench.backends[1].link.send(ACCEPTED, b"0")
    assert bench.backends[1].received == [GREETING, large]
    bench.say(READY)
    assert bench.backends[1].received[-1] == READY


async def test_many_small_messages_do_not_wait_without_limit(bench: Bench) -> None:
    bench.say(GREETING)
    bench.backends[0].link.send(REFUSAL, b"0")
    with pytest.raises(Busy):
        bench.say(*[READY] * (ROOM // 512 + 1))


async def test_a_session_that_is_closed_while_the_mirror_is_chosen_ends_with_it(bench: Bench) -> None:
    bench.say(GREETING)
    bench.backends[0].link.send(REFUSAL, b"0")
    await asyncio.sleep(0)
    await bench.fallback.close()
    await bench.choose(is_modern=True)
    assert all(each.is_closed for each in bench.backends)


async def test_what_the_mirror_refuses_is_answered(bench: Bench) -> None:
    bench.say(GREETING, LIST)
    bench.backends[0].link.send(REFUSAL, b"0")
    await asyncio.sleep(0)
    error = bench.mirror_error = InvalidParams("no protocolVersion")
    await bench.choose(is_modern=True)
    assert bench.link.refused == [(b"0", error), (b"1", error)]


async def test_a_mirror_that_cannot_greet_the_server_answers_what_waits(bench: Bench) -> None:
    bench.say(GREETING, LIST)
    bench.backends[0].link.send(REFUSAL, b"0")
    await asyncio.sleep(0)
    await bench.choose(is_modern=True)
    bench.backends[1].link.send(REFUSAL, b"0")
    assert bench.sent == [REFUSAL]
    assert bench.backends[1].received == [GREETING, LIST], "the mirror answers it"


async def test_a_second_greeting_leaves_the_session_where_it_is(bench: Bench) -> None:
    bench.say(GREETING)
    (first,) = bench.backends
    first.link.send(ACCEPTED, b"0")
    bench.say(GREETING)
    first.link.send(REFUSAL, b"0")
    assert bench.sent == [ACCEPTED, REFUSAL]
    assert bench.asked == []

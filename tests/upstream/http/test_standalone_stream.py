"""The standalone GET stream is kept open without a task, and its end is reported once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from unittest.mock import Mock

import pytest

from gateway.config import InForce, Limits, Timeouts
from gateway.http.upstream_client import Bounds, Client
from gateway.http.upstream_url import Endpoint
from gateway.http_client.client import HttpClient
from gateway.protocol.errors import CallLost
from gateway.runtime.tasks import Tasks
from gateway.upstream.channel import SideListener
from gateway.upstream.http import standalone_stream
from gateway.upstream.http.http_session import HttpSession
from gateway.upstream.http.http_upstream import HttpUpstream
from gateway.upstream.http.standalone_stream import StandaloneStream
from gateway.upstream.http.streamable_http import StreamableChannel
from tests.support.fake_http import OK, FakeHttp, Script, Wire, says, stays
from tests.support.noted_timers import Timers
from tests.support.workbench import eventually

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b"data: one\n\n"
REFUSED = b"HTTP/1.1 409 No\r\nContent-Length: 0\r\n\r\n"
HEAD_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone_stream, "HEAD_SECONDS", HEAD_SECONDS)
    monkeypatch.setattr(standalone_stream, "REOPEN_SECONDS", (0.0,))


class Listening(SideListener):
    """A stream with what its listener heard."""

    def __init__(self, url: str) -> None:
        self.tasks = Tasks(Mock())
        self.calls = HttpClient(self.tasks)
        self.client = Client(InForce(Bounds(Limits(event_bytes=100), Timeouts())), self.calls)
        self.upstream = HttpUpstream(self.client, Endpoint(url, "The server"), self.tasks)
        self.headers = {"A": "b"}
        self.stream: StandaloneStream
        self.words: list[str] = []
        self.receive: Callable[[bytes], None] = lambda data: self.words.append(data.decode())

    def hear_side(self, data: bytes) -> None:
        self.receive(data)

    def side_reopened(self) -> None:
        self.words.append("reopened")

    def side_closed(self, *, was_open: bool) -> None:
        self.words.append("lost" if was_open else "none")

    async def open(self) -> None:
        self.stream = StandaloneStream(HttpSession(self.upstream), self.headers, self)
        await self.stream.open()

    async def ended(self) -> list[str]:
        await eventually(lambda: not {"lost", "none"}.isdisjoint(self.words), "the stream has ended for good")
        return self.words


Listen = Callable[..., AbstractAsyncContextManager[tuple[Listening, FakeHttp]]]


@pytest.fixture
async def listen(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listen]:
    made: list[Listening] = []

    @asynccontextmanager
    async def start(
        script: Script,
        *reopen_seconds: float,
        receive: Callable[[bytes], None] | None = None,
        head_seconds: float = HEAD_SECONDS,
    ) -> AsyncIterator[tuple[Listening, FakeHttp]]:
        async with FakeHttp(script) as server:
            monkeypatch.setattr(standalone_stream, "REOPEN_SECONDS", reopen_seconds or (0.0,) * 3)
            monkeypatch.setattr(standalone_stream, "HEAD_SECONDS", head_seconds)
            it = Listening(server.url)
            made.append(it)
            it.receive = receive or it.receive
            await it.open()
            yield it, server
            it.stream.stop_reporting()
            it.stream.close()

    yield start
    for it in made:
        it.client.close()
        await eventually(lambda it=it: not it.calls.connections, "all connections are closed")


async def test_an_open_stream_has_no_task(listen: Listen) -> None:
    async with listen(stays(STREAM, EVENT)) as (it, _):
        assert it.stream.is_open
        await eventually(lambda: it.words == ["one"])
        assert len(it.tasks) == 0


async def test_a_stream_that_ends_is_opened_again_and_the_gap_is_reported(listen: Listen) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(STREAM, EVENT)
        if server.connections > 1:
            await wire.gone()

    async with listen(script) as (it, server):
        await eventually(lambda: it.words == ["one", "reopened", "one"])


async def test_a_stream_that_ends_with_its_session_is_heard_until_then_and_not_opened_again(listen: Listen) -> None:
    ends = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(STREAM, EVENT)
        await ends.wait()
        await wire.say(b"data: last\n\n")

    async with listen(script) as (it, server):
        await eventually(lambda: it.words == ["one"])
        it.stream.stop_reporting()
        ends.set()
        await eventually(lambda: not it.stream.is_open)
        await eventually(lambda: not it.calls.connections)
        assert (it.words, len(server.requests)) == (["one", "last"], 1)


async def test_streams_that_end_at_once_are_given_up(listen: Listen) -> None:
    async with listen(says(STREAM)) as (it, server):
        assert await it.ended() == ["reopened", "reopened", "lost"]
        assert (len(server.requests), it.stream.is_open) == (3, False)


async def test_a_server_without_this_stream_is_asked_once(listen: Listen) -> None:
    async with listen(stays(b"HTTP/1.1 405 No\r\nContent-Length: 0\r\n\r\n")) as (it, server):
        assert not it.stream.is_open
        assert it.words == ["none"]
        assert len(server.requests) == 1


async def test_a_server_that_takes_another_stream_for_open_is_asked_again(listen: Listen) -> None:
    async with listen(stays(REFUSED)) as (it, server):
        assert await it.ended() == ["none"]
        assert len(server.requests) == 3


async def test_the_handshake_waits_for_a_further_request_if_the_first_one_broke(listen: Listen) -> None:
    answers = iter((b"", b"", STREAM))  # the client sends what broke off without a reply once more

    async def script(wire: Wire) -> None:
        await wire.request()
        if answer := next(answers):
            await wire.say(answer)
            await wire.gone()

    async with listen(script) as (it, _):
        assert it.stream.is_open


@pytest.mark.parametrize(("reply", "is_open"), [((REFUSED,), False), ((), True)], ids=["refused", "no answer yet"])
async def test_only_a_stream_whose_server_has_not_answered_in_time_is_taken_for_open(
    listen: Listen,
    reply: tuple[bytes, ...],
    is_open: bool,  # noqa: FBT001
) -> None:
    async with listen(stays(*reply), 0.0, 3600.0, head_seconds=0.05) as (it, _):
        assert it.stream.is_open is is_open


@pytest.mark.parametrize(("location", "path"), [(b"/mcp/", b"/mcp/"), (b"http://other.test/", b"/mcp")])
async def test_redirects_are_followed_within_the_origin_only(listen: Listen, location: bytes, path: bytes) -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % location
    async with listen(says(moved)) as (it, server):
        assert await it.ended() == ["none"]
        assert [request.split()[1] for request in server.requests] == [b"/mcp", path, path]


async def test_a_redirect_to_another_origin_does_not_hold_up_the_handshake(listen: Listen) -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://other.test/\r\nContent-Length: 0\r\n\r\n"
    async with listen(says(moved), 0.0, 3600.0) as (it, server):
        assert (it.words, it.stream.is_open) == ([], False)
        assert len(server.requests) == 1


async def test_a_broken_stream_counts_as_one_that_ended(listen: Listen) -> None:
    cut = STREAM.replace(b"\r\n\r\n", b"\r\nContent-Length: 99\r\n\r\n") + EVENT
    async with listen(says(cut), 0.0) as (it, _):
        assert await it.ended() == ["one", "lost"]


@pytest.mark.parametrize("said", [b"data: " + b"x" * 200, b"data: lost\n\n"], ids=["too large", "refused"])
async def test_an_event_that_cannot_be_taken_ends_its_stream(listen: Listen, said: bytes) -> None:
    def receive(data: bytes) -> None:
        raise CallLost(data.decode())

    async with listen(stays(STREAM, said), 0.0, receive=receive) as (it, server):
        assert await it.ended() == ["lost"]
        await server.left.wait()
        assert it.tasks.failures == 0


async def test_a_bug_in_the_listener_is_reported_and_ends_the_stream(listen: Listen) -> None:
    def receive(data: bytes) -> None:
        raise LookupError(data)

    async with listen(stays(STREAM, EVENT), receive=receive) as (it, server):
        assert await it.ended() == ["lost"]
        assert it.tasks.failures == 1
        assert len(server.requests) == 1


async def test_closing_ends_the_stream_and_reports_nothing_after_the_word(listen: Listen) -> None:
    async with listen(stays(STREAM)) as (it, server):
        it.stream.stop_reporting()
        it.stream.close()
        it.stream.close()
        await server.left.wait()
        assert it.words == []
        assert not it.stream.is_open


async def test_closing_in_a_pause_sends_no_further_request(listen: Listen, timers: Timers) -> None:
    async with listen(says(STREAM), 0.0, 3600.0) as (it, server):
        await eventually(lambda: timers.of(3600.0))
        it.stream.close()
        assert [timer.cancelled() for timer in timers.of(3600.0)] == [True]
        assert it.words == ["lost"]
        assert len(server.requests) == 1


async def test_the_end_of_the_process_ends_the_stream_without_a_word(listen: Listen, timers: Timers) -> None:
    async with listen(stays(STREAM), 0.0, 3600.0) as (it, server):
        it.client.close()
        await server.left.wait()
        assert it.words == []
        assert not timers.of(3600.0)
        assert len(server.requests) == 1


async def closes_when_used_again(wire: Wire) -> None:
    """A server that answers a POST, and takes a second request on its connection for one on a closed connection."""
    if (await wire.request()).startswith(b"GET"):
        await wire.say(STREAM)
        await wire.gone()
    await wire.say(OK)
    await wire.request()


async def post(it: Listening) -> None:
    reply = await it.client.send("POST", it.upstream.endpoint.url, {}, b"{}")
    _ = await reply.read_at_most(100)


@pytest.mark.parametrize("idle", [1, 2])
async def test_a_connection_that_was_closed_meanwhile_costs_one_more_request_but_no_failure(idle: int) -> None:
    async with FakeHttp(closes_when_used_again) as server:
        it = Listening(server.url)
        await asyncio.gather(*(post(it) for _ in range(idle)))
        assert len(it.calls.idle) == idle
        await it.open()
        assert it.stream.is_open
        assert len(server.requests) == idle + 2
        it.stream.stop_reporting()
        it.stream.close()
        it.client.close()


async def test_a_session_whose_end_is_interrupted_closes_its_stream() -> None:
    async def script(wire: Wire) -> None:
        if (await wire.request()).startswith(b"GET"):
            await wire.say(STREAM)
        await wire.gone()

    async with FakeHttp(script) as server:
        it = Listening(server.url)
        channel = StreamableChannel(it.upstream)
        channel.adopt("s1", "2025-11-25")
        await channel.listen("2025-11-25", {}, SideListener())
        closing = asyncio.gather(channel.close(end_session=True))
        await eventually(lambda: len(server.requests) == 2, "the DELETE is sent")
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await eventually(lambda: not it.calls.connections, "the stream is closed")
        it.client.close()


async def test_a_stream_whose_headers_cannot_be_sent_ends() -> None:
    it = Listening("http://127.0.0.1:9/mcp")
    it.headers = {"A": "b\r\nc"}
    await it.open()
    assert (await it.ended(), it.stream.is_open) == (["none"], False)
    assert it.tasks.failures == 1

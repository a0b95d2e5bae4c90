"""Which connection carries a request, and what becomes of requests when connections cannot be had."""

import asyncio
import time
from typing import Any

import pytest
from yarl import URL

from gateway.http_client.client import HttpClient
from gateway.http_client.connection import Connection, PendingRequest
from gateway.http_client.connector import Connector
from gateway.http_client.errors import ClientClosed, ConnectTimedOut, NotConnected
from gateway.http_client.idle_connections import IdleConnections
from gateway.http_client.origin import Origin
from gateway.http_client.request_head import RequestHead
from gateway.runtime.tasks import Tasks
from tests.support.fake_http import OK, FakeHttp, Wire, answers, says, stays
from tests.support.reply_recorder import COMPLETE, Recorder, Sender
from tests.support.workbench import eventually


async def test_requests_at_the_same_time_have_connections_of_their_own(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        sender = Sender(client, server.url)
        recorders = [sender.begin()[0] for _ in range(5)]
        for heard in recorders:
            await heard.over()
            assert heard.words == COMPLETE
        assert server.connections == len(client.connections) == len(client.idle) == 5
        await sender.send()
        assert server.connections == 5


async def test_the_connection_that_was_used_last_is_used_first(client: HttpClient) -> None:
    order: list[int] = []

    async def script(wire: Wire) -> None:
        number = server.connections
        while True:
            await wire.request()
            order.append(number)
            await wire.say(OK)

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        recorders = [sender.begin()[0] for _ in range(3)]
        for heard in recorders:
            await heard.over()
        for _ in range(3):
            await sender.send()
        assert len(set(order[3:])) == 1


async def test_connections_of_different_origins_are_not_mixed(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as one, FakeHttp(answers(OK)) as other:
        for server in (one, other, one, other):
            assert (await Sender(client, server.url).send()).words == COMPLETE
        assert (one.connections, other.connections) == (1, 1)
        assert (len(one.requests), len(other.requests)) == (2, 2)


async def test_an_idle_connection_is_closed_after_its_time(tasks: Tasks) -> None:
    client = HttpClient(tasks, keep_alive_seconds=0.02)
    async with FakeHttp(stays(OK)) as server:
        await Sender(client, server.url).send()
        assert len(client.idle) == 1
        await server.left.wait()
        await eventually(lambda: not client.connections)
        assert not client.idle
    client.close()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the connections that their upstream closed had been idle."""
    found, since = list[float](), dict[Connection, float]()
    put, end = IdleConnections.put, IdleConnections.ended

    def noted_idle(idle: IdleConnections, connection: Connection) -> None:
        since[connection] = time.monotonic()
        put(idle, connection)

    def noted(idle: IdleConnections, connection: Connection) -> None:
        found.append(time.monotonic() - since[connection])
        end(idle, connection)

    monkeypatch.setattr(IdleConnections, "put", noted_idle)
    monkeypatch.setattr(IdleConnections, "ended", noted)
    return found


@pytest.mark.parametrize("is_reset", [False, True])
async def test_how_long_an_upstream_keeps_a_connection_is_learnt_when_it_closes_one(
    ended: list[float], client: HttpClient, *, is_reset: bool
) -> None:
    async def script(wire: Wire) -> None:
        await wire.request()
        await wire.say(OK)
        await asyncio.sleep(0.05)
        if is_reset:
            wire.reset()

    async with FakeHttp(script) as server:
        sender = Sender(client, server.url)
        await sender.send()
        await eventually(lambda: not client.idle)
        (seen,) = ended
        assert 0.03 < seen < 1


async def test_a_connection_that_the_gateway_distrusts_says_nothing_of_its_upstream(
    ended: list[float], client: HttpClient
) -> None:
    async with FakeHttp(stays(OK)) as server:
        heard, pending = Sender(client, server.url).begin()
        await heard.over()
        pending.distrust()
        await eventually(lambda: not client.connections)
        assert not ended


# -- no connection ----------------------------------------------------------------------------------------------------


async def test_a_name_that_cannot_be_a_host_is_told_as_that(client: HttpClient) -> None:
    sender = Sender(client, "http://127.0.0.1/mcp", Origin("a" * 64 + ".example", 80))
    heard = await sender.send()
    assert type(heard.failure) is NotConnected


async def test_an_abort_at_any_step_of_connecting_leaves_nothing_behind(client: HttpClient, tasks: Tasks) -> None:
    async with FakeHttp(stays()) as server:
        for steps in range(12):
            heard, pending = Sender(client, server.url).begin()
            for _ in range(steps):
                await asyncio.sleep(0)
            pending.abort()
            await eventually(lambda: not len(tasks) and not client.connections)
            assert heard.words == []


async def test_a_closed_client_fails_what_is_in_flight_and_what_comes_later(client: HttpClient, tasks: Tasks) -> None:
    async with FakeHttp(stays()) as server:
        sender = Sender(client, server.url)
        sent, _ = sender.begin()
        await eventually(lambda: server.requests)
        connecting, _ = sender.begin()
        client.close()
        late, _ = sender.begin()
        for heard, was_sent in ((sent, True), (connecting, False), (late, False)):
            await heard.over()
            assert isinstance(heard.failure, ClientClosed)
            assert heard.failure.sent is was_sent
        assert len(server.requests) == 1
        await eventually(lambda: not len(tasks))


@pytest.fixture
def _no_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("gateway.world.resolve", resolve)


@pytest.mark.parametrize("connects", [True, False])
async def test_an_abort_in_the_very_step_in_which_connecting_ends_is_the_last_word(
    client: HttpClient, tasks: Tasks, monkeypatch: pytest.MonkeyPatch, *, connects: bool
) -> None:
    connect = Connector.connect

    async def connected(connector: Connector, connection: Connection, seconds: float) -> None:
        await connect(connector, connection, seconds)
        pending.abort()
        if not connects:
            raise NotConnected("too late")

    monkeypatch.setattr(Connector, "connect", connected)
    async with FakeHttp(stays()) as server:
        heard, pending = Sender(client, server.url).begin()
        await eventually(lambda: not len(tasks))
        monkeypatch.undo()
        assert heard.words == []
        assert server.requests == []


async def test_connecting_tasks_that_are_cancelled_from_outside_fail_their_requests(
    client: HttpClient, tasks: Tasks
) -> None:
    async with FakeHttp(stays()) as server:
        heard, _ = Sender(client, server.url).begin()
        await tasks.close()
        await heard.over()
        assert isinstance(heard.failure, ClientClosed)
        assert not heard.failure.sent


async def test_a_connection_that_ends_in_the_step_that_opened_it_does_not_fail_the_second_attempt(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that stood still while it connected to a server that closes at once."""
    start, started = Connection.start, []

    def starts(connection: Connection, *args: Any, **options: Any) -> None:
        start(connection, *args, **options)
        started.append(connection)
        if len(started) == 1:
            assert connection.eof_received() is not True

    monkeypatch.setattr(Connection, "start", starts)
    async with FakeHttp(says(OK)) as server:
        heard, _ = Sender(client, server.url).begin(is_repeatable=True)
        await heard.over()
        assert (heard.words, len(started)) == (COMPLETE, 2)


async def test_a_bug_while_connecting_fails_the_request_and_is_reported(client: HttpClient, tasks: Tasks) -> None:
    heard = await Sender(client, "http://127.0.0.1/mcp", Origin("127.0.0.1", "no port")).send()  # type: ignore[arg-type]
    assert isinstance(heard.failure, NotConnected)
    assert tasks.failures <= 1
    tasks.failures = 0


async def test_a_listener_that_raises_at_a_failed_connection_is_reported(client: HttpClient, tasks: Tasks) -> None:
    async with FakeHttp(says()) as server:
        pass
    heard, _ = Sender(client, server.url).begin()

    def react(word: str) -> None:
        raise LookupError(word)

    heard.react = react
    await heard.over()
    await eventually(lambda: tasks.failures == 1)
    tasks.failures = 0


@pytest.mark.usefixtures("_no_name_is_found")
async def test_an_upstream_that_accepts_no_connection_is_given_up_at_the_deadline(client: HttpClient) -> None:
    """The name lookup counts too; here it never ends."""
    heard, _ = Sender(client, "http://upstream.test:1/mcp").begin(seconds=0.02)
    await heard.over()
    assert isinstance(heard.failure, ConnectTimedOut)
    assert not heard.failure.sent


async def test_no_proxy_of_the_environment_is_used(client: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeHttp(answers(OK)) as server, FakeHttp(answers(OK)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert (await Sender(client, server.url).send()).words == COMPLETE
        assert proxy.connections == 0


async def test_a_request_goes_out_as_it_was_given(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        url = URL(server.url + "?a=b%20c")
        heard = Recorder()
        head = RequestHead("POST", url)
        client.begin(PendingRequest(Origin.of(url), heard, head.encoded({"X": "1"}, 2), b"{}", 5))
        await heard.over()
        assert server.requests == [
            b"POST /mcp?a=b%%20c HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: */*\r\n"
            b"Accept-Encoding: identity\r\nUser-Agent: mrtr-gateway\r\nX: 1\r\nContent-Length: 2\r\n\r\n{}"
            % server.port
        ]

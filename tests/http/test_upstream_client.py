"""The client of MCP requests: what it sends again, and what its failures mean."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest
from yarl import URL

from gateway.config import InForce, Limits, Timeouts
from gateway.http.upstream_client import Bounds, Client
from gateway.http_client.client import HttpClient
from gateway.http_client.errors import NoReply, RequestFailed
from gateway.protocol.errors import CallLost, Unreachable
from gateway.runtime.tasks import Tasks
from tests.support.fake_http import OK, FakeHttp, Script, answers, closes_when_used_again, says
from tests.support.workbench import eventually

WHERE = "The upstream"


@pytest.fixture
async def calls() -> AsyncIterator[HttpClient]:
    """The connections, of which none may be left."""
    tasks = Tasks(Mock())
    calls = HttpClient(tasks)
    yield calls
    await eventually(lambda: not calls.connections, "all connections are closed")
    assert not tasks.failures


@pytest.fixture
async def client(calls: HttpClient) -> AsyncIterator[Client]:
    client = Client(InForce(Bounds(Limits(), Timeouts())), calls)
    yield client
    client.close()


async def read(client: Client, method: str, server: FakeHttp) -> bytes | None:
    body = b"{}" if method == "POST" else b""
    try:
        reply = await client.send(method, URL(server.url), {"A": "b"}, body)
        try:
            return await reply.read_at_most(100)
        finally:
            reply.close()
    except RequestFailed as exc:
        raise exc.mapped(WHERE) from exc


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS"])
async def test_a_request_that_may_run_twice_is_repeated_on_a_new_connection(client: Client, method: str) -> None:
    async with FakeHttp(closes_when_used_again(OK)) as server:
        assert await read(client, method, server) == b"ok"
        assert await read(client, method, server) == b"ok"
        assert (len(server.requests), server.connections) == (3, 2)


async def test_a_repetition_that_nobody_accepts_does_not_hide_that_the_first_one_may_have_come(client: Client) -> None:
    async with FakeHttp(closes_when_used_again(OK)) as server:
        url = URL(server.url)
        assert await read(client, "GET", server) == b"ok"
        server.stop_listening()
        with pytest.raises(NoReply):
            _ = await client.send("POST", url, {}, b"{}", sending="repeatable")


@pytest.mark.parametrize(("method", "is_repeatable"), [("GET", False), ("DELETE", False), ("POST", True)])
async def test_a_request_that_may_run_twice_is_sent_at_most_twice(
    client: Client, calls: HttpClient, method: str, *, is_repeatable: bool
) -> None:
    """All idle connections are as old as the one that proved dead."""
    async with FakeHttp(closes_when_used_again(OK)) as server:
        url = URL(server.url)
        _ = await asyncio.gather(*(read(client, "GET", server) for _ in range(3)))
        assert len(calls.idle) == 3
        reply = await client.send(method, url, {}, b"", sending="repeatable" if is_repeatable else "usual")
        assert await reply.read_at_most(9) == b"ok"
        assert (len(server.requests), server.connections) == (5, 4)


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_a_post_is_never_repeated(client: Client, method: str) -> None:
    async with FakeHttp(closes_when_used_again(OK)) as server:
        assert await read(client, method, server) == b"ok"
        with pytest.raises(CallLost, match="broke the connection without a reply"):
            await read(client, method, server)
        assert (len(server.requests), server.connections) == (2, 1)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_new_connection_without_a_reply_is_tried_again_once(client: Client, method: str) -> None:
    """If the process stood still once it was open, its server may have closed it before the request came."""
    async with FakeHttp(says()) as server:
        with pytest.raises(CallLost):
            await read(client, method, server)
        assert (len(server.requests), server.connections) == (2, 2)


async def test_siblings_share_connections_with_bounds_of_their_own(client: Client) -> None:
    sibling = client.sibling(InForce(Bounds(Limits(event_bytes=7), Timeouts())))
    assert sibling.limits.event_bytes == 7
    async with FakeHttp(answers(OK)) as server:
        assert await read(client, "POST", server) == await read(sibling, "POST", server) == b"ok"
        assert server.connections == 1


@pytest.mark.parametrize(
    ("script", "meaning", "words"),
    [
        (None, Unreachable, "Connection refused"),
        (says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"), CallLost, "in the middle of its reply"),
        (says(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"), CallLost, "status 101"),
    ],
)
async def test_each_failure_has_its_meaning(
    client: Client, script: Script | None, meaning: type[Exception], words: str
) -> None:
    async with FakeHttp(script or says()) as server:
        if script is None:
            server.stop_listening()
        with pytest.raises(meaning, match=words):
            await read(client, "POST", server)


async def test_sessions_share_the_head_of_their_messages(client: Client) -> None:
    url, fixed = URL("http://it.test/mcp"), {"Accept": "a"}
    one = client.prepared(url, {"Authorization": "x"}, fixed, None)
    assert client.prepared(url, {"Authorization": "x"}, dict(fixed), None) is one
    assert client.prepared(url, {"Authorization": "x"}, fixed, one) is one
    other = client.prepared(url, {"Authorization": "y"}, fixed, one)
    assert (b"Authorization: x" in one.head, b"Authorization: y" in other.head) == (True, True)
    assert b"x" not in other.head.partition(b"Authorization: ")[2].partition(b"\r\n")[0]


def test_the_shared_head_of_messages_is_gone_with_the_last_session(client: Client) -> None:
    url = URL("http://it.test/mcp")
    sessions = [client.prepared(url, {"Authorization": "the last"}, {}, None) for _ in range(2)]
    gone = weakref.ref(sessions[0])
    del sessions[1]
    assert gone() is sessions[0]
    sessions.clear()
    assert gone() is None


def test_so_many_heads_are_shared_and_further_ones_are_not(client: Client) -> None:
    url = URL("http://it.test/mcp")
    fixed: dict[str, str] = {}
    kept = [client.prepared(url, {"Authorization": str(number)}, fixed, None) for number in range(257)]
    first, last = ({"Authorization": number} for number in ("0", "256"))
    assert client.prepared(url, first, {}, None) is kept[0]
    assert client.prepared(url, last, {}, None) is not kept[-1]
    assert client.prepared(url, last, fixed, kept[-1]) is kept[-1], "a session keeps its own"

"""One answer for a caller that waits."""

import asyncio

import pytest
from yarl import URL

from gateway.http_client.client import HttpClient
from gateway.http_client.errors import NoReply, NotConnected
from gateway.http_client.origin import Origin
from gateway.http_client.request_head import RequestHead
from gateway.http_client.whole_reply import BodyTooLarge, WholeReply, request
from tests.support.fake_http import OK, FakeHttp, answers, says, stays
from tests.support.workbench import eventually


async def ask(client: HttpClient, url: str, *, limit: int = 100) -> WholeReply:
    url_ = URL(url)
    return await request(
        client, Origin.of(url_), RequestHead("POST", url_), {}, b"{}", connect_seconds=20, max_body_bytes=limit
    )


async def test_a_whole_reply_is_returned_and_its_connection_used_again(client: HttpClient) -> None:
    async with FakeHttp(answers(OK)) as server:
        for _ in range(2):
            reply = await ask(client, server.url, limit=2)
            assert (reply.head.status, reply.body) == (200, b"ok")
        assert server.connections == 1


async def test_a_body_that_is_too_large_raises_and_closes_the_connection(client: HttpClient) -> None:
    async with FakeHttp(stays(OK)) as server:
        with pytest.raises(BodyTooLarge):
            await ask(client, server.url, limit=1)
        await server.left.wait()


async def test_a_failure_is_raised(client: HttpClient) -> None:
    async with FakeHttp(says()) as server:
        with pytest.raises(NoReply):
            await ask(client, server.url)
    with pytest.raises(NotConnected):
        await ask(client, server.url)


async def test_a_cancelled_request_closes_its_connection(client: HttpClient) -> None:
    async with FakeHttp(stays(b"HTTP/1.1 200 OK\r\n")) as server:
        waiting = asyncio.gather(ask(client, server.url))
        await eventually(lambda: server.requests)
        waiting.cancel()
        await server.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await waiting

"""The HTTP client towards upstreams: which responses it takes, and how it explains the others."""

from collections.abc import AsyncIterator

import pytest
from yarl import URL

from gateway.config import InForce, Limits, Timeouts
from gateway.http.client import Bounds, Client
from gateway.protocol.errors import CallLost
from tests.support.fake_wire import fake_wire

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client(InForce(Bounds(Limits(), Timeouts())))
    yield made
    await made.close()


async def test_a_switch_of_protocols_is_an_error_whichever_way_the_request_is_sent(client: Client) -> None:
    said = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
    async with fake_wire(said, stays=True) as url:
        with pytest.raises(CallLost, match=r"The server switched protocols \(HTTP 101\) unasked"):
            async with client.exchange("POST", URL(url), {}, b"{}", "The server"):
                pass


async def test_an_interim_response_is_skipped(client: Client) -> None:
    async with (
        fake_wire(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + OK) as url,
        client.exchange("GET", URL(url), {}, None, "The server") as response,
    ):
        assert (response.status, await response.read()) == (200, b"ok")

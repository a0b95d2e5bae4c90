"""The requests of the probe itself."""

from unittest.mock import Mock

from yarl import URL

from gateway.config import InForce, Limits, Timeouts
from gateway.http.upstream_client import Bounds, Client
from gateway.http_client.client import HttpClient
from gateway.runtime.tasks import Tasks
from gateway.tools.probe.steps.requests import ask
from tests.support.fake_http import OK, FakeHttp, closes_when_used_again


async def test_a_server_that_closed_an_idle_connection_is_asked_again() -> None:
    client = Client(InForce(Bounds(Limits(), Timeouts())), HttpClient(Tasks(Mock())))
    async with FakeHttp(closes_when_used_again(OK)) as server:
        for _ in range(2):
            assert (await ask(client, "POST", URL(server.url), {}, b"{}", seconds=20)).body == b"ok"
        assert (len(server.requests), server.connections) == (3, 2)
    client.close()

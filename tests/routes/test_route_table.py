"""Several routes in one process: each has its own limits, times, credentials and headers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.protocol import mcp
from gateway.sessions import accepted_credentials
from tests.support.fake_upstream import FakeUpstream, Turn, asks, waits
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, jwt, later
from tests.upstream.test_faults import challenge

SECRET = "s3cret-of-the-gateway"
REPLACE = {"mode": "replace", "token": SECRET}


# -- in front of upstreams ------------------------------------------------------------------------------------------


@pytest.fixture
async def other() -> AsyncIterator[FakeUpstream]:
    """To be asked for before `begin`, whose gateway comes to rest first."""
    async with FakeUpstream() as fake:
        yield fake


def routes(one: FakeUpstream, other: FakeUpstream, over: Any = (), **keys: Any) -> list[dict[str, Any]]:
    return [
        {"path": "/mcp", "upstream": {"url": one.url}},
        {"path": "/other", "upstream": {"url": other.url}, **dict(over), **keys},
    ]


def at_other(stand: Stand, authorization: str | None = None, **options: Any) -> Client:
    return Client(stand.http, f"http://{stand.gateway.listen}/other", authorization, **options)


async def test_a_route_has_times_of_its_own(upstream: FakeUpstream, other: FakeUpstream, begin: Start) -> None:
    """The first route's call waits for as long as the second's is refused early and its person times out."""
    go = asyncio.Event()

    async def silent(_: Turn) -> None:
        await go.wait()

    over = {"hold": {"ttl_seconds": 0.1}, "timeouts": {"handshake_seconds": 0.2}}
    stand = await begin(routes=routes(upstream, other, over))
    for fake in (upstream, other):
        fake.tool(asks("answered"))
    kept, lost = await stand.client().call(), await at_other(stand).call()
    await other.saw("answer")  # the gateway's own, when the time was over
    assert (await stand.client().answer(kept)).text == "answered"
    assert (await at_other(stand).answer(lost)).outcome == (400, -32602, "invalid_request_state")

    other.on("initialize", silent)
    late = await at_other(stand, info={"name": "new", "version": "1"}).call()
    assert "did not finish its handshake in 0.2 s" in late.error["message"]
    go.set()


async def test_a_route_has_a_pool_of_its_own_size(upstream: FakeUpstream, other: FakeUpstream, begin: Start) -> None:
    go = asyncio.Event()

    full = routes(upstream, other, sessions={"max": 1})
    stand = await begin(routes=full, timeouts={"session_wait_seconds": 0.05})
    for fake in (upstream, other):
        fake.tool(waits(go, "done"))
    first = [later(at_other(stand).call())]
    await other.saw("tools/call")
    assert (await at_other(stand).call()).status == 503
    first += [later(stand.client().call()) for _ in range(2)]
    await upstream.saw("tools/call", 2)
    go.set()
    assert [(await each).text for each in first] == ["done"] * 3


# -- credentials ----------------------------------------------------------------------------------------------------


async def test_the_gateways_credential_goes_with_everything_and_the_clients_with_nothing(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(route={"credentials": REPLACE, "set_headers": {"x-tenant": "acme"}})
    upstream.tool(asks("answered"))
    client = stand.client("Bearer the-clients")
    assert (await client.answer(await client.call())).text == "answered"
    stand.gateway.routes.live["/mcp"].upstream.pool.retire()
    await upstream.saw("DELETE")
    words = {seen.word for seen in upstream.seen}
    assert words >= {"initialize", "GET", "notifications/initialized", "tools/call", "answer", "DELETE"}
    for seen in upstream.seen:
        assert seen.headers.getall("Authorization") == [f"Bearer {SECRET}"], seen.word
        assert seen.headers["x-tenant"] == "acme", seen.word


@pytest.mark.parametrize("mode", [REPLACE, {"mode": "drop"}])
async def test_a_refusal_of_the_gateways_credential_is_not_the_clients_business(
    mode: dict[str, str], upstream: FakeUpstream, begin: Start
) -> None:
    upstream.on("initialize", challenge(401, only="nobody's"))
    stand = await begin(route={"credentials": mode})
    refused = await stand.client("Bearer mine").call()
    assert (refused.status, refused.error["data"]["reason"]) == (200, "upstream_refused")
    assert "routes[].credentials" in refused.error["message"]
    assert "WWW-Authenticate" not in refused.headers
    assert SECRET not in refused.data.decode()


@pytest.mark.parametrize("mode", [REPLACE, {"mode": "drop"}])
async def test_unchecked_claims_do_not_make_a_principal(
    mode: dict[str, str], upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_credentials, "_FRESH_SECONDS", 0.0)
    upstream.tool(asks("answered"))
    real, forged = (jwt(iss="i", sub="ada", client_id="c", jti=name) for name in ("real", "forged"))
    stand = await begin(route={"credentials": mode})
    asked = await stand.client(real).call()
    stolen = await stand.client(forged).call(state=asked.state, answers={})
    assert stolen.outcome == (400, -32602, "invalid_request_state")
    assert (await stand.client(real).answer(asked)).text == "answered"
    assert (await stand.client(forged).post(mcp.DISCOVER)).status == 200
    assert len(upstream.of("initialize")) == 2, "the forged one has a session of its own"
    assert not upstream.of(mcp.PING), "nobody's credential could be asked about"


async def test_a_new_secret_keeps_sessions_and_calls(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(asks("answered"))
    stand = await begin(route={"credentials": REPLACE})
    asked = await stand.client().call()
    stand.reload(upstream.url, route={"credentials": {**REPLACE, "token": "renewed"}})
    assert (await stand.client().answer(asked)).text == "answered"
    assert [seen.headers["Authorization"] for seen in upstream.of("answer")] == ["Bearer renewed"]
    assert len(upstream.of("initialize")) == 1

"""Several routes in one process: each has its own limits, times, credentials and headers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.config import Credentials, Route, Upstream, parse
from gateway.http.upstream_headers import for_call, for_passing
from gateway.protocol import mcp
from gateway.protocol.errors import InvalidRequest
from gateway.sessions import group as groups
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, configuration, jwt
from tests.upstream.test_faults import challenge

SECRET = "s3cret-of-the-gateway"
REPLACE = {"mode": "replace", "token": SECRET}


def route(**keys: Any) -> Route:
    return Route(upstream=Upstream(url="http://127.0.0.1:1/mcp"), **keys)


def sent(**headers: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))


CLIENTS = sent(Authorization="Bearer mine", X_Tenant="a", Cookie="c", Host="gw", Connection="close, X-Hop", X_Hop="1")
POLICIES: list[tuple[dict[str, Any], dict[str, str], dict[str, str]]] = [
    # (keys of the route, what a call takes along, what is passed through)
    ({}, {"Authorization": "Bearer mine"}, {"Authorization": "Bearer mine", "X-Tenant": "a", "Cookie": "c"}),
    (
        {"credentials": Credentials(mode="drop"), "forward_headers": ("x-tenant",)},
        {"x-tenant": "a"},
        {"X-Tenant": "a", "Cookie": "c"},
    ),
    (
        {"credentials": Credentials(mode="replace", token="own"), "drop_headers": ("cookie",)},
        {"Authorization": "Bearer own"},
        {"X-Tenant": "a", "Authorization": "Bearer own"},
    ),
    (
        {"credentials": Credentials(mode="replace", token="own", header="x-api-key")},
        {"x-api-key": "own"},
        {"X-Tenant": "a", "Cookie": "c", "x-api-key": "own"},
    ),
    (
        {"set_headers": {"x-tenant": "fixed"}},
        {"Authorization": "Bearer mine", "x-tenant": "fixed"},
        {"Authorization": "Bearer mine", "Cookie": "c", "x-tenant": "fixed"},
    ),
]


@pytest.mark.parametrize(("keys", "called", "passed"), POLICIES)
def test_what_goes_upstream(keys: dict[str, Any], called: dict[str, str], passed: dict[str, str]) -> None:
    assert for_call(route(**keys), CLIENTS) == called
    assert for_passing(route(**keys), CLIENTS) == CIMultiDict(passed)


def test_a_client_cannot_send_the_header_of_the_gateways_own_credential() -> None:
    policy = route(credentials=Credentials(mode="replace", token="own", header="x-api-key"))
    assert for_passing(policy, sent(X_API_KEY="forged")).getall("x-api-key") == ["own"]


def test_repeated_headers_are_passed_as_they_came() -> None:
    twice = CIMultiDictProxy(CIMultiDict([("X-A", "1"), ("X-B", "2"), ("X-A", "3")]))
    assert list(for_passing(route(), twice).items()) == [("X-A", "1"), ("X-B", "2"), ("X-A", "3")]


def test_one_credential_cannot_hide_behind_another() -> None:
    two = CIMultiDictProxy(CIMultiDict([("Authorization", "Bearer mine"), ("authorization", "Bearer yours")]))
    for policy in (for_call, for_passing):
        with pytest.raises(InvalidRequest, match="The header Authorization came 2 times, and it tells who is calling"):
            policy(route(), two)


@pytest.mark.parametrize("policy", [for_call, for_passing])
def test_a_bound_header_that_came_twice_is_refused(policy: Any) -> None:
    two = CIMultiDictProxy(CIMultiDict([("X-Api-Key", "mine"), ("x-api-key", "yours")]))
    with pytest.raises(InvalidRequest, match="The header x-api-key came 2 times"):
        policy(route(forward_headers=("x-api-key",)), two)
    free = policy(route(forward_headers=("x-api-key",), bind_headers=()), two)
    assert list(free.items()) in ([("x-api-key", "mine, yours")], [("X-Api-Key", "mine"), ("x-api-key", "yours")])


def test_other_headers_that_came_twice_go_upstream_in_their_order() -> None:
    names = ("x-forwarded-for", "cookie")
    came = [("X-Forwarded-For", "a, b"), ("Cookie", "a=1"), ("x-forwarded-for", "c"), ("cookie", "b=2")]
    many = CIMultiDictProxy(CIMultiDict(came))
    called = for_call(route(forward_headers=names, bind_headers=()), many)
    assert called == {"x-forwarded-for": "a, b, c", "cookie": "a=1; b=2"}


@pytest.mark.parametrize("policy", [for_call, for_passing])
def test_a_value_that_is_not_text_is_refused(policy: Any) -> None:
    with pytest.raises(InvalidRequest, match="Authorization is not UTF-8"):
        policy(route(), sent(Authorization="Bearer \udce4"))


def test_no_secret_is_shown() -> None:
    loaded = parse(
        configuration("http://127.0.0.1:1/mcp", route={"credentials": REPLACE, "set_headers": {"x-k": SECRET}}),
        "t",
        {},
    )
    assert loaded.routes[0].credentials.token == SECRET
    assert SECRET not in repr(loaded)
    assert "<x-k hidden>" in repr(loaded)


# -- in front of upstreams ------------------------------------------------------------------------------------------


@pytest.fixture
async def other() -> AsyncIterator[FakeUpstream]:
    """To be asked for before `begin`, whose gateway comes to rest first."""
    fake = FakeUpstream()
    await fake.start()
    yield fake
    await fake.close()


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

    async def ask(turn: Turn) -> None:
        await turn.elicit()
        await turn.result(text("answered"))

    async def silent(_: Turn) -> None:
        await go.wait()

    over = {"hold": {"ttl_seconds": 0.1}, "timeouts": {"handshake_seconds": 0.2}}
    stand = await begin(routes=routes(upstream, other, over))
    for fake in (upstream, other):
        fake.tool(ask)
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

    async def wait(turn: Turn) -> None:
        await go.wait()
        await turn.result(text("done"))

    full = routes(upstream, other, sessions={"max": 1})
    stand = await begin(routes=full, timeouts={"session_wait_seconds": 0.05})
    for fake in (upstream, other):
        fake.tool(wait)
    first = [asyncio.create_task(at_other(stand).call())]
    await other.saw("tools/call")
    assert (await at_other(stand).call()).status == 503
    first += [asyncio.create_task(stand.client().call()) for _ in range(2)]
    await upstream.saw("tools/call", 2)
    go.set()
    assert [(await each).text for each in first] == ["done"] * 3


# -- credentials ----------------------------------------------------------------------------------------------------


async def test_the_gateways_credential_goes_with_everything_and_the_clients_with_nothing(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def ask(turn: Turn) -> None:
        await turn.elicit()
        await turn.result(text("answered"))

    stand = await begin(route={"credentials": REPLACE, "set_headers": {"x-tenant": "acme"}})
    upstream.tool(ask)
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
    monkeypatch.setattr(groups, "_ACCEPTED_SECONDS", 0.0)

    async def ask(turn: Turn) -> None:
        await turn.elicit()
        await turn.result(text("answered"))

    upstream.tool(ask)
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
    async def ask(turn: Turn) -> None:
        await turn.elicit()
        await turn.result(text("answered"))

    upstream.tool(ask)
    stand = await begin(route={"credentials": REPLACE})
    asked = await stand.client().call()
    renewed = configuration(upstream.url, route={"credentials": {**REPLACE, "token": "renewed"}})
    stand.gateway.apply(parse(renewed, "test", {}))
    assert (await stand.client().answer(asked)).text == "answered"
    assert [seen.headers["Authorization"] for seen in upstream.of("answer")] == ["Bearer renewed"]
    assert len(upstream.of("initialize")) == 1

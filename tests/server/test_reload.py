"""Another configuration under a gateway at work: what is new follows it, what runs or waits ends as it began."""

import asyncio
import gc
import itertools
import json
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from gateway.admin.reload import Reload
from gateway.cluster import membership
from gateway.cluster.membership import Membership
from gateway.cluster.worker import Worker
from gateway.config import Config, ConfigError, InForce, Problem, Replica, parse
from gateway.http_client.client import HttpClient
from gateway.http_client.connection import PendingRequest
from gateway.plugins import loader
from gateway.protocol import mcp
from gateway.runtime.tasks import Tasks
from gateway.seal import keyring
from gateway.server.process import Gateway
from gateway.telemetry import Metrics
from tests.bridge.test_subscription import EVERYTHING, OFFERED, change, listening
from tests.parts.launch import free_port
from tests.support.fake_name_service import FakeNameService
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, ask, asks, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, KEY, Client, Reply, Stand, configuration, eventually, jwt, later

OTHER_KEY = "1e" * 32
LOST = (400, -32602, "invalid_request_state")
NONE = (404, -32601, None)
ROUNDS = "mcp_server_operation_duration_seconds_count"
COMPLETE = {"method": "tools/call", "protocol_version": mcp.MODERN, "outcome": "complete", "error_type": ""}
CONTINUED = "mcp_gateway_continuations_total"


def reconfigured(url: str, **sections: Any) -> Config:
    return parse(configuration(url, **sections), "test", {})


def routes(**urls: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Routes by name: an url, or a whole route without its path."""
    return [
        {"path": f"/{name}", **({"upstream": {"url": url}} if isinstance(url, str) else url)}
        for name, url in urls.items()
    ]


@pytest.fixture
async def second() -> AsyncIterator[FakeUpstream]:
    """Another upstream."""
    async with FakeUpstream() as fake:
        yield fake


def at(stand: Stand, path: str, **options: Any) -> Client:
    return Client(stand.http, f"http://{stand.gateway.listen}/{path}", **options)


# Nothing is forgotten.


EVERY_SECTION: dict[str, Any] = {
    "replica": {"id": "gw-1", "listen": "127.0.0.1:0"},
    "limits": {"body_bytes": 4_000_000},
    "legs": {"rounds": 3},
    "tasks": {"ttl_seconds": 5},
    "principal": {"source": "authorization"},
    "security": {"allowed_hosts": ["127.0.0.1"]},
    "log": {"level": "info"},
    "debug": {"bodies": False},
    "tls": {},
    "route": {"cache": {"ttl_ms": 1}},
}
"""Sections that the file does not have are the same objects in every configuration."""
NO_DATA = (type, type(asyncio), type(asyncio.sleep), type(len), asyncio.AbstractEventLoop)


def reachable(root: object) -> Iterator[object]:
    """Everything that `root` leads to; of functions what they closed over, since their modules lead everywhere."""
    seen, todo = {id(root)}, [root]
    while todo:
        found = todo.pop()
        yield found
        parts = gc.get_referents(found) if not isinstance(found, NO_DATA) else getattr(found, "__closure__", None)
        for part in parts or ():
            if id(part) not in seen:
                seen.add(id(part))
                todo.append(part)


def sections(config: Config) -> dict[int, str]:
    """The structs of a configuration, by identity."""
    parts = [getattr(config, name) for name in config.__struct_fields__]
    parts += config.routes
    return {id(part): type(part).__name__ for part in (config, *parts) if isinstance(part, msgspec.Struct)}


@pytest.mark.parametrize("warm", [False, True], ids=["idle", "with an idle session"])
async def test_nothing_of_the_old_configuration_is_in_use_any_more(
    upstream: FakeUpstream, begin: Start, *, warm: bool
) -> None:
    """Who keeps a section of it was forgotten by `Gateway.apply`."""
    new = reconfigured(upstream.url, **EVERY_SECTION)
    stand = await begin(file=Mock(load=lambda: new), **EVERY_SECTION)
    if warm:
        assert (await stand.client().call()).text
    old = stand.gateway.config
    parts = {id_: name for id_, name in sections(old).items() if id_ not in sections(new)}
    assert len(parts) == len(sections(old))

    def used() -> set[str]:
        return {parts[id(found)] for found in reachable(stand.gateway) if id(found) in parts}

    assert used() == set(parts.values()), "the walk sees who uses it"
    stand.gateway.reload.ask()
    await eventually(lambda: not used(), "the reload is over")
    assert stand.gateway.config is new


# Keys.


async def test_keys_are_rotated_in_three_phases_and_no_call_is_lost(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(ask)
    first = await client.call()
    stand.gateway.apply(reconfigured(upstream.url, state={"keys": [KEY, OTHER_KEY]}))
    assert (await client.answer(await client.call())).text
    second = await client.call()
    stand.gateway.apply(reconfigured(upstream.url, state={"keys": [OTHER_KEY, KEY]}))
    assert (await client.answer(await client.call())).text
    third = await client.call()
    assert (await client.answer(first)).text
    assert (await client.answer(second)).text
    stand.gateway.apply(reconfigured(upstream.url, state={"keys": [OTHER_KEY]}))
    assert (await client.answer(third)).text
    assert (await client.answer(await client.call())).text
    assert len({each.state.split(".")[1] for each in (first, second)}) == 1
    assert third.state.split(".")[1] != first.state.split(".")[1]


async def test_a_call_asks_again_under_the_newest_key(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    """The exchange is older than the key ring: what it seals after the reload must open after the next one."""

    upstream.tool(asks("done", "one", "two"))
    asked = await client.call()
    stand.gateway.apply(reconfigured(upstream.url, state={"keys": [OTHER_KEY, KEY]}))
    asked = await client.answer(asked)
    stand.gateway.apply(reconfigured(upstream.url, state={"keys": [OTHER_KEY]}))
    assert (await client.answer(asked)).text == "done"


async def test_a_phase_that_is_skipped_rejects_and_counts(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"quiet_seconds": 0.02, "ttl_seconds": 0.3})
    client = stand.client()
    upstream.tool(ask)
    asked = await client.call()
    stand.gateway.apply(
        reconfigured(upstream.url, hold={"quiet_seconds": 0.02, "ttl_seconds": 0.3}, state={"keys": [OTHER_KEY]})
    )
    assert (await client.answer(asked)).outcome == LOST
    assert stand.metric("mcp_gateway_state_rejected_total", reason="unknown_key") == 1
    await eventually(lambda: stand.held == 0, "it expires as it would have")


async def test_a_worker_opens_what_its_siblings_sealed_without_keys(upstream: FakeUpstream, tmp_path: Path) -> None:
    worker = Worker(0, 2, str(tmp_path), b"w" * 32)
    without = Gateway(reconfigured(upstream.url, state={"keys": []}), worker)
    started_later = Gateway(reconfigured(upstream.url), worker)
    assert set(without.key_ids) < set(started_later.key_ids)


async def test_the_same_keys_are_the_same_ring(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.tool(ask)
    asked = await stand.client().call()
    stand.gateway.apply(reconfigured(upstream.url, limits={"body_bytes": 100_000}))
    derive = Mock(wraps=keyring.HKDF)
    monkeypatch.setattr(keyring, "HKDF", derive)
    assert (await stand.client().answer(asked)).text
    derive.assert_not_called()


# Replicas.


@asynccontextmanager
async def two(begin: Start, other: Any = None, **more: Any) -> AsyncIterator[tuple[Stand, Stand, Any]]:
    """Two replicas, the second one with `other` sections, and the configuration of each by number."""
    peers = {"gw-1": f"127.0.0.1:{free_port()}", "gw-2": f"127.0.0.1:{free_port()}"}

    def member(name: str) -> dict[str, Any]:
        return {"id": name, "listen": peers[name], "peers": peers}

    one = await begin(replica=member("gw-1"), **more)
    two = await begin(replica=member("gw-2"), **{**more, **(other or {})})

    def again(number: int, url: str, **sections: Any) -> None:
        stand = (one, two)[number - 1]
        stand.gateway.apply(reconfigured(url, replica=member(f"gw-{number}"), **{**more, **sections}))

    yield one, two, again


@pytest.mark.parametrize("reloaded", [(1,), (2,), (1, 2)], ids=["the owner", "who asks", "both"])
async def test_a_reply_between_replicas_outlives_the_keys_it_began_with(
    upstream: FakeUpstream, begin: Start, reloaded: tuple[int, ...]
) -> None:
    go, running = asyncio.Event(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        await turn.progress(1)
        running.set()
        await go.wait()
        await turn.progress(2)
        await turn.result(text("done"))

    upstream.tool(tool)
    async with two(begin) as (one, other, again):
        options = {"meta": {mcp.META_PROGRESS_TOKEN: "p"}}
        asked = await one.client().call(**options)
        answers = dict.fromkeys(asked.questions, ACCEPT)
        retry = later(other.client().call(state=asked.state, answers=answers, **options))
        await running.wait()
        await eventually(lambda: len(one.gateway.downstream.legs.relayed) == 1)
        for keys in ([KEY, OTHER_KEY], [OTHER_KEY, KEY], [OTHER_KEY]):
            for number in reloaded:
                again(number, upstream.url, state={"keys": keys})
        go.set()
        reply = await retry
        assert reply.text == "done"
        assert [note["params"]["progress"] for note in reply.notifications][-1:] == [2]
        assert other.metric(CONTINUED, step="forwarded") == 1


async def test_a_replica_with_new_keys_speaks_to_one_that_began_with_them(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    keys = {"state": {"keys": [OTHER_KEY]}}
    async with two(begin, keys) as (one, other, again):
        again(1, upstream.url, **keys)
        assert one.gateway.key_ids == other.gateway.key_ids
        asked = await one.client().call()
        assert (await other.client().answer(asked)).text
        assert other.metric(CONTINUED, step="forwarded") == 1


async def test_replicas_in_neighbouring_phases_understand_each_other(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(ask)
    phases = ([KEY], [KEY, OTHER_KEY], [OTHER_KEY, KEY], [OTHER_KEY])
    async with two(begin) as (one, other, again):
        for before, after in itertools.pairwise(phases):
            for first, then in ((1, 2), (2, 1)):
                again(then, upstream.url, state={"keys": before})
                again(first, upstream.url, state={"keys": after})
                for here, there in ((one, other), (other, one)):
                    asked = await here.client().call()
                    assert (await there.client().answer(asked)).text
            again(1, upstream.url, state={"keys": after})
            again(2, upstream.url, state={"keys": after})


async def test_peers_come_and_go(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(ask)
    async with two(begin) as (one, other, _):
        alone = {"id": "gw-2", "listen": other.gateway.config.replica.listen}
        other.gateway.apply(reconfigured(upstream.url, replica=alone))
        assert other.gateway.members.alone
        asked = await one.client().call()
        assert (await other.client().answer(asked)).outcome == (503, -32603, "owner_stalled")
        assert mcp.CANCELLED not in upstream.words
        assert other.metric(CONTINUED, step="forwarded") == 0
        assert (await one.client().answer(asked)).text
        back = {**alone, "peers": dict(one.gateway.config.replica.peers)}
        other.gateway.apply(reconfigured(upstream.url, replica=back))
        asked = await one.client().call()
        assert json.loads((await other.client().answer(asked)).text) == ACCEPT
        assert other.metric(CONTINUED, step="forwarded") == 1


async def test_a_name_is_not_looked_up_in_the_old_service(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    gate = asyncio.Event()

    async def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        if host == "old":
            await gate.wait()
        return [f"{host}:1"]

    monkeypatch.setattr(membership, "resolve", resolve)
    names, tasks = FakeNameService(), Tasks(Metrics("0"))
    names.has(old="old:1", new="new:1")
    replica = Replica(id="gw-1", listen="127.0.0.1:1", peers_dns="old:1")
    in_force = InForce(replica)
    members = Membership(in_force, None, names, tasks)
    first = later(members.candidates("x"))
    await eventually(lambda: asked == ["old"])
    in_force.replace(msgspec.structs.replace(replica, peers_dns="new:1"))
    assert members.is_unsure, "the new service was not asked yet"
    gate.set()
    assert await first == ["gw-1"]
    monkeypatch.setattr(membership, "_FRESH_SECONDS", 0.0)
    assert sorted(await members.candidates("x")) == ["gw-1", "new"]
    assert not members.is_unsure
    await tasks.close()


# Routes.


async def test_a_new_route_serves_at_once_with_series_at_zero(upstream: FakeUpstream, stand: Stand) -> None:
    assert (await at(stand, "new").call()).outcome == NONE
    stand.gateway.apply(reconfigured(upstream.url, routes=routes(mcp=upstream.url, new=upstream.url)))
    body = stand.gateway.metrics.render().decode()
    assert 'mcp_gateway_held_calls{route="/new"} 0.0' in body
    assert 'mcp_gateway_sessions{route="/new",state="idle"} 0.0' in body
    assert (await at(stand, "new").call()).text == "done"


async def test_a_removed_route_takes_no_new_calls_and_ends_parked_ones(
    upstream: FakeUpstream, second: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    stand = await begin(routes=routes(mcp=second.url, old=upstream.url))
    old = at(stand, "old")
    over, asked, also = await old.call(), await old.call(), await old.call()
    assert (await old.answer(over)).text
    pool = stand.gateway.routes.live["/old"].upstream.pool
    stand.gateway.apply(reconfigured(upstream.url, routes=routes(mcp=second.url)))
    assert pool.closed
    assert (await old.call()).outcome == NONE
    assert (await old.post(mcp.DISCOVER)).outcome == NONE
    assert (await old.call(state="mrtr1.x.y", answers={})).outcome == NONE
    async with stand.http.get(old.url) as response:
        assert response.status == 404
    async with stand.http.post(old.url, data=b"no json") as response:
        assert response.status == 404
    assert len(upstream.of("DELETE")) == 1, "its idle session is ended"
    assert json.loads((await old.answer(asked)).text) == ACCEPT
    wrong = await old.call(state=also.state, answers={key: {"action": "no such"} for key in also.questions})
    assert wrong.error["code"] == -32602, "an answer that does not fit is told, as on any route"
    assert json.loads((await old.answer(also)).text) == ACCEPT
    assert json.loads((await old.answer(also)).text) == ACCEPT, "the kept result too"
    await upstream.saw("DELETE", 3)
    assert stand.metric("mcp_gateway_sessions", route="/old", state="busy") == 0
    assert stand.metric("mcp_gateway_sessions", route="/old", state="idle") == 0


async def test_a_removed_route_ends_the_calls_parked_at_another_replica(
    upstream: FakeUpstream, second: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    async with two(begin, routes=routes(mcp=second.url, old=upstream.url)) as (one, other, again):
        asked = await at(one, "old").call()
        again(1, upstream.url, routes=routes(mcp=second.url))
        again(2, upstream.url, routes=routes(mcp=second.url))
        assert json.loads((await at(other, "old").answer(asked)).text) == ACCEPT
        assert other.metric(CONTINUED, route="/old", step="forwarded") == 1
        assert other.metric(ROUNDS, route="/old", **COMPLETE) == 1


async def test_a_removed_route_without_calls_is_freed(
    upstream: FakeUpstream, second: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    route = {"upstream": {"url": upstream.url}, "continuation": "replay"}
    stand = await begin(routes=routes(mcp=second.url, old=route))
    asked = await at(stand, "old").call()
    stand.gateway.apply(reconfigured(upstream.url, routes=routes(mcp=second.url)))
    assert (await at(stand, "old").answer(asked)).outcome == NONE
    assert len(upstream.of("tools/call")) == 1


async def test_a_state_of_a_call_that_is_over_is_refused_where_the_route_is_gone_too(
    upstream: FakeUpstream, second: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    hold = {"linger_seconds": 0}
    stand = await begin(routes=routes(mcp=second.url, old=upstream.url), hold=hold)
    asked = await at(stand, "old").call()
    stand.gateway.apply(reconfigured(upstream.url, routes=routes(mcp=second.url), hold=hold))
    assert (await at(stand, "old").answer(asked)).text
    await eventually(lambda: not list(stand.gateway.lot))
    assert (await at(stand, "old").answer(asked)).outcome == LOST


async def test_parked_calls_end_at_the_old_upstream_of_a_route(
    upstream: FakeUpstream, second: FakeUpstream, stand: Stand
) -> None:
    upstream.tool(ask)
    client = stand.client(jwt(sub="ada"))
    asked, kept = await client.call(), await client.call()
    assert (await client.answer(kept)).text
    stand.gateway.apply(reconfigured(second.url))
    assert (await client.call()).text == "done"
    assert "tools/call" in second.words
    sent = len(second.seen)
    assert json.loads((await client.answer(asked)).text) == ACCEPT
    assert json.loads((await client.answer(kept)).text) == ACCEPT
    assert len(second.seen) == sent, "the new upstream hears nothing of the old calls"
    await upstream.saw("DELETE", 2)


async def test_a_retry_takes_the_headers_that_its_call_began_with(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(ask)
    stand = await begin(route={"forward_headers": ["x-tenant"]})
    client = Client(stand.http, stand.url, headers={"x-tenant": "one", "x-other": "two"})
    asked = await client.call()
    stand.gateway.apply(reconfigured(upstream.url, route={"forward_headers": ["x-other"]}))
    assert (await client.answer(asked)).text
    (answer,) = upstream.of("answer")
    assert (answer.headers.get("x-tenant"), answer.headers.get("x-other")) == ("one", None)
    asked = await client.call()
    call = upstream.of("tools/call")[-1]
    assert (call.headers.get("x-tenant"), call.headers.get("x-other")) == (None, "two")
    assert (await client.answer(asked)).text


async def test_what_is_known_of_a_client_that_calls_again_and_again_is_forgotten(
    upstream: FakeUpstream, begin: Start
) -> None:
    """Its head and its `_meta` are always the same, so nothing of them is read again (`round.new_round`)."""
    stand = await begin(route={"set_headers": {"x-tenant": "one"}})
    for name in ("one", "two"):
        stand.gateway.apply(reconfigured(upstream.url, route={"set_headers": {"x-tenant": name}}))
        for _ in range(4):
            assert (await stand.client().call()).text
        assert {call.headers["x-tenant"] for call in upstream.of("tools/call")[-4:]} == {name}


BINDS = {"forward_headers": ["x-api-key", "x-tenant"]}
MINE = {"X-Api-Key": "mine", "X-Tenant": "a"}


@pytest.mark.parametrize(
    "now",
    [
        BINDS | {"bind_headers": ["x-tenant"]},
        BINDS | {"bind_headers": []},
        {"forward_headers": ["x-tenant"]},
        None,
    ],
)
async def test_a_call_that_waits_stays_bound_to_the_headers_that_it_began_with(
    upstream: FakeUpstream, second: FakeUpstream, begin: Start, now: dict[str, Any] | None
) -> None:
    upstream.tool(ask)

    def both(route: dict[str, Any] | None) -> list[dict[str, Any]]:
        old = {} if route is None else {"old": {"upstream": {"url": upstream.url}, **route}}
        return routes(mcp=second.url, **old)

    stand = await begin(routes=both(BINDS | {"bind_headers": ["x-api-key"]}))
    asked = await at(stand, "old", headers=MINE).call()
    stand.gateway.apply(reconfigured(upstream.url, routes=both(now)))
    refused = {
        (await at(stand, "old", headers=other).answer(asked)).outcome for other in ({}, MINE | {"X-Api-Key": "x"})
    }
    assert refused == {NONE if now is None else LOST}
    assert json.loads((await at(stand, "old", headers=MINE | {"X-Tenant": "b"}).answer(asked)).text) == ACCEPT


async def test_a_header_that_becomes_bound_binds_what_is_sealed_from_then_on(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    stand = await begin(route=BINDS | {"bind_headers": []})
    before = await stand.client(headers=MINE).call()
    stand.gateway.apply(reconfigured(upstream.url, route=BINDS))
    after = await stand.client(headers=MINE).call()
    other = stand.client(headers=MINE | {"X-Api-Key": "x"})
    assert (await other.answer(after)).outcome == LOST
    assert (await other.answer(before)).text
    assert (await stand.client(headers=MINE).answer(after)).text


async def test_a_route_that_is_the_same_keeps_its_sessions_and_what_it_learnt(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    assert (await client.call()).text
    before = upstream.words
    stand.gateway.apply(
        reconfigured(upstream.url, route={"undeclared": "refuse", "ephemeral": ["x"]}, limits={"body_bytes": 10_000})
    )
    assert (await client.call()).text
    assert upstream.words == [*before, "tools/call"], "no handshake, no tools/list, no DELETE"


async def test_a_changed_route_serves_new_calls_by_its_new_words(upstream: FakeUpstream, begin: Start) -> None:
    """Under `abort` the call of a client that declared nothing ends; under `refuse` the tool falls back."""
    upstream.tool(ask)
    stand = await begin()
    mute = stand.client(capabilities={})
    assert (await mute.call()).error["code"] == -32021
    stand.gateway.apply(reconfigured(upstream.url, route={"undeclared": "refuse"}))
    assert (await mute.call()).text == "null"
    stand.gateway.apply(reconfigured(upstream.url, route={"continuation": "replay", "cache": {"ttl_ms": 77}}))
    asked = await stand.client().call()
    assert stand.held == 0
    assert json.loads((await stand.client().answer(asked)).text) == ACCEPT
    assert (await stand.client().post("tools/list")).result["ttlMs"] == 77


async def test_a_subscription_ends_where_its_upstream_does_and_else_lives_on(
    upstream: FakeUpstream, second: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.capabilities = OFFERED
    async with listening(client, EVERYTHING) as stream:
        stand.gateway.apply(reconfigured(upstream.url, hold={"ttl_seconds": 5}))
        upstream.side("s1").put_nowait(change("tools/list_changed"))
        assert (await stream.next())["method"] == mcp.TOOLS_CHANGED
        assert len(stand.gateway.routes.live["/mcp"].upstream.subscriptions) == 1, "a drain will find it"
        stand.gateway.apply(reconfigured(second.url))
        assert (await stream.next())["result"]["resultType"] == "complete"
    await upstream.saw("DELETE")
    await eventually(lambda: stand.sessions("busy") == 0)


async def test_a_subscription_that_was_asked_for_too_late_ends_too(
    upstream: FakeUpstream, second: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.capabilities = OFFERED
    gate = upstream.holding("initialize", once=True)
    waiting = later(client.post(mcp.LISTEN, {"notifications": EVERYTHING}))
    await upstream.saw("initialize")
    stand.gateway.apply(reconfigured(second.url))
    gate.set()
    assert (await waiting).final["result"]["resultType"] == "complete"


# Limits.


async def test_fewer_calls_may_be_held_and_those_that_are_stay(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.tool(ask)
    client = stand.client()
    asked = [await client.call() for _ in range(3)]
    stand.gateway.apply(reconfigured(upstream.url, hold={"max_calls": 2}))
    assert stand.metric("mcp_gateway_held_calls_limit") == 2
    assert (await client.call()).status == 503
    assert stand.held == 3
    for each in asked:
        assert (await client.answer(each)).text
    assert (await client.answer(await client.call())).text
    stand.gateway.apply(reconfigured(upstream.url, hold={"max_calls_per_principal": 1}))
    one = await client.call()
    assert (await client.call()).status == 429
    assert (await client.answer(one)).text


async def test_the_body_limit_follows_in_both_directions(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    large = {"text": "x" * 10_000}
    assert (await client.call(arguments=large)).text
    stand.gateway.apply(reconfigured(upstream.url, limits={"body_bytes": 5_000}))
    assert (await client.call(arguments=large)).status == 413
    stand.gateway.apply(reconfigured(upstream.url, limits={"body_bytes": 50_000}))
    assert (await client.call(arguments=large)).text


async def test_the_budgets_for_bytes_follow(upstream: FakeUpstream, stand: Stand) -> None:
    traffic = stand.gateway.routes.process.traffic
    most = {"receiving_bytes": 5_000_000, "sending_bytes": 20_000_000}
    stand.gateway.apply(reconfigured(upstream.url, limits=most))
    assert (traffic.receiving.limit, traffic.sending.limit) == (5_000_000, 20_000_000)


async def test_a_call_that_waits_keeps_its_time_and_a_new_one_has_the_new(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    stand = await begin(hold={"linger_seconds": 0.05})
    client = stand.client()
    before = await client.call()
    old = stand.gateway.routes.live["/mcp"].deadlines
    stand.gateway.apply(reconfigured(upstream.url, hold={"ttl_seconds": 0.2, "linger_seconds": 0.05}))
    after = await client.call()
    await eventually(lambda: stand.held == 1, "the new one expires")
    assert (await client.answer(after)).outcome == LOST
    assert (await client.answer(before)).text
    assert stand.gateway.routes.live["/mcp"].deadlines is not old
    every = (old.idle, old.silence, *old.shared.values())
    await eventually(lambda: not any(map(len, every)), "nothing waits for the old alarms")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("timeouts", "idle_seconds"),
        ("timeouts", "keepalive_seconds"),
        ("legs", "limit_seconds"),
        ("hold", "ttl_seconds"),
        ("state", "ttl_seconds"),
        ("hold", "linger_seconds"),
    ],
)
async def test_calls_after_a_reload_have_the_new_deadlines(
    upstream: FakeUpstream, stand: Stand, section: str, key: str
) -> None:
    keys = {"keys": [KEY]} if section == "state" else {}
    stand.gateway.apply(reconfigured(upstream.url, **{section: {**keys, key: 7.5}}))
    deadlines, began = stand.gateway.routes.live["/mcp"].deadlines, time.monotonic()
    timers = (deadlines.idle, deadlines.silence, *deadlines.shared.values())
    for timer in timers:
        timer.arm(stand, lambda: None)
    assert sum(7.5 <= (timer.deadline(stand) or 0.0) - began < 8 for timer in timers) == 1
    for timer in timers:
        timer.disarm(stand)


async def test_the_next_connection_to_an_upstream_has_the_new_time(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.gateway.apply(reconfigured(upstream.url, timeouts={"connect_seconds": 7.5}))
    given: list[float | None] = []
    begin = HttpClient.begin

    def noted(calls: HttpClient, pending: PendingRequest, **options: bool) -> None:
        given.append(pending.connect_seconds)
        begin(calls, pending, **options)

    monkeypatch.setattr(HttpClient, "begin", noted)
    assert (await stand.client().call()).text
    assert set(given) == {7.5}


async def test_a_shorter_state_is_sealed_and_a_longer_one_that_is_out_still_opens(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def many(turn: Turn) -> None:
        await asyncio.gather(*(turn.elicit("q" * 300 + str(number)) for number in range(3)))
        await turn.result(text("done"))

    upstream.tool(many)
    stand = await begin()
    client = stand.client()
    asked = await client.call()
    assert len(asked.state) > 1024
    stand.gateway.apply(reconfigured(upstream.url, limits={"state_bytes": 1024}))
    shorter = await client.call()
    assert len(shorter.state) <= 1024
    assert (await client.answer(asked)).text == "done"
    assert (await client.answer(shorter)).text == "done"


async def test_a_waiting_call_gets_a_session_when_the_limit_rises(upstream: FakeUpstream, begin: Start) -> None:
    gate = asyncio.Event()

    async def slow(turn: Turn) -> None:
        await turn.raw(b": working\n\n")
        await gate.wait()
        await turn.result(text("done"))

    stand = await begin(sessions={"max": 1, "quarantine_seconds": 0.3})
    client = stand.client()
    assert (await client.call()).text
    upstream.tool(slow)
    calls = [later(client.call()) for _ in range(4)]
    pool = stand.gateway.routes.live["/mcp"].upstream.pool
    await eventually(lambda: pool.waiting == 3)
    stand.gateway.apply(reconfigured(upstream.url, sessions={"max": 3}))
    await upstream.saw("tools/call", 4)
    await eventually(lambda: stand.sessions("busy") == 3)
    gate.set()
    assert [(await call).text for call in calls] == ["done"] * 4


async def test_an_idle_session_is_used_under_the_new_bounds(upstream: FakeUpstream, stand: Stand) -> None:
    client = stand.client()
    assert (await client.call()).text

    upstream.tool(lambda turn: turn.result(text("x" * 5000)))
    assert (await client.call()).text
    stand.gateway.apply(reconfigured(upstream.url, limits={"event_bytes": 1000}))
    assert (await client.call()).outcome[1:] == (-32603, "call_lost")
    assert len(upstream.of("initialize")) == 1


async def test_idle_sessions_are_swept_by_the_new_time(upstream: FakeUpstream, stand: Stand) -> None:
    assert (await stand.client().call()).text
    stand.gateway.apply(reconfigured(upstream.url, sessions={"idle_seconds": 0.05}))
    await upstream.saw("DELETE")


async def test_connections_over_the_new_cap_are_refused_and_the_old_ones_served(
    upstream: FakeUpstream, stand: Stand
) -> None:
    host, _, port = stand.gateway.listen.rpartition(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    probe = b"GET /mcp HTTP/1.1\r\nHost: localhost\r\nMCP-Protocol-Version: 2026-07-28\r\n\r\n"
    for reader, writer in streams:
        writer.write(probe)
        assert b"405" in await reader.readline()
    stand.gateway.apply(reconfigured(upstream.url, limits={"connections": 1}))
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(probe)
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), DEADLINE) == b""
    writer.close()
    for reader, writer in streams:
        writer.write(probe)
        while b"405" not in await asyncio.wait_for(reader.readline(), DEADLINE):
            pass
        writer.close()


async def test_hosts_and_principals_follow(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    client = stand.client()
    assert (await client.call(headers={"Host": "gateway.example"})).status == 403
    proxied: dict[str, Any] = {
        "security": {"allowed_hosts": ["gateway.example"]},
        "principal": {"source": "header", "header": "x-user", "trusted_proxies": ["127.0.0.0/8"]},
        "hold": {"max_calls_per_principal": 1},
    }
    stand.gateway.apply(reconfigured(upstream.url, **proxied))
    upstream.tool(ask)
    ann = {"Host": "gateway.example", "x-user": "ann"}
    asked = await client.call(headers=ann)
    bobs = await client.call(headers={**ann, "x-user": "bob"})
    assert (await client.call(headers=ann)).status == 429
    assert (await client.answer(bobs, headers=ann)).outcome == LOST
    trusting_others = proxied | {"principal": {**proxied["principal"], "trusted_proxies": ["10.0.0.0/8"]}}
    stand.gateway.apply(reconfigured(upstream.url, **trusting_others))
    assert (await client.answer(bobs, headers={**ann, "x-user": "bob"})).outcome == LOST, "anybody could say so"
    stand.gateway.apply(reconfigured(upstream.url, **proxied))
    assert (await client.answer(bobs, headers={**ann, "x-user": "bob"})).text
    assert (await client.answer(asked, headers=ann)).text


async def test_a_request_whose_body_comes_after_the_reload_is_served_by_it(
    upstream: FakeUpstream, second: FakeUpstream, stand: Stand, client: Client
) -> None:
    headers, body = client.build("tools/call", {"name": "tool", "arguments": {}})
    begun = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:10]
        await begun.wait()
        yield body[10:]

    async def post() -> Reply:
        async with client.http.post(client.url, headers=headers, data=slowly()) as response:
            return Reply(response, await response.read(), "tools/call")

    call = later(post())
    await eventually(lambda: stand.gateway.downstream.in_flight == 1)
    stand.gateway.apply(reconfigured(second.url))
    begun.set()
    assert (await call).text == "done"
    assert not upstream.seen


# Nothing leaks.


async def test_fifty_reloads_leave_nothing_behind(upstream: FakeUpstream, second: FakeUpstream, begin: Start) -> None:
    for each in (upstream, second):
        each.tool(ask)
    stand = await begin(hold={"linger_seconds": 0.05})
    client = stand.client()
    assert (await client.answer(await client.call())).text
    waiting = await client.call()
    used: list[weakref.ref[Any]] = []
    for number in range(50):
        url = (second, upstream)[number % 2].url
        live = stand.gateway.routes.live["/mcp"]
        used += [weakref.ref(live.upstream.pool), weakref.ref(live.deadlines)]
        del live
        stand.gateway.apply(
            reconfigured(
                url,
                routes=routes(mcp=url, **{f"r{number}": url}),
                hold={"linger_seconds": 0.05, "ttl_seconds": 100 + number},
            )
        )
        assert (await client.answer(await client.call())).text
    assert (await client.answer(waiting)).text
    await eventually(lambda: not stand.tasks(), "no task is left")

    def left() -> list[Any]:
        gc.collect()
        return [found for ref in used if (found := ref()) is not None]

    await eventually(lambda: not left(), "no pool and no alarm is left")


# The signal.


class Files:
    """Stands for the file, which hands out what the test put there, and for the process."""

    def __init__(self, *files: Config | Exception, has_file: bool = True) -> None:
        self.next = [*files]
        self.path = Path()
        self.unusable: Config | None = None
        self.applied: list[Config] = []
        self.counted: list[bool] = []
        self.is_whole = threading.Event()
        self.is_whole.set()
        self.metrics = Metrics("0")
        self.tasks = Tasks(self.metrics)
        file: Any = self if has_file else None
        self.reload = Reload(file, InForce(ONE), self, self.tasks)

    def apply(self, config: Config) -> None:
        if config is self.unusable:
            raise ConfigError([Problem("tls.cert_file", "cannot be read")])
        self.applied.append(config)

    def reloaded(self, *, applied: bool) -> None:
        self.counted.append(applied)

    def load(self) -> Config:
        found = self.next.pop(0)
        _ = self.is_whole.wait(5)
        if isinstance(found, Exception):
            raise found
        return found

    async def done(self) -> None:
        await eventually(lambda: not len(self.tasks))

    async def signalled(self, times: int) -> None:
        """So many signals to a process that has started, and what comes of them."""
        self.reload.begin()
        for _ in range(times):
            self.reload.ask()
        await self.done()


ONE = reconfigured("http://127.0.0.1:1/mcp")
TWO = reconfigured("http://127.0.0.1:2/mcp")
THREE = reconfigured("http://127.0.0.1:3/mcp")
STUCK = reconfigured("http://127.0.0.1:3/mcp", listen="127.0.0.1:5", workers=2)


async def test_signals_are_served_one_after_the_other_and_the_last_file_wins() -> None:
    files = Files(TWO, THREE)
    files.is_whole.clear()
    signalled = later(files.signalled(2))
    await eventually(lambda: files.next == [THREE])
    await asyncio.to_thread(int)  # behind a second read
    assert files.next == [THREE]
    files.is_whole.set()
    await signalled
    assert files.applied == [TWO, THREE]
    assert files.counted == [True, True]


async def test_a_signal_before_the_start_waits_for_it() -> None:
    files = Files(TWO)
    files.reload.ask()
    await asyncio.sleep(0)
    await asyncio.to_thread(int)  # behind a read
    assert files.next == [TWO]
    await files.signalled(0)
    assert files.applied == [TWO]


async def test_a_file_that_needs_a_restart_is_refused_as_a_whole(tmp_path: Path, log_lines: Lines) -> None:
    files = Files(STUCK, ConfigError([Problem("routes", "is empty")]), TWO)
    files.path = tmp_path / "gateway.yaml"
    _ = files.path.write_text("admin: null\nworkers: 2\nlisten: 127.0.0.1:5\n")
    await files.signalled(3)
    told = ": cannot change while the process runs; restart, or put the old value back"
    (line, _) = log_lines("config.rejected")
    assert line["problems"] == [f"{files.path}:2:1: workers{told}", f"{files.path}:3:1: listen{told}"]
    assert files.applied == [TWO]
    assert files.counted == [False, False, True]


async def test_a_bug_of_the_loader_is_counted_and_the_next_signal_served() -> None:
    files = Files(ZeroDivisionError(), TWO)
    await files.signalled(1)
    assert files.counted == [False]
    assert files.metrics.series.registry.get_sample_value("mcp_gateway_task_failures_total") == 1
    await files.signalled(1)
    assert files.applied == [TWO]


async def test_a_drain_ignores_the_signal_even_while_the_file_is_read() -> None:
    files = Files(TWO, THREE)
    files.reload.ask()
    files.reload.close()
    await files.signalled(1)
    assert files.applied == files.counted == []


async def test_without_a_file_nothing_changes_and_the_log_says_why(log_lines: Lines) -> None:
    files = Files(has_file=False)
    await files.signalled(1)
    assert (files.applied, files.counted) == ([], [False])
    (line,) = log_lines("config.rejected")
    assert line["level"] == "warning"
    assert "of --config again, and this process has none" in line["note"]


async def test_a_reload_changes_nothing_if_a_plug_in_that_it_asks_for_cannot_be_loaded(
    begin: Start, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade on disk, whose plug-ins need more than the program that runs."""
    stand = await begin(routes=[{"path": "/child", "upstream": {"command": ["cat"]}}])
    before = stand.gateway.config
    monkeypatch.setattr(loader, "plugin", Mock(side_effect=ImportError))
    with pytest.raises(ImportError):
        stand.gateway.apply(reconfigured(upstream.url))
    assert stand.gateway.config is before
    monkeypatch.undo()
    stand.gateway.apply(reconfigured(upstream.url))
    assert stand.gateway.config is not before


async def test_an_inapplicable_file_is_rejected_and_the_next_one_is_applied() -> None:
    """A file that the configuration names was taken away between its reading and its use."""
    files = Files(TWO, THREE)
    files.unusable = TWO
    await files.signalled(2)
    assert (files.applied, files.counted) == ([THREE], [False, True])

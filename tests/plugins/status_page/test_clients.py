"""Who has the calls: the address and the name of each client, without a log that was on before."""

import json
from typing import Any

import msgspec
import pytest

from gateway.downstream.direct_calls import DirectCall
from gateway.plugins.status_page.status_page import page
from gateway.telemetry.process_status import CallerStatus, Status
from tests.plugins.status_page.test_running_calls import one_running
from tests.support.cluster import Cluster
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import FakeUpstream, Turn, ask, text
from tests.support.known_calls import arguments, calling, reply
from tests.support.replicas import drop
from tests.support.stand import Start
from tests.support.status import SECRET, fetch, process, status_of, told
from tests.support.status import held as held_for
from tests.support.workbench import ACCEPT, Stand, jwt

PROXIED: dict[str, Any] = {"principal": {"trusted_proxies": ["127.0.0.0/8"]}}

GREEDY = CallerStatus(caller="a", held=1, sessions=1)


def came_from(address: str) -> dict[str, str]:
    return {"X-Forwarded-For": address}


async def held(stand: Stand) -> list[str]:
    return [call.client for call in (await told(stand)).held]


async def test_a_held_call_names_its_client(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    upstream.tool(ask)
    told_name = f"agent\n\x1b[2J {'x' * 100}"
    _ = await stand.client(info={"name": "assistant", "version": "3"}).call()
    _ = await stand.client(jwt(iss="https://id.example", sub=SECRET), info={"name": told_name, "version": "3"}).call()
    _ = await stand.client(info={"name": "Bearer abcdef0123456789abcdef", "version": "3"}).call()
    first, second, third = await held(stand)
    assert first == "127.0.0.1 assistant"
    assert second == f"127.0.0.1 agent ?[2J {'x' * 69}"
    assert "abcdef0123456789" not in third, "a secret is masked, whoever sends it as its name"
    html = (await fetch(stand, "/status"))[1]
    assert "127.0.0.1 assistant" in html
    assert SECRET not in html, "whom a token names is not shown"
    await drop(stand)


async def test_the_address_is_what_trusted_proxies_tell_of_it(upstream: FakeUpstream, begin: Start) -> None:
    stand, plain = await begin(**PROXIED), await begin()
    upstream.tool(asks_for_ever)
    _ = await stand.client().call(headers=came_from("203.0.113.9, 198.51.100.7"))
    assert await held(stand) == ["198.51.100.7 bench"]
    _ = await plain.client().call(headers=came_from("198.51.100.7"))
    assert await held(plain) == ["127.0.0.1 bench"], "anybody may send the header"
    await drop(stand)
    await drop(plain)


async def asks_for_ever(turn: Turn) -> None:
    while True:
        await turn.elicit("q")


async def test_a_caller_is_shown_with_the_clients_that_have_the_most_of_its_calls(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(**PROXIED)
    upstream.tool(ask)
    for number, calls in ((1, 2), (2, 4), (3, 1), (4, 3)):
        for _ in range(calls):
            _ = await stand.client().call(headers=came_from(f"198.51.100.{number}"))
    _ = await stand.client(jwt(iss="https://id.example", sub="ada")).call()
    many, one = (await told(stand)).callers
    assert list(many.clients.items()) == [
        ("198.51.100.2 bench", 4),
        ("198.51.100.4 bench", 3),
        ("198.51.100.1 bench", 2),
    ]
    assert (many.held, one.clients) == (10, {"127.0.0.1 bench": 1})
    html = (await fetch(stand, "/status"))[1]
    assert "4 of 198.51.100.2 bench" in html
    sums = "4 from 198.51.100.2, 3 from 198.51.100.4, 2 from 198.51.100.1."
    assert f"By address (of a proxy, unless principal.trusted_proxies names it):\n{sums}" in html
    await drop(stand)


@pytest.mark.parametrize("sections", [{}, PROXIED], ids=["no proxy", "a trusted proxy"])
async def test_a_call_that_no_coroutine_serves_names_its_client_too(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr("gateway.plugins.status_page.snapshot.LONG_SECONDS", 0.0)
    monkeypatch.setitem(arguments, "arguments", {"a": 1})
    stand = await begin(**sections)
    upstream.tool(lambda turn: turn.result(text("x")))
    shown = "198.51.100.7 bench" if sections else "127.0.0.1 bench"
    async with calling(stand, "X-Forwarded-For: 198.51.100.7") as (raw, sent):
        go = upstream.holding("tools/call", asks_for_ever)
        await raw.send(sent)
        call = await one_running(stand)
        (direct,) = stand.gateway.downstream.legs.seen
        assert isinstance(direct, DirectCall)
        assert call.client == shown
        (caller,) = (await told(stand)).callers
        assert caller.clients == {shown: 1}
        go.set()
        asked = json.loads((await reply(raw))[1])
        assert asked["result"]["resultType"] == "input_required"
        assert await held(stand) == [shown]
        await drop(stand)


def test_a_replica_of_an_older_version_tells_of_no_clients() -> None:
    sent = json.loads(msgspec.json.encode(status_of(process(0), held=(held_for(1),), callers=(GREEDY,))))
    del sent["held"][0]["client"], sent["callers"][0]["clients"], sent["addresses"]
    status = msgspec.convert(sent, Status)
    assert "By address" not in page(status)
    assert (status.held[0].client, status.callers[0].clients) == ("", {})
    assert '<p class="soft"></p>' not in page(status)


async def test_a_call_that_another_replica_takes_over_has_the_address_of_its_client(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = FakeStore(upstream, rounds=2)
    asked, (one, two, three) = await cluster.asked("gw-1", "gw-2", "gw-3", **PROXIED)
    await cluster.crash(one)
    again = await three.client().answer(asked, headers=came_from("198.51.100.7"))
    for stand in (two, three):  # each tells of the whole cluster
        assert await held(stand) == ["198.51.100.7 bench"]
    assert (await two.client().answer(again)).json == [ACCEPT] * 2

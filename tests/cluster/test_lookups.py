"""Replicas behind one DNS name find each other, and lookups that fail lose none of them."""

import asyncio
import socket
from typing import Any

import pytest

from gateway import world as seam
from gateway.cluster import membership
from gateway.cluster.membership import Membership, resolve
from gateway.cluster.peer_errors import ReplyBroken
from gateway.cluster.worker import Address  # noqa: TC001  (one import style)
from gateway.config import InForce, Replica
from gateway.protocol.errors import OwnerSilent
from gateway.runtime.tasks import Tasks
from tests.parts.launch import free_port
from tests.support.fake_name_service import EXCHANGES, IDS, PEERS, FakeClock, FakeNameService, static
from tests.support.fake_upstream import FakeUpstream
from tests.support.replicas import TWICE, Cluster, in_time
from tests.support.workbench import ACCEPT, eventually, later


async def test_peers_are_found_by_asking_each_address_for_its_id(world: FakeNameService, dns: Membership) -> None:
    world.has(gw_1="10.0.0.1:8081", gw_2="10.0.0.2:8081", gw_3="10.0.0.3:8081")
    assert await dns.address("gw-2") == "10.0.0.2:8081"
    assert await dns.address("gw-3#4") == "10.0.0.3:8081"
    assert world.resolved == [("peers.example", 8081)]
    assert sorted(world.asked) == ["10.0.0.1:8081", "10.0.0.2:8081", "10.0.0.3:8081"]
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2", "gw-3"]
    assert len(world.resolved) == 1, "what was found is still fresh"
    assert await dns.address("gw-1") is None


async def test_discovered_replicas_fail_over_in_the_order_of_configured_ones(
    world: FakeNameService, dns: Membership, tasks: Tasks
) -> None:
    world.has(gw_1="10.0.0.1:1", gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    written = static("gw-2", tasks, {name: PEERS[name] for name in IDS[:3]})
    for exchange in EXCHANGES[:50]:
        assert await dns.candidates(exchange) == await written.candidates(exchange)


async def test_a_missing_id_is_looked_up_at_most_once_per_pause(
    world: FakeNameService, dns: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outdated lookup does not prove a death; a state with a foreign id cannot hammer the name service."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(membership.asyncio, "sleep", sleep)
    world.has(gw_2="10.0.0.2:1")
    with pytest.raises(OwnerSilent):
        await dns.address("gw-3")
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    assert await dns.address("gw-3") == "10.0.0.3:1"
    assert slept[0] <= 0
    assert 0 < slept[1] <= 0.5, "it waited until it may look again"
    for _ in range(100):
        assert await dns.address("gw-3") == "10.0.0.3:1"
    assert len(world.resolved) == 2, "a known member needs no lookup"


async def test_a_replica_that_introduces_itself_is_known_before_the_name_service_has_it(
    world: FakeNameService, dns: Membership, clock: FakeClock
) -> None:
    world.names["10.0.0.9:8081"] = "gw-9"
    dns.greeted("gw-9", "10.0.0.9")
    await eventually(lambda: "gw-9" in dns.known())
    assert (await dns.address("gw-9"), world.resolved) == ("10.0.0.9:8081", [])
    assert world.greeted == [], "verifying an introduction does not introduce, or two replicas would never stop"
    assert await dns.is_back("gw-9")
    clock.now += 60
    assert await dns.is_unlisted("gw-9"), "it was known once, and is not new"
    assert await dns.address("gw-9") == "10.0.0.9:8081", "it may live there all the same"


@pytest.mark.parametrize(
    ("host", "remote", "there"),
    [("gw-9", "10.0.0.9", "gw-8"), ("gw-9", "10.0.0.9", None), ("gw-9", "10.0.0.9", ReplyBroken())],
)
async def test_an_introduction_is_believed_only_after_its_senders_address_confirms_it(
    world: FakeNameService, dns: Membership, tasks: Tasks, host: str, remote: str, there: str | Exception | None
) -> None:
    if there is not None:
        world.names["10.0.0.9:8081"] = there
    dns.greeted(host, remote)
    await eventually(lambda: world.asked == ["10.0.0.9:8081"])
    await eventually(lambda: not len(tasks))
    assert dns.known() == {}


async def test_introductions_are_ignored_with_configured_peers(tasks: Tasks) -> None:
    members = static("gw-1", tasks)
    members.greeted("gw-9", "10.0.0.9")
    members.greeted("gw-1", "10.0.0.9")
    await members.begin()
    assert len(tasks) == 0
    assert not await members.is_back("gw-2")


async def test_a_young_process_takes_an_unknown_id_for_a_new_replica(
    world: FakeNameService, tasks: Tasks, clock: FakeClock, replica: InForce[Replica]
) -> None:
    dns = Membership(replica, None, world, tasks)
    world.has(gw_2="10.0.0.2:1")
    assert await dns.address("gw-2") == "10.0.0.2:1"
    assert not await dns.is_unlisted("gw-3")
    dns.forget_address("gw-2")
    world.has()
    clock.now += 0.5
    assert await dns.is_unlisted("gw-2"), "this one it knew"
    assert not await dns.is_unlisted("gw-3")
    clock.now += 9.5
    assert await dns.is_unlisted("gw-3")


async def test_concurrent_callers_share_one_lookup(world: FakeNameService, dns: Membership) -> None:
    world.has(gw_2="10.0.0.2:1")
    world.hold = asyncio.Event()
    looks = [later(dns.is_unlisted(f"gw-{2 + number % 2}")) for number in range(20)]
    await eventually(lambda: world.resolved)
    world.hold.set()
    assert await in_time(asyncio.gather(*looks)) == [False, True] * 10
    assert len(world.resolved) == 1


async def test_a_cancelled_caller_does_not_cancel_the_shared_lookup(world: FakeNameService, dns: Membership) -> None:
    world.has(gw_2="10.0.0.2:1")
    world.hold = asyncio.Event()
    one, other = (later(dns.address("gw-2")) for _ in range(2))
    await eventually(lambda: world.resolved)
    one.cancel()
    await asyncio.wait((one,))
    world.hold.set()
    assert await in_time(other) == "10.0.0.2:1"


async def test_candidates_are_looked_up_again_when_the_last_lookup_is_old(
    world: FakeNameService, dns: Membership, clock: FakeClock
) -> None:
    world.has(gw_2="10.0.0.2:1")
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    clock.now += 5
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]
    clock.now += 0.001
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2", "gw-3"]
    assert len(world.resolved) == 2


@pytest.mark.parametrize("failure", [socket.gaierror(-2, "no name"), OSError("no net"), TimeoutError()])
async def test_known_replicas_stay_known_when_the_name_service_fails(
    world: FakeNameService, dns: Membership, clock: FakeClock, failure: Exception
) -> None:
    world.has(gw_2="10.0.0.2:1")
    assert await dns.address("gw-2") == "10.0.0.2:1"
    world.records = failure
    clock.now += 60
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]
    assert await dns.address("gw-2") == "10.0.0.2:1"
    with pytest.raises(OwnerSilent) as caught:
        await dns.address("gw-3")
    assert caught.value.status == 503, "it cannot be told whether it is dead"
    assert caught.value.is_local
    assert dns.is_unsure
    assert "peers_dns" in caught.value.message
    assert not await dns.is_unlisted("gw-3")
    with pytest.raises(OwnerSilent):
        await dns.is_back("gw-3")
    world.has(gw_2="10.0.0.2:1")
    clock.now += 60
    assert await dns.is_unlisted("gw-3"), "now it can"
    assert not await dns.is_back("gw-3")


async def test_a_lookup_that_hangs_times_out(
    world: FakeNameService, dns: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_RESOLVE_SECONDS", 0.01)
    world.hold = asyncio.Event()
    with pytest.raises(OwnerSilent):
        await in_time(dns.address("gw-2"))


@pytest.mark.parametrize("known", [True, False])
async def test_an_address_that_does_not_tell_its_id_may_belong_to_any_replica(
    world: FakeNameService, dns: Membership, clock: FakeClock, *, known: bool
) -> None:
    """A stopped replica accepts connections: its calls live, and no other replica may take them over."""
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    if known:
        assert await dns.address("gw-2") == "10.0.0.2:1"
        clock.now += 60
    world.names["10.0.0.2:1"] = ReplyBroken()
    await dns.candidates("e")
    assert await dns.address("gw-3") == "10.0.0.3:1", "others are not affected"
    try:
        found: Address | str | None = await dns.address("gw-2")
    except OwnerSilent:
        found = "silent"
    assert found == ("10.0.0.2:1" if known else "silent"), "but never dead"
    assert not await dns.is_unlisted("gw-2")
    del world.names["10.0.0.2:1"]
    clock.now += 60
    await dns.candidates("e")
    assert await dns.is_unlisted("gw-2"), "no process is there any more"


async def test_addresses_without_a_process_are_skipped(world: FakeNameService, dns: Membership) -> None:
    world.has(gw_2="10.0.0.2:1")
    world.records = ["10.0.0.9:1", "10.0.0.2:1", "10.0.0.8:1"]
    assert await dns.address("gw-2") == "10.0.0.2:1"
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]


async def test_an_unlisted_replica_keeps_its_last_address(
    world: FakeNameService, dns: Membership, clock: FakeClock, replica: InForce[Replica]
) -> None:
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    await dns.candidates("e")
    world.has(gw_3="10.0.0.3:1")
    clock.now += 60
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-3"]
    assert await dns.is_unlisted("gw-2")
    assert await dns.address("gw-2") == "10.0.0.2:1", "a name service may drop one that lives"
    replica.replace(Replica(id="gw-1", listen="127.0.0.1:1", peers_dns="other.example:8081"))
    clock.now += 60
    with pytest.raises(OwnerSilent):
        await dns.address("gw-2")


@pytest.mark.parametrize("noted", ["gw-2", "gw-2#1"])
async def test_a_dead_member_is_found_again_under_another_address(
    world: FakeNameService, dns: Membership, clock: FakeClock, noted: str
) -> None:
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    assert await dns.address(noted) == "10.0.0.2:1"
    dns.note(noted, "silent")
    assert await dns.address(noted) == "10.0.0.2:1"
    assert len(world.resolved) == 2, "it was looked up anew: its address may belong to another replica by now"
    dns.note(noted, "silent")
    world.has(gw_2="10.0.0.77:1", gw_3="10.0.0.3:1")
    clock.now += 0.5
    assert await dns.address(noted) == "10.0.0.77:1"
    assert not dns.was_silent(noted), "it has answered there"
    clock.now += 2
    assert not dns.was_silent(noted)


async def test_replicas_that_swap_addresses_are_found_again(
    world: FakeNameService, dns: Membership, clock: FakeClock
) -> None:
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    await dns.candidates("e")
    world.has(gw_3="10.0.0.2:1", gw_2="10.0.0.3:1")
    clock.now += 60
    await dns.candidates("e")
    assert await dns.address("gw-2") == "10.0.0.3:1"
    assert await dns.address("gw-3") == "10.0.0.2:1"


async def test_a_name_resolves_to_addresses_with_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1:8081" in await resolve("127.0.0.1", 8081)

    async def two_families(*_: Any, **options: Any) -> list[Any]:
        assert options["type"] == socket.SOCK_STREAM
        six = (socket.AF_INET6, 1, 6, "", ("fd00::1", 8081, 0, 0))
        four = (socket.AF_INET, 1, 6, "", ("10.0.0.1", 8081))
        return [six, four, six, four]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_families)
    assert await resolve("peers", 8081) == ["[fd00::1]:8081", "10.0.0.1:8081"]


# -- real replicas --------------------------------------------------------------------------------------------------


async def test_replicas_find_one_another_through_a_name_service(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_NAMELESS_SECONDS", 0)
    port = free_port()
    dead, *hosts = [f"127.0.0.{number}" for number in range(1, 5)]

    lookup = seam.resolve

    async def resolve(host: str, service: int, **options: Any) -> list[Any]:
        if host != "peers.example":
            return await lookup(host, service, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, service)) for each in (dead, *hosts)]

    monkeypatch.setattr(seam, "resolve", resolve)
    section = {"peers": {}, "peers_dns": f"peers.example:{port}"}
    for number, host in enumerate(hosts, 1):
        timeouts = {"peer_accept_seconds": 2}
        await cluster.start(f"gw-{number}", f"{host}:{port}", replica=section, timeouts=timeouts, **TWICE)
    one, two, three = cluster.stands.values()
    asked = await one.client().call()
    assert (await two.client().answer(asked)).json == ACCEPT
    asked = await one.client().call()
    await cluster.crash(one)
    reply = await three.client().answer(asked)
    assert reply.json == ACCEPT
    assert len(upstream.of("tools/call")) == 3

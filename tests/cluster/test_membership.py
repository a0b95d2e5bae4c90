"""Members are found, lost and found again, and every member puts them into the same order."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.cluster import discovery, membership
from gateway.cluster.discovery import resolve
from gateway.cluster.membership import Membership
from gateway.cluster.worker import Address, Worker
from gateway.config import Replica
from gateway.protocol.errors import OwnerSilent
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.fake_upstream import DEADLINE
from tests.support.workbench import eventually

IDS = tuple(f"gw-{number}" for number in range(1, 6))
PEERS = {name: f"127.0.0.1:{9000 + number}" for number, name in enumerate(IDS)}
EXCHANGES = [f"exchange-{number}" for number in range(500)]


class Clock:
    """Stands for `time` in the module under test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class World:
    """A name service and the processes at its addresses; an exception instead of an answer is raised."""

    def __init__(self) -> None:
        self.records: list[Address] | Exception = []
        self.names: dict[Address, str | Exception] = {}
        self.resolved: list[tuple[str, int]] = []
        self.asked: list[Address] = []
        self.greeted: list[Address] = []
        self.hold: asyncio.Event | None = None

    def has(self, **names: str) -> None:
        """What there is from now on: address by id, `gw_1` for gw-1."""
        self.names = {address: name.replace("_", "-") for name, address in names.items()}
        self.records = list(self.names)

    async def resolve(self, host: str, port: int) -> list[Address]:
        self.resolved.append((host, port))
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.records, Exception):
            raise self.records
        return self.records

    async def ask_name(self, address: Address, introduced: str) -> str | None:
        self.asked.append(address)
        if introduced:
            self.greeted.append(address)
        name = self.names.get(address)
        if isinstance(name, Exception):
            raise name
        return name


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(discovery, "time", found)
    monkeypatch.setattr(membership, "time", found)
    return found


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    metrics = Metrics("0")
    found = Tasks(metrics)
    yield found
    await found.close()
    assert metrics._registry.get_sample_value("mcp_gateway_task_failures_total") == 0


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def dns(world: World, tasks: Tasks) -> Membership:
    replica = Replica(id="gw-1", listen="127.0.0.1:1", peers_dns="peers.example:8081")
    found = Membership(replica, None, tasks, world.ask_name, world.resolve)
    found._discovery._born = float("-inf")  # it has been here for long
    return found


def static(own: str, tasks: Tasks, peers: dict[str, Address] = PEERS, worker: Worker | None = None) -> Membership:
    return Membership(Replica(id=own, listen="127.0.0.1:1", peers=peers), worker, tasks, World().ask_name)


def worker(number: int, count: int = 3) -> Worker:
    return Worker(number, count, "/run/gw", bytes(32))


async def in_time(work: Any) -> Any:
    async with asyncio.timeout(DEADLINE):
        return await work


# -- one alone, and peers that are written down --------------------------------------------------------------------


async def test_a_replica_without_peers_is_alone(tasks: Tasks) -> None:
    lone = Membership(Replica(id="gw-1"), None, tasks, World().ask_name)
    assert (lone.own, lone.host, lone.alone) == ("gw-1", "gw-1", True)
    assert await lone.candidates("e") == ["gw-1"]
    with pytest.raises(OwnerSilent, match=r"not among replica\.peers of gw-1"):
        await lone.address("gw-2")
    assert static("gw-1", tasks, {"gw-1": "127.0.0.1:1"}).alone, "it is its only peer"
    assert Membership(Replica(id="gw-1"), worker(0, 1), tasks, World().ask_name).alone
    for accompanied in (
        static("gw-1", tasks),
        Membership(Replica(id="gw-1", peers_dns="a:1"), None, tasks, World().ask_name),
        Membership(Replica(id="gw-1"), worker(0, 2), tasks, World().ask_name),
    ):
        assert not accompanied.alone


async def test_without_an_id_the_host_gives_its_name(tasks: Tasks) -> None:
    assert Membership(Replica(), None, tasks, World().ask_name).own == socket.gethostname()
    assert Membership(Replica(), worker(2), tasks, World().ask_name).own == f"{socket.gethostname()}#2"


async def test_an_address_comes_from_the_configuration_and_from_nowhere_else(tasks: Tasks) -> None:
    members = static("gw-1", tasks)
    for name in IDS[1:]:
        assert await members.address(name) == PEERS[name]
        assert await members.address(f"{name}#7") == PEERS[name], "a worker is reached through its host"
    assert await members.address("gw-1") is None, "a member does not connect to itself"
    assert await members.address("gw-1#0") is None
    foreign = ["", "gw-9", "127.0.0.1:9001", "169.254.169.254:80", "unix:/run/x", "#0", "gw-2/x", "GW-2"]
    for name in foreign:
        with pytest.raises(OwnerSilent):
            await members.address(name)
        assert await members.is_unlisted(name)
    assert not any([await members.is_unlisted(name) for name in (*IDS, "gw-1#0")])


# -- failover candidates -------------------------------------------------------------------------------------------


async def test_all_members_put_the_candidates_of_an_exchange_into_one_order(tasks: Tasks) -> None:
    everybody = [static(name, tasks) for name in IDS]
    everybody.append(static("gw-3", tasks, dict(reversed(PEERS.items()))))
    for exchange in EXCHANGES:
        orders = {tuple(await each.candidates(exchange)) for each in everybody}
        assert len(orders) == 1
        assert sorted(*orders) == sorted(IDS)


async def test_each_exchange_has_an_order_of_its_own(tasks: Tasks) -> None:
    members = static("gw-1", tasks, {name: PEERS[name] for name in IDS[:3]})
    orders = [tuple(await members.candidates(exchange)) for exchange in EXCHANGES]
    assert set(orders) == set(itertools.permutations(IDS[:3]))
    first = [order[0] for order in orders]
    assert all(first.count(name) > len(EXCHANGES) / 5 for name in IDS[:3]), (
        "no member is the first candidate of most exchanges"
    )


async def test_a_missing_member_does_not_change_the_order_of_the_others(tasks: Tasks) -> None:
    all_five, four = static("gw-1", tasks), static("gw-1", tasks, {k: v for k, v in PEERS.items() if k != "gw-4"})
    for exchange in EXCHANGES:
        order = await all_five.candidates(exchange)
        assert await four.candidates(exchange) == [name for name in order if name != "gw-4"]


async def test_only_the_own_host_expands_to_its_workers(tasks: Tasks) -> None:
    mine = [static("gw-2", tasks, worker=worker(number)) for number in range(3)]
    other = static("gw-1", tasks)
    assert [each.own for each in mine] == ["gw-2#0", "gw-2#1", "gw-2#2"]
    assert {each.host for each in mine} == {"gw-2"}
    seen = set()
    for exchange in EXCHANGES:
        hosts = await other.candidates(exchange)
        siblings = mine[0].local_candidates(exchange)
        assert sorted(siblings) == ["gw-2#0", "gw-2#1", "gw-2#2"]
        seen.add(tuple(siblings))
        place = hosts.index("gw-2")
        for each in mine:
            assert each.local_candidates(exchange) == siblings
            assert await each.candidates(exchange) == [*hosts[:place], *siblings, *hosts[place + 1 :]]
    assert len(seen) == 6
    assert other.local_candidates("e") == ["gw-1"]


async def test_workers_reach_one_another_over_their_sockets(tasks: Tasks) -> None:
    first = static("gw-2", tasks, worker=worker(0))
    assert await first.address("gw-2#1") == "unix:/run/gw/peer-1.sock"
    assert await first.address("gw-2#2") == "unix:/run/gw/peer-2.sock"
    assert await first.address("gw-3#1") == PEERS["gw-3"]
    for name in ("gw-2", "gw-2#", "gw-2#3", "gw-2#-1", "gw-2#x", "gw-2#1#2", "gw-2#../../x", "gw-2#²"):
        assert await first.address(name) is None, name
    assert worker(1).socket("admin") == "unix:/run/gw/admin-1.sock"


async def test_a_host_knows_its_own(tasks: Tasks) -> None:
    for members in (static("gw-2", tasks), static("gw-2", tasks, worker=worker(1))):
        assert all(members.is_own_host(name) for name in ("gw-2", "gw-2#0", "gw-2#9"))
        assert not any(members.is_own_host(name) for name in ("", "gw-1", "gw-22", "gw-2.x", "gw-1#gw-2"))


# -- the name service ----------------------------------------------------------------------------------------------


async def test_peers_are_found_by_asking_each_address_for_its_id(world: World, dns: Membership, clock: Clock) -> None:
    world.has(gw_1="10.0.0.1:8081", gw_2="10.0.0.2:8081", gw_3="10.0.0.3:8081")
    assert await dns.address("gw-2") == "10.0.0.2:8081"
    assert await dns.address("gw-3#4") == "10.0.0.3:8081"
    assert world.resolved == [("peers.example", 8081)]
    assert sorted(world.asked) == ["10.0.0.1:8081", "10.0.0.2:8081", "10.0.0.3:8081"]
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2", "gw-3"]
    assert len(world.resolved) == 1, "what was found is still fresh"
    assert await dns.address("gw-1") is None


async def test_discovered_replicas_have_the_order_of_configured_ones(
    world: World, dns: Membership, tasks: Tasks
) -> None:
    world.has(gw_1="10.0.0.1:1", gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    written = static("gw-2", tasks, {name: PEERS[name] for name in IDS[:3]})
    for exchange in EXCHANGES[:50]:
        assert await dns.candidates(exchange) == await written.candidates(exchange)


async def test_a_missing_id_is_looked_up_at_most_once_per_pause(
    world: World, dns: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outdated lookup does not prove a death; a state with a foreign id cannot hammer the name service."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(discovery.asyncio, "sleep", sleep)
    world.has(gw_2="10.0.0.2:1")
    with pytest.raises(OwnerSilent):
        await dns.address("gw-3")
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    assert await dns.address("gw-3") == "10.0.0.3:1"
    assert slept[0] == 0
    assert 0 < slept[1] <= discovery._PAUSE_SECONDS, "it waited until it may look again"
    for _ in range(100):
        assert await dns.address("gw-3") == "10.0.0.3:1"
    assert len(world.resolved) == 2, "a known member needs no lookup"


async def test_a_replica_that_introduces_itself_is_known_before_the_name_service_has_it(
    world: World, dns: Membership, clock: Clock
) -> None:
    world.names["10.0.0.9:8081"] = "gw-9"
    dns.greeted("gw-9", "10.0.0.9")
    await eventually(lambda: "gw-9" in dns._discovery._greeted)
    assert (await dns.address("gw-9"), world.resolved) == ("10.0.0.9:8081", [])
    assert world.greeted == [], "verifying an introduction does not introduce, or two replicas would never stop"
    assert await dns.is_back("gw-9")
    clock.now += discovery._GREETED_SECONDS
    assert await dns.is_unlisted("gw-9"), "it was known once, and is not new"
    assert await dns.address("gw-9") == "10.0.0.9:8081", "it may live there all the same"


@pytest.mark.parametrize(
    ("host", "remote", "there"),
    [("gw-9", "10.0.0.9", "gw-8"), ("gw-9", "10.0.0.9", None), ("gw-9", "10.0.0.9", TimeoutError())],
)
async def test_an_introduction_is_believed_only_from_its_senders_address(
    world: World, dns: Membership, tasks: Tasks, host: str, remote: str, there: str | Exception | None
) -> None:
    if there is not None:
        world.names["10.0.0.9:8081"] = there
    dns.greeted(host, remote)
    await eventually(lambda: world.asked == ["10.0.0.9:8081"])
    await eventually(lambda: not len(tasks))
    assert dns._discovery._greeted == {}


async def test_introductions_are_ignored_with_configured_peers(tasks: Tasks) -> None:
    members = static("gw-1", tasks)
    members.greeted("gw-9", "10.0.0.9")
    members.greeted("gw-1", "10.0.0.9")
    await members.begin()
    assert len(tasks) == 0
    assert not await members.is_back("gw-2")


async def test_a_young_process_takes_an_unknown_id_for_a_new_replica(
    world: World, dns: Membership, clock: Clock
) -> None:
    dns._discovery._born = clock.now
    world.has(gw_2="10.0.0.2:1")
    assert await dns.address("gw-2") == "10.0.0.2:1"
    assert not await dns.is_unlisted("gw-3")
    dns.forget_address("gw-2")
    world.has()
    clock.now += discovery._PAUSE_SECONDS
    assert await dns.is_unlisted("gw-2"), "this one it knew"
    assert not await dns.is_unlisted("gw-3")
    clock.now += discovery._NAMELESS_SECONDS
    assert await dns.is_unlisted("gw-3")


async def test_concurrent_lookups_are_one_lookup(world: World, dns: Membership, clock: Clock) -> None:
    world.has(gw_2="10.0.0.2:1")
    world.hold = asyncio.Event()
    looks = [asyncio.get_running_loop().create_task(dns.is_unlisted(f"gw-{2 + number % 2}")) for number in range(20)]
    await eventually(lambda: world.resolved)
    world.hold.set()
    assert await in_time(asyncio.gather(*looks)) == [False, True] * 10
    assert len(world.resolved) == 1


async def test_a_cancelled_caller_does_not_cancel_the_lookup_of_the_others(world: World, dns: Membership) -> None:
    world.has(gw_2="10.0.0.2:1")
    world.hold = asyncio.Event()
    one, other = (asyncio.get_running_loop().create_task(dns.address("gw-2")) for _ in range(2))
    await eventually(lambda: world.resolved)
    one.cancel()
    await asyncio.wait((one,))
    world.hold.set()
    assert await in_time(other) == "10.0.0.2:1"


async def test_candidates_are_looked_up_again_when_the_last_lookup_is_old(
    world: World, dns: Membership, clock: Clock
) -> None:
    world.has(gw_2="10.0.0.2:1")
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    clock.now += discovery._FRESH_SECONDS
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]
    clock.now += 0.001
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2", "gw-3"]
    assert len(world.resolved) == 2


@pytest.mark.parametrize("failure", [socket.gaierror(-2, "no name"), OSError("no net"), TimeoutError()])
async def test_a_name_service_that_fails_leaves_what_is_known(
    world: World, dns: Membership, clock: Clock, failure: Exception
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


async def test_a_name_service_that_hangs_is_given_up(
    world: World, dns: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_RESOLVE_SECONDS", 0.01)
    world.hold = asyncio.Event()
    with pytest.raises(OwnerSilent):
        await in_time(dns.address("gw-2"))


@pytest.mark.parametrize("known", [True, False])
async def test_an_address_that_does_not_tell_its_id_may_be_any_replica(
    world: World, dns: Membership, clock: Clock, *, known: bool
) -> None:
    """A stopped replica accepts connections: its calls live, and no other replica may take them over."""
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    if known:
        assert await dns.address("gw-2") == "10.0.0.2:1"
        clock.now += 60
    world.names["10.0.0.2:1"] = TimeoutError()
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


async def test_records_that_lead_nowhere_are_passed_over(world: World, dns: Membership) -> None:
    world.has(gw_2="10.0.0.2:1")
    world.records = ["10.0.0.9:1", "10.0.0.2:1", "10.0.0.8:1"]
    assert await dns.address("gw-2") == "10.0.0.2:1"
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-2"]


async def test_an_unlisted_replica_keeps_its_last_address(world: World, dns: Membership, clock: Clock) -> None:
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    await dns.candidates("e")
    world.has(gw_3="10.0.0.3:1")
    clock.now += 60
    assert sorted(await dns.candidates("e")) == ["gw-1", "gw-3"]
    assert await dns.is_unlisted("gw-2")
    assert await dns.address("gw-2") == "10.0.0.2:1", "a name service may drop one that lives"
    dns.change(Replica(id="gw-1", listen="127.0.0.1:1", peers_dns="other.example:8081"))
    clock.now += 60
    with pytest.raises(OwnerSilent):
        await dns.address("gw-2")


# -- silent and dead members ---------------------------------------------------------------------------------------


async def test_a_silent_member_is_passed_over_for_a_while(tasks: Tasks, clock: Clock) -> None:
    members = static("gw-1", tasks)
    assert not members.was_silent("gw-2")
    members.note_silent("gw-2")
    members.note_silent("gw-3#1")
    assert members.was_silent("gw-2")
    assert members.was_silent("gw-3#1")
    assert not members.was_silent("gw-3")
    assert await members.address("gw-2") == PEERS["gw-2"]
    clock.now += membership._SILENT_SECONDS - 0.001
    assert members.was_silent("gw-2")
    clock.now += 0.001
    assert not members.was_silent("gw-2")


async def test_a_member_that_refused_is_asked_again_at_once(tasks: Tasks) -> None:
    members = static("gw-1", tasks)
    members.forget_address("gw-2")
    assert not members.was_silent("gw-2")


async def test_the_memory_of_the_silent_is_bounded(tasks: Tasks, clock: Clock) -> None:
    members = static("gw-1", tasks)
    for number in range(1000):
        members.note_silent(f"gw-{number}")
        clock.now += 1
    assert len(members._silent) <= membership._SILENT_SECONDS + 1


@pytest.mark.parametrize("noted", ["gw-2", "gw-2#1"])
async def test_a_dead_member_is_found_again_under_another_address(
    world: World, dns: Membership, clock: Clock, noted: str
) -> None:
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    assert await dns.address(noted) == "10.0.0.2:1"
    dns.note_silent(noted)
    assert await dns.address(noted) == "10.0.0.2:1"
    assert len(world.resolved) == 2, "it was looked up anew: its address may belong to another replica by now"
    dns.note_silent(noted)
    world.has(gw_2="10.0.0.77:1", gw_3="10.0.0.3:1")
    clock.now += discovery._PAUSE_SECONDS
    assert await dns.address(noted) == "10.0.0.77:1"
    assert dns.was_silent(noted), "but it has its pause"
    clock.now += membership._SILENT_SECONDS
    assert not dns.was_silent(noted)


async def test_addresses_that_change_hands_are_noticed(world: World, dns: Membership, clock: Clock) -> None:
    world.has(gw_2="10.0.0.2:1", gw_3="10.0.0.3:1")
    await dns.candidates("e")
    world.has(gw_3="10.0.0.2:1", gw_2="10.0.0.3:1")
    clock.now += 60
    await dns.candidates("e")
    assert await dns.address("gw-2") == "10.0.0.3:1"
    assert await dns.address("gw-3") == "10.0.0.2:1"


# -- the real name service -----------------------------------------------------------------------------------------


async def test_a_name_resolves_to_addresses_that_can_be_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1:8081" in await resolve("127.0.0.1", 8081)

    async def two_families(*_: Any, **options: Any) -> list[Any]:
        assert options == {"type": socket.SOCK_STREAM}
        six = (socket.AF_INET6, 1, 6, "", ("fd00::1", 8081, 0, 0))
        four = (socket.AF_INET, 1, 6, "", ("10.0.0.1", 8081))
        return [six, four, six, four]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_families)
    assert await resolve("peers", 8081) == ["[fd00::1]:8081", "10.0.0.1:8081"]

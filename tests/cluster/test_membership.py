"""Every member knows the others' addresses, and puts them into the same order."""

import itertools
import socket

import pytest

from gateway.cluster.membership import Membership
from gateway.config import InForce, Replica
from gateway.protocol.errors import OwnerSilent
from gateway.runtime.tasks import Tasks
from tests.support.fake_name_service import EXCHANGES, IDS, PEERS, FakeClock, FakeNameService, static, worker

# -- a single replica, configured peers -----------------------------------------------------------------------------


async def test_a_replica_without_peers_is_alone(tasks: Tasks) -> None:
    lone = Membership(InForce(Replica(id="gw-1")), None, FakeNameService(), tasks)
    assert (lone.own, lone.host, lone.alone) == ("gw-1", "gw-1", True)
    assert await lone.candidates("e") == ["gw-1"]
    with pytest.raises(OwnerSilent, match=r"not among replica\.peers of gw-1"):
        await lone.address("gw-2")
    assert static("gw-1", tasks, {"gw-1": "127.0.0.1:1"}).alone, "it is its only peer"
    assert Membership(InForce(Replica(id="gw-1")), worker(0, 1), FakeNameService(), tasks).alone
    for accompanied in (
        static("gw-1", tasks),
        Membership(InForce(Replica(id="gw-1", peers_dns="a:1")), None, FakeNameService(), tasks),
        Membership(InForce(Replica(id="gw-1")), worker(0, 2), FakeNameService(), tasks),
    ):
        assert not accompanied.alone


async def test_without_a_configured_id_the_host_name_is_the_id(tasks: Tasks) -> None:
    assert Membership(InForce(Replica()), None, FakeNameService(), tasks).own == socket.gethostname()
    assert Membership(InForce(Replica()), worker(2), FakeNameService(), tasks).own == f"{socket.gethostname()}#2"


async def test_an_address_comes_only_from_the_configuration(tasks: Tasks) -> None:
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


async def test_all_members_put_the_candidates_of_an_exchange_into_the_same_order(tasks: Tasks) -> None:
    everybody = [static(name, tasks) for name in IDS]
    everybody.append(static("gw-3", tasks, dict(reversed(PEERS.items()))))
    for exchange in EXCHANGES:
        orders = {tuple(await each.candidates(exchange)) for each in everybody}
        assert len(orders) == 1
        assert sorted(*orders) == sorted(IDS)


async def test_each_exchange_has_its_own_order(tasks: Tasks) -> None:
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


async def test_only_a_hosts_own_candidates_include_its_workers(tasks: Tasks) -> None:
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


async def test_a_host_recognises_its_own_members(tasks: Tasks) -> None:
    for members in (static("gw-2", tasks), static("gw-2", tasks, worker=worker(1))):
        assert all(members.is_own_host(name) for name in ("gw-2", "gw-2#0", "gw-2#9"))
        assert not any(members.is_own_host(name) for name in ("", "gw-1", "gw-22", "gw-2.x", "gw-1#gw-2"))


# -- silent and dead members ---------------------------------------------------------------------------------------


async def test_a_silent_member_is_skipped_for_a_while(tasks: Tasks, clock: FakeClock) -> None:
    members = static("gw-1", tasks)
    assert not members.was_silent("gw-2")
    members.note("gw-2", "silent")
    members.note("gw-3#1", "silent")
    assert members.was_silent("gw-2")
    assert members.was_silent("gw-3#1")
    assert members.was_silent("gw-3"), "they share an address"
    assert await members.address("gw-2") == PEERS["gw-2"]
    clock.now += 1.999
    assert members.was_silent("gw-2")
    clock.now += 0.001
    assert not members.was_silent("gw-2")


async def test_a_reload_forgets_which_members_were_silent(tasks: Tasks) -> None:
    in_force = InForce(Replica(id="gw-1", listen="127.0.0.1:1", peers=PEERS))
    members = Membership(in_force, None, FakeNameService(), tasks)
    members.note("gw-2", "silent")
    in_force.replace(in_force.value)
    assert not members.was_silent("gw-2")
    assert members.seen["gw-2"].state == "silent"


async def test_a_member_is_skipped_for_its_own_silence_alone(tasks: Tasks) -> None:
    members = static("gw-1", tasks)
    members.note("gw-2", "dead")
    members.note("gw-3", "silent", is_local=True)
    assert not any(map(members.was_silent, PEERS)), "one that refused may be back, and one may be out of reach"
    members.note("gw-3", "silent")
    members.note("gw-3", "answered")
    assert not members.was_silent("gw-3")

"""The status page of one replica shows the whole cluster, whatever the other replicas answer."""

import asyncio
import json
import time
from email.utils import formatdate
from html import unescape
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace

from gateway import world
from gateway.cluster.worker import Worker
from gateway.plugins.status_page import cluster_view
from gateway.plugins.status_page.cluster_view import STATUS_BYTES
from gateway.seal.peer_messages import Told
from gateway.telemetry.process_status import PeerStatus, Status
from tests.parts.launch import free_port
from tests.support.fake_peer import Asked, FakePeer, Silent, tells, tells_later
from tests.support.fake_upstream import DEADLINE, FakeUpstream, Turn, ask
from tests.support.noted_connections import NotedConnection
from tests.support.replicas import Cluster, drop, facing, in_time
from tests.support.status import fetch, process, status_of
from tests.support.workbench import KEY, Stand, eventually, later


@pytest.fixture(autouse=True)
def _long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a real replica may take longer than the real deadlines."""
    for name in ("_ANSWER_SECONDS", "_SIBLING_SECONDS"):
        monkeypatch.setattr(cluster_view, name, DEADLINE)


async def seen(stand: Stand, query: str = "") -> Status:
    code, body, _ = await in_time(fetch(stand, f"/status.json{query}"))
    assert code == 200
    return msgspec.json.decode(body, type=Status)


def peer(status: Status, name: str) -> PeerStatus:
    return next(each for each in status.peers if each.id == name)


def states(status: Status) -> dict[str, str]:
    return {each.id: each.state for each in status.processes}


def missing(status: Status) -> list[tuple[str, str]]:
    """The replicas without a status, and why."""
    prefix = "No status from "
    found = [each for each in status.notices if each.text.startswith(prefix)]
    return [(each.text.removeprefix(prefix).partition(":")[0], each.detail) for each in found]


async def test_each_replica_shows_what_all_of_them_hold(upstream: FakeUpstream, cluster: Cluster) -> None:
    stands = await cluster.begin("gw-1", "gw-2", "gw-3")
    upstream.tool(ask)
    for number, stand in enumerate(stands, 1):
        for _ in range(number):
            _ = await stand.client().call()
    for name, stand in zip(("gw-1", "gw-2", "gw-3"), stands, strict=True):
        status = await seen(stand)
        assert (status.replica, status.covers, status.state) == (name, "cluster", "ready")
        assert states(status) == dict.fromkeys(("gw-1", "gw-2", "gw-3"), "ready")
        assert status.held_total == len(status.held) == 6
        assert {call.owner for call in status.held} == {"gw-1", "gw-2", "gw-3"}
        (row,) = status.routes
        assert (row.held, row.sessions["busy"]) == (6, 6)
        assert {each.state for each in status.peers} == {"answered"}
        assert missing(status) == []
        assert not [each for each in status.notices if "differ" in each.text], "they differ in addresses alone"
    for stand in stands:
        await drop(stand)


async def test_the_json_has_the_problems_of_the_page_once(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(Turn.reset)
    _ = await one.client().call()
    for stand in (one, two):
        for query in ("", "?replica=gw-1"):
            (notice,) = (await seen(stand, query)).notices
            assert "The upstream of /mcp is failing" in notice.text
            assert (await fetch(stand, f"/status{query}"))[1].count("The upstream of /mcp is failing") == 1


async def test_a_replica_whose_sessions_are_all_in_use_is_a_problem_of_the_cluster(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    full, other = await cluster.begin("gw-1", "gw-2", sessions={"max": 2})
    upstream.tool(ask)
    for _ in range(2):
        _ = await full.client().call()
    alone = "Sessions in use on /mcp: 2 of 2 (sessions.max)"
    for stand, query, text in (
        (full, "?replica=gw-1", alone),
        (full, "", f"gw-1: {alone}"),
        (other, "", f"gw-1: {alone}"),
    ):
        html = (await in_time(fetch(stand, f"/status{query}")))[1]
        assert [text in html, "1 problem" in html, "New ones are refused; see Callers" in html] == [True] * 3
    assert "Sessions in use" not in (await in_time(fetch(full, "/status?replica=gw-2")))[1]
    await drop(full)


async def test_a_server_is_failing_since_it_last_answered_any_replica(
    upstream: FakeUpstream, cluster: Cluster, passed: list[float]
) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3")

    async def after(seconds: float, stand: Stand, tool: Any) -> tuple[str, float]:
        passed[0] += seconds
        upstream.tool(tool)
        _ = await stand.client().call()
        return await health()

    async def health() -> tuple[str, float]:
        (row,) = (await seen(one)).routes
        return row.health, round(row.last_failure.since_seconds_ago, -1) if row.last_failure is not None else 0.0

    assert await after(0, one, Turn.reset) == ("failing", 0)
    assert (await after(100, three, Turn.result))[0] == "ok"
    assert await after(100, three, Turn.reset) == ("failing", 0)
    assert (await after(100, two, Turn.result))[0] == "ok"
    await cluster.crash(two)
    assert await health() == ("failing", 100), "another replica's answer is still known, that of the dead one is not"
    passed[0] += 100
    _ = await cluster.start("gw-2", cluster.peers["gw-2"])
    forgotten = "an answer since may be forgotten: 1 process started later"
    html = (await fetch(one, "/status"))[1]
    assert (await health(), forgotten in html, html.count(") or later")) == (("failing", 200), True, 2)
    assert forgotten not in (await fetch(one, "/status?replica=gw-3"))[1], "it has run for longer"
    (row,) = (await seen(one, "?replica=gw-1")).routes
    assert (row.health, round(row.last_ok_seconds_ago or 0.0, -1)) == ("failing", 400), "what it saw itself"
    assert "as the traffic of gw-1 shows it" in (await fetch(one, "/status?replica=gw-1"))[1]


async def test_the_phase_of_a_rotation_is_that_of_all_replicas(cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    (old,) = one.gateway.key_ids
    added = "ef" * 32

    def have(stand: Stand, *keys: str) -> None:
        config = stand.gateway.config
        stand.gateway.apply(replace(config, state=replace(config.state, keys=keys)))

    async def phase(query: str = "") -> str:
        return (await seen(two, query)).key_phase

    assert await phase() == "One key at gw-2, gw-1: no rotation is under way there."
    have(one, KEY, added)
    (_, new) = one.gateway.key_ids
    lacking = f"A rotation is under way: {old} seals at gw-2, gw-1; gw-2 cannot open {new}."
    assert await phase() == f"{lacking} As {new} is the new key, phase 1 is half done: put it last everywhere."
    assert [each.id for each in (await seen(two)).keys] == [old], "the table is of this replica"
    assert await phase("?replica=gw-2") == "One key at gw-2: no rotation is under way there."
    assert f"{old} seals at gw-1. As {new} is the new key, phase 1 is done" in await phase("?replica=gw-1")
    have(one, added, KEY)
    unknown = "gw-1 did not tell any keys, and gw-1 may lack {}, or gw-2 one of theirs."
    told = f"One key at gw-2: no rotation is under way there; {unknown.format(old)}"
    assert await phase() == told, "it seals its status, too"
    have(two, KEY, added)
    assert f"{old} seals at gw-2; {new} seals at gw-1. Phase 2 is half done: put {new} first" in await phase()
    have(two, added)
    lacking = (
        f"{new} seals at gw-2, gw-1; gw-2 cannot open {old}. As {old} is the old key, phase 3 is half done: move it"
    )
    assert lacking in await phase()
    have(one, "cd" * 32, KEY)
    have(two, added, KEY)
    look = "Before the next step, see State keys on the page of gw-1."
    assert f"{new} seals at gw-2; {unknown.format(new)} {look}" in await phase()


async def test_one_replica_can_be_chosen_on_the_page_of_another(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tool(ask)
    _ = await two.client().call()
    for name, held in (("gw-1", 0), ("gw-2", 1)):
        status = await seen(one, f"?replica={name}")
        assert (status.replica, status.covers, status.held_total) == (name, "replica", held)
        assert list(states(status)) == [name]
    assert (await seen(one, "?replica=gw-9")).covers == "cluster", "an unknown one is no reason for an empty page"
    _, whole, _ = await fetch(one, "/status?refresh=10&route=/mcp")
    assert 'href="status?refresh=10&amp;route=/mcp&amp;replica=gw-2"' in whole
    _, chosen, _ = await fetch(one, "/status?refresh=10&replica=gw-2")
    assert "<h1>gw-2" in chosen
    assert 'href="status?refresh=10">all replicas' in chosen
    assert 'href="status.json?replica=gw-2"' in chosen
    await drop(two)


async def test_a_replica_alone_asks_nobody(cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1")
    status = await seen(one)
    assert (status.covers, status.peers_total) == ("replica", 0)
    other = await cluster.fake(FakePeer(lambda asked: asked.refuse(403)))
    (two,) = await cluster.begin("gw-2", fakes={"gw-3": other.address})
    _ = await seen(two, "?replica=gw-2")
    assert other.asked == [], "its own status needs no other replica"


async def test_a_replica_that_is_dead_or_refuses_is_shown_as_such(cluster: Cluster) -> None:
    old = await cluster.fake(FakePeer(lambda asked: asked.refuse(403)))
    fakes = {"gw-2": f"127.0.0.1:{free_port()}", "gw-3": old.address}
    one, _ = await cluster.begin("gw-1", "gw-4", fakes=fakes)
    status = await seen(one)
    assert states(status) == {"gw-1": "ready", "gw-2": "dead", "gw-3": "refused", "gw-4": "ready"}
    assert missing(status) == [
        ("gw-2", f"No process listens at {fakes['gw-2']}"),
        ("gw-3", "It refuses requests from gw-1 (HTTP 403): compare the clocks and state.keys of both"),
    ]
    assert {each.id: each.state for each in status.peers} == {"gw-2": "dead", "gw-3": "refused", "gw-4": "answered"}
    assert "restart it only for a key of its environment" in next(
        each.fix for each in status.notices if "gw-3" in each.text
    )
    one.gateway.recent_errors.config_file = "/etc/gateway.yaml"
    fixes = [each.fix for each in (await seen(one)).notices if "gw-2" in each.text]
    assert "`mrtr-gateway doctor --config /etc/gateway.yaml` on gw-1 asks it. If it never ended" in fixes[0]
    assert "its address in replica.peers is wrong, here or at another replica" in fixes[0]
    _, html, _ = await fetch(one, "/status")
    assert "No status from gw-2: its calls, and what servers answered it, are not counted here" in html
    assert (await seen(one, "?replica=gw-2")).covers == "cluster"


async def test_a_wrong_address_is_told_on_every_page(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.peers = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2", "gw-3")}
    files = {"gw-2": {**cluster.peers, "gw-3": f"127.0.0.1:{free_port()}"}, "gw-3": cluster.peers}
    files["gw-1"] = {**cluster.peers, "gw-2": cluster.peers["gw-3"], "gw-3": "gw-3.invalid:1"}
    two, three, one = [
        await cluster.start(name, cluster.peers[name], replica={"peers": peers}) for name, peers in files.items()
    ]
    assert not [each for each in (await seen(three)).notices if each.is_bad], "nobody has asked yet"
    assert states(await seen(two))["gw-3"] == "dead"
    (there,) = [each for each in (await seen(three)).notices if each.is_bad]
    assert there.text == f"gw-2 did not reach gw-3 at {files['gw-2']['gw-3']} (dead) within the last 10 minutes"
    assert there.text in (await fetch(three, "/status"))[1]
    assert peer(await seen(three, "?replica=gw-2"), "gw-3").state == "dead"
    status = await seen(one)
    assert states(status) == {"gw-1": "ready", "gw-2": "stalled", "gw-3": "silent"}
    assert missing(status) == [
        ("gw-2", "Its answer was not a status (is its address in replica.peers that of another one?)"),
        ("gw-3", "It cannot be reached from gw-1 (its name in replica.peers does not resolve)"),
    ]
    later_on = world.monotonic() + 601
    with monkeypatch.context() as patch:
        patch.setattr(world, "monotonic", lambda: later_on)
        assert "gw-2 did not reach" not in str((await seen(three)).notices), "it may be back for long"
    assert "gw-2 did not reach" in str((await seen(three)).notices)
    two.gateway.config.replica.peers["gw-3"] = cluster.peers["gw-3"]
    _ = await seen(two)
    assert "gw-2 did not reach" not in str((await seen(three)).notices)


async def test_a_skipped_phase_of_a_key_rotation_is_shown_on_both_sides(cluster: Cluster) -> None:
    cluster.peers = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2")}
    keys = {"gw-1": [KEY], "gw-2": ["ef" * 32, KEY]}
    one, two = [await cluster.start(name, cluster.peers[name], state={"keys": keys[name]}) for name in keys]
    (here,) = [notice for notice in (await seen(one)).notices if "No status" in notice.text]
    assert here.detail == "It seals its answers with a key that this replica lacks"
    assert here.fix.startswith("compare state.keys")
    (there,) = [notice for notice in (await seen(two)).notices if "No status" in notice.text]
    assert there.detail == "It refuses requests from gw-2 (HTTP 403): compare state.keys of both, whose clocks agree"
    assert "clock" not in there.fix
    assert [states(await seen(each))[other] for each, other in ((one, "gw-2"), (two, "gw-1"))] == ["refused"] * 2


@pytest.mark.parametrize(("ahead", "way"), [(120, "120 s ahead of"), (-120, "120 s behind")])
async def test_a_replica_whose_clock_is_off_is_shown_with_the_seconds(
    cluster: Cluster, ahead: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = float(int(time.time()))
    monkeypatch.setattr(world, "wall", lambda: now)
    date = formatdate(now + ahead, usegmt=True)
    one, _ = await facing(cluster, lambda asked: asked.refuse(403, date))
    (notice,) = (await seen(one)).notices
    refuses = f"It refuses requests from gw-1 (HTTP 403): its clock is {way} that of gw-1"
    assert (notice.detail, peer(await seen(one), "gw-2").state) == (refuses, "refused")
    assert notice.fix.startswith(f"gw-2's clock is {way} this replica's; compare the clocks")
    assert notice.fix in unescape((await fetch(one, "/status"))[1])


async def test_a_silent_replica_holds_the_page_up_for_a_bounded_time(
    cluster: Cluster, hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_view, "_ANSWER_SECONDS", 0.1)
    quiet = await cluster.fake(Silent())

    async def drips(asked: Asked) -> None:
        _ = await asked.take()
        await asked.begin()
        await asked.silence()

    slow = await cluster.fake(FakePeer(drips))
    fakes = {"gw-2": quiet.address, "gw-3": hole, "gw-4": slow.address}
    patient = {"peer_connect_seconds": 60, "peer_accept_seconds": 60}  # so that nothing else ends the wait
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts=patient)
    status = await seen(one)
    assert missing(status) == [(name, "It did not answer within 0.1 s") for name in ("gw-2", "gw-3", "gw-4")]
    assert {each.state for each in status.peers} == {"silent"}, "no connection may have been made yet"
    one.gateway.members.note("gw-2", "silent")
    _ = await seen(one)
    assert one.gateway.members.was_silent("gw-2"), "a view neither makes requests go elsewhere nor ends that"
    assert not one.gateway.members.was_silent("gw-4")


async def test_a_replica_that_accepts_and_does_not_answer_is_stalled(
    cluster: Cluster, hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = await cluster.fake(Silent())
    fakes = {"gw-2": quiet.address, "gw-3": hole, "gw-4": "127.0.0.1:1"}
    soon = {"peer_connect_seconds": 0.05, "peer_accept_seconds": 60}
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts=soon)
    monkeypatch.setattr(cluster_view, "_ANSWER_SECONDS", 0.5)
    status = await seen(one)
    assert {each.id: each.state for each in status.peers} == {"gw-2": "stalled", "gw-3": "silent", "gw-4": "dead"}
    fix = next(each.fix for each in status.notices if "gw-2" in each.text)
    assert "If it hangs, restart it" in fix
    assert status.key_phase.endswith("no rotation is under way there; gw-2, gw-3 did not tell any keys.")


async def test_the_cause_of_silence_on_this_replica_has_its_own_fix(cluster: Cluster) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": "gw-2.invalid:1"})
    (notice,) = (await seen(one)).notices
    assert (peer(await seen(one), "gw-2").state, notice.fix[:31]) == ("silent", "check this replica, not the own")


@pytest.mark.parametrize("ends", ["killed", "stopped"])
async def test_the_last_answer_of_a_replica_is_remembered_when_it_is_out_of_reach(
    cluster: Cluster, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    go.set()
    soon = {"peer_connect_seconds": 0.1}
    one, other = await facing(cluster, tells_later(go, Told(json.dumps(told()))), timeouts=soon)
    assert peer(await seen(one), "gw-2").last_answer_seconds_ago is not None
    later_on = world.monotonic() + 60
    monkeypatch.setattr(world, "monotonic", lambda: later_on)
    if ends == "killed":
        await other.close()
    go.clear()
    monkeypatch.setattr(cluster_view, "_ANSWER_SECONDS", 0.1)
    for query in ("", "", "?replica=gw-1"):
        found = peer(await seen(one, query), "gw-2")
        assert found.state == {"killed": "dead", "stopped": "stalled"}[ends]
        assert found.last_answer_seconds_ago is not None
        assert found.last_answer_seconds_ago >= 60
    assert ">never<" not in (await fetch(one, "/status"))[1]


def told(**changes: Any) -> dict[str, Any]:
    """What gw-2 could say, with changes."""
    status = replace(status_of(replace(process(0), id="gw-2")), replica="gw-2")
    return {**msgspec.to_builtins(status), **changes}


LIES: list[tuple[str, str]] = [
    ("nothing", ""),
    ("no JSON", "{"),
    ("another type", json.dumps([told()])),
    ("deep nesting", "[" * 100_000),
    ("a missing field", json.dumps({"replica": "gw-2"})),
    ("a field of another type", json.dumps(told(held_total="1"))),
    ("an unknown state", json.dumps(told(processes=[{"id": "gw-2", "state": "fine"}]))),
    ("the name of another replica", json.dumps(told(replica="gw-1"))),
    ("processes of another replica", json.dumps(told(processes=[{"id": "gw-1", "state": "ready"}]))),
    ("a number beyond all measure", json.dumps(told(held_total=10**30))),
    ("an infinite number", json.dumps(told()).replace('"uptime_seconds": 0', '"uptime_seconds": 1e999')),
    ("more bytes than a status may have", json.dumps(told(key_phase="x" * STATUS_BYTES))),
]


@pytest.mark.parametrize("lie", [lie for _, lie in LIES], ids=[name for name, _ in LIES])
async def test_what_is_no_status_of_that_replica_is_not_shown(cluster: Cluster, lie: str) -> None:
    one, liar = await facing(cluster, tells(Told(lie)))
    status = await seen(one)
    assert liar.kinds == ["status"]
    assert states(status) == {"gw-1": "ready", "gw-2": "stalled"}
    assert [(each.state, each.last_answer_seconds_ago) for each in status.peers] == [("stalled", None)]
    assert [name for name, _ in missing(status)] == ["gw-2"]
    assert (await fetch(one, "/status"))[0] == 200


async def test_views_at_the_same_time_ask_once(cluster: Cluster, accepted: list[NotedConnection]) -> None:
    go = asyncio.Event()
    one, other = await facing(cluster, tells_later(go, Told(json.dumps(told()))))
    first = later(seen(one))
    await eventually(lambda: other.kinds == ["status"])
    second = later(seen(one))
    await eventually(lambda: len(accepted) == 2 and accepted[1].is_serving, "the second view is asked for")
    go.set()
    assert states(await in_time(first)) == states(await in_time(second))
    assert other.kinds == ["status"]
    _ = await seen(one)
    assert other.kinds == ["status", "status"], "a later view asks anew"


async def test_a_host_with_workers_answers_for_all_of_them(
    upstream: FakeUpstream, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.peers = {"gw-1": f"127.0.0.1:{free_port()}", "gw-2": f"127.0.0.1:{free_port()}"}
    for number in range(2):
        worker = Worker(number, 3, str(tmp_path), bytes(32))  # the third is not there
        await cluster.start("gw-2", cluster.peers["gw-2"], worker, listen=f"127.0.0.1:{free_port()}")
    one = await cluster.start("gw-1", cluster.peers["gw-1"])
    upstream.tool(ask)
    for name in ("gw-2#0", "gw-2#1"):
        _ = await cluster.stands[name].client().call()
    status = await seen(one)
    assert states(status) == {"gw-1": "ready", "gw-2#0": "ready", "gw-2#1": "ready", "gw-2#2": "silent"}
    socket = aiohttp.UnixConnector(str(tmp_path / "admin-0.sock"))
    async with aiohttp.ClientSession(connector=socket) as http, http.get("http://admin/status.json") as response:
        at_home = msgspec.json.decode(await response.read(), type=Status)
    assert states(at_home)["gw-2#2"] == "dead", "a word that older replicas do not know"
    assert status.held_total == 2
    assert missing(status) == []
    assert any("gw-2: No status from gw-2#2" in each.text for each in status.notices)
    assert (await seen(one, "?replica=gw-2")).held_total == 2
    for stand in cluster.stands.values():
        await drop(stand)

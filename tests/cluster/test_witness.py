"""A silent owner: another replica continues its call only if a witness confirms, and never harms the owner's call.

The replicas are real and in this process. Owners are cut off by addresses that lead nowhere; the fake upstream has an
event store, as real servers have that can resume.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.cluster import witness
from gateway.cluster.worker import Address
from gateway.exchange.commands import Timer
from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.seal.peer_messages import Gone, PeerRequest, Told
from tests.parts.launch import free_port
from tests.support.fake_peer import Asked, FakePeer, tells, tells_later
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import DEADLINE, FakeUpstream
from tests.support.logs import Lines
from tests.support.replicas import (
    STALLED,
    TWICE,
    Cluster,
    asked_peers,
    exchange_failing_over_to,
    facing,
    frames_of,
    in_time,
    orphan,
    peer_request_for,
    resealed,
    steps,
)
from tests.support.workbench import ACCEPT, Stand, eventually, later, leave

TIMES = {"peer_connect_seconds": 0.2, "peer_accept_seconds": 5}
"""Nobody but a hole in the network lets a connection wait; all others answer, however busy the machine is."""


async def looking(cluster: Cluster, at: Mapping[str, Address | None], **sections: Any) -> list[Stand]:
    """Start replicas, each with the address at which it looks for gw-1; None is the right one."""
    cluster.peers = {name: f"127.0.0.1:{free_port()}" for name in at}
    for name, door in cluster.peers.items():
        peers = {**cluster.peers, "gw-1": at[name] or cluster.peers["gw-1"]}
        await cluster.start(name, door, replica={"peers": peers}, **{"timeouts": TIMES, **sections})
    return list(cluster.stands.values())


async def cut_off(cluster: Cluster, hole: Address, names: tuple[str, ...], **sections: Any) -> list[Stand]:
    """Start replicas that cannot reach gw-1, while gw-1 reaches all of them."""
    return await looking(cluster, {name: None if name == "gw-1" else hole for name in names}, **sections)


def only(stand: Stand) -> Any:
    (driver,) = stand.gateway.lot
    return driver


async def expire(stand: Stand) -> None:
    """Let the one parked call expire."""
    only(stand).fire(Timer.TTL)
    await is_quiet(stand)


async def is_quiet(stand: Stand) -> None:
    """Wait until it has sent all its messages to other replicas and to the upstream."""
    speaking = {"ask about an expired call", "send upstream", "close session"}
    await eventually(lambda: not speaking.intersection(stand.tasks()))


def is_unharmed(upstream: FakeUpstream) -> bool:
    return mcp.CANCELLED not in upstream.words and len(upstream.of("tools/call")) == 1


# -- with a witness ---------------------------------------------------------------------------------------------------


async def test_a_silent_owners_call_is_resumed_if_a_witness_confirms_the_silence(
    upstream: FakeUpstream, cluster: Cluster, hole: Address
) -> None:
    one, two, three = await cut_off(cluster, hole, ("gw-1", "gw-2", "gw-3"))
    _ = FakeStore(upstream)
    asked = await one.client().call()
    assert (await two.client().answer(asked)).json == [ACCEPT]
    assert is_unharmed(upstream)
    resumed = steps(two).get("resumed", 0) + steps(three).get("resumed", 0)
    assert resumed == 1
    await eventually(lambda: only(one).is_finished, "the owner hears the result too")
    await eventually(lambda: not (two.busy_tasks() or three.busy_tasks()))
    ended = [seen.session for seen in upstream.of("DELETE")]
    assert upstream.of("tools/call")[0].session not in ended, (ended, "the session is the owner's")
    assert (await one.client().answer(asked)).json == [ACCEPT]


async def test_an_owner_without_a_client_does_not_end_a_session_whose_side_stream_another_replica_may_have_taken(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """A server with one side stream per session ends the owner's, or refuses it, when a replica resumes the call."""
    one, _ = await cluster.begin("gw-1", "gw-2", hold={"grace_seconds": 60})
    store = FakeStore(upstream)
    asked = await one.client().call()
    store.hold.clear()
    retry = later(one.client().answer(asked))
    (answered,) = await upstream.saw("answer")
    await leave(retry)
    await eventually(lambda: only(one).glance(0.0).state == State.DETACHED)
    sides = len(upstream.of("GET"))

    upstream.once("GET", lambda turn: turn.reply(405))
    upstream.side(answered.session).put_nowait(None)
    await upstream.saw("GET", sides + 1)
    (session,) = one.group().sessions
    await eventually(lambda: session.lost, "the side stream has ended for good")
    store.hold.set()
    await eventually(lambda: only(one).is_finished)
    await is_quiet(one)
    assert "DELETE" not in upstream.words, "another replica may still read the result"
    assert (await one.client().answer(asked)).json == [ACCEPT]


async def test_a_silent_owners_ephemeral_call_runs_again_and_the_first_run_is_left_alone(
    upstream: FakeUpstream, cluster: Cluster, hole: Address
) -> None:
    one, two, _ = await cut_off(cluster, hole, ("gw-1", "gw-2", "gw-3"), **TWICE)
    asked = await one.client().call()
    assert (await two.client().answer(asked)).json == ACCEPT
    assert len(upstream.of("tools/call")) == 2
    assert mcp.CANCELLED not in upstream.words
    assert one.held == 1
    assert (await one.client().answer(asked)).json == ACCEPT


async def test_a_silent_owners_call_that_cannot_be_continued_waits_for_its_owner(
    upstream: FakeUpstream, cluster: Cluster, hole: Address, log_lines: Lines
) -> None:
    one, two, three = await cut_off(cluster, hole, ("gw-1", "gw-2", "gw-3"))
    asked = await one.client().call()
    for count, stand in enumerate((two, three, two), 1):
        reply = await stand.client().answer(asked)
        assert reply.outcome == STALLED
        told = [line for line in log_lines() if line.get("reason") == "owner_stalled"]
        assert len(told) == count, "one line for each"
        (line,) = {(line["event"], line["level"], line["cause"], line["exchange_id"]) for line in told}
        assert line == ("peer.failed", "warning", reply.error["message"], only(one).id)
        assert "gw-1" in reply.error["message"]
        assert reply.headers["Retry-After"] == "1"
    assert is_unharmed(upstream)
    assert "answer" not in upstream.words
    assert [len(list(stand.gateway.lot)) for stand in (one, two, three)] == [1, 0, 0], "nor is the error kept"
    for stand in (two, three):
        stand.gateway.config.replica.peers["gw-1"] = cluster.peers["gw-1"]
    assert (await two.client().answer(asked)).json == ACCEPT, "the network is whole again"
    assert len(upstream.of("tools/call")) == 1


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_silent_owners_call_that_cannot_be_resumed_is_given_back_unharmed(
    upstream: FakeUpstream, cluster: Cluster, hole: Address, log_lines: Lines, status: int
) -> None:
    one, two, _ = await cut_off(cluster, hole, ("gw-1", "gw-2", "gw-3"))

    _ = FakeStore(upstream)
    upstream.on("resume", lambda turn: turn.reply(status))
    asked = await one.client().call()
    for _ in range(2):
        reply = await two.client().answer(asked)
        assert reply.outcome == ((401, -32603, "upstream_refused") if status == 401 else STALLED)
    events = [line["event"] for line in log_lines() if "reason" in line]
    assert events == ["upstream.failed" if status == 401 else "peer.failed"] * 2, "no exchange is over"
    assert is_unharmed(upstream)
    assert "answer" not in upstream.words, "an answer without an open stream would lose the result"
    assert (await one.client().answer(asked)).json == [ACCEPT]


async def test_a_call_that_a_silent_candidate_may_have_resumed_is_not_cancelled(
    upstream: FakeUpstream, cluster: Cluster, hole: Address
) -> None:
    """The owner is proven dead, but the first candidate may have taken the call over before it fell silent."""
    one, two = await cluster.begin("gw-1", "gw-2", fakes={"gw-3": hole}, timeouts=TIMES)

    _ = FakeStore(upstream)
    upstream.on("resume", lambda turn: turn.reply(400))
    asked = await one.client().call()
    exchange = await exchange_failing_over_to(two, "gw-3", "gw-2")
    state = resealed(asked.state, exchange=exchange)
    await cluster.crash(one)
    reply = await two.client().call(state=state, answers=dict.fromkeys(asked.questions, ACCEPT))
    assert reply.outcome == STALLED
    assert is_unharmed(upstream)
    assert "answer" not in upstream.words


async def test_a_candidate_that_reaches_a_silent_owner_leaves_the_call_to_it(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **TWICE)
    frames = await frames_of(cluster, "gw-2", peer_request_for("gw-2", "resume", asked, two.client()))
    assert "accept" in repr(frames)
    assert is_unharmed(upstream)
    assert (steps(one), steps(two)) == ({"held": 1}, {})


@pytest.mark.parametrize("tries", [{"silent": 1}, {}], ids=["unheard", "witness"])
async def test_a_candidate_tries_to_reach_a_silent_owner_unless_it_has_just_tried(
    upstream: FakeUpstream, cluster: Cluster, hole: Address, tries: dict[str, int]
) -> None:
    one, two = await cut_off(cluster, hole, ("gw-1", "gw-2"), **TWICE)
    _ = FakeStore(upstream)
    asked = await one.client().call()
    if not tries:
        reach = replaced(peer_request_for("gw-2", "reach"), "gw-1")
        assert await frames_of(cluster, "gw-2", reach) == [Told("silent")]
    _ = await frames_of(cluster, "gw-2", peer_request_for("gw-2", "resume", asked, two.client()))
    assert steps(two) == {"resumed": 1}
    assert asked_peers(two) == tries
    assert (await one.client().answer(asked)).json == [ACCEPT]


# -- without one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [{}, TWICE], ids=["once", "ephemeral"])
async def test_silence_proves_nothing_with_two_replicas(
    upstream: FakeUpstream, cluster: Cluster, hole: Address, sections: dict[str, Any]
) -> None:
    one, two = await cut_off(cluster, hole, ("gw-1", "gw-2"), **sections)
    _ = FakeStore(upstream)
    asked = await one.client().call()
    reply = await two.client().answer(asked)
    assert reply.outcome == STALLED
    assert "does not accept a connection from gw-2" in reply.error["message"]
    assert asked_peers(two) == {"silent": 1}
    assert is_unharmed(upstream)
    assert "resume" not in upstream.words
    assert (await one.client().answer(asked)).json == [ACCEPT]


async def test_a_replica_that_reaches_the_owner_keeps_its_call_from_being_run_again(
    upstream: FakeUpstream, cluster: Cluster, hole: Address
) -> None:
    at = {"gw-1": None, "gw-2": hole, "gw-3": None, "gw-4": hole}
    one, two, three, _ = await looking(cluster, at, **TWICE)
    asked = await one.client().call()
    assert (await two.client().answer(asked)).outcome == STALLED, "gw-4 does not reach it, gw-3 does"
    assert is_unharmed(upstream)
    assert (await three.client().answer(asked)).json == ACCEPT


@pytest.mark.parametrize("address", ["gw-1.invalid:8081", "[::1]:8081"], ids=["name", "local address"])
@pytest.mark.parametrize("sections", [{}, TWICE], ids=["once", "ephemeral"])
async def test_a_fault_of_this_replica_proves_nothing_about_the_owner(
    upstream: FakeUpstream, cluster: Cluster, hole: Address, address: Address, sections: dict[str, Any]
) -> None:
    """A name does not resolve, or connections from 127.0.0.1 cannot reach ::1. No witness is asked."""
    times = {"peer_connect_seconds": 10, "peer_accept_seconds": 5}  # a name service may take its time to know nothing
    one, two, _ = await looking(cluster, {"gw-1": None, "gw-2": address, "gw-3": hole}, timeouts=times, **sections)
    asked = await one.client().call()
    for _ in range(2):
        reply = await two.client().answer(asked)
        assert reply.outcome == STALLED
        assert "cannot be reached from gw-2" in reply.error["message"]
    assert asked_peers(two) == {"silent": 2}
    assert is_unharmed(upstream)
    assert "answer" not in upstream.words
    assert (await one.client().answer(asked)).json == ACCEPT


async def test_another_replica_at_the_owners_address_proves_nothing(cluster: Cluster) -> None:
    one, _ = await facing(cluster, tells(Gone("gw-7")), **TWICE)
    reply = await one.client().answer(await orphan(one, "gw-2"))
    assert reply.outcome == STALLED
    assert "gw-7" in reply.error["message"]
    assert steps(one) == {}


@pytest.mark.parametrize("word", ["refuses", "unknown", "silence"])
async def test_a_replica_that_cannot_tell_does_not_testify(cluster: Cluster, hole: Address, word: str) -> None:
    """A replica of an older version refuses the question."""

    async def script(asked: Asked) -> None:
        if word == "refuses":
            await asked.refuse(403)
            await asked.silence()
        peer_request = await asked.take()
        assert (peer_request.kind, peer_request.path) == ("reach", "gw-2")
        if word == "silence":
            await asked.silence()
        await asked.tell(Told(word))

    peer = await cluster.fake(FakePeer(script))
    fakes = {"gw-2": hole, "gw-3": peer.address}
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts={"peer_connect_seconds": 0.1}, **TWICE)
    reply = await in_time(one.client().answer(await orphan(one, "gw-2")))
    assert reply.outcome == STALLED
    assert steps(one) == {}
    assert len(peer.asked) == 1


async def test_an_older_candidate_is_skipped_for_a_silent_owners_call(cluster: Cluster, hole: Address) -> None:
    """It does not know that it must not harm the call."""

    async def script(asked: Asked) -> None:
        if (await asked.take()).kind == "reach":
            await asked.tell(Told("silent"))
        else:
            asked.die()

    peer = await cluster.fake(FakePeer(script))
    fakes = {"gw-2": hole, "gw-3": peer.address}
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts={"peer_connect_seconds": 0.1}, **TWICE)
    asked = await orphan(one, "gw-2", "gw-3", "gw-1")
    reply = await one.client().answer(asked)
    assert peer.kinds == ["reach", "resume", "resume"]
    assert reply.outcome == STALLED, "it took the request and broke off: it may be at work on it"


async def test_many_retries_cost_one_round_of_questions(
    cluster: Cluster, hole: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "_GOOD_SECONDS", 600)  # on a busy machine, eleven retries may take more than 2 s
    go = asyncio.Event()
    peer = await cluster.fake(FakePeer(tells_later(go, Told("unknown"))))
    fakes = {"gw-2": hole, "gw-3": peer.address}
    times = {"peer_connect_seconds": 0.1, "peer_accept_seconds": 5}
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts=times, **TWICE)
    asked = await orphan(one, "gw-2")
    loop = asyncio.get_running_loop()
    retries = [loop.create_task(one.client().answer(asked)) for _ in range(10)]
    await eventually(lambda: asked_peers(one) == {"silent": 10})
    go.set()
    replies = [await in_time(retry) for retry in retries]
    assert {reply.outcome for reply in replies} == {STALLED}
    assert (await one.client().answer(asked)).outcome == STALLED
    assert peer.kinds == ["reach"]


# -- the witness ------------------------------------------------------------------------------------------------------


async def test_a_witness_that_waits_in_vain_reports_silence(cluster: Cluster, hole: Address) -> None:
    await cluster.begin("gw-1", fakes={"gw-4": hole}, timeouts={"peer_connect_seconds": 0.1})
    reach = replaced(peer_request_for("gw-1", "reach"), "gw-4")
    assert await frames_of(cluster, "gw-1", reach) == [Told("silent")]


async def test_a_witness_reports_its_own_attempt_to_connect(cluster: Cluster) -> None:
    at = {"gw-5": f"127.0.0.1:{free_port()}", "gw-6": "gw-6.invalid:1", "gw-7": "[::1]:1"}
    # A name service may take its time to know nothing, and a time that is over would be silence.
    await cluster.begin("gw-1", "gw-2", fakes=at, timeouts={"peer_connect_seconds": 30})
    words = {}
    for name in ("gw-1", "gw-2", *at, "gw-9"):
        words[name] = await frames_of(cluster, "gw-1", replaced(peer_request_for("gw-1", "reach"), name))
    assert words == {
        "gw-1": [Told("unknown")],
        "gw-2": [Told("reached")],
        "gw-5": [Told("silent")],
        "gw-6": [Told("unknown")],
        "gw-7": [Told("unknown")],
        "gw-9": [Told("unknown")],
    }


def replaced(peer_request: PeerRequest, about: str, detail: bytes = b"") -> PeerRequest:
    return replace(peer_request, path=about, body=detail)


async def test_a_replica_tells_whether_it_continued_an_exchange(cluster: Cluster) -> None:
    asked, (one, _) = await cluster.asked("gw-1", "gw-2")
    exchange = only(one).id

    async def told(about: str, round_: bytes) -> Any:
        return await frames_of(cluster, "gw-1", replaced(peer_request_for("gw-1", "holds"), about, round_))

    assert await told(exchange, b"0") == [Told("yes")]
    assert await told(exchange, b"1") == [Told("no")], "it is in that round itself, as the asking replica is"
    assert await told("other", b"0") == [Told("no")]
    assert [await told(exchange, odd) for odd in (b"no number", b"1" * 5000)] == [[Told("unknown")]] * 2
    assert (await one.client().answer(asked)).json == ACCEPT


# -- the owner comes back ---------------------------------------------------------------------------------------------


async def test_an_owner_that_is_unsure_of_the_members_does_not_cancel(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """Cut off, it forgets the addresses of its peers, and the name service may be out of reach too."""
    section = {"peers": {}, "peers_dns": "peers.invalid:8081"}
    one = await cluster.start("gw-1", f"127.0.0.1:{free_port()}", replica=section)
    await eventually(lambda: one.gateway.members.is_unsure)
    _ = FakeStore(upstream)
    _ = await one.client().call()
    await expire(one)
    assert len(one.gateway.lot) == 0
    assert is_unharmed(upstream)


def telling(*words: str) -> FakePeer:
    """A FAKE replica that answers each question whether it has taken a call over with the next of these words."""
    left = list(words)

    async def script(asked: Asked) -> None:
        await asked.take()
        word = left.pop(0)
        if word == "silence":
            await asked.refuse(503)
            return
        await asked.tell(Told(word))

    return FakePeer(script)


@pytest.mark.parametrize(
    ("words", "is_cancelled"),
    [
        (("unknown", "no"), True),
        (("silence", "unknown", "no"), True),
        (("unknown", "yes"), False),
        (("unknown",) * 3, False),  # after the last pause it gives up asking
    ],
)
async def test_an_owner_that_could_not_ask_asks_again(
    upstream: FakeUpstream, cluster: Cluster, words: tuple[str, ...], *, is_cancelled: bool
) -> None:
    peer = await cluster.fake(telling(*words))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": peer.address})
    _ = FakeStore(upstream, rounds=2)
    _ = await one.client().call()
    await expire(one)
    if is_cancelled:
        _ = await upstream.saw(mcp.CANCELLED)
    assert peer.kinds == ["holds"] * len(words)
    assert len(one.gateway.lot) == 0
    assert is_unharmed(upstream) is not is_cancelled


async def test_an_owner_cancels_an_expired_call_that_no_other_replica_has(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    (one, two) = await cluster.begin("gw-1", "gw-2")
    _ = FakeStore(upstream)
    _ = await one.client().call()
    await cluster.crash(two)
    await expire(one)
    await upstream.saw(mcp.CANCELLED)
    assert len(one.gateway.lot) == 0


async def test_a_retry_that_arrives_during_the_inquiry_finds_its_call(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    go = asyncio.Event()
    one, peer = await facing(cluster, tells_later(go, Told("no")), timeouts={"peer_accept_seconds": DEADLINE})
    _ = FakeStore(upstream, rounds=2)
    asked = await one.client().call()
    only(one).fire(Timer.TTL)
    await eventually(lambda: peer.kinds == ["holds"])
    asked = await one.client().answer(asked)
    go.set()
    await eventually(lambda: "ask about an expired call" not in one.tasks())
    assert (await one.client().answer(asked)).json == [ACCEPT] * 2
    assert is_unharmed(upstream)

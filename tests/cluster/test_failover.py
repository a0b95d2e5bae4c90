"""A dead owner's call is resumed, run again or lost, on the one replica that every retry fails over to."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gateway.protocol import mcp
from gateway.protocol.errors import Stopping
from gateway.seal.peer_messages import Data, End, Gone, Head
from gateway.upstream.http import standalone_stream
from tests.parts.launch import free_port
from tests.support.black_hole import black_hole
from tests.support.fake_http import FakeHttp
from tests.support.fake_peer import Asked, FakePeer, Silent
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import READ_ONLY, FakeUpstream, Turn, event, text
from tests.support.logs import Lines
from tests.support.replicas import (
    TWICE,
    Cluster,
    Gate,
    asked_peers,
    dies_after_the_body,
    facing,
    in_time,
    order,
    orphan,
    progress,
    steps,
)
from tests.support.status import told
from tests.support.workbench import ACCEPT, eventually, later, leave


async def test_a_call_that_is_taken_over_stays_bound_to_its_credentials(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    async def twice(turn: Turn) -> None:
        _ = await turn.elicit("q")
        await turn.result(text(json.dumps(await turn.elicit("r"))))

    upstream.tool(twice)
    one, other = await cluster.begin("gw-1", "gw-2", route={"forward_headers": ["x-api-key"], "ephemeral": ["*"]})
    asked = await one.client(headers={"X-Api-Key": "mine"}).call()
    await cluster.crash(one)
    refused = (400, -32602, "invalid_request_state")
    assert (await other.client(headers={"X-Api-Key": "another"}).answer(asked)).outcome == refused
    again = await other.client(headers={"X-Api-Key": "mine"}).answer(asked)
    assert (await other.client().answer(again)).outcome == refused
    assert (await other.client(headers={"X-Api-Key": "mine"}).answer(again)).text


async def test_a_dead_owners_call_is_lost_if_it_may_not_run_twice(
    log_lines: Lines, upstream: FakeUpstream, cluster: Cluster
) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    await cluster.crash(one)
    reply = await two.client().answer(asked)
    assert reply.outcome == (200, -32603, "owner_lost")
    assert "gw-1" in reply.error["message"]
    (line,) = log_lines("exchange.finished")
    assert line["reason"] == "owner_lost"
    assert str(line["fix"]).startswith("see why gw-1 ended, in its own log or that of what runs it")
    assert "check the call's effects" in str(line["fix"])
    assert "its address in replica.peers is wrong, here or at another replica" in str(line["fix"])
    assert "Its server is told to cancel it" in reply.error["message"]
    assert [error.fix for error in (await told(two)).errors] == ["S" + str(line["fix"])[1:]]
    (cancelled,) = await upstream.saw(mcp.CANCELLED)
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert len(upstream.of("tools/call")) == 1
    assert "answer" not in upstream.words
    assert steps(two) == {"lost": 1}
    again = await two.client().answer(asked)
    assert again.outcome == reply.outcome, "and so it stays"
    assert len(upstream.of("tools/call")) == 1


async def test_a_tool_that_was_known_to_be_repeatable_runs_again_even_if_its_server_is_slow(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    upstream.tools = [READ_ONLY]
    _ = await one.client().post("tools/list")
    asked = await one.client().call()
    await cluster.crash(one)
    upstream.on("tools/list", lambda turn: turn.for_ever())
    assert (await two.client().answer(asked)).json == ACCEPT
    assert len(upstream.of("tools/call")) == 2
    assert steps(two) == {"replayed": 1}
    assert [error.kind for error in (await told(two)).errors] == [], "nothing is lost"


async def test_concurrent_retries_at_two_replicas_reach_the_same_candidate(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", **TWICE)
    gate = Gate(upstream)
    asked = await one.client().call()
    (driver,) = one.gateway.lot
    candidates = [name for name in await order(two, driver.id) if name != "gw-1"]
    assert candidates == [name for name in await order(three, driver.id) if name != "gw-1"]
    await cluster.crash(one)
    upstream.tool(gate.tool)
    replies = [later(stand.client().answer(asked)) for stand in (two, three, two, three)]
    first = cluster.stands[candidates[0]]
    await eventually(
        lambda: len(first.gateway.routes.live["/mcp"].deadlines.silence) == 4, "all wait at the first candidate"
    )
    await eventually(gate.answered.is_set)
    gate.go.set()
    assert [reply.text for reply in await in_time(asyncio.gather(*replies))] == ["done"] * 4
    assert len(upstream.of("tools/call")) == 2, "once by the dead owner, once by the first candidate"
    assert steps(first).get("replayed") == 1


async def test_a_restarted_owner_that_gets_the_retry_itself_runs_the_call_again(cluster: Cluster) -> None:
    asked, (one,) = await cluster.asked("gw-1", **TWICE)
    await cluster.crash(one)
    again = await cluster.start("gw-1", cluster.peers["gw-1"], **TWICE)
    assert (await again.client().answer(asked)).json == ACCEPT
    assert asked_peers(again) == {}


@pytest.mark.parametrize("streams", [True, False])
async def test_a_stream_begun_on_this_replica_continues_with_the_candidates_reply(
    cluster: Cluster, *, streams: bool
) -> None:
    """The owner streamed; if the candidate sends one body, the client reads it as the last event."""

    async def owner(asked: Asked) -> None:
        await asked.take()
        await asked.begin()
        await asked.say(Head(200, (), streamed=True), Data(event(progress(1))))
        asked.die()

    final = {"jsonrpc": "2.0", "id": "c2", "result": {**text("heir"), "resultType": "complete"}}

    async def candidate(asked: Asked) -> None:
        await asked.take()
        if not streams:
            await asked.reply(json.dumps(final).encode())
            return
        await asked.tell(Head(200, (), streamed=True), Data(event(progress(2))), Data(event(final)), End("complete"))

    first, second = await cluster.fake(FakePeer(owner, mortal=True)), await cluster.fake(FakePeer(candidate))
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": first.address, "gw-3": second.address})
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-3"))
    assert reply.is_stream
    assert [each["params"]["progress"] for each in reply.notifications] == ([1, 2] if streams else [1])
    assert reply.text == "heir"
    assert b"HTTP/1.1" not in reply.data, "one head, although two replicas wrote the stream"
    assert (first.kinds, second.kinds) == (["owner"], ["heir"])
    assert second.asked[0].peer_request.to == "gw-3"


async def test_a_restarted_owner_takes_its_former_call_over_as_a_candidate(cluster: Cluster) -> None:
    async def script(asked: Asked) -> None:
        peer_request = await asked.take()
        if peer_request.kind == "owner":
            await asked.tell(Gone("gw-2"))
        else:
            await asked.reply(b'{"jsonrpc":"2.0","id":"c2","error":{"code":-32603,"message":"heir"}}')

    one, peer = await facing(cluster, script, mortal=True)
    reply = await one.client().answer(await orphan(one, "gw-2", "gw-2"))
    assert reply.error["message"] == "heir"
    assert peer.kinds == ["owner", "heir"], "the process that has its name now is the first candidate"
    assert peer.connections == 1, "one connection serves both"


async def served_as_candidate(asked: Asked) -> None:
    peer_request = await asked.take()
    await asked.reply(b'{"jsonrpc":"2.0","id":"c2","error":{"code":-32603,"message":"heir"}}')
    assert peer_request.kind == "heir"


async def test_a_dead_candidate_is_skipped_and_asked_again_by_the_next_retry(cluster: Cluster) -> None:
    """It may be back, and may have taken the call over."""
    port = free_port()
    (one,) = await cluster.begin(
        "gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}", "gw-3": f"127.0.0.1:{port}"}, **TWICE
    )
    first = await orphan(one, "gw-2", "gw-3", "gw-2", "gw-1")
    second = await orphan(one, "gw-2", "gw-3", "gw-1")
    assert (await one.client().answer(first)).json == ACCEPT
    assert asked_peers(one) == {"dead": 3}
    await cluster.fake(FakePeer(served_as_candidate), port)
    assert (await one.client().answer(second)).error["message"] == "heir"


async def test_a_silent_candidate_is_skipped_and_not_asked_by_the_next_retry(cluster: Cluster) -> None:
    """Otherwise every retry would wait for it."""
    port = free_port()
    (one,) = await cluster.begin(
        "gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}", "gw-3": f"127.0.0.1:{port}"}, **TWICE
    )
    first = await orphan(one, "gw-2", "gw-3", "gw-1")
    second = await orphan(one, "gw-2", "gw-3", "gw-2", "gw-1")
    with black_hole(f"127.0.0.1:{port}"):
        assert (await one.client().answer(first)).json == ACCEPT
    peer = await cluster.fake(FakePeer(served_as_candidate), port)
    assert (await one.client().answer(second)).json == ACCEPT
    assert not peer.asked
    assert asked_peers(one) == {"dead": 3, "silent": 2}


@pytest.mark.parametrize(
    ("candidate", "outcomes"),
    [
        (Silent, {"dead": 1, "stalled": 1}),
        (partial(FakePeer, dies_after_the_body, mortal=True), {"dead": 2, "broke": 1}),
    ],
    ids=["stalls", "is killed by it"],
)
async def test_a_call_goes_to_the_next_candidate_if_one(
    cluster: Cluster, candidate: Callable[[], FakeHttp], outcomes: dict[str, int]
) -> None:
    peer = await cluster.fake(candidate())
    refusing = f"127.0.0.1:{free_port()}"
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": refusing, "gw-3": peer.address}, **TWICE)
    asked = await orphan(one, "gw-2", "gw-3", "gw-1")
    assert (await one.client().answer(asked)).json == ACCEPT
    assert asked_peers(one) == outcomes
    if isinstance(peer, Silent):
        assert bytes(peer.received[0]).endswith(b"\r\n\r\n"), "it was given nothing"


async def test_a_candidate_that_took_the_request_and_fell_silent_is_not_skipped(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """It may be working on the request, so no other replica may."""

    async def script(asked: Asked) -> None:
        await asked.take()
        if times.pop():
            await asked.begin()
            await asked.say(Head(200, (), streamed=False))
        await asked.silence()

    times = [False, True]
    peer = await cluster.fake(FakePeer(script))
    fakes = {"gw-2": f"127.0.0.1:{free_port()}", "gw-3": peer.address}
    (one,) = await cluster.begin("gw-1", fakes=fakes, timeouts={"keepalive_seconds": 0.1}, **TWICE)
    asked = await orphan(one, "gw-2", "gw-3", "gw-1")
    while times:
        assert (await one.client().answer(asked)).outcome == (503, -32603, "owner_stalled")
    assert peer.kinds == ["heir", "heir"]
    assert len(upstream.of("tools/call")) == 1


async def test_a_takeover_with_wrong_answers_leaves_nothing_behind(upstream: FakeUpstream, cluster: Cluster) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", **TWICE)
    await cluster.crash(one)
    before = len(upstream.seen)
    for wrong in ({"action": "shrug"}, "text", None):
        reply = await two.client().call(state=asked.state, answers={"q": wrong})
        assert (reply.status, reply.error["code"]) == (400, -32602)
        assert len(two.gateway.lot) == two.held == 0
        assert not list(two.gateway.lot)
    assert len(upstream.seen) == before, "nothing went upstream"
    assert (await two.client().answer(asked)).json == ACCEPT


async def test_a_replica_at_its_cap_takes_no_call_over(cluster: Cluster) -> None:
    asked, (one, two) = await cluster.asked("gw-1", "gw-2", hold={"max_calls": 1}, **TWICE)
    await cluster.crash(one)
    own = await two.client().call()
    full = await two.client().answer(asked)
    assert full.status == 503
    assert full.headers["Retry-After"]
    assert (await two.client().answer(own)).json == ACCEPT
    assert (await two.client().answer(asked)).json == ACCEPT


async def test_a_take_over_that_its_client_leaves_before_it_has_a_session_gives_the_call_up(
    upstream: FakeUpstream, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FakeStore(upstream)
    # Else a busy machine lets the take-over go on without the standalone stream before the client is given up.
    monkeypatch.setattr(standalone_stream, "HEAD_SECONDS", 30.0)
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    await cluster.crash(one)
    upstream.on("GET", lambda turn: turn.for_ever())
    before = len(upstream.of("GET"))
    retry = later(two.client().answer(asked))
    (*_, opening) = await upstream.saw("GET", before + 1)
    await leave(retry)
    await eventually(opening.cut.is_set, "the session is left")
    await eventually(lambda: not two.busy_tasks(), "the take-over has ended")
    assert two.sessions("busy") == 0
    (call,) = store.calls.values()
    assert call.answers == [{"action": "cancel"}], "what the client answered was not sent"
    assert len(upstream.of(mcp.CANCELLED)) == 1


async def test_a_take_over_that_is_stopped_before_its_task_begins_leaves_no_answer_waiting(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = FakeStore(upstream)
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    await cluster.crash(one)
    start = two.gateway.tasks.start

    def stop() -> None:
        for driver in tuple(two.gateway.lot):
            driver.stop(Stopping("the host has left"))

    def stopping(work: Any, name: str) -> Any:
        if name == "send upstream":  # the answers wait for the task that is started next
            asyncio.get_running_loop().call_soon(stop)
        return start(work, name)

    two.gateway.tasks.start = stopping  # type: ignore[method-assign]
    reply = await two.client().answer(asked)
    assert reply.outcome == (503, -32603, "stopping")
    await eventually(lambda: "send upstream" not in two.tasks(), "nothing waits for the stream")
    assert "resume" not in upstream.words[: upstream.words.index(mcp.CANCELLED)]

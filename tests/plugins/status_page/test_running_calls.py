"""Which calls run, on what each waits, and what is lost if the process ends."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.bridge.plain_call import PlainCall
from gateway.exchange.machine import State
from gateway.http.incoming import Incoming
from gateway.plugins.status_page.merge_statuses import cut
from gateway.plugins.status_page.status_page import page
from gateway.plugins.status_page.status_view import only
from gateway.protocol import mcp
from gateway.server.drain import drain
from gateway.telemetry.process_status import MOST_HELD, CallStatus, Status
from tests.plugins.status_page.test_merge_statuses import of_workers
from tests.support.cluster import Cluster
from tests.support.fake_modern import FakeModern
from tests.support.fake_store import FakeStore
from tests.support.fake_upstream import FORM, READ_ONLY, URL, FakeUpstream, Turn, ask, asks, gives_up, text
from tests.support.legacy_client import LegacyClient
from tests.support.logs import Lines
from tests.support.replicas import Gate, drop
from tests.support.stand import Start
from tests.support.status import SECRET, fetch, held, process, route, status_of, told
from tests.support.workbench import ACCEPT, KEY, Stand, eventually, later, leave

SERVER_WORKS = "the server's response"


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.plugins.status_page.snapshot.LONG_SECONDS", 0.0)


async def one_running(stand: Stand) -> CallStatus:
    """The only running call, once there is one."""
    found = list[CallStatus]()

    async def runs() -> bool:
        found[:] = (await told(stand)).running
        return bool(found)

    await eventually(runs)
    (call,) = found
    return call


@pytest.mark.usefixtures("_soon")
async def test_a_plain_call_that_hangs_is_listed_as_it_is(upstream: FakeUpstream, stand: Stand) -> None:
    _ = await stand.client().call()
    go = upstream.waiting_tool()
    running = later(stand.client().call("slow", {"passport": SECRET}, headers={"X-Request-Id": "mine-1"}))
    _ = await upstream.saw("tools/call", 2)
    call = await one_running(stand)
    assert (call.route, call.method, call.name, call.state) == ("/mcp", "tools/call", "slow", "running")
    assert (call.waits_for, call.owner, call.request_id) == (SERVER_WORKS, "gw-1", "mine-1")
    assert call.running_seconds is not None
    assert call.silent_seconds is not None
    assert 0 <= call.silent_seconds <= call.running_seconds < 60
    assert (call.at_end, call.expires_in_seconds) == ("lost", None)
    status = await told(stand)
    assert (status.running_total, status.held, status.processes[0].lost_at_end) == (1, (), 1)
    assert status.routes[0].oldest_call_seconds is not None
    (plain,) = stand.gateway.downstream.legs.seen
    assert isinstance(plain, PlainCall), "who looked at it made no exchange of it"
    html = (await fetch(stand, "/status"))[1]
    assert "1 running call, the oldest for " in html
    assert "mine-1" in html
    assert SECRET not in html
    go.set()
    assert (await running).text == "done"
    assert (await told(stand)).running == ()
    assert (await told(stand)).routes[0].oldest_call_seconds is None


async def test_a_call_that_has_just_begun_is_not_listed(upstream: FakeUpstream, stand: Stand) -> None:
    go = upstream.waiting_tool()
    running = later(stand.client().call())
    _ = await upstream.saw("tools/call")
    assert (await told(stand)).running == ()
    assert "No call has run for 5 s." in (await fetch(stand, "/status"))[1]
    go.set()
    _ = await running


@pytest.mark.usefixtures("_soon")
async def test_a_call_without_a_session_waits_for_one(upstream: FakeUpstream, stand: Stand) -> None:
    go = upstream.holding("initialize")
    running = later(stand.client().call())
    call = await one_running(stand)
    assert (call.waits_for, call.silent_seconds) == ("a session with the server, or its list of tools", None)
    assert (call.at_end, (await told(stand)).processes[0].lost_at_end) == (None, 0), (
        "a drain has its client call again"
    )
    go.set()
    _ = await running


@pytest.mark.usefixtures("_soon")
async def test_a_request_that_passes_through_and_hangs_is_listed(upstream: FakeUpstream, stand: Stand) -> None:
    client = await LegacyClient(stand, headers={"X-Request-Id": "mine-1"}).initialize()

    async def begins_and_hangs(turn: Turn) -> None:
        await turn.begin(200, is_stream=True)
        await turn.for_ever()

    async def is_listed() -> None:
        call = await one_running(stand)
        assert (call.route, call.method, call.name, call.request_id) == ("/mcp", "tools/call", "slow", "mine-1")
        assert (call.waits_for, call.owner, len(call.caller)) == ("the server's response, passed through", "gw-1", 8)
        assert call.client == "127.0.0.1"
        status = await told(stand)
        assert (status.running_total, call.at_end, status.processes[0].lost_at_end) == (1, "lost", 1)
        assert status.routes[0].oldest_call_seconds == status.running[0].running_seconds
        html = (await fetch(stand, "/status"))[1]
        assert SECRET not in html
        assert (call.silent_seconds, "the time without a message is not known" in html) == (None, True)

    message = client.call_message("slow", {"passport": SECRET})
    upstream.tool(Turn.for_ever)
    running = later(client.post(message))
    await is_listed()
    await leave(running)
    await eventually(lambda: not stand.gateway.routes.process.passing)
    upstream.tool(begins_and_hangs)
    async with client.open(message):  # whose body is gone
        await is_listed()
    await eventually(lambda: not stand.gateway.routes.process.passing)
    for method, name in (("tools/call", "n" * 100_000), ("m" * 100_000, "")):
        upstream.on(method, begins_and_hangs)
        async with client.open(client.call_message(name) | {"method": method}):
            await eventually(lambda: [each for each in stand.gateway.routes.process.passing if each.rpc_method])
            (passing,) = stand.gateway.routes.process.passing
            assert len((passing.rpc_method or "") + (passing.target or "")) <= 210, "nothing weighs what is kept"
        await eventually(lambda: not stand.gateway.routes.process.passing)


@pytest.mark.usefixtures("_soon")
async def test_a_ping_is_a_sign_of_life(upstream: FakeUpstream, stand: Stand, passed: list[float]) -> None:
    ping, pinged = asyncio.Event(), asyncio.Event()

    async def pings(turn: Turn) -> None:
        await turn.begin(200, is_stream=True)
        await ping.wait()
        _ = await turn.ask("ping")
        pinged.set()
        await turn.for_ever()

    upstream.tool(pings)
    running = later(stand.client().call())
    _ = await upstream.saw("tools/call")
    passed[0] = 100.0
    silent = (await one_running(stand)).silent_seconds
    ping.set()
    await pinged.wait()
    alive = (await one_running(stand)).silent_seconds
    assert silent is not None
    assert alive is not None
    assert alive < 100 <= silent
    await leave(running)


async def test_a_modern_request_that_hangs_is_listed_once_it_has_run_for_long(
    begin: Start, monkeypatch: pytest.MonkeyPatch, passed: list[float]
) -> None:
    async with FakeModern() as server:
        server.other["resources/read"] = lambda _: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        stand = await begin(route={"upstream": {"url": server.url}})
        running = later(stand.client().post("resources/read", {"uri": f"file:///home/ada/{SECRET}"}))
        await eventually(lambda: server.of("resources/read"))
        assert (await told(stand)).running == ()
        monkeypatch.setattr("gateway.plugins.status_page.snapshot.LONG_SECONDS", 0.0)
        (call,) = (await told(stand)).running
        assert (call.method, call.name) == ("resources/read", "")
        assert "may hang" not in (await fetch(stand, "/status"))[1]
        passed[0] = 3600.0
        html = (await fetch(stand, "/status"))[1]
        assert "The upstream of /mcp may hang: last answer 1 h ago; 1 running call, the oldest for 1 h" in html
        assert ((await told(stand)).routes[0].health, "1 problem" in html) == ("ok", False)
        await leave(running)


@pytest.mark.usefixtures("_soon")
async def test_a_server_does_not_hang_because_calls_wait_for_a_session(
    upstream: FakeUpstream, begin: Start, passed: list[float]
) -> None:
    stand = await begin(sessions={"max": 2}, legs={"limit_seconds": 100})
    client, gate = stand.client(), Gate(upstream)
    asked = [await client.call() for _ in range(2)]
    running = [later(client.call()) for _ in range(2)]
    (live,) = stand.gateway.routes.live.values()
    await eventually(lambda: live.upstream.pool.waiting == 2)
    passed[0] = 31.0
    status = await told(stand)
    (row,), html = status.routes, (await fetch(stand, "/status"))[1]
    assert (status.running_total, row.running, row.unsent, row.oldest_call_seconds) == (2, 2, 2, None)
    assert ["2 calls waiting for one" in html, "may hang" in html, "the oldest for" in html] == [True, False, False]
    running.append(later(client.answer(asked[0])))
    await gate.answered.wait()
    passed[0] = 62.0
    html = (await fetch(stand, "/status"))[1]
    assert re.search("The upstream of /mcp may hang: last answer .* ago; 1 running call, the oldest for ", html)
    assert (await told(stand)).running_total == 3
    for each in running:
        await leave(each)
    await drop(stand)


@pytest.mark.usefixtures("_soon")
async def test_of_the_requests_that_pass_through_only_those_are_read_that_are_shown(
    upstream: FakeUpstream, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, note = list[Incoming](), Incoming.note
    monkeypatch.setattr("gateway.plugins.status_page.snapshot.MOST_HELD", 1)
    monkeypatch.setattr(Incoming, "note", lambda incoming: (read.append(incoming), note(incoming))[1])
    upstream.tool(Turn.for_ever)
    client = await LegacyClient(stand).initialize()
    running = [later(client.post(client.call_message())) for _ in range(3)]
    _ = await upstream.saw("tools/call", 3)
    status = await told(stand)
    assert (len(status.running), status.running_total, len(read)) == (1, 3, 1)
    (row,), (oldest,) = status.routes, status.running
    assert (row.running, row.oldest_call_seconds) == (3, oldest.running_seconds)
    for each in running:
        await leave(each)


@pytest.mark.usefixtures("_soon")
async def test_a_stream_that_stays_open_is_no_running_call(upstream: FakeUpstream, stand: Stand) -> None:
    client = await LegacyClient(stand).initialize()
    async with client.listen():
        status = await told(stand)
        assert (status.running, status.routes[0].streams) == ((), 1)


@pytest.mark.usefixtures("_soon")
async def test_the_uri_of_a_running_read_is_not_shown(upstream: FakeUpstream, stand: Stand) -> None:
    go = upstream.holding("resources/read", lambda turn: turn.result({"contents": []}))
    running = later(stand.client().post("resources/read", {"uri": f"file:///home/ada/{SECRET}"}))
    assert (await one_running(stand)).name == ""
    go.set()
    _ = await running


@pytest.mark.usefixtures("_soon")
async def test_a_call_whose_round_ended_early_still_waits_for_its_server(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(legs={"limit_seconds": 0.03})
    go = upstream.waiting_tool()
    shed = await stand.client().call(headers={"X-Request-Id": "the-first"})
    assert shed.questions == {}
    status = await told(stand)
    expected = "the server's response; between rounds of its client"
    assert [call.waits_for for call in (*status.held, *status.running)] == [expected] * 2
    assert expected in (await fetch(stand, "/status"))[1].replace("&#39;", "'")
    (driver,) = stand.gateway.lot.waiting()
    assert [(call.request_id, call.first_request_id) for call in status.held] == [("the-first", "")]
    shed = await stand.client().call(state=shed.state, headers={"X-Request-Id": "the-second"})
    status, html = await told(stand), (await fetch(stand, "/status"))[1]
    for call in (*status.held, *status.running):
        assert (call.request_id, call.first_request_id) == ("the-second", "the-first")
        assert call.exchange_id == driver.id != ""
    for label, id_ in (("first", "the-first"), ("exchange", driver.id)):
        assert html.count(f"{label}: <code>{id_}</code>") == 2, "among the held and among the running calls"
    go.set()
    await eventually(lambda: driver.is_finished)
    assert (await told(stand)).running == ()
    assert (await stand.client().call(state=shed.state)).text == "done"


@pytest.mark.usefixtures("_soon")
async def test_an_answered_call_has_run_without_the_time_of_its_user(
    upstream: FakeUpstream, begin: Start, passed: list[float]
) -> None:
    stand = await begin(hold={"grace_seconds": 30})
    client, gate = stand.client(), Gate(upstream)
    asked = await client.call()
    status = await told(stand)
    assert (status.running, status.held[0].running_seconds) == ((), None)
    (driver,) = stand.gateway.lot.waiting()
    passed[0] = 100.0
    answering = later(client.answer(asked))
    await gate.answered.wait()
    call = await one_running(stand)
    assert call.waits_for == SERVER_WORKS
    assert call.age_seconds > 100
    assert call.running_seconds is not None
    assert call.silent_seconds is not None
    assert max(call.running_seconds, call.silent_seconds) < 100
    await leave(answering)
    await eventually(lambda: driver.glance(0.0).state == State.DETACHED)
    assert (await one_running(stand)).waits_for == "the server's response; its client has left"
    gate.go.set()
    assert (await client.answer(asked)).text == "done"


@pytest.mark.usefixtures("_soon")
async def test_a_round_that_another_replica_relays_is_listed_where_its_call_runs(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, other = await cluster.begin("gw-1", "gw-2")
    gate = Gate(upstream)
    asked = await one.client().call()
    answering = later(other.client().answer(asked))
    await gate.answered.wait()
    call = await one_running(one)
    assert call.owner == one.gateway.members.own
    assert (await told(one)).running_total == 1
    legs = one.gateway.downstream.legs
    assert legs.relayed
    assert legs.relayed.keys() <= legs.seen.keys(), "it would also be listed if it had never been held"
    gate.go.set()
    assert (await answering).text == "done"


async def test_the_first_request_of_a_call_that_was_taken_over_is_not_known(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    _ = FakeStore(upstream, rounds=3)
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    await cluster.crash(one)
    for _ in range(2):
        asked = await two.client().answer(asked)
    (call,) = (await told(two)).held
    assert (call.first_request_id, call.exchange_id != "") == ("", True)
    await drop(two)


def test_the_longest_of_many_running_calls_are_shown() -> None:
    calls = tuple(replace(held(1), running_seconds=float(number * 7 % 300), request_id="r") for number in range(300))
    status = cut(status_of(process(0), running=calls, running_total=300))
    assert [call.running_seconds for call in status.running] == sorted(map(float, range(100, 300)), reverse=True)
    assert f"{MOST_HELD} of 300 are shown" in page(status)


def test_running_calls_and_the_oldest_one_of_a_route_are_those_of_all_processes() -> None:
    def part(number: int, path: str, seconds: float | None) -> Status:
        rows = (route(path=path, oldest_call_seconds=seconds, running=1, unsent=number),)
        calls = (replace(held(1), route=path, running_seconds=seconds),)
        return status_of(process(number), routes=rows, running=calls, running_total=1)

    whole = of_workers(part(0, "/mcp", 7.0), part(1, "/other", 50.0), part(2, "/mcp", 9.0))
    assert [call.running_seconds for call in whole.running] == [50.0, 9.0, 7.0]
    assert (whole.running_total, [row.oldest_call_seconds for row in whole.routes]) == (3, [9.0, 50.0])
    assert [row.unsent for row in whole.routes] == [2, 1]
    alone = only(whole, "/mcp")
    assert ([call.route for call in alone.running], alone.running_total) == (["/mcp", "/mcp"], 2)
    older = replace(whole, routes=tuple(replace(row, running=0) for row in whole.routes))
    assert [only(older, path).running_total for path in ("/mcp", "/no route")] == [2, 0]
    assert of_workers(part(0, "/mcp", None), part(1, "/mcp", None)).routes[0].oldest_call_seconds is None


# What is lost if the process ends.


async def fates(stand: Stand) -> tuple[list[str | None], int]:
    """What becomes of the held calls, and how many of them are lost."""
    status = await told(stand)
    return [call.at_end for call in status.held], status.processes[0].lost_at_end


@pytest.mark.parametrize(
    ("route", "keys", "fate"),
    [({}, [KEY], "lost"), ({"ephemeral": ["tool"]}, [KEY], "run again"), ({"ephemeral": ["tool"]}, [], "lost")],
)
async def test_a_call_without_event_ids_is_run_again_or_lost(
    upstream: FakeUpstream, begin: Start, route: dict[str, Any], keys: list[str], fate: str
) -> None:
    stand = await begin(route=route, state={"keys": keys})
    upstream.tool(ask)
    _ = await stand.client().call()
    assert await fates(stand) == ([fate], int(fate == "lost"))
    html = (await fetch(stand, "/status"))[1]
    assert f"if it ends: {fate}" in html
    assert f"calls lost if it ends: {int(fate == 'lost')}" in html
    await drop(stand)


async def primed(turn: Turn) -> None:
    """A tool whose server stores events, and that does not end."""
    await turn.raw(b"id: e1\ndata:\n\n")
    await turn.for_ever()


def endless(turn: Turn) -> Awaitable[None]:
    """A tool that does not end."""
    return turn.for_ever()


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize(
    ("tool", "route", "keys", "fate", "is_promoted"),
    [
        (endless, {}, [KEY], "lost", False),
        (endless, {"ephemeral": ["tool"]}, [KEY], "run again", False),
        (endless, {"ephemeral": ["tool"]}, [], "lost", False),
        (primed, {}, [KEY], "resumed", False),
        (primed, {}, [], "lost", False),
        (primed, {"continuation": "replay"}, [KEY], "run again", False),
        (endless, {}, [KEY], "lost", True),
        (endless, {"ephemeral": ["tool"]}, [KEY], "run again", True),
        (primed, {}, [KEY], "resumed", True),
    ],
)
async def test_what_becomes_of_a_running_call_is_what_a_drain_does_with_it(
    upstream: FakeUpstream,
    begin: Start,
    log_lines: Lines,
    tool: Callable[[Turn], Awaitable[None]],
    route: dict[str, Any],
    keys: list[str],
    fate: str,
    is_promoted: bool,  # noqa: FBT001
) -> None:
    stand = await begin(route=route, state={"keys": keys}, hold={"drain_seconds": 0.05})
    upstream.tool(tool)
    running = later(stand.client().call())
    _ = await upstream.saw("tools/call")
    assert not is_promoted or stand.gateway.downstream.legs.running
    if tool is primed:
        await eventually(lambda: [call for call in stand.gateway.downstream.legs.seen if call.at_end == fate])
    assert (await one_running(stand)).at_end == fate
    assert (await told(stand)).processes[0].lost_at_end == (fate == "lost")
    assert f"if it ends: {fate}" in (await fetch(stand, "/status"))[1]
    await drain(stand.gateway, delay_seconds=0)
    (line,) = log_lines("exchange.finished")
    assert (line["outcome"] == "error") == (fate == "lost")
    assert ("error" in (await running).final) == (fate == "lost")


@pytest.mark.usefixtures("_soon")
async def test_a_request_that_never_asks_has_no_state_to_come_back_with(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 0.05})
    upstream.on("completion/complete", endless)
    params = {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "a", "value": ""}}
    running = later(stand.client().post("completion/complete", params))
    _ = await upstream.saw("completion/complete")
    assert (await one_running(stand)).at_end == "lost"
    await drain(stand.gateway, delay_seconds=0)
    assert (await running).status == 503


async def test_a_tool_that_says_that_it_may_run_twice_is_run_again(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tools = [READ_ONLY]
    stand = await begin()
    upstream.tool(ask)
    _ = await stand.client().call()
    assert await fates(stand) == (["run again"], 0)
    await drop(stand)


async def test_answers_that_do_not_fit_into_the_state_cannot_be_given_again(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(route={"ephemeral": ["tool"]}, limits={"state_bytes": 1024})
    upstream.tool(asks("ok", "first", "second"))
    client = stand.client()
    long = {"action": "accept", "content": {"name": Random(1).randbytes(2000).hex()}}  # it cannot be compressed
    _ = await client.answer(await client.call(), long)
    assert await fates(stand) == (["lost"], 1)
    await drop(stand)


async def test_a_call_with_event_ids_is_resumed_and_so_is_its_result(upstream: FakeUpstream, begin: Start) -> None:
    store, stand = FakeStore(upstream), await begin(hold={"grace_seconds": 0.02})
    asked = await stand.client().call()
    assert await fates(stand) == (["resumed"], 0)
    assert json.loads((await stand.client().answer(asked)).text) == [ACCEPT]
    assert store.rounds == 1


async def test_a_result_that_waits_for_its_client_is_read_elsewhere(upstream: FakeUpstream, begin: Start) -> None:
    stand, gives_up_asking = await begin(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.say({"id": 0, "method": mcp.ELICIT, "params": FORM}, "e1")
        await gives_up_asking.wait()
        await turn.result(text("late"))

    upstream.tool(tool)
    asked = await stand.client().call()
    gives_up_asking.set()
    (driver,) = stand.gateway.lot.waiting()
    await eventually(lambda: driver.glance(0.0).state == State.FINISHED)
    assert await fates(stand) == (["resumed"], 0)
    assert (await stand.client().answer(asked)).text == "late"


async def test_a_call_whose_user_visits_a_url_is_lost_though_it_has_event_ids(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def refers(turn: Turn) -> None:
        error = {"code": -32042, "message": "visit", "data": {"elicitations": [URL]}}
        await turn.say({"id": turn.id, "error": error}, "e1")

    stand = await begin()
    upstream.tool(refers)
    _ = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    assert driver.glance(0.0).state == State.REFERRED
    assert await fates(stand) == (["lost"], 1)
    await drop(stand)


async def test_a_lost_call_stays_lost(upstream: FakeUpstream, begin: Start) -> None:
    stand, dies = await begin(), asyncio.Event()
    upstream.tool(gives_up(dies, Turn.reset))
    asked = await stand.client().call()
    dies.set()

    async def is_lost() -> bool:
        return (await told(stand)).held[0].is_lost

    await eventually(is_lost)
    assert await fates(stand) == ([None], 0)
    _ = await stand.client().answer(asked, {"action": "cancel"})


async def test_a_call_that_is_to_run_again_can_do_so_elsewhere(upstream: FakeUpstream, begin: Start) -> None:
    stand, dies = await begin(route={"ephemeral": ["tool"]}), asyncio.Event()
    upstream.each("tools/call", gives_up(dies, Turn.reset), lambda turn: turn.result(text("ok")))
    asked = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    dies.set()
    await eventually(lambda: driver.glance(0.0).state == State.BROKEN)
    assert await fates(stand) == (["run again"], 0)
    assert (await stand.client().answer(asked)).text == "ok"


async def test_a_draining_process_shows_when_it_ends_at_the_latest(begin: Start) -> None:
    stand = await begin(hold={"drain_seconds": 40})
    assert (await told(stand)).processes[0].ends_in_seconds is None
    draining = later(drain(stand.gateway, delay_seconds=60))
    await eventually(lambda: not stand.gateway.reload.is_open)
    seconds = (await told(stand)).processes[0].ends_in_seconds
    assert seconds is not None
    assert 100 < seconds <= 100 + stand.gateway.config.timeouts.cancel_seconds + 5, "what follows the drain included"
    assert re.search(r"ends in 1 min \d+ s or sooner", (await fetch(stand, "/status"))[1])
    draining.cancel()
    _ = await asyncio.gather(draining, return_exceptions=True)

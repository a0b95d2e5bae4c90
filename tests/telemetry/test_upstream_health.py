"""The health of an upstream follows the traffic of its route."""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from gateway.bridge import upstream_call
from gateway.bridge.call_context import Context
from gateway.config import ConfigFile
from gateway.exchange.machine import State
from gateway.protocol import mcp
from gateway.protocol.errors import Busy, CallLost, OwnerLost
from gateway.sessions.pool.pool import Pool
from gateway.telemetry import Metrics
from gateway.telemetry.recent_errors import RecentErrors
from gateway.telemetry.upstream_health import UpstreamHealth
from tests.support.fake_modern import FakeModern, Json
from tests.support.fake_upstream import FakeUpstream, Turn, ask, text
from tests.support.host import fake
from tests.support.legacy_client import LegacyClient, SseClient
from tests.support.logs import Lines
from tests.support.replicas import drop
from tests.support.stand import Start
from tests.support.status import fetch, told, upstream_up
from tests.support.workbench import Stand, eventually, later, leave


async def test_health_is_what_traffic_showed(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    (route,) = (await told(stand)).routes
    assert (route.health, route.last_ok_seconds_ago, route.last_failure) == ("unknown", None, None)
    assert (route.transport, route.era) == ("auto", "unknown")
    assert await upstream_up(stand) is None

    assert (await stand.client().call()).text == "done"
    (route,) = (await told(stand)).routes
    assert (route.health, route.last_failure) == ("ok", None)
    assert (route.transport, route.era) == ("streamable-http", "old")

    seen = len(upstream.seen) + len(upstream.probes)
    assert await upstream_up(stand) == 1
    for path in ("/status", "/status.json", "/status"):
        assert (await fetch(stand, path))[0] == 200
    assert len(upstream.seen) + len(upstream.probes) == seen, "the page asks the upstream nothing"

    upstream.forget()
    upstream.on("initialize", lambda turn: turn.reset())
    assert (await stand.client().call()).error["code"] == mcp.INTERNAL_ERROR
    status = await told(stand)
    (route,) = status.routes
    failure = route.last_failure
    assert route.health == "failing"
    assert await upstream_up(stand) == 0
    assert failure is not None
    assert failure.kind == "upstream_unreachable"
    assert upstream.url in failure.cause
    assert f"`mrtr-gateway probe {upstream.url}`" in failure.fix, "it can be pasted"
    (error,) = status.errors
    assert (error.kind, error.route, error.count) == ("upstream_unreachable", "/mcp", 1)
    html = (await fetch(stand, "/status"))[1]
    assert "is failing" in html
    assert "ready, 1 problem" in html

    upstream.on("initialize", upstream.initialize)
    assert (await stand.client().call()).text == "done"
    (route,) = (await told(stand)).routes
    assert route.health == "ok"
    assert await upstream_up(stand) == 1
    assert route.last_failure is not None, "when it failed last is still told"


async def test_an_upstream_is_failing_since_its_first_failure_after_its_last_answer(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr("gateway.world.monotonic", lambda: time.monotonic() + passed[0])
    stand = await begin()

    async def since_seconds() -> float:
        failure = (await told(stand)).routes[0].last_failure
        assert failure is not None
        return round(failure.since_seconds_ago, -1)

    async def after(seconds: float, *, fails: bool = True) -> float:
        passed[0] += seconds
        upstream.forget()
        upstream.on("initialize", (lambda turn: turn.reset()) if fails else upstream.initialize)
        _ = await stand.client().call()
        return await since_seconds() if fails else 0.0

    assert [await after(0), await after(100), await after(100)] == [0, 100, 200]
    served, asked = Pool.served, list[Pool]()
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "served", property(lambda pool: asked.append(pool) or served.__get__(pool)))
        _ = await asyncio.gather(*(stand.client().call() for _ in range(3)))
    assert asked == [], "of a crowd, one failure is judged, for many sessions are asked"
    assert await since_seconds() == 200
    assert "failing since " in (await fetch(stand, "/status"))[1]
    _ = await after(100, fails=False)
    assert (await told(stand)).routes[0].health == "ok"
    assert [await after(50), await after(100)] == [0, 100]

    _ = await after(100, fails=False)
    _ = await after(50)
    _ = await after(0.1, fails=False)
    _ = await after(0.1)  # too soon for another look at the answers
    assert await after(100) == 100


async def test_a_child_for_which_the_gateway_has_no_descriptor_is_its_own_fault(
    begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No child is started again at once, ahead of its sessions: this process would do nothing else."""

    def pipe() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("gateway.world.pipe", pipe)
    stand = await begin(route={"upstream": {"command": fake("fake_stdio.py"), "warm": 1}})
    for _ in range(4):
        error = (await stand.client().call()).error
        assert "cannot be started: the gateway has no file descriptor left (ulimit -n " in error["message"]
    status = await told(stand)
    assert (status.routes[0].health, status.errors[0].fix.partition(" (")[0]) == ("unknown", "Raise the hard limit")
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="upstream_unreachable") == 0
    stand.gateway.routes.live["/mcp"].upstream.retire()


Ask = Callable[[str], Awaitable[Json]]
"""Calls a tool, and returns the answer."""


async def mirrored(begin: Start, route: Json) -> tuple[Stand, Ask]:
    stand = await begin(route=route)
    client = await LegacyClient(stand).initialize()

    async def ask(tool: str) -> Json:
        async with client.call(tool) as stream:
            return await stream.message()

    return stand, ask


async def before_http(begin: Start, stack: AsyncExitStack) -> tuple[Stand, Ask]:
    server = await stack.enter_async_context(FakeModern())
    server.tools |= {"die": lambda _: {"id": "another", "result": {}}, "echo": lambda call: call.text("good")}
    return await mirrored(begin, {"upstream": {"url": server.url}, "era": "mirror"})


async def before_a_child(begin: Start, stack: AsyncExitStack) -> tuple[Stand, Ask]:
    stand, ask = await mirrored(begin, {"upstream": {"command": fake("fake_modern_stdio.py")}})
    stack.callback(stand.gateway.routes.live["/mcp"].upstream.retire)
    return stand, ask


async def between_transports(begin: Start, stack: AsyncExitStack) -> tuple[Stand, Ask]:
    server = await stack.enter_async_context(FakeUpstream())

    @server.tool
    async def tool(turn: Turn) -> None:
        if turn.seen.body["params"]["name"] == "die":
            turn.reply(500, b"oops")
        else:
            await turn.result()

    stand = await begin(route={"upstream": {"url": server.url, "transport": "streamable-http"}})
    client = await SseClient(stand).initialize()
    stack.callback(client.stream.close)

    async def ask(tool: str) -> Json:
        _ = await client.post(client.call_message(tool))
        return await client.stream.message()

    return stand, ask


@pytest.mark.processes
@pytest.mark.parametrize("start", [before_http, before_a_child, between_transports])
async def test_one_answer_in_the_same_session_ends_a_failure(begin: Start, start: Any) -> None:
    async with AsyncExitStack() as stack:
        stand, ask = await start(begin, stack)
        for tool, health, up in (("die", "failing", 0), ("echo", "ok", 1)):
            assert ("error" in await ask(tool)) == (tool == "die")
            assert ((await told(stand)).routes[0].health, await upstream_up(stand)) == (health, up)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        (None, "`mrtr-gateway probe http://{host}/mcp`"),
        (Path("/etc/gateway.yaml"), "`mrtr-gateway doctor --config /etc/gateway.yaml --route /mcp`"),
    ],
)
async def test_the_command_of_a_fix_names_the_server_and_no_secret(
    upstream: FakeUpstream, begin: Start, file: Path | None, command: str
) -> None:
    host = URL(upstream.url).authority
    stand = await begin(url=f"http://{host}/mcp?api_key=s3cr3t", file=None if file is None else ConfigFile(file))
    upstream.on("initialize", lambda turn: turn.reset())
    _ = await stand.client().call()
    status = await told(stand)
    (error,) = status.errors
    assert status.routes[0].last_failure is not None
    for fix in (error.fix, status.routes[0].last_failure.fix):
        assert command.format(host=host) in fix
    assert "s3cr3t" not in (await fetch(stand))[1]


async def break_off(turn: Turn) -> None:
    await turn.reset()


def breaks_off(upstream: FakeUpstream) -> None:
    upstream.tool(break_off)


def is_slow(upstream: FakeUpstream) -> None:
    upstream.tool(Turn.for_ever)


def is_elsewhere(upstream: FakeUpstream) -> None:
    upstream.on("initialize", lambda turn: turn.reply(302, b"", {"Location": "http://127.0.0.2:1/mcp"}))


def forgets_sessions(upstream: FakeUpstream) -> None:
    for method in ("ping", "tools/call"):
        upstream.on(method, lambda turn: turn.reply(404, {"error": "no session"}))


@pytest.mark.parametrize(
    ("fails", "kind", "says", "keeps"),
    [
        (breaks_off, "call_lost", "to see why it broke off", "idle_seconds"),
        (is_slow, "call_lost", "is only slow, raise timeouts.idle_seconds of the route", "broke off"),
        (is_elsewhere, "upstream_unreachable", "set upstream.url to the final address", "runs"),
        (forgets_sessions, "session_lost", "the next call opens a new session", "idle_seconds"),
    ],
)
async def test_the_log_has_the_fix_of_the_page_which_fits_and_can_be_pasted(
    upstream: FakeUpstream,
    begin: Start,
    log_lines: Lines,
    fails: Callable[[FakeUpstream], None],
    kind: str,
    says: str,
    keeps: str,
) -> None:
    """`keeps`: what does not belong to the cause."""
    stand = await begin(timeouts={"idle_seconds": 0.2}, file=ConfigFile(Path("/etc/gateway.yaml")))
    fails(upstream)
    assert (await stand.client().call()).error["data"]["reason"] == kind
    (line,) = [*log_lines("exchange.finished"), *log_lines("upstream.failed")]
    (error,) = (await told(stand)).errors
    assert error.kind == kind
    assert error.fix[1:] == line["fix"][1:]
    assert says in line["fix"]
    assert keeps not in line["fix"]
    assert "`mrtr-gateway doctor --config /etc/gateway.yaml --route /mcp`" in line["fix"]


async def test_a_server_that_takes_no_answer_fell_silent_and_did_not_break_off(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(timeouts={"answer_seconds": 0.1})
    upstream.tool(ask)
    asked = await stand.client().call()
    _ = upstream.holding("answer")
    assert (await stand.client().answer(asked)).error["data"]["reason"] == "call_lost"
    (error,) = (await told(stand)).errors
    assert "did not accept a message within timeouts.answer_seconds" in error.text
    assert "restart it if it hangs; if it is only slow, raise timeouts.answer_seconds;" in error.fix
    assert "broke off" not in error.fix


async def test_the_fix_of_a_limit_has_its_key_and_value(upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(ask)
    stand = await begin(hold={"max_calls": 1})
    asked = await stand.client().call()
    _ = await stand.client().call()
    _ = await stand.client().answer(asked)
    (error,) = (await told(stand)).errors
    raised = "raise hold.max_calls (1 when it happened), or add a replica"
    assert error.kind == "busy"
    assert error.fix == f"See Callers on the status page: stop one that should not have so many, or {raised}"


async def test_a_refused_caller_makes_no_failing_upstream(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()

    upstream.on("initialize", lambda turn: turn.reply(401, {}, {"WWW-Authenticate": "Bearer"}))
    assert (await stand.client("Bearer bad-token").call()).status == 401
    status = await told(stand)
    assert (status.routes[0].health, status.routes[0].last_failure) == ("ok", None), "it is there"
    assert [error.kind for error in status.errors] == ["upstream_refused"]


async def test_a_failure_without_a_waiting_client_is_shown(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_call, "CANCEL_AGAIN_SECONDS", ())  # nobody is there to be told
    stand = await begin()

    async def ask_and_break(turn: Turn) -> None:
        _ = await asyncio.gather(turn.elicit("q"), broken.wait())

    broken = asyncio.Event()
    upstream.tool(ask_and_break)
    asked = await stand.client().call()
    await upstream.close()
    await eventually(stand.gateway.recent_errors.told)
    status = await told(stand)
    assert [(error.kind, error.count) for error in status.errors] == [("call_lost", 1)]
    assert status.routes[0].health == "failing"
    _ = await stand.client().answer(asked)
    assert (await told(stand)).errors[0].count == 1, "its client hears of the same failure"


async def test_the_log_tells_at_once_of_the_calls_that_broke_without_their_clients(
    upstream: FakeUpstream, begin: Start, log_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_call, "CANCEL_AGAIN_SECONDS", ())
    stand = await begin(file=ConfigFile(Path("/etc/gateway.yaml")))
    client = stand.client()
    upstream.tool(break_off)
    assert (await client.call()).error["data"]["reason"] == "call_lost", "its client is there, and hears of it"
    upstream.tool(ask)
    asked = [await client.call() for _ in range(3)]
    await upstream.close()

    def told_of() -> list[Any]:
        return [line for line in log_lines("upstream.failed") if line["level"] == "warning"]

    await eventually(told_of)
    (line,) = told_of()
    assert (line["calls"], line["route"], line["upstream"]) == (3, "/mcp", upstream.url)
    assert "broke" in line["cause"]
    assert "`mrtr-gateway doctor --config /etc/gateway.yaml --route /mcp`" in line["fix"]
    assert len(log_lines("exchange.finished")) == 1, "that of the first call"
    assert (await client.answer(asked[0])).error["data"]["reason"] == "call_lost"


async def test_a_run_that_cannot_begin_is_one_failure(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_call, "CANCEL_AGAIN_SECONDS", ())
    stand = await begin(route={"ephemeral": ["tool"]})
    upstream.tool(ask)
    asked = await stand.client().call()
    (driver,) = stand.gateway.lot.waiting()
    await upstream.close()
    await eventually(lambda: driver.glance(0.0).state == State.BROKEN)
    retried = await stand.client().answer(asked)
    assert retried.error["message"].endswith("call again with the same requestState and inputResponses")
    counts = {error.kind: error.count for error in (await told(stand)).errors}
    assert counts == {"call_lost": 1, "upstream_unreachable": 1}
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="upstream_unreachable") == 1
    await drop(stand)


async def test_a_call_that_gets_no_session_without_its_client_is_not_told_as_broken(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_of = list[Exception]()
    monkeypatch.setattr(Context, "unheard", lambda _, error: told_of.append(error))
    stand = await begin(
        route={"ephemeral": ["tool"], "sessions": {"max": 1}},
        hold={"grace_seconds": 30},
        timeouts={"session_wait_seconds": 0.05},
    )
    breaks, goes_on = asyncio.Event(), asyncio.Event()

    async def breaks_without_its_client(turn: Turn) -> None:
        _ = await turn.elicit("q")
        await breaks.wait()
        await turn.reset()

    async def works(turn: Turn) -> None:
        await goes_on.wait()
        await turn.result(text("done"))

    upstream.each("tools/call", breaks_without_its_client, works)
    client = stand.client()
    asked = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    answering = later(client.answer(asked))
    _ = await upstream.saw("answer")
    await leave(answering)
    await eventually(lambda: driver.glance(0.0).state == State.DETACHED)
    other = later(client.call())  # takes the session
    await eventually(lambda: stand.gateway.downstream.in_flight == 1)
    breaks.set()
    await eventually(lambda: driver.glance(0.0).state == State.BROKEN)
    assert told_of
    assert not any(isinstance(error, Busy) for error in told_of)
    goes_on.set()
    assert (await other).text == "done"
    await drop(stand)


async def test_a_server_that_is_silent_is_told(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.2})
    upstream.tool(Turn.for_ever)
    _ = await stand.client().call()
    (error,) = (await told(stand)).errors
    assert (error.kind, error.count) == ("call_lost", 1)
    assert "was silent for 0.2 s" in error.text
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 1


async def test_a_server_that_is_silent_without_its_client_is_told_at_once(
    upstream: FakeUpstream, begin: Start, log_lines: Lines
) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.2}, legs={"limit_seconds": 0.05})
    upstream.tool(Turn.for_ever)
    client = stand.client()
    shed = await client.call()
    await eventually(lambda: log_lines("upstream.failed"))
    (line,) = log_lines("upstream.failed")
    assert (line["level"], line["route"], line["calls"]) == ("warning", "/mcp", 1)
    assert "was silent for 0.2 s" in line["cause"]
    assert "raise timeouts.idle_seconds" in line["fix"]
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 1
    assert (await client.call(state=shed.state)).error["data"]["reason"] == "call_lost"
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 1


async def test_answers_that_are_not_taken_without_their_client_are_told_at_once(
    upstream: FakeUpstream, begin: Start, log_lines: Lines
) -> None:
    stand = await begin(timeouts={"answer_seconds": 0.2}, hold={"grace_seconds": 30})
    upstream.tool(ask)
    client = stand.client()
    asked = await client.call()
    _ = upstream.holding("answer")
    answering = later(client.answer(asked))
    _ = await upstream.saw("answer")
    await leave(answering)
    await eventually(lambda: [line for line in log_lines("upstream.failed") if line["level"] == "warning"])
    assert stand.metric("mcp_gateway_upstream_errors_total", kind="call_lost") == 1


async def test_a_server_that_cannot_be_answered_is_told_as_no_failing_one(
    upstream: FakeUpstream, begin: Start
) -> None:
    upstream.has_sessions = False
    upstream.tool(ask)
    stand = await begin()
    _ = await stand.client().call()
    status = await told(stand)
    assert [(error.kind, error.count) for error in status.errors] == [("upstream_cannot_ask", 1)]
    assert "Run the server with sessions" in status.errors[0].fix
    assert status.routes[0].health == "ok"


async def test_an_old_clients_traffic_counts(upstream: FakeUpstream, begin: Start) -> None:
    """What is passed through shows as well whether somebody is there."""
    stand = await begin()
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}}
    async with stand.http.post(stand.url, json=body) as response:
        assert response.status == 200
    assert (await told(stand)).routes[0].health == "ok"
    await upstream.close()
    async with stand.http.post(stand.url, json=body) as response:
        assert response.status == 502
    status = await told(stand)
    assert status.routes[0].health == "failing"
    assert [(error.kind, error.count) for error in status.errors] == [("upstream_unreachable", 1)]


def test_a_lost_owner_is_not_the_upstreams_failure() -> None:
    known = UpstreamHealth("/mcp", Metrics(), RecentErrors(), url="http://h/mcp")
    known.note(OwnerLost("gw-1", "gone"), None)
    assert known.failure is None
    known.note(CallLost("gone"), None)
    assert known.failure is not None


def test_a_child_that_ended_is_told_and_no_failure_of_its_route() -> None:
    errors = RecentErrors()
    health = UpstreamHealth("/mcp", metrics := Metrics(), errors, url=None)
    for _ in range(3):
        health.child_started()
    health.child_ended("was asked to end", asked=True)
    health.child_ended("ended (exit code 1)", asked=False)
    (error,) = errors.told()
    assert (error.kind, error.route) == ("child_ended", "/mcp")
    assert health.failure is None
    assert metrics.children["/mcp",].value == 1
    assert [metrics.children_ended["/mcp", why].value for why in ("asked", "unasked")] == [1, 1]

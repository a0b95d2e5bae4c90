"""What /status tells of a gateway at work, and what it does not; the page itself is looked at in tests/e2e."""

import asyncio
import json
import re
from html import unescape
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from msgspec.structs import replace

from gateway.admin import status_page
from gateway.admin.snapshot import about, known_peers
from gateway.admin.status_page import HEADERS, every_seconds, page, prefers_json
from gateway.admin.status_view import duration
from gateway.auth.host_check import admin_names, check_admin
from gateway.cluster.membership import Membership
from gateway.cluster.worker import Worker
from gateway.config import ConfigError, parse
from gateway.exchange.events import Expired
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, InvalidParams, InvalidState, Unauthorized, Unreachable
from gateway.routes.upstream_health import UpstreamHealth
from gateway.telemetry.recent_errors import RecentErrors, presentable
from gateway.telemetry.status import (
    MOST_ERRORS,
    MOST_HELD,
    ErrorStatus,
    Failure,
    HeldStatus,
    KeyStatus,
    Notice,
    PeerStatus,
    ProcessStatus,
    RouteStatus,
    Status,
    cut,
    health,
    together,
)
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import KEY, Stand, configuration, eventually, jwt

SECRET: Final = "s3cr3t"


async def ask(turn: Turn) -> None:
    answer = await turn.elicit("q")
    await turn.result(text(json.dumps(answer)))


async def fetch(stand: Stand, path: str = "/status.json", **headers: str) -> tuple[int, str, Any]:
    async with stand.http.get(f"http://{stand.gateway.admin}{path}", headers=headers) as response:
        return response.status, await response.text(), response


async def told(stand: Stand) -> Status:
    status, body, _ = await fetch(stand)
    assert status == 200
    return msgspec.json.decode(body, type=Status)


async def drop(stand: Stand) -> None:
    """Give up what nobody will answer."""
    for driver in list(stand.gateway.lot):
        driver._feed(Expired())


# Held calls, without contents.


async def test_a_held_call_is_told_without_contents(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    upstream.tool(ask)
    token = f"Bearer {SECRET}-token-of-ada"
    answer = {"action": "accept", "content": {"name": f"{SECRET}-answer"}}
    arguments = {"passport": f"{SECRET}-argument"}
    asked = await stand.client(token).call("book_flight", arguments)
    answers = dict.fromkeys(asked.questions, answer)
    assert (
        SECRET in (await stand.client(token).call("book_flight", arguments, state=asked.state, answers=answers)).text
    )
    asked = await stand.client(token).call("book_flight", {"passport": f"{SECRET}-argument"})
    _, body, _ = await fetch(stand)
    _, html, _ = await fetch(stand, "/status")
    for shown in (body, unescape(html)):
        assert SECRET not in shown
        assert asked.state not in shown
        assert "Name?" not in shown, "what the server asked is between it and its user"
        assert KEY not in shown
    status = await told(stand)
    (call,) = status.held
    assert (call.route, call.method, call.name) == ("/mcp", "tools/call", "book_flight")
    assert (call.state, call.round, call.asked) == ("parked", 1, ("elicitation",))
    assert (call.owner, status.held_total) == ("gw-1", 1)
    assert call.expires_in_seconds is not None
    assert 590 < call.expires_in_seconds <= 600
    assert 0 < call.age_seconds < 60
    assert not any(f'"{session}"' in body for session in upstream.known)
    assert status.routes[0].held == 1
    assert status.routes[0].sessions["busy"] == 1
    assert sum(status.routes[0].sessions.values()) == len(upstream.known)
    assert status.processes[0].held == status.processes[0].held_of_one_caller == 1
    await drop(stand)
    assert (await told(stand)).held == ()


async def test_the_uri_of_a_resource_is_not_told(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    upstream.on("resources/read", ask)
    _ = await stand.client().post("resources/read", {"uri": f"file:///home/ada/{SECRET}"})
    _, body, _ = await fetch(stand)
    assert SECRET not in body
    assert (await told(stand)).held[0].method == "resources/read"
    await drop(stand)


async def test_callers_are_told_apart_and_not_told(upstream: FakeUpstream, begin: Start) -> None:
    one, other = await begin(), await begin()
    upstream.tool(ask)
    for stand in (one, other):
        for caller in ("ada", "ada", "bob"):
            _ = await stand.client(jwt(iss="https://id.example", sub=caller)).call()
    marks = [[call.caller for call in (await told(stand)).held] for stand in (one, other)]
    for first, second, third in marks:
        assert first == second != third
    assert not set(marks[0]) & set(marks[1]), "a mark means nothing to another process"
    await drop(one)
    await drop(other)


def test_workers_mark_a_caller_the_same() -> None:
    key = bytes(range(32))
    one, two = (Worker(number, 2, "/tmp", key) for number in range(2))
    assert one.mark == two.mark != key
    assert one.mark not in key


def held(age: float) -> HeldStatus:
    return HeldStatus(
        route="/mcp",
        method="tools/call",
        name="t",
        state="parked",
        round=1,
        asked=(),
        age_seconds=age,
        expires_in_seconds=1,
        owner="gw-1",
        caller="c",
    )


def status_of(*processes: ProcessStatus, **fields: Any) -> Status:
    config = parse(json.dumps({"routes": [{"upstream": {"url": "http://127.0.0.1:1/mcp"}}]}), "test", {})
    return replace(about(config, "gw-1", 0, is_draining=False), processes=processes, **fields)


def test_the_oldest_calls_are_shown_and_all_are_counted() -> None:
    ages = [float(number * 7 % 300) for number in range(300)]
    status = cut(status_of(held=tuple(map(held, ages)), held_total=300))
    assert [call.age_seconds for call in status.held] == sorted(ages, reverse=True)[:MOST_HELD]
    assert f"{MOST_HELD} of 300 are shown" in page(status)


async def test_of_many_parked_calls_the_first_are_listed(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admin.snapshot.MOST_HELD", 2)
    stand = await begin()
    upstream.tool(ask)
    for name in ("first", "second", "third"):
        _ = await stand.client().call(name)
    status = await told(stand)
    assert [call.name for call in status.held] == ["first", "second"]
    assert (status.held_total, status.routes[0].held, status.processes[0].held) == (3, 3, 3)
    await drop(stand)


# The upstream's health.


async def test_health_is_what_traffic_showed(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    (route,) = (await told(stand)).routes
    assert (route.health, route.last_ok_seconds_ago, route.last_failure) == ("unknown", None, None)
    assert (route.transport, route.era) == ("auto", "unknown")

    assert (await stand.client().call()).text == "done"
    (route,) = (await told(stand)).routes
    assert (route.health, route.last_failure) == ("ok", None)
    assert (route.transport, route.era) == ("streamable-http", "old")

    seen = len(upstream.seen) + len(upstream.probes)
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
    assert failure is not None
    assert failure.kind == "upstream_unreachable"
    assert upstream.url in failure.cause
    assert "mrtr-gateway probe" in failure.fix
    (error,) = status.errors
    assert (error.kind, error.route, error.count) == ("upstream_unreachable", "/mcp", 1)
    html = (await fetch(stand, "/status"))[1]
    assert "is failing" in html
    assert "ready, 1 problem" in html

    upstream.on("initialize", upstream.initialize)
    assert (await stand.client().call()).text == "done"
    (route,) = (await told(stand)).routes
    assert route.health == "ok"
    assert route.last_failure is not None, "when it failed last is still told"


async def test_a_refused_caller_makes_no_failing_upstream(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()

    async def refuse(turn: Turn) -> None:
        turn.reply(401, {}, {"WWW-Authenticate": "Bearer"})

    upstream.on("initialize", refuse)
    assert (await stand.client("Bearer bad-token").call()).status == 401
    status = await told(stand)
    assert (status.routes[0].health, status.routes[0].last_failure) == ("ok", None), "it is there"
    assert [error.kind for error in status.errors] == ["upstream_refused"]


async def test_a_server_that_fails_while_nobody_waits_is_told(upstream: FakeUpstream, begin: Start) -> None:
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


async def test_a_server_that_is_silent_is_told(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"idle_seconds": 0.2})
    upstream.tool(Turn.for_ever)
    _ = await stand.client().call()
    (error,) = (await told(stand)).errors
    assert (error.kind, error.count) == ("call_lost", 1)
    assert "was silent for 0.2 s" in error.text


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


def test_the_last_word_is_the_health() -> None:
    failure = Failure(kind="k", cause="c", fix="f", seconds_ago=5)
    assert health(None, None) == "unknown"
    assert health(9.0, None) == "ok"
    assert health(None, failure) == "failing"
    assert health(9.0, failure) == "failing"
    assert health(1.0, failure) == "ok"


# Errors.


async def test_what_a_server_says_of_a_call_is_not_repeated(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()

    async def fail(turn: Turn) -> None:
        error = {"code": -32000, "message": f"cannot pay with card {SECRET}"}
        turn.reply(500, {"jsonrpc": "2.0", "id": None, "error": error})

    upstream.tool(fail)
    assert SECRET in (await stand.client().call()).error["message"], "its client gets to know"
    status = await told(stand)
    assert status.errors[0].text.endswith("answered HTTP 500; the call may have had effects")
    assert status.routes[0].last_failure is not None
    assert SECRET not in (await fetch(stand))[1]


async def test_a_url_is_told_without_its_secrets(begin: Start) -> None:
    stand = await begin(url=f"http://127.0.0.1:9/mcp?key={SECRET}")
    _ = await stand.client().call()
    status = await told(stand)
    assert status.routes[0].upstream == "http://127.0.0.1:9/mcp"
    assert "127.0.0.1:9/mcp of route" in status.errors[0].text
    assert SECRET not in (await fetch(stand))[1]


def test_errors_that_differ_in_numbers_are_one_and_there_are_never_many() -> None:
    errors = RecentErrors()
    for number in range(5):
        _ = errors.note(Unreachable(f"is started again in {number} s"), "/mcp")
    (error,) = errors.told()
    assert (error.count, error.text) == (5, "is started again in 4 s")
    same = Unreachable("the same one")
    assert (errors.note(same), errors.note(same)) == ("upstream_unreachable", None)
    assert errors.told()[0].count == 1
    for letter in range(3 * MOST_ERRORS):
        _ = errors.note(Unreachable("x" * (letter + 1)))
    assert len(errors.told()) == MOST_ERRORS
    assert errors.told()[0].text == "x" * 3 * MOST_ERRORS
    assert all(error.text != "the same one" for error in errors.told()), "the oldest has gone"


def test_what_only_its_client_can_mend_is_no_trouble() -> None:
    errors, mended = RecentErrors(), (InvalidParams("x"), InvalidState("expired"), Unauthorized("x", has_token=True))
    assert [errors.note(error) for error in mended] == [None] * 3
    assert errors.note(InvalidState("unknown_key")) == "unknown_key"
    assert "state.keys" in errors.told()[0].fix


def test_a_lost_owner_is_not_the_upstreams_failure() -> None:
    known = UpstreamHealth("/mcp", RecentErrors(), is_command=False)
    known.note(CallLost("gone", data={"reason": "owner_lost"}))
    assert known.failure is None
    known.note(CallLost("gone"))
    assert known.failure is not None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\x1b[31mc\u202ed", "a b [31mc d"),
        ("with Bearer abcdefghijkl", "with Bearer [hidden]"),
        ("X refused a message: card 1234", "X refused a message"),
        ("X answered HTTP 502 (card (1) 2); the call may", "X answered HTTP 502; the call may"),
        ("y" * 1000, "y" * 399 + "…"),
    ],
)
def test_a_text_is_one_harmless_line(text: str, shown: str) -> None:
    assert presentable(text) == shown


async def test_a_bug_is_told(stand: Stand) -> None:
    async def fail() -> None:
        raise RuntimeError(SECRET)

    stand.gateway.tasks.spawn(fail(), "test")
    await eventually(lambda: stand.gateway.tasks.failures)
    stand.planted_bugs = 1
    (notice,) = (await told(stand)).notices
    assert notice.text.startswith("1 unexpected error")
    assert SECRET not in (await fetch(stand))[1]


# The configuration.


async def test_a_file_that_was_rejected_is_told_until_one_is_taken_over(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    found: list[ConfigError | str] = [ConfigError(["routes[0].upstream.url: is no URL"]), configuration(upstream.url)]

    def read() -> Any:
        next_ = found.pop(0)
        if isinstance(next_, ConfigError):
            raise next_
        return parse(next_, "test", {})

    reload = stand.gateway.reload
    reload._read = read
    reload.ask()
    await eventually(lambda: reload.rejected)
    (notice,) = (await told(stand)).notices
    assert "routes[0].upstream.url: is no URL" in notice.text
    assert "mrtr-gateway check" in notice.fix
    reload.ask()
    await eventually(lambda: reload.rejected is None)
    assert (await told(stand)).notices == ()


async def test_keys_are_told_by_id_and_use(begin: Start) -> None:
    first, second = "aa" * 32, "bb" * 32
    stand = await begin(state={"keys": [first, second]})
    status = await told(stand)
    assert [key.role for key in status.keys] == ["seals and opens", "only opens"]
    assert status.keys[0].id == stand.gateway.key_ids[0]
    assert "a rotation is under way" in status.key_phase
    assert first not in (await fetch(stand))[1]
    assert (await told(await begin())).key_phase == "One key: no rotation is under way."
    assert "lost when the process ends" in (await told(await begin(state={"keys": []}))).key_phase


async def test_limits_are_told_with_what_is_used_of_them(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"max_calls": 5, "max_calls_per_principal": 4}, limits={"connections": 50})
    upstream.tool(ask)
    for _ in range(4):
        _ = await stand.client().call()
    status = await told(stand)
    (process,) = status.processes
    assert (process.held, process.held_limit) == (4, 5)
    assert (process.held_of_one_caller, process.held_of_one_caller_limit) == (4, 4)
    assert 1 <= process.connections <= process.connections_limit == 50
    assert 10 < process.open_files < process.open_files_limit
    assert process.memory_bytes > 10_000_000
    html = (await fetch(stand, "/status"))[1]
    assert "Held calls: 4 of 5 (hold.max_calls)" in html
    assert "Held calls of one caller: 4 of 4 (hold.max_calls_per_principal)" in html
    assert (await stand.client().call()).status == 429
    assert [error.kind for error in (await told(stand)).errors] == ["busy"]
    await drop(stand)


async def test_a_draining_gateway_says_so(begin: Start) -> None:
    stand = await begin()
    drain = asyncio.get_running_loop().create_task(stand.gateway.drain(delay_seconds=60))
    await eventually(lambda: not stand.gateway.ready)
    status = await told(stand)
    assert (status.state, status.processes[0].state) == ("draining", "draining")
    drain.cancel()
    _ = await asyncio.gather(drain, return_exceptions=True)


# Peers.


async def test_peers_are_told_as_they_were_found_last() -> None:
    peers = {f"gw-{number}": f"10.0.0.{number}:8081" for number in range(1, 5)}
    config = parse(
        configuration("http://127.0.0.1:1/mcp", replica={"id": "gw-1", "listen": "10.0.0.1:8081", "peers": peers}),
        "t",
        {},
    )
    members = Membership(config.replica, Worker(0, 2, "/tmp", b""), None, None)  # type: ignore[arg-type]
    members.note("gw-2#1", "answered")
    members.note("gw-2#0", "stalled")
    members.note("gw-3", "dead")
    members.note("gw-1#1", "answered")
    members.note("gone", "answered")
    found = {
        peer.id: (peer.address, peer.state, peer.last_answer_seconds_ago is None) for peer in known_peers(members)
    }
    assert found == {
        "gw-2": ("10.0.0.2:8081", "stalled", False),
        "gw-3": ("10.0.0.3:8081", "dead", True),
        "gw-4": ("10.0.0.4:8081", "not asked", True),
        "gw-1#1": ("this host", "answered", False),
    }
    for number in range(3000):
        members.note(f"pod-{number}", "dead")
    assert len(members.seen) == 1000


# Workers as one.


def process(number: int, configuration: str = "aaa") -> ProcessStatus:
    return ProcessStatus(id=f"gw-1#{number}", state="ready", configuration=configuration, held=number)


def route(**fields: Any) -> RouteStatus:
    usual: dict[str, Any] = {
        "path": "/mcp",
        "upstream": "http://127.0.0.1:1/mcp",
        "transport": "auto",
        "era": "unknown",
        "continuation": "hold",
        "health": "unknown",
        "last_ok_seconds_ago": None,
        "last_failure": None,
        "held": 1,
        "sessions": {"idle": 1, "busy": 2, "quarantined": 0},
        "sessions_limit": 10,
        "waiting": 1,
        "children": None,
        "children_limit": None,
        "subscriptions": 1,
        "streams": 0,
    }
    return RouteStatus(**{**usual, **fields})


def test_workers_are_told_as_one() -> None:
    failure = Failure(kind="call_lost", cause="c", fix="f", seconds_ago=3)
    parts = [
        status_of(process(1), routes=(route(last_failure=failure, health="failing"),), routes_total=1, held_total=1),
        status_of(
            process(0),
            routes=(route(last_ok_seconds_ago=2.0, era="old", transport="sse", health="ok"),),
            routes_total=1,
            held=(held(5),),
            held_total=2,
        ),
    ]
    config = parse(configuration("http://127.0.0.1:1/mcp", listen="127.0.0.1:1", workers=3), "test", {})
    whole = together(about(config, "gw-1", 0, is_draining=False), parts)
    assert [(each.id, each.state) for each in whole.processes] == [
        ("gw-1#0", "ready"),
        ("gw-1#1", "ready"),
        ("gw-1#2", "silent"),
    ]
    assert (whole.state, whole.held_total, len(whole.held)) == ("not ready", 3, 1)
    (row,) = whole.routes
    assert (row.health, row.era, row.transport, row.held, row.waiting) == ("ok", "old", "sse", 2, 2)
    assert row.last_failure == failure
    assert (row.sessions, row.sessions_limit) == ({"idle": 2, "busy": 4, "quarantined": 0}, 20)
    assert [notice.text.partition(":")[0] for notice in whole.notices] == [
        "No answer within a second from gw-1#2",
    ]
    assert "gw-1#2" in page(whole)


def test_workers_that_run_under_different_configurations_are_told() -> None:
    parts = [status_of(process(0, "aaa")), status_of(process(1, "bbb"))]
    config = parse(configuration("http://127.0.0.1:1/mcp", listen="127.0.0.1:1", workers=2), "test", {})
    whole = together(about(config, "gw-1", 0, is_draining=False), parts)
    assert "different configurations (aaa, bbb)" in whole.notices[0].text
    assert together(about(config, "gw-1", 0, is_draining=True), parts).state == "draining"


# Who may look, and how.


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9090", "localhost.evil.example", ""])
async def test_a_rebound_name_gets_nothing(stand: Stand, host: str) -> None:
    for path in ("/status", "/status.json"):
        status, body, _ = await fetch(stand, path, Host=host)
        assert status == 403
        assert "security.allowed_hosts" in body
    assert (await fetch(stand, "/metrics", Host=host))[0] == 200, "scrapers come by any name"
    assert (await fetch(stand, "/readyz", Host=host))[0] == 200


async def test_addresses_and_configured_names_are_served(begin: Start) -> None:
    stand = await begin(security={"allowed_hosts": ["gw.example", "127.0.0.1"]})
    for host in ("127.0.0.1:9090", "localhost", "10.1.2.3:9090", "[::1]:9090", "GW.example:9090"):
        assert (await fetch(stand, "/status", Host=host))[0] == 200, host
    names = admin_names(parse(configuration("http://127.0.0.1:1/mcp", admin="gw-host:9090"), "test", {}))
    check_admin("gw-host:9090", names)


async def test_the_page_is_told_and_nothing_is_done(stand: Stand) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        async with stand.http.request(method, f"http://{stand.gateway.admin}/status") as response:
            assert response.status == 405
    async with stand.http.head(f"http://{stand.gateway.admin}/status") as response:
        assert (response.status, await response.read()) == (200, b"")
    status, body, _ = await fetch(stand, "/nothing")
    assert (status, body) == (404, "try /healthz /readyz /metrics /status\n")


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/status", "text/html,application/xhtml+xml,*/*;q=0.8", "text/html"),
        ("/status", "*/*", "text/html"),
        ("/status", "application/json", "application/json"),
        ("/status", "application/json, text/html", "text/html"),
        ("/status.json", "text/html", "application/json"),
    ],
)
async def test_a_page_for_people_and_json_for_programs(stand: Stand, path: str, accept: str, kind: str) -> None:
    _, body, response = await fetch(stand, path, Accept=accept)
    assert response.content_type == kind
    assert (body.startswith("<!DOCTYPE html>"), body.startswith("{")) == (kind == "text/html", kind != "text/html")
    for name, value in HEADERS.items():
        assert response.headers[name] == value
    assert "Access-Control-Allow-Origin" not in response.headers
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_accept_is_read_for_json() -> None:
    assert prefers_json("application/json")
    assert not prefers_json("")


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, None), ("10", 10), ("0", 2), ("x", None), ("99999", None), ("1'", None), ("", None)]
)
async def test_the_page_loads_itself_again_only_where_that_was_asked_for(
    asked: str | None, seconds: int | None
) -> None:
    assert every_seconds(asked) == seconds
    html = page(status_of(process(0)), every_seconds(asked))
    assert (f'http-equiv="refresh" content="{seconds}"' in html) == (seconds is not None)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (180_000, "2 d 2 h")],
)
def test_durations_are_told_in_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


class Evil:
    """Makes a hostile text for each field, which names its field so that the test can look for it."""

    MARKUP = "\"><script>alert(1)</script><img src=x onerror=alert(2)>' `<b>` {{ 7 * 7 }}"

    def __init__(self) -> None:
        self.fields: list[str] = []

    def __getitem__(self, field: str) -> str:
        self.fields.append(field)
        return field + self.MARKUP


def hostile(evil: Evil) -> Status:
    """A status of which every displayed text is hostile."""
    failure = Failure(kind="k", cause=evil["cause"], fix=evil["fix"], seconds_ago=1)
    texts = {field: evil[f"route-{field}"] for field in ("path", "upstream", "transport", "continuation")}
    failing = route(**texts, sessions={evil["session-state"]: 1}, last_failure=failure, health="failing")
    texts = {field: evil[f"held-{field}"] for field in ("route", "method", "name", "owner", "caller")}
    error = ErrorStatus(
        **{field: evil[f"error-{field}"] for field in ("kind", "route", "text", "fix")},
        count=1,
        first_seconds_ago=1,
        last_seconds_ago=1,
    )
    return Status(
        **{field: evil[field] for field in ("version", "replica", "state", "time", "configuration", "key_phase")},
        uptime_seconds=1,
        notices=(Notice(evil["notice-text"], evil["notice-fix"], evil["notice-detail"]),),
        processes=(ProcessStatus(id=evil["process-id"], state="ready", configuration=evil["process-configuration"]),),
        routes=(failing,),
        held=(replace(held(1), **texts, asked=(evil["held-asked"],)),),
        peers=(PeerStatus(id=evil["peer"], address=evil["address"], state="dead", last_answer_seconds_ago=1),),
        keys=(KeyStatus(evil["key"], "only opens"),),
        errors=(error,),
    )


@pytest.mark.parametrize("health", ["ok", "failing"])
def test_a_hostile_text_in_any_displayed_field_stays_text(health: Any) -> None:
    evil = Evil()
    status = hostile(evil)
    html = page(replace(status, routes=(replace(status.routes[0], health=health),)))
    tags = set(re.findall(r"<\s*([a-zA-Z]+)", html))
    assert not tags & {"script", "img", "b"}
    shown = unescape(re.sub("<[^>]*>", "", html))
    for field in evil.fields:
        expected = f"{field}{evil.MARKUP}"
        if field != "fix" or health == "failing":
            assert expected in shown or expected.replace("`", "") in shown, field


@pytest.mark.parametrize("name", ["status.html", "status.css"])
def test_the_template_and_the_style_sheet_are_part_of_the_package(name: str) -> None:
    assert (Path(status_page.__file__).parent / name).is_file()

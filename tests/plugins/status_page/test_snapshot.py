"""The snapshot of a process for /status: it has no contents of calls."""

import asyncio
import os
import re
import time
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from gateway.cluster.membership import Membership
from gateway.cluster.worker import Worker
from gateway.config import ConfigError, InForce, Problem, parse
from gateway.plugins.status_page.snapshot import known_peers
from gateway.plugins.status_page.status_view import judged
from gateway.server.drain import drain
from gateway.telemetry.process_status import Use
from tests.support.authority import Authority
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream, Turn, ask, gives_up, text
from tests.support.replicas import drop
from tests.support.stand import Start
from tests.support.status import SECRET, fetch, told
from tests.support.workbench import KEY, Stand, configuration, eventually, jwt, later

GAUGES = {
    *("ready", "connections", "connections_limit", "requests_in_flight", "sessions_limit", "children_limit"),
    *("held_calls_of_one_caller", "held_calls_of_one_caller_limit"),
    *("sessions_of_one_caller", "sessions_of_one_caller_limit"),
    *("config_last_reload_successful", "upstream_up", "upstream_reaction_timestamp_seconds"),
}


async def test_a_held_call_is_shown_without_its_contents(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    upstream.tool(ask)
    token = f"Bearer {SECRET}-token-of-ada"
    answer = {"action": "accept", "content": {"name": f"{SECRET}-answer"}}
    arguments = {"passport": f"{SECRET}-argument"}
    asked = await stand.client(token).call("book_flight", arguments)
    assert SECRET in (await stand.client(token).answer(asked, answer)).text
    asked = await stand.client(token).call("book_flight", arguments)
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
    assert status.processes[0].held == 1
    await drop(stand)
    assert (await told(stand)).held == ()


async def test_the_uri_of_a_resource_is_not_shown(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    upstream.on("resources/read", ask)
    _ = await stand.client().post("resources/read", {"uri": f"file:///home/ada/{SECRET}"})
    _, body, _ = await fetch(stand)
    assert SECRET not in body
    assert (await told(stand)).held[0].method == "resources/read"
    await drop(stand)


async def test_callers_have_different_marks_and_are_not_named(upstream: FakeUpstream, begin: Start) -> None:
    one, other, stranger = await begin(), await begin(), await begin(state={"keys": ["ef" * 32]})
    upstream.tool(ask)
    for stand in (one, other, stranger):
        for caller in ("ada", "ada", "bob"):
            _ = await stand.client(jwt(iss="https://id.example", sub=caller)).call()
    marks = [[call.caller for call in (await told(stand)).held] for stand in (one, other, stranger)]
    for first, second, third in marks:
        assert first == second != third
    assert marks[0] == marks[1], "with the same keys, a caller has the same mark at every replica"
    assert not set(marks[0]) & set(marks[2]), "a mark means nothing without the keys"
    for stand in (one, other, stranger):
        await drop(stand)


async def test_the_callers_that_have_the_most_are_shown(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin()
    upstream.tool(ask)
    for number, calls in enumerate((1, 1, 3, 1, 1, 2), 1):
        for _ in range(calls):
            _ = await stand.client(jwt(iss="https://id.example", sub=f"caller-{number}")).call()
    upstream.tool(lambda turn: turn.result(text("x")))
    _ = await stand.client(jwt(iss="https://id.example", sub="holds nothing")).call()
    status = await told(stand)
    tags = Counter(call.caller for call in status.held)
    (first, second, *_) = tags.most_common()
    assert [(each.caller, each.held, each.sessions) for each in status.callers[:2]] == [(*first, 3), (*second, 2)]
    assert len(status.callers) == 5
    assert status.callers[0].most_held == Use(3, 1000, "gw-1")
    html = (await fetch(stand, "/status"))[1]
    assert re.search(
        rf'<code>{first[0]}</code></th>\s*<td class="num" data-label="Held" role="cell"><div>3\s*<p', html
    )
    await drop(stand)


async def test_a_caller_that_holds_nothing_is_shown_with_its_sessions(upstream: FakeUpstream, begin: Start) -> None:
    stand, go = await begin(), upstream.waiting_tool()
    assert (await told(stand)).callers == ()
    assert 'id="callers"' not in (await fetch(stand, "/status"))[1]
    call = later(stand.client().call())
    await upstream.saw("tools/call")
    assert [(each.held, each.sessions) for each in (await told(stand)).callers] == [(0, 1)]
    go.set()
    _ = await call
    assert (await told(stand)).callers == (), "an idle session makes room for others"


async def test_a_caller_that_uses_most_of_its_sessions_is_told_and_counted_without_idle_ones(
    upstream: FakeUpstream, begin: Start
) -> None:
    limits = {"route": {"sessions": {"max_per_principal": 5}}, "hold": {"max_calls_per_principal": 4}}
    stand, go = await begin(**limits), upstream.waiting_tool()
    callers = [stand.client(jwt(iss="https://id.example", sub=name)) for name in ("ada", "bob")]
    running = [later(callers[0].call()) for _ in range(4)]
    await upstream.saw("tools/call", 4)
    last = later(callers[1].call())
    await upstream.saw("tools/call", 5)
    metrics = (await fetch(stand, "/metrics"))[1].splitlines()
    shown = ('sessions_of_one_caller{route="/mcp"} 4.0', 'sessions_of_one_caller_limit{route="/mcp"} 5.0')
    assert {f"mcp_gateway_{each}" for each in shown} < {*metrics}
    status = await told(stand)
    (notice,) = status.notices
    caller = status.callers[0].caller
    assert [each.most_sessions for each in status.callers] == [Use(4, 5, "/mcp of gw-1"), Use(1, 5, "/mcp of gw-1")]
    assert notice.text == f"Sessions in use of caller {caller} on /mcp: 4 of 5 (sessions.max_per_principal)"
    assert notice.fix == "When the limit is reached, new ones are refused; see Callers"
    go.set()
    _ = await asyncio.gather(*running, last)
    assert (await told(stand)).notices == (), "its sessions are idle"
    assert 'mcp_gateway_sessions_of_one_caller{route="/mcp"} 0.0' in (await fetch(stand, "/metrics"))[1]


async def test_a_held_call_whose_server_is_gone_is_shown_as_lost(upstream: FakeUpstream, begin: Start) -> None:
    stand, dies = await begin(), asyncio.Event()

    upstream.tool(gives_up(dies, Turn.reset))
    asked = await stand.client().call()
    assert not (await told(stand)).held[0].is_lost
    dies.set()

    async def is_lost() -> bool:
        return (await told(stand)).held[0].is_lost

    await eventually(is_lost)
    (call,) = (await told(stand)).held
    assert call.expires_in_seconds is not None, "the answer is kept as long as the call was"
    assert "lost: the client will be told" in (await fetch(stand, "/status"))[1]
    told_client = await stand.client().answer(asked, {"action": "cancel"})
    assert "may have had effects" in told_client.error["message"]
    assert (await told(stand)).held == ()


async def test_the_oldest_of_many_parked_calls_are_listed(
    upstream: FakeUpstream, begin: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.plugins.status_page.snapshot.MOST_HELD", 2)
    stand = await begin()
    upstream.tool(ask)
    for name in ("first", "second", "third"):
        _ = await stand.client().call(name)
    status = await told(stand)
    assert [call.name for call in status.held] == ["first", "second"]
    assert (status.held_total, status.routes[0].held, status.processes[0].held) == (3, 3, 3)
    await drop(stand)


async def test_the_error_text_of_a_server_is_not_repeated(upstream: FakeUpstream, begin: Start) -> None:
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


async def test_a_url_is_shown_without_its_secrets(begin: Start) -> None:
    stand = await begin(url=f"http://127.0.0.1:9/mcp?key={SECRET}")
    _ = await stand.client().call()
    status = await told(stand)
    assert status.routes[0].upstream == "http://127.0.0.1:9/mcp"
    assert "127.0.0.1:9/mcp of route" in status.errors[0].text
    assert SECRET not in (await fetch(stand))[1]


async def test_a_bug_is_shown_as_a_problem(stand: Stand) -> None:
    async def fail() -> None:
        raise RuntimeError(SECRET)

    stand.gateway.tasks.spawn(fail(), "test")
    await eventually(lambda: stand.gateway.tasks.failures)
    stand.planted_bugs = 1
    (notice,) = (await told(stand)).notices
    assert notice.text.startswith("1 unexpected error")
    assert SECRET not in (await fetch(stand))[1]


async def test_a_rejected_file_is_shown_until_a_later_one_is_applied(
    upstream: FakeUpstream, begin: Start, tmp_path: Path
) -> None:
    file = tmp_path / "my gateway.yaml"
    _ = file.write_text("log: {level: debug}\n")
    found: list[ConfigError | str] = [
        ConfigError([Problem("routes[0].upstream.url", "is no URL")]),
        configuration(upstream.url, log={"level": "debug"}),
        configuration(upstream.url),
    ]

    def read() -> Any:
        next_ = found.pop(0)
        if isinstance(next_, ConfigError):
            raise next_
        return parse(next_, "test", {})

    stand = await begin(file=Mock(load=read, path=file))
    reload = stand.gateway.reload
    reload.ask()
    await eventually(lambda: reload.rejected)
    (notice,) = (await told(stand)).notices
    assert "routes[0].upstream.url: is no URL" in notice.text
    command = f"kill -HUP {os.getpid()}"
    assert notice.fix == f"Correct the file (`mrtr-gateway check --config '{file}'`), then run `{command}`"
    reload.ask()
    await eventually(lambda: reload.needs_restart)
    (notice,) = (await told(stand)).notices
    assert notice.fix == f"Restart the gateway, or put the old values back in the file and run `{command}`"
    load_time = stand.gateway.metrics.load_time[()]
    load_time.set(100)
    (before,) = (await told(stand)).processes
    reload.ask()
    await eventually(lambda: reload.rejected is None)
    assert (await told(stand)).notices == ()
    await eventually(lambda: load_time.value != 100)
    (after,) = (await told(stand)).processes
    assert (before.loaded_seconds_ago or 0) > 1_000_000 > (after.loaded_seconds_ago or 0)


async def test_a_risky_setting_is_shown_as_a_caution(begin: Start) -> None:
    stand = await begin(route={"forward_headers": ["x-forwarded-access-token"]})
    (notice,) = (await told(stand)).notices
    assert ("set bind_headers" in notice.text, notice.is_bad) == (True, False)


async def test_the_caution_about_a_certificate_is_about_the_one_in_use(begin: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    stand = await begin(tls={"cert_file": str(authority.sign("shown", days=3))})
    _ = authority.sign("shown", days=90)
    (notice,) = (await told(stand)).notices
    assert notice.text.startswith("tls.cert_file expires on ")
    stand.gateway.apply(stand.gateway.config)
    assert (await told(stand)).notices == ()


def apply(stand: Stand, *keys: str) -> None:
    config = stand.gateway.config
    stand.gateway.apply(replace(config, state=replace(config.state, keys=keys)))


async def test_keys_are_shown_by_id_and_use(begin: Start) -> None:
    first, second = "aa" * 32, "bb" * 32
    stand = await begin(state={"keys": [first, second]})
    status = await told(stand)
    assert [key.role for key in status.keys] == ["seals and opens", "only opens"]
    assert status.keys[0].id == stand.gateway.key_ids[0]
    assert f"A rotation is under way: {status.keys[0].id} seals at gw-1. If {status.keys[1].id}" in status.key_phase
    assert "move it from state.keys to session_keys from 20" in status.key_phase
    assert status.keys_kept_seconds == 3600, "as long as a task lives"
    (before,) = status.processes
    assert 0 < (before.sealing_seconds_ago or 0) <= before.uptime_seconds
    apply(stand, second, first)
    status = await told(stand)
    (after,) = status.processes
    assert after.newest_key == status.keys[0].id
    assert (after.sealing_seconds_ago or 0) < after.uptime_seconds - before.uptime_seconds
    html = (await fetch(stand, "/status"))[1]
    assert "Use at gw-1" in html
    assert first not in html + (await fetch(stand))[1]
    assert (await told(await begin())).key_phase == "One key at gw-1: no rotation is under way there."
    keyless = await begin(state={"keys": []})
    assert "lost when the process ends" in (await told(keyless)).key_phase
    apply(keyless, first)
    assert (await told(keyless)).key_phase == "One key at gw-1: no rotation is under way there."
    long = await begin(state={"keys": [first, second], "ttl_seconds": 7200})
    assert (await told(long)).keys_kept_seconds == 7200


async def test_limits_are_shown_with_their_use(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(hold={"max_calls": 6, "max_calls_per_principal": 4}, limits={"connections": 50})
    upstream.tool(ask)
    for _ in range(4):
        _ = await stand.client().call()
    _ = await stand.client("Bearer another").call()
    status = await told(stand)
    (process,) = status.processes
    metrics = (await fetch(stand, "/metrics"))[1].splitlines()
    assert {"mcp_gateway_held_calls_of_one_caller 4.0", "mcp_gateway_held_calls_of_one_caller_limit 4.0"} < {*metrics}
    assert (process.held, process.held_limit) == (5, 6)
    assert 1 <= process.connections <= process.connections_limit == 50
    assert {name: each.limit for name, each in process.budgets.items()} == {
        "limits.receiving_bytes": 32 << 20,
        "limits.sending_bytes": 32 << 20,
        "limits.arriving_bytes": 32 << 20,
        "limits.results_bytes": 16 << 20,
        "limits.calls_bytes": 128 << 20,
        "limits.calls_bytes_per_principal": 32 << 20,
        "limits.replay_bytes": 32 << 20,
        "limits.cold_bytes": 1 << 30,
    }
    full = {name: replace(budget, used=budget.limit) for name, budget in process.budgets.items()}
    notices = judged(replace(status, notices=(), processes=(replace(process, budgets=full),))).notices
    assert all(notice.fix for notice in notices), "each budget says what happens when it is full"
    assert process.cold == 0
    assert 10 < process.open_files < process.open_files_limit
    assert process.memory_bytes > 10_000_000
    html = (await fetch(stand, "/status"))[1]
    assert "Held calls: 5 of 6 (hold.max_calls)" in html
    assert f"Held calls of caller {status.callers[0].caller}: 4 of 4 (hold.max_calls_per_principal)" in html
    assert (await stand.client().call()).status == 429
    assert [error.kind for error in (await told(stand)).errors] == ["busy"]
    await drop(stand)


async def test_the_metrics_show_the_use_of_each_limit_beside_the_limit(begin: Start) -> None:
    command = {"command": ["false"], "warm": 0, "max_children": 4}
    paths = [{"path": "/mcp", "upstream": {"url": "http://127.0.0.1:1/mcp"}}, {"path": "/child", "upstream": command}]
    stand = await begin(limits={"connections": 99}, sessions={"max": 7}, routes=paths)

    async def shown() -> dict[str, float]:
        lines = (await fetch(stand, "/metrics"))[1].splitlines()
        found = (line.removeprefix("mcp_gateway_").rpartition(" ") for line in lines)
        return {name: float(value) for name, _, value in found if name.partition("{")[0] in GAUGES}

    before = await shown()
    assert before.pop("config_last_reload_successful") == 1
    assert before == {
        "ready": 1,
        "connections": 0,
        "connections_limit": 99,
        "requests_in_flight": 0,
        "held_calls_of_one_caller": 0,
        "held_calls_of_one_caller_limit": 1000,
        'sessions_limit{route="/mcp"}': 7,
        'sessions_limit{route="/child"}': 4,
        'sessions_of_one_caller{route="/mcp"}': 0,
        'sessions_of_one_caller{route="/child"}': 0,
        'sessions_of_one_caller_limit{route="/mcp"}': 1100,
        'sessions_of_one_caller_limit{route="/child"}': 1100,
        'children_limit{route="/child"}': 4,
    }
    assert (await stand.client().on(stand.url.removesuffix("/mcp") + "/child").call()).error
    now = await shown()
    assert now['upstream_up{route="/child"}'] == 0
    assert 0 <= time.time() - now['upstream_reaction_timestamp_seconds{route="/child"}'] < 60
    config = stand.gateway.config
    stand.gateway.apply(replace(config, routes=config.routes[:1]))
    await drain(stand.gateway, delay_seconds=0)
    assert not [name for name in await shown() if "/child" in name]
    assert (await shown())["ready"] == 0


@pytest.mark.parametrize(
    ("upstream_section", "transport", "era"),
    [
        ({"url": "http://127.0.0.1:1/mcp"}, "auto", "unknown"),
        ({"url": "http://127.0.0.1:1/mcp", "transport": "streamable-http"}, "streamable-http", "unknown"),
        ({"url": "http://127.0.0.1:1/sse", "transport": "sse"}, "sse", "old"),
        ({"command": ["cat"], "warm": 0}, "stdio", "unknown"),
    ],
)
async def test_a_route_is_shown_with_its_configured_transport(
    begin: Start, upstream_section: dict[str, Any], transport: str, era: str
) -> None:
    stand = await begin(routes=[{"path": "/mcp", "upstream": upstream_section}])
    (route,) = (await told(stand)).routes
    assert (route.transport, route.era) == (transport, era)
    assert (route.children, route.last_ok_seconds_ago) == (0 if transport == "stdio" else None, None)


async def test_a_bridged_route_is_shown_as_legacy_before_the_first_request(begin: Start) -> None:
    (route,) = (await told(await begin(route={"era": "bridge"}))).routes
    assert route.era == "old"


@pytest.mark.parametrize(("fake", "transport"), [(FakeSse, "sse"), (FakeUpstream, "streamable-http")])
async def test_a_detected_transport_is_shown(begin: Start, fake: Any, transport: str) -> None:
    async with fake() as upstream:
        stand = await begin(url=upstream.url)
        _ = await stand.client().post("server/discover")
        (route,) = (await told(stand)).routes
        assert (route.transport, route.era, route.health) == (transport, "old", "ok")


async def test_a_draining_gateway_says_so(begin: Start) -> None:
    stand = await begin()
    draining = later(drain(stand.gateway, delay_seconds=60))
    await eventually(lambda: not stand.gateway.reload.is_open)
    status = await told(stand)
    assert (status.state, status.processes[0].state) == ("draining", "draining")
    draining.cancel()
    _ = await asyncio.gather(draining, return_exceptions=True)


async def test_peers_are_shown_in_their_last_known_state() -> None:
    peers = {f"gw-{number}": f"10.0.0.{number}:8081" for number in range(1, 5)}
    config = parse(
        configuration("http://127.0.0.1:1/mcp", replica={"id": "gw-1", "listen": "10.0.0.1:8081", "peers": peers}),
        "t",
        {},
    )
    members = Membership(InForce(config.replica), Worker(0, 2, "/tmp", b""), None, None)  # type: ignore[arg-type]
    members.note("gw-2#1", "answered")
    members.note("gw-2#0", "stalled")
    members.note("gw-3", "dead")
    members.note("gone", "answered")
    found = {
        peer.id: (peer.address, peer.state, peer.last_answer_seconds_ago is None) for peer in known_peers(members)
    }
    assert found == {
        "gw-2": ("10.0.0.2:8081", "stalled", False),
        "gw-3": ("10.0.0.3:8081", "dead", True),
        "gw-4": ("10.0.0.4:8081", "not asked", True),
    }
    for number in range(3000):
        members.note(f"pod-{number}", "dead")
    assert len(members.seen) == 1000

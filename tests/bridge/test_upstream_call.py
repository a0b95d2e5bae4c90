"""The upstream call of one exchange, and the messages beside it."""

import asyncio
import errno
import os
from typing import Any

import pytest

from gateway.bridge import upstream_call
from gateway.exchange.commands import TTL
from gateway.http.error_texts import texts
from gateway.protocol import mcp
from gateway.protocol.errors import Unreachable
from gateway.sessions.session import Session
from gateway.telemetry import Event
from tests.support.fake_upstream import FORM, READ_ONLY, URL, FakeUpstream, Turn, ask, ask_action, lacks_session, text
from tests.support.logs import Lines
from tests.support.replicas import Gate
from tests.support.stand import Start
from tests.support.status import told
from tests.support.workbench import ACCEPT, Client, Reply, Stand, eventually, later, leave


@pytest.fixture
def without_keep_alive(upstream: FakeUpstream) -> None:
    """Have the server close each connection once a session is open on it."""

    async def close(turn: Turn) -> None:
        await upstream.plain(turn)
        assert turn.response is not None
        turn.response.force_close()

    for word in ("server/discover", "initialize", mcp.INITIALIZED, "tools/list"):
        upstream.on(word, close)


@pytest.mark.usefixtures("without_keep_alive")
async def test_answers_to_an_upstream_that_cannot_be_reached_may_be_given_again(
    upstream: FakeUpstream, stand: Stand, client: Client, log_lines: Lines
) -> None:
    upstream.tool(ask_action)
    asked = await client.call()
    async with upstream.refusing_connections():
        for number in (1, 2):
            refused = await client.answer(asked)
            assert refused.outcome == (200, -32603, "upstream_unreachable")
            assert stand.held == 1
            lines = log_lines("upstream.failed")
            assert len(lines) == number
            assert lines[-1]["request_id"] == refused.error["data"]["requestId"]
    assert (await client.answer(asked)).text == "accept"
    assert len(upstream.of("answer")) == 1, "the answer reached the upstream once"
    assert len(upstream.of("tools/call")) == 1
    assert upstream.of(mcp.CANCELLED) == []


@pytest.mark.usefixtures("without_keep_alive")
async def test_a_brief_error_says_too_that_answers_may_be_given_again(
    upstream: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "are_brief", True)
    upstream.tool(ask_action)
    asked = await client.call()
    async with upstream.refusing_connections():
        said = (await client.answer(asked)).error["message"]
    again = "The answers were not sent: call again with the same requestState and inputResponses"
    assert said.startswith(f"{Unreachable.brief}. {again} (requestId ")
    assert (await client.answer(asked)).text == "accept"


@pytest.mark.usefixtures("without_keep_alive")
@pytest.mark.parametrize(
    ("number", "cause", "fix", "health"),
    [
        (errno.EMFILE, "no file descriptor left (ulimit -n ", "Raise the hard limit (", "ok"),
        # It may be an address that this host cannot use, so the alert about the upstream has to fire.
        (errno.EADDRNOTAVAIL, "no local address or port left for it", "If many calls are held, ", "failing"),
    ],
)
async def test_an_answer_for_which_the_gateway_has_no_descriptor_or_port_is_explained(
    upstream: FakeUpstream,
    stand: Stand,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    cause: str,
    fix: str,
    health: str,
) -> None:
    upstream.tool(ask_action)
    asked = await client.call()

    def open_socket(_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("gateway.world.new_socket", open_socket)
        said = (await client.answer(asked)).error["message"]
    assert cause in said
    assert "The answers were not sent: call again" in said
    status = await told(stand)
    assert status.routes[0].health == health
    assert status.errors[0].fix.startswith(fix)
    assert (await client.answer(asked)).text == "accept"


@pytest.mark.usefixtures("without_keep_alive")
async def test_an_answer_given_in_advance_that_cannot_be_sent_ends_the_call(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    asking = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b"")
        await asking.wait()
        await ask_action(turn)

    upstream.tool(tool)
    call = later(client.call(answers={"q": ACCEPT}))
    _ = await upstream.saw("tools/call")
    async with upstream.refusing_connections():
        asking.set()
        ended = await call
    assert ended.outcome == (200, -32603, "call_lost")
    assert "may have had effects" in ended.error["message"]
    assert stand.held == 0


async def test_the_handshake_opens_the_side_stream_before_initialized(upstream: FakeUpstream, client: Client) -> None:
    assert (await client.call()).text == "done"
    assert upstream.words == [
        "initialize",
        "GET",
        "notifications/initialized",
        "tools/list",
        "tools/call",
    ]
    assert len({seen.session for seen in upstream.seen[1:]}) == 1
    assert all(seen.headers["MCP-Protocol-Version"] == "2025-11-25" for seen in upstream.seen[1:])


async def test_the_log_level_is_set_on_a_session_only_when_it_differs(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities["logging"] = {}
    for level in ("info", "info", "error", None, "error"):
        await client.call(meta={mcp.META_LOG_LEVEL: level} if level else None)
    levels = [seen.body["params"]["level"] for seen in upstream.of(mcp.SET_LEVEL)]
    assert levels == ["info", "error"]
    assert len(upstream.of("initialize")) == 1


async def test_a_stateless_upstream_that_asks_ends_the_call_with_one_clear_error(
    upstream: FakeUpstream, client: Client
) -> None:
    upstream.has_sessions = False
    upstream.tool(ask)
    reply = await client.call()
    assert reply.outcome == (200, -32603, "upstream_cannot_ask")
    assert "stateless" in reply.error["message"]
    assert "GET" not in upstream.words
    assert "answer" not in upstream.words


async def referred(upstream: FakeUpstream, stand: Stand, client: Client) -> Reply:
    """Return what a call got whose user is to visit a URL, and whose reserved session is lost meanwhile."""
    upstream.once("tools/call", lambda turn: turn.error(-32042, "visit", {"elicitations": [URL]}))
    asked = await client.call()

    upstream.once("GET", lambda turn: turn.reply(405))
    upstream.side("s1").put_nowait(None)
    await upstream.saw("GET", 2)
    await eventually(lambda: all(each.lost for each in stand.group().sessions), "the side stream is given up")
    return asked


async def test_a_reserved_session_that_is_lost_while_the_url_is_visited_is_replaced(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    asked = await referred(upstream, stand, client)
    assert (await client.answer(asked, {"action": "accept"})).text == "done"
    assert [seen.session for seen in upstream.of("tools/call")] == ["s1", "s2"]
    await eventually(lambda: stand.sessions("busy") == 0)


async def test_a_call_that_cannot_begin_after_the_url_was_visited_begins_later(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    asked = await referred(upstream, stand, client)
    async with upstream.refusing_connections():
        for _ in range(2):
            reply = await client.answer(asked, {"action": "accept"})
            assert reply.outcome == (200, -32603, "upstream_unreachable")
            assert "call again with the same requestState" in reply.error["message"]
    assert (await client.answer(asked, {"action": "accept"})).text == "done"
    assert len(upstream.of("tools/call")) == 2


async def test_leaving_before_the_call_was_sent_sends_nothing_more(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    await client.call()  # the tools are known from now on
    upstream.forget()
    gate = upstream.holding("initialize", once=True)
    call = later(client.call())
    await upstream.saw("initialize", 2)
    await leave(call)
    gate.set()
    await eventually(lambda: not stand.busy_tasks())
    assert len(upstream.of("tools/call")) == 2, "the forgotten session's refusal is the last"
    assert mcp.CANCELLED not in upstream.words


async def test_a_call_that_its_client_left_is_not_sent_again_in_another_session(
    upstream: FakeUpstream, begin: Start
) -> None:
    """The upstream refuses the session after the client has left: the call must not begin then."""
    stand = await begin(hold={"grace_seconds": 0.01})
    client = stand.client()
    assert (await client.call()).text

    async def forgotten_late(turn: Turn) -> None:
        await upstream.saw(mcp.CANCELLED)
        upstream.on("ping", lacks_session)
        lacks_session(turn)

    upstream.tool(forgotten_late)
    call = later(client.call())
    await upstream.saw("tools/call", 2)
    await leave(call)
    await upstream.saw("ping")
    await eventually(lambda: not stand.busy_tasks())
    assert len(upstream.of("tools/call")) == 2, "the one before, and the one that was left"
    assert len(upstream.of("initialize")) == 1


async def test_a_cancelled_call_that_never_ends_frees_its_session_without_delete(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(lambda turn: turn.for_ever())
    call = later(client.call())
    seen = (await upstream.saw("tools/call"))[0]
    await leave(call)
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: stand.sessions("quarantined") == 0)
    async with asyncio.timeout(2):
        await seen.cut.wait()
    assert "DELETE" not in upstream.words


@pytest.mark.parametrize("word", ["tools/list", mcp.SET_LEVEL])
async def test_leaving_during_a_request_of_the_gateways_own_deletes_nothing_under_it(
    upstream: FakeUpstream, stand: Stand, client: Client, word: str
) -> None:
    upstream.capabilities["logging"] = {}
    upstream.on(word, lambda turn: turn.for_ever())
    call = later(client.call(meta={mcp.META_LOG_LEVEL: "info"}))
    seen = (await upstream.saw(word))[0]
    await leave(call)
    async with asyncio.timeout(2):
        await seen.cut.wait()
    await eventually(lambda: not stand.busy_tasks())
    assert "DELETE" not in upstream.words
    assert "tools/call" not in upstream.words


async def test_a_bug_while_answers_are_sent_ends_the_call_and_tells_the_upstream(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise ZeroDivisionError

    upstream.tool(lambda turn: turn.elicit("name"))
    asked = await client.call()
    monkeypatch.setattr(Session, "answer", broken)
    async with asyncio.timeout(5):
        assert (await client.answer(asked)).error["code"] == -32603
        _ = await upstream.saw(mcp.CANCELLED)
    stand.planted_bugs = 1


@pytest.mark.parametrize("first", ["stream", "answer"])
async def test_a_call_whose_stream_and_answer_both_fail_runs_again_once(
    upstream: FakeUpstream, stand: Stand, first: str
) -> None:
    async def breaks_when_answered(turn: Turn) -> None:
        params = {**FORM, "requestedSchema": {**FORM["requestedSchema"], "title": "q"}}  # type: ignore[dict-item]
        await turn.say({"id": 0, "method": mcp.ELICIT, "params": params})
        await (upstream.saw("answer") if first == "stream" else gate.answered.wait())
        await turn.reset()

    async def refused(turn: Turn) -> None:
        if first == "stream":
            await eventually(lambda: stand.nested(mcp.ELICIT, "replayed"), "the second run has asked")
        lacks_session(turn)

    client = stand.client()
    gate = Gate(upstream)
    upstream.once("tools/call", breaks_when_answered)
    upstream.tools = [READ_ONLY]
    asked = await client.call()
    upstream.once("answer", refused)
    answering = later(client.answer(asked))
    await eventually(gate.answered.is_set, "the second run has its answer")
    await eventually(lambda: not {"call", "send upstream"} & set(stand.tasks()), "nothing of the first run goes on")
    gate.go.set()
    assert (await answering).text == "done"
    assert len(upstream.of("tools/call")) == 2


async def test_a_call_is_judged_by_what_its_tool_was_when_it_was_parked(upstream: FakeUpstream, stand: Stand) -> None:
    """Nothing is asked of a server that has just lost a call."""

    async def breaks(turn: Turn) -> None:
        _ = await turn.elicit("q")
        await turn.notify(mcp.TOOLS_CHANGED, {})
        await turn.reset()

    upstream.tools = [READ_ONLY]
    upstream.each("tools/call", breaks, lambda turn: turn.result(text("again")))
    asked = await stand.client().call()
    upstream.on(mcp.TOOLS_LIST, lambda turn: turn.for_ever())
    assert (await stand.client().answer(asked)).text == "again"
    assert len(upstream.of(mcp.TOOLS_LIST)) == 1


async def test_leaving_in_the_first_round_cancels_at_once_and_once(
    log_lines: Lines, upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    ended = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await ended.wait()
        await turn.error(0, "cancelled") if turn.response is None else await turn.result(text("too late"))

    upstream.tool(tool)
    call = later(client.call())
    await upstream.saw("tools/call")
    await leave(call)
    cancelled = (await upstream.saw(mcp.CANCELLED))[0]
    assert cancelled.body["params"]["requestId"] == upstream.of("tools/call")[0].body["id"]
    assert cancelled.session == upstream.of("tools/call")[0].session
    assert stand.sessions("quarantined") == 1
    assert "DELETE" not in upstream.words, "never under a pending call"
    ended.set()
    await upstream.saw("DELETE")
    await eventually(lambda: stand.sessions("quarantined") == 0)
    assert len(upstream.of(mcp.CANCELLED)) == 1
    (line,) = log_lines(Event.EXCHANGE_FINISHED)
    assert (line["level"], line["outcome"]) == ("info", "cancelled")


async def test_a_cancellation_that_is_refused_is_sent_again_though_nothing_reads_the_call_any_more(
    upstream: FakeUpstream, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_call, "CANCEL_AGAIN_SECONDS", (0.0,))

    async def breaks_off(turn: Turn) -> None:
        await turn.raw(b": running\n\n")
        await turn.reset()

    upstream.tool(breaks_off)
    upstream.once(mcp.CANCELLED, lambda turn: turn.reply(503))
    assert (await client.call()).error["data"]["reason"] == "call_lost"
    one, other = await upstream.saw(mcp.CANCELLED, 2)
    assert one.body["params"] == other.body["params"]


async def test_a_bug_in_one_message_does_not_keep_back_the_next(
    upstream: FakeUpstream, stand: Stand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, bugs = Session.answer, [ZeroDivisionError]

    async def broken_once(*args: Any) -> None:
        if bugs:
            raise bugs.pop()
        await answer(*args)

    async def tool(turn: Turn) -> None:
        for number in (1, 2):
            await turn.say({"id": number, "method": "no/such"})
        await upstream.saw("answer")
        await turn.result(text("done"))

    monkeypatch.setattr(Session, "answer", broken_once)
    upstream.tool(tool)
    assert (await client.call()).text == "done"
    assert [seen.body["id"] for seen in upstream.of("answer")] == [2]
    stand.planted_bugs = 1


async def test_a_held_call_that_is_left_frees_its_session_at_once(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    closed = asyncio.Event()

    async def tool(turn: Turn) -> None:
        try:
            _ = await turn.elicit("name")
        finally:
            closed.set()

    upstream.tool(tool)
    _ = await client.call()
    (driver,) = stand.gateway.lot.waiting()
    (session,) = stand.group().sessions
    assert session.in_flight is not None
    session.leave(session.in_flight)
    assert not session.pending, "no task would notice later"
    await closed.wait()
    driver.fire(TTL)

"""An HTTP refusal is the answer to a call, or says that its session is gone; only then the call is sent again.

The FAKE upstream counts what it runs, so that a second execution shows.
"""

import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from gateway.http_client.errors import ConnectTimedOut, NotConnected, ReplyCut, RequestFailed
from gateway.protocol import mcp
from gateway.upstream.http.http_errors import is_local
from tests.support.fake_sse import FakeSse, Message, Stream
from tests.support.fake_upstream import FakeUpstream, Script, Turn, play, text
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually

TEMPLATES = [
    (404, -32001, "Session not found"),
    (404, -32600, "Session not found"),
    (404, -32600, "Not Found: Session has been terminated"),
    (400, -32000, "Bad Request: No valid session ID provided"),
    (400, -32000, "Bad Request: No valid session ID"),
]
"""How servers that echo the request's id refuse a session that they do not know."""
ANSWERS = [
    (400, -32603, "The database session timed out"),
    (404, -32603, "No such session of the shell"),
    (404, -32000, "No such file"),
    (400, -32000, "Session not found: abc"),
    (500, -32603, "The session crashed"),
    (400, -32602, "Bad argument"),
]
"""How tools fail, at servers that give their errors an HTTP status."""


def error(id_: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "error": {"code": code, "message": message}}


def refusing(status: int, code: int, message: str) -> Script:
    """Refuse with the request's own id."""

    return lambda turn: turn.reply(status, error(turn.id, code, message))


class Ledger:
    """Counts the executions of a tool; what it does after that is its `ending`."""

    def __init__(self, upstream: FakeUpstream, ending: Script) -> None:
        self.runs: list[str | None] = []
        self._ending = ending
        upstream.tool(self.run)

    async def run(self, turn: Turn) -> None:
        self.runs.append(turn.session)
        await play(self._ending, turn)


def restart(upstream: FakeUpstream, ledger: Ledger, refuse: Script) -> None:
    """From now on the server knows no session that was opened before, and says so in these words."""
    upstream.forget()

    async def run(turn: Turn) -> None:
        await play(ledger.run if turn.session in upstream.known else refuse, turn)

    upstream.tool(run)
    upstream.on(mcp.PING, refuse)


# -- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "code", "message"), ANSWERS)
async def test_an_error_with_the_calls_own_id_is_its_answer(
    upstream: FakeUpstream, client: Client, status: int, code: int, message: str
) -> None:
    ledger = Ledger(upstream, refusing(status, code, message))
    reply = await client.call()
    assert (reply.status, reply.error["code"], reply.error["message"]) == (200, code, message)
    assert ledger.runs == ["s1"]
    assert (await client.call()).error["message"] == message
    assert ledger.runs == ["s1", "s1"], "its session is as good as before"


@pytest.mark.parametrize(("status", "code", "message"), TEMPLATES)
async def test_the_words_of_a_lost_session_are_an_answer_while_the_session_lives(
    upstream: FakeUpstream, client: Client, status: int, code: int, message: str
) -> None:
    ledger = Ledger(upstream, refusing(status, code, message))
    assert (await client.call()).error["message"] == message
    assert ledger.runs == ["s1"]
    (ping,) = upstream.of(mcp.PING)
    assert ping.session == "s1"


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_a_result_that_comes_with_an_error_status_is_the_result(
    upstream: FakeUpstream, client: Client, status: int
) -> None:
    async def fail(turn: Turn) -> None:
        result = {**text("The database session timed out"), "isError": True}
        turn.reply(status, {"jsonrpc": "2.0", "id": turn.id, "result": result})

    ledger = Ledger(upstream, fail)
    assert (await client.call()).result["isError"] is True
    assert ledger.runs == ["s1"]


@pytest.mark.parametrize("sent", [b"", b"The database session timed out", b"<h1>Not Found</h1>"])
@pytest.mark.parametrize("status", [400, 404])
async def test_a_refusal_without_an_id_does_not_mean_that_the_session_is_lost(
    upstream: FakeUpstream, client: Client, status: int, sent: bytes
) -> None:
    ledger = Ledger(upstream, lambda turn: turn.reply(status, sent))
    reply = await client.call()
    assert reply.outcome == (200, -32603, "call_lost")
    assert "may have had effects" in reply.error["message"]
    assert ledger.runs == ["s1"]


@pytest.mark.parametrize(
    "pong",
    [
        refusing(500, -32603, "Out of memory"),
        refusing(401, -32001, "Session not found"),
        refusing(400, -32001, "Session not found"),
        refusing(404, -32600, "Session not found"),
        Turn.reset,
    ],
)
async def test_a_ping_that_is_refused_in_another_way_proves_nothing(
    upstream: FakeUpstream, client: Client, pong: Callable[[Turn], Any]
) -> None:
    ledger = Ledger(upstream, refusing(404, -32001, "Session not found"))
    upstream.on(mcp.PING, pong)
    assert (await client.call()).error["message"] == "Session not found"
    assert ledger.runs == ["s1"]


@pytest.mark.parametrize("pong", [Turn.reset, lambda turn: turn.result({})])
async def test_an_error_without_the_calls_id_is_no_answer_though_the_session_may_live(
    upstream: FakeUpstream, client: Client, pong: Callable[[Turn], Any]
) -> None:
    """The server may have ended after its refusal, and a client of the gateway knows of no session."""

    ledger = Ledger(upstream, lambda turn: turn.reply(404, error(None, -32001, "Session not found")))
    upstream.on(mcp.PING, pong)
    reply = await client.call()
    assert reply.outcome == (200, -32603, "call_lost")
    assert "answered HTTP 404 (Session not found), and a ping did not prove" in reply.error["message"]
    assert ledger.runs == ["s1"]


async def test_an_answer_with_an_error_status_ends_a_call_that_may_run_twice(
    upstream: FakeUpstream, begin: Start
) -> None:
    async def fail(turn: Turn) -> None:
        if len(ledger.runs) == 1:
            await turn.elicit("q")
        else:
            turn.reply(500, error(turn.id, -32603, "The session crashed"))

    client = (await begin(route={"continuation": "replay"})).client()
    ledger = Ledger(upstream, fail)
    reply = await client.answer(await client.call())
    assert reply.error["message"] == "The session crashed"
    assert len(ledger.runs) == 2


# -- the lost session -------------------------------------------------------------------------------------------------


def lost(status: int, said: object) -> Script:
    return lambda turn: turn.reply(status, said)


LOST = [
    *(refusing(*words) for words in TEMPLATES),
    lost(404, error("server-error", -32600, "Session not found")),
    lost(404, b"not found"),
    lost(400, b"Bad Request: No valid session ID provided"),
    lost(400, error(None, -32000, "Bad Request: no valid session")),
]


@pytest.mark.parametrize("refuse", LOST)
async def test_a_session_that_is_lost_is_opened_again(
    upstream: FakeUpstream, stand: Stand, client: Client, refuse: Script
) -> None:
    ledger = Ledger(upstream, lambda turn: turn.result(text("done")))
    assert (await client.call()).text == "done"
    restart(upstream, ledger, refuse)
    assert (await client.call()).text == "done"
    assert ledger.runs == ["s1", "s2"]
    assert [seen.session for seen in upstream.of("tools/call")] == ["s1", "s1", "s2"]
    assert stand.metric("mcp_gateway_sessions_lost_total") == 1


@pytest.mark.parametrize("refuse", LOST[len(TEMPLATES) :])
async def test_a_session_that_is_lost_twice_is_an_error(
    upstream: FakeUpstream, client: Client, refuse: Script
) -> None:
    upstream.tool(refuse)
    upstream.on(mcp.PING, refuse)
    assert (await client.call()).outcome == (200, -32603, "session_lost")
    assert len(upstream.of("tools/call")) == 2


async def test_a_session_that_is_refused_in_unknown_words_costs_one_call(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    ledger = Ledger(upstream, lambda turn: turn.result(text("done")))
    assert (await client.call()).text == "done"
    restart(upstream, ledger, refusing(400, -32000, "Unknown session, sorry"))
    assert (await client.call()).error["message"] == "Unknown session, sorry"
    assert (await client.call()).text == "done"
    assert ledger.runs == ["s1", "s2"]
    assert stand.metric("mcp_gateway_sessions_lost_total") == 1


async def test_a_ping_about_a_lost_session_carries_the_calls_credential(upstream: FakeUpstream, stand: Stand) -> None:
    client = stand.client("Bearer ada")
    ledger = Ledger(upstream, lambda turn: turn.result(text("done")))
    _ = await client.call()
    restart(upstream, ledger, refusing(404, -32001, "Session not found"))
    assert (await client.call()).text == "done"
    (ping,) = upstream.of(mcp.PING)
    assert (ping.session, ping.headers["Authorization"]) == ("s1", "Bearer ada")


# -- HTTP+SSE ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "code", "message"), [*ANSWERS, *TEMPLATES])
async def test_over_http_sse_an_error_with_the_calls_own_id_is_its_answer(
    old: FakeSse, begin: Start, status: int, code: int, message: str
) -> None:
    runs = 0

    async def refuse(sent: Message) -> web.Response | None:
        nonlocal runs
        if sent.get("method") != "tools/call":
            return None
        runs += 1
        return web.json_response(error(sent["id"], code, message), status=status)

    stand = await begin(route={"upstream": {"url": old.url, "transport": "sse"}})
    old.post = refuse
    assert (await stand.client().call()).error["message"] == message
    assert runs == 1
    assert len(old.streams) == 1


async def test_over_http_sse_an_answer_on_the_stream_outweighs_the_refusal_of_its_post(
    old: FakeSse, begin: Start
) -> None:
    runs = 0

    async def tool(_: FakeSse, stream: Stream, message: Message) -> None:
        nonlocal runs
        runs += 1
        stream.say(id=message["id"], result=text("done"))

    async def lose(sent: Message) -> web.Response | None:
        if sent.get("method") == "tools/call":
            await tool(old, old.streams[0], sent)
        elif sent.get("method") != mcp.PING:
            return None
        return web.Response(status=404, text="Could not find session")

    stand = await begin(route={"upstream": {"url": old.url, "transport": "sse"}})
    client = stand.client()
    assert (await client.call()).text == "done"
    old.post = lose
    assert (await client.call()).text == "done"
    await eventually(lambda: not stand.busy_tasks())
    assert runs == 1
    assert len(old.streams) == 1


# -- faults of this host ----------------------------------------------------------------------------------------------


def caused(failure: RequestFailed, cause: Exception) -> RequestFailed:
    failure.__cause__ = cause
    return failure


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (caused(NotConnected(""), socket.gaierror(socket.EAI_AGAIN, "later")), True),
        (caused(NotConnected(""), OSError(errno.EMFILE, "too many")), True),
        (caused(NotConnected(""), OSError(errno.ENETUNREACH, "no route")), True),
        (caused(NotConnected(""), ConnectionRefusedError(errno.ECONNREFUSED, "refused")), False),
        (caused(ConnectTimedOut(), TimeoutError()), False),
        (caused(ReplyCut(), OSError(errno.EMFILE, "too many")), False),
        (ConnectionResetError(errno.ENOMEM, "another library"), False),
    ],
)
def test_only_a_connection_that_this_host_could_not_open_is_a_local_fault(
    failure: Exception, *, expected: bool
) -> None:
    assert is_local(failure) is expected

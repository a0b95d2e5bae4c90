"""Errors: what they name, and the secrets that never leave the gateway."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.downstream.rejections import reject
from gateway.http.incoming import Incoming
from gateway.http.outbox import FinalMessage
from gateway.http.reply import Discarded
from gateway.http.server.response import Response
from gateway.protocol import mcp
from gateway.protocol.errors import GatewayError, InvalidState, StateFromFuture
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import Client, Stand

CANARY = "c4nary-7f3a9-"


async def test_no_secret_reaches_logs_metrics_admin_or_errors(
    upstream: FakeUpstream, log_lines: Lines, begin: Start
) -> None:
    stand = await begin(hold={"ttl_seconds": 0.3})
    client = stand.client(f"Bearer {CANARY}credential")
    secret = {"action": "accept", "content": {"name": CANARY + "answer"}}

    async def tool(turn: Turn) -> None:
        answer = await turn.elicit("q")
        if turn.body["params"]["name"] == "breaks":
            await turn.raw(b"data: {broken " + CANARY.encode() + b"\n\n")
        await turn.result(text(str(answer)))

    upstream.tool(tool)
    shown: list[str] = []
    states: list[str] = []
    arguments = {"secret": CANARY + "argument"}
    for name in ("works", "breaks"):
        asked = await client.call(name, arguments)
        assert CANARY not in asked.state
        done = await client.call(name, arguments, state=asked.state, answers={"q": secret})
        if name == "breaks":
            shown.append(done.data.decode())
        forged = [asked.state, asked.state[:-3] + "AAA"]
        refused = [await client.call(name, {}, state=state, answers={"q": secret}) for state in forged]
        shown += [reply.data.decode() for reply in refused]
        states.append(asked.state)
    shown.append((await client.call("works", arguments, answers={"q": {"action": CANARY}}, state="x")).data.decode())
    await client.call("works", arguments)  # and nobody comes back
    await upstream.saw(mcp.CANCELLED)
    for path in ("/metrics", "/readyz", "/healthz", "/status", "/status.json", "/"):
        async with stand.http.get(f"http://{stand.gateway.admin}{path}") as response:
            shown.append(await response.text())
    shown.append(log_lines.stream.getvalue())
    assert "state.rejected" in shown[-1], "the log was really read"
    for page in shown:
        assert CANARY not in page
        assert not any(state[20:60] in page for state in states)


Fault = Callable[[FakeUpstream], None]


def _answers(word: str, status: int, body: Any = None, **headers: str) -> Fault:
    def plant(upstream: FakeUpstream) -> None:
        upstream.on(word, lambda turn: turn.reply(status, body, headers))

    return plant


def _repeats_its_query(word: str) -> Fault:
    """The server's error quotes the URL that it was asked with, whole and in part."""

    def plant(upstream: FakeUpstream) -> None:
        async def answer(turn: Turn) -> None:
            message = f"no such page: /mcp?{turn.seen.query}; bad key {CANARY}key"
            turn.reply(400, {"jsonrpc": "2.0", "id": turn.body.get("id"), "error": {"code": -1, "message": message}})

        upstream.on(word, answer)

    return plant


def _breaks(word: str) -> Fault:
    def plant(upstream: FakeUpstream) -> None:
        upstream.on(word, lambda turn: turn.reset())

    return plant


FAULTS: dict[str, Fault] = {
    "page of an error": _answers("initialize", 500, b"<h1>broken</h1>"),
    "no JSON-RPC": _answers("initialize", 200, b"{}"),
    "handshake refused in words": _repeats_its_query("initialize"),
    "other origin": _answers("initialize", 307, None, Location=f"http://10.0.0.1/?{CANARY}key"),
    "circle": _answers("initialize", 307, None, Location=f"/mcp?api_key={CANARY}key"),
    "credential refused": _answers("initialize", 401, b"", **{"WWW-Authenticate": "Bearer"}),
    "hangs up at first": _breaks("initialize"),
    "call answered with nothing": _answers("tools/call", 200, b""),
    "call answered with a page": _answers("tools/call", 502, b"<h1>bad gateway</h1>"),
    "hangs up in a call": _breaks("tools/call"),
    "result is no object": lambda upstream: upstream.on("tools/call", lambda turn: turn.result(5)),
}


@pytest.mark.parametrize("fault", [*FAULTS, "is not there"])
async def test_a_secret_in_the_url_of_an_upstream_is_never_shown(
    upstream: FakeUpstream, log_lines: Lines, begin: Start, fault: str
) -> None:
    secret = f"api_key={CANARY}key&token={CANARY}token"
    route = {"forward_headers": ["x-tenant"]}
    stand = await begin(url=f"{upstream.url}?{secret}", route=route, log={"level": "debug"})
    if fault in FAULTS:
        FAULTS[fault](upstream)
    else:
        await upstream.close()
    shown: list[str] = []
    for method, params in (("tools/call", {"name": "tool"}), (mcp.DISCOVER, None), ("tools/list", None)):
        async with stand.client().open(method, params) as response:
            shown.append(f"{response.headers}{await response.text()}")
    old = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "tool"}}
    async with stand.http.post(stand.url, json=old) as response:
        shown.append(f"{response.headers}{await response.text()}")
    async with stand.http.get(stand.url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp")) as response:
        shown.append(f"{response.headers}{await response.text()}")
    for path in ("/metrics", "/status", "/status.json"):
        async with stand.http.get(f"http://{stand.gateway.admin}{path}") as response:
            shown.append(await response.text())
    shown += [repr(stand.gateway.config), log_lines.stream.getvalue()]
    assert "server.started" in shown[-1], "the log was really read"
    for page in shown:
        assert CANARY not in page
    if fault != "is not there":
        assert upstream.seen[0].query == secret, "and it does go upstream"


async def test_no_upstream_text_becomes_a_label(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        await turn.ask(f"odd/{turn.body['params']['name']}")
        await turn.notify(f"notifications/{turn.body['params']['name']}", {})
        await turn.result(text("ok"))

    upstream.tool(tool)
    for number in range(30):
        await client.call(f"tool-{number}")
    rendered = stand.gateway.metrics.render().decode()
    assert "odd/" not in rendered
    assert "tool-" not in rendered


async def test_an_error_names_the_requests_own_id(client: Client) -> None:
    reply = await client.post("x/y")
    assert reply.final["id"] == "c1"


REASONS = {
    "too_large": "larger than limits.state_bytes",
    "malformed": "not a state of this gateway, or truncated",
    "unknown_key": "sealed with a key that is not in state.keys",
    "forged": "changed in transit, or sealed with another key of the same id",
    "version": "sealed by another version of the gateway",
    "expired": "the client retried after state.ttl_seconds",
    "other_route": "it came with another request",
    "other_method": "it came with another request",
    "other_target": "it came with another request",
    "other_arguments": "it came with another request",
    "other_principal": "another caller sent it",
    "other_headers": "it came with other credentials",
    "answered": "the round has been answered with other answers, or before its call went cold (hold.cold_seconds)",
    "ended": "its call is over: it expired (hold.ttl_seconds), its client was away for longer than hold.grace_seconds",
}


class FakeReply(Discarded):
    """A reply that nobody waits for; it keeps its final message, or what was written into its stream."""

    final: FinalMessage
    written = b""

    async def only(self, final: FinalMessage) -> Response:
        self.final = final
        return await super().only(final)

    async def write(self, data: bytes) -> None:
        self.written += data


async def rejected(stand: Stand, error: GatewayError) -> tuple[int, Any]:
    """The status of a rejection, and its error."""
    reply = FakeReply()
    await reject(error, incoming("POST"), reply, stand.gateway.routes)
    return reply.final.status, json.loads(reply.final.body)["error"]


def incoming(method: str) -> Incoming:
    return Incoming("/mcp", CIMultiDictProxy(CIMultiDict()), None, b"{}", method=method)


async def test_a_state_from_the_future_is_logged_with_what_to_check(stand: Stand, log_lines: Lines) -> None:
    status, error = await rejected(stand, StateFromFuture("gw-2"))
    assert (status, error["data"]["reason"]) == (503, "owner_stalled")
    assert stand.metric("mcp_gateway_state_rejected_total", reason="future") == 1
    (line,) = log_lines("peer.failed")
    assert line["reason"] == "owner_stalled"
    assert "gw-2 that holds this call has a clock" in line["cause"]
    assert line["fix"].startswith("compare the clocks")


@pytest.mark.parametrize("reason", REASONS)
async def test_a_rejected_state_is_counted_and_logged_with_its_reason(
    stand: Stand, log_lines: Lines, reason: str
) -> None:
    status, error = await rejected(stand, InvalidState(reason))
    assert (status, error["message"]) == (400, "Invalid or expired requestState")
    assert stand.metric("mcp_gateway_state_rejected_total", reason=reason) == 1
    (line,) = log_lines("state.rejected")
    assert line["reason"] == reason
    assert line["note"].startswith(REASONS[reason])


async def test_only_a_stream_that_answers_no_request_is_broken_off_for_an_error(stand: Stand) -> None:
    reply, error = FakeReply(), StateFromFuture("gw-2")
    reply.started = True
    with pytest.raises(ConnectionResetError):
        await reject(error, incoming("GET"), reply, stand.gateway.routes)
    assert not reply.written
    await reject(error, incoming("POST"), reply, stand.gateway.routes)
    assert b"owner_stalled" in reply.written

"""`log.access`: one line for each request of a client, whatever becomes of it, and none unless it is switched on."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.protocol import mcp
from tests.support.fake_modern import FORM, Call, FakeModern
from tests.support.fake_sse import FakeSse
from tests.support.fake_upstream import FakeUpstream, Turn, ask, text
from tests.support.known_calls import arguments, known, request
from tests.support.legacy_client import LegacyClient
from tests.support.logs import Lines
from tests.support.raw_connection import raw_connection
from tests.support.replicas import Gate, drop, opened
from tests.support.stand import Start
from tests.support.status import told as status_of
from tests.support.workbench import ACCEPT, Client, Stand, eventually, jwt, later, leave

ON = {"log": {"access": True}}
VERIFIED = {"source": "jwt", "issuer": "https://issuer.example", "jwks_url": "http://127.0.0.1:1/keys"}
TOLD = ("exchange.finished", "upstream.failed", "request.finished")
Told = dict[str, Any]


def told(lines: Lines, *names: str) -> list[tuple[Any, ...]]:
    """What each line says of its request."""
    return [tuple(line[name] for name in names) for line in lines("request.finished")]


async def ready(turn: Turn) -> None:
    await turn.result(text("x"))


async def test_each_round_of_a_call_has_a_line_with_the_exchange(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    Gate(upstream).go.set()
    client = (await begin(**ON)).client()
    asked = await client.call("tool", headers={"X-Request-Id": "first"})
    _ = await client.answer(asked, headers={"X-Request-Id": "second"})
    first, second = log_lines("request.finished")
    (finished,) = log_lines("exchange.finished")
    common = {
        "level": "info",
        "route": "/mcp",
        "http_method": "POST",
        "method": "tools/call",
        "target": "tool",
        "status": 200,
        "exchange_id": opened(asked.state).exchange,
    }
    assert common.items() <= first.items()
    assert common.items() <= second.items()
    assert [(each["request_id"], each["outcome"]) for each in (first, second)] == [
        ("first", "input_required"),
        ("second", "complete"),
    ]
    assert finished["exchange_id"] == first["exchange_id"]
    assert all(each["ms"] >= 0 for each in (first, second))


async def test_a_plain_call_has_one_line_with_an_exchange_of_its_own(
    monkeypatch: pytest.MonkeyPatch, log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    monkeypatch.setitem(arguments, "arguments", {"a": 1})
    stand = await begin(**ON)
    upstream.tool(ready)
    async with raw_connection(stand) as raw:
        sent = request(stand)
        await known(stand, raw, sent)
        await known(stand, raw, sent)  # but for the line, these could be served without a coroutine
    lines = log_lines("request.finished")
    assert [(line["target"], line["outcome"]) for line in lines] == [("tool", "complete")] * 6
    assert len({line["request_id"] for line in lines}) == 6
    assert len({line["exchange_id"] for line in lines}) == 6


async def test_a_reload_switches_it_on_and_off(
    log_lines: Lines, upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(ready)
    for count, sections in ((0, {}), (1, ON), (1, {})):
        stand.reload(upstream.url, **sections)
        _ = await client.call()
        assert len(log_lines("request.finished")) == count


REFUSED: list[tuple[str, Callable[[Client], Any], Told]] = [
    (
        "no JSON",
        lambda c: c.raw({mcp.PROTOCOL_VERSION: mcp.MODERN}, b"{"),
        {"status": 400, "method": None, "reason": "parse_error"},
    ),
    ("another Host", lambda c: c.call(headers={"Host": "evil.example"}), {"status": 403, "reason": "forbidden"}),
    ("a forged state", lambda c: c.call(state="mrtr1.no"), {"status": 400, "target": "tool", "reason": "malformed"}),
    (
        "an unknown method",
        lambda c: c.post("x/y"),
        {"status": 404, "method": "x/y", "target": None, "reason": "method_not_found"},
    ),
    (
        "no path",
        lambda c: c.on(c.url + "/nowhere").call(),
        {"status": 404, "route": None, "reason": "method_not_found"},
    ),
    (
        "too large",
        lambda c: c.call(arguments={"a": "b" * 9000}),
        {"status": 413, "method": None, "reason": "too_large"},
    ),
]


@pytest.mark.parametrize(("ask", "said"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
async def test_a_request_that_is_refused_has_a_line(
    log_lines: Lines, begin: Start, ask: Callable[[Client], Any], said: Told
) -> None:
    stand = await begin(**ON, limits={"body_bytes": 8000})
    reply = await ask(stand.client())
    (line,) = log_lines("request.finished")
    assert {"outcome": "rejected", "http_method": "POST", "remote": "127.0.0.1", **said}.items() <= line.items()
    assert line["request_id"] == reply.headers["X-Request-Id"]
    assert line["cause"] == reply.error["message"]


async def test_a_caller_who_is_not_verified_has_a_line_with_what_was_asked(log_lines: Lines, begin: Start) -> None:
    client = (await begin(**ON, principal=VERIFIED)).client()
    _ = await client.call()
    _ = await client.call(headers={"Authorization": jwt(iss="https://issuer.example")})
    assert told(log_lines, "status", "outcome", "method", "target", "reason", "caller") == [
        (401, "rejected", "tools/call", "tool", "unauthorized", None),
        (503, "error", "tools/call", "tool", "no_keys", None),
    ]


async def test_a_caller_with_too_many_calls_has_a_line(log_lines: Lines, upstream: FakeUpstream, begin: Start) -> None:
    Gate(upstream).go.set()
    stand = await begin(**ON, hold={"max_calls_per_principal": 1})
    client = stand.client()
    asked = await client.call()
    (most,) = (await status_of(stand)).callers
    _ = await client.call()
    _ = await client.answer(asked)
    assert told(log_lines, "status", "outcome", "reason", "caller") == [
        (200, "input_required", None, most.caller),
        (429, "rejected", "busy", most.caller),
        (200, "complete", None, most.caller),
    ]
    assert "(hold.max_calls_per_principal)" in log_lines("request.finished")[1]["cause"]
    (finished,) = log_lines("exchange.finished")
    assert finished["caller"] == most.caller


async def test_a_call_without_a_place_at_its_first_question_is_refused_in_log_and_metrics(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    both = asyncio.Barrier(2)  # at their start, each could be parked

    async def tool(turn: Turn) -> None:
        await both.wait()
        await ask(turn)

    upstream.tool(tool)
    stand = await begin(**ON, hold={"max_calls_per_principal": 1})
    client = stand.client()
    _ = await asyncio.gather(client.call(), client.call())
    assert sorted(told(log_lines, "status", "outcome", "reason"), key=str) == [
        (200, "input_required", None),
        (429, "rejected", "busy"),
    ]
    (refused,) = log_lines("exchange.finished")
    assert refused["outcome"] == "rejected"
    assert "(hold.max_calls_per_principal)" in refused["cause"]
    assert stand.gateway.metrics.rejections["busy",].value == 1
    await drop(stand)


async def test_a_call_that_gets_no_session_is_counted_as_refused(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"max": 1}, timeouts={"session_wait_seconds": 0.05})
    go = upstream.waiting_tool()
    running = later(stand.client().call())
    _ = await upstream.saw("tools/call")
    assert (await stand.client().call()).status == 503
    assert stand.gateway.metrics.rejections["busy",].value == 1
    go.set()
    assert (await running).text == "done"


async def test_a_failure_of_the_server_is_an_error(log_lines: Lines, upstream: FakeUpstream, begin: Start) -> None:
    client = (await begin(**ON)).client()
    await upstream.close()
    _ = await client.call()
    (line,) = log_lines("request.finished")
    assert (line["status"], line["outcome"], line["reason"]) == (200, "error", "upstream_unreachable")
    assert upstream.url in line["cause"]


async def test_a_failure_in_a_stream_has_its_reason(log_lines: Lines, upstream: FakeUpstream, begin: Start) -> None:
    async def tool(turn: Turn) -> None:
        await turn.notify(mcp.LOG, {"level": "info", "data": 1})
        await turn.reset()

    upstream.tool(tool)
    _ = await (await begin(**ON)).client().call(meta={mcp.META_LOG_LEVEL: "info"})
    assert told(log_lines, "status", "outcome", "reason") == [(200, "error", "call_lost")]


async def test_an_error_of_the_server_has_no_reason(log_lines: Lines, upstream: FakeUpstream, begin: Start) -> None:
    upstream.tool(lambda turn: turn.error(-32000, "of the server", None))
    _ = await (await begin(**ON)).client().call()
    assert told(log_lines, "reason", "cause") == [(None, None)]


async def test_an_answer_that_is_not_valid_is_not_repeated(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    upstream.tool(ask)
    stand = await begin(**ON)
    asked = await stand.client().call()
    _ = await stand.client().answer(asked, {"action": "my answer"})
    *_, line = log_lines("request.finished")
    assert line["reason"] == "invalid_params"
    assert "is not a valid ElicitResult: Invalid enum value - at `$.action`" in line["cause"]
    assert not any("my answer" in str(line) for line in log_lines())
    await drop(stand)


@pytest.mark.parametrize(("proxies", "remote"), [([], "127.0.0.1"), (["127.0.0.0/8"], "198.51.100.7")])
async def test_the_address_of_a_client_behind_a_proxy_is_told_if_the_proxy_is_trusted(
    log_lines: Lines, begin: Start, proxies: list[str], remote: str
) -> None:
    client = (await begin(**ON, principal={"trusted_proxies": proxies})).client(headers={"X-Forwarded-For": remote})
    _ = await client.post("x/y")
    _ = await client.on(client.url + "/nowhere").call()
    assert told(log_lines, "remote") == [(remote,)] * 2


async def test_a_path_that_is_no_route_is_a_target(log_lines: Lines, begin: Start) -> None:
    stand = await begin(**ON)
    async with stand.http.get(f"http://{stand.gateway.listen}/.well-known/unknown?key=1"):
        pass
    assert told(log_lines, "route", "target", "status") == [(None, "/.well-known/unknown", 404)]


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("refused", [mcp.INITIALIZE, mcp.TOOLS_LIST, mcp.TOOLS_CALL])
async def test_a_failure_before_or_in_a_call_is_told_with_its_exchange(
    log_lines: Lines, upstream: FakeUpstream, begin: Start, refused: str, *, is_on: bool
) -> None:
    upstream.on(refused, lambda turn: turn.reply(500))
    _ = await (await begin(log={"access": is_on})).client().call()
    names = [line["exchange_id"] for event in TOLD for line in log_lines(event)]
    assert len(names) == 1 + is_on
    assert ([len(name) for name in names], len(set(names))) == ([32] * len(names), 1)


async def test_a_client_that_leaves_has_a_line(log_lines: Lines, upstream: FakeUpstream, begin: Start) -> None:
    arrived = asyncio.Event()

    async def tool(turn: Turn) -> None:
        arrived.set()
        await turn.for_ever()

    upstream.tool(tool)
    waiting = asyncio.create_task((await begin(**ON)).client().call())
    await arrived.wait()
    await leave(waiting)
    await eventually(lambda: log_lines("request.finished"))
    assert told(log_lines, "target", "status", "outcome") == [("tool", None, "cancelled")]


async def test_a_client_that_leaves_a_stream_has_a_line_with_its_status(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.notify(mcp.LOG, {"level": "info", "data": 1})
        await turn.for_ever()

    upstream.tool(tool)
    params, meta = {"name": "tool", "arguments": {}}, {mcp.META_LOG_LEVEL: "info"}
    async with (await begin(**ON)).client().open(mcp.TOOLS_CALL, params, meta=meta) as response:
        _ = await response.content.readany()
    await eventually(lambda: log_lines("request.finished"))
    assert told(log_lines, "target", "status", "outcome") == [("tool", 200, "cancelled")]


async def test_a_notification_has_a_line(log_lines: Lines, begin: Start) -> None:
    stand = await begin(**ON)
    body = {"jsonrpc": "2.0", "method": "notifications/x", "params": {"_meta": {mcp.META_VERSION: mcp.MODERN}}}
    async with stand.http.post(stand.url, json=body):
        pass
    assert told(log_lines, "status", "method", "outcome") == [(202, "notifications/x", "complete")]


async def test_what_passes_through_has_a_line_whose_outcome_goes_by_the_status(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(**ON)
    client = await LegacyClient(stand).initialize()
    for status in (200, 404, 500):
        upstream.on(mcp.TOOLS_LIST, lambda turn, status=status: turn.reply(status, {"jsonrpc": "2.0", "id": turn.id}))
        _ = await client.post({"id": 1, "method": mcp.TOOLS_LIST})
    upstream.tool(lambda turn: turn.reset())
    async with client.listen() as stream:
        assert stream.response.status == 200
    await eventually(lambda: len(log_lines("request.finished")) == 6)
    assert told(log_lines, "http_method", "method", "status", "outcome") == [
        ("POST", mcp.INITIALIZE, 200, "complete"),
        ("POST", mcp.INITIALIZED, 202, "complete"),
        ("POST", mcp.TOOLS_LIST, 200, "complete"),
        ("POST", mcp.TOOLS_LIST, 404, "rejected"),
        ("POST", mcp.TOOLS_LIST, 500, "error"),
        ("GET", None, 200, "cancelled"),
    ]


async def test_a_reply_that_the_server_cuts_short_is_an_error(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.notify(mcp.LOG, {"level": "info", "data": 1})
        await turn.reset()

    upstream.tool(tool)
    client = await LegacyClient(await begin(**ON)).initialize()
    async with client.request(mcp.TOOLS_CALL, {"name": "tool", "arguments": {}}) as stream:
        _ = await stream.message()
        await eventually(lambda: len(log_lines("request.finished")) == 3)
    (*_, last) = told(log_lines, "target", "status", "outcome")
    assert last == ("tool", 200, "error")


async def test_a_relayed_call_has_a_line(log_lines: Lines, old: FakeSse, begin: Start) -> None:
    client = await LegacyClient(await begin(**ON, url=old.url)).initialize()
    _ = await client.ask(mcp.TOOLS_LIST)
    await eventually(lambda: len(log_lines("request.finished")) == 3)
    found = told(log_lines, "method", "status", "outcome")
    assert found[-1] == (mcp.TOOLS_LIST, 200, "complete")
    assert len(set(told(log_lines, "caller"))) == 1


async def test_a_mirrored_call_and_its_answer_have_lines_of_one_exchange(log_lines: Lines, begin: Start) -> None:
    def ask(call: Call) -> Any:
        return call.text(call.answers) if call.answers else call.ask(name=FORM)

    async with FakeModern() as server:
        server.tools["ask"] = ask
        client = await LegacyClient(await begin(**ON, url=server.url, route={"era": "mirror"})).initialize()
        async with client.request(mcp.TOOLS_CALL, {"name": "ask", "arguments": {}}) as stream:
            assert await client.answer(await stream.message(), ACCEPT) == 202
            _ = await stream.message()
        async with client.request(mcp.TOOLS_CALL, {"name": "ask", "arguments": {}}, id_="given-up") as stream:
            _ = await stream.message()
            assert await client.notify(mcp.CANCELLED, {"requestId": "given-up"}) == 202
        await eventually(lambda: len(log_lines("request.finished")) == 6)
    assert {line["caller"] for line in log_lines("request.finished")} == {
        line["caller"] for line in log_lines("exchange.finished")
    }
    answered, given_up = (line["exchange_id"] for line in log_lines("exchange.finished"))
    named = {(line["exchange_id"], line["method"]) for line in log_lines("request.finished") if "exchange_id" in line}
    assert named == {
        (answered, mcp.TOOLS_CALL),
        (answered, None),
        (given_up, mcp.TOOLS_CALL),
        (given_up, mcp.CANCELLED),
    }


async def test_a_mirrored_call_that_fails_in_its_stream_has_its_reason(log_lines: Lines, begin: Start) -> None:
    async with FakeModern() as server:
        server.tools["ask"] = lambda call: call.ask(name=FORM)
        client = await LegacyClient(await begin(**ON, url=server.url, route={"era": "mirror"})).initialize()
        async with client.request(mcp.TOOLS_CALL, {"name": "ask", "arguments": {}}) as stream:
            question = await stream.message()
            await server.close()
            assert await client.answer(question, ACCEPT) == 202
            _ = await stream.message()
        await eventually(lambda: len(log_lines("request.finished")) == 4)
    (line,) = (line for line in log_lines("request.finished") if line["method"] == mcp.TOOLS_CALL)
    assert (line["status"], line["reason"]) == (200, "call_lost")
    assert server.url in line["cause"]


async def test_nothing_foreign_is_logged_as_it_came(log_lines: Lines, upstream: FakeUpstream, begin: Start) -> None:
    upstream.on(mcp.RESOURCES_READ, lambda turn: turn.result({"contents": []}))
    client = (await begin(**ON)).client()
    secret = "https://user:s3cret@host/\x1b[2J?key=" + "s3cret" * 9
    _ = await client.post(mcp.RESOURCES_READ, {"uri": secret}, headers={mcp.NAME_HEADER: "x"})
    _ = await client.post(mcp.RESOURCES_READ, {"uri": "u" * 5000}, headers={mcp.NAME_HEADER: "x"})
    masked, cut = (line["target"] for line in log_lines("request.finished"))
    assert "s3cret" not in masked
    assert "\x1b" not in masked
    assert cut == "u" * 200


async def test_a_refused_handshake_of_a_call_is_told_with_the_name_of_its_exchange(
    log_lines: Lines, upstream: FakeUpstream, begin: Start
) -> None:
    upstream.on(mcp.INITIALIZE, lambda turn: turn.reply(404))
    client = (await begin(route={"era": "bridge"})).client()
    _ = await client.post(mcp.RESOURCES_READ, {"uri": "u:x"}, headers={mcp.NAME_HEADER: "u:x"})
    (finished,), (failed,) = log_lines("exchange.finished"), log_lines("upstream.failed")
    assert finished["exchange_id"] == failed["exchange_id"]

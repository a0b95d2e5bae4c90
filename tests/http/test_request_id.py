"""One name for one HTTP request: in its reply, in the gateway's own errors, in the log, over all replicas."""

import asyncio
from unittest.mock import Mock

import pytest

from gateway.http.server.request import HttpRequest
from gateway.protocol import mcp
from tests.parts.launch import free_port
from tests.support.fake_upstream import FakeUpstream, Turn, breaks_when_answered, text
from tests.support.logs import Lines
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, eventually

MINE = "req-7f3a/9:x"


def own(request_id: str) -> bool:
    """Whether it is one that the gateway made."""
    prefix, _, number = request_id.partition("-")
    return len(prefix) == 12 and int(prefix, 16) >= 0 and int(number, 16) > 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (MINE, True),
        ("0af7651916cd43dd8448eb211c80319c", True),
        ("6f1c1f0e-51d1-4a8e-9d1c-0a8b9e6a7c55", True),
        ("Root=1-67891233-abcdef012345678912345678", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("-a", False),
        ("a b", False),
        ('a"b', False),
        ("a\\n", False),
        ("a<b>", False),
        ("\u00e4", False),
        (None, False),
    ],
)
def test_an_id_is_taken_if_it_is_one_short_word(given: str | None, kept: bool) -> None:  # noqa: FBT001
    http = HttpRequest(Mock(request_id=given), Mock(), Mock())
    http.identify(iter(["mine"]))
    assert http.id == (given if kept else "mine")


async def test_the_id_of_the_client_is_in_the_reply_the_error_and_the_log(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    _ = await client.call()
    await upstream.close()
    reply = await client.call(headers={"X-Request-Id": MINE})
    assert reply.headers["X-Request-Id"] == MINE
    assert reply.error["data"]["requestId"] == MINE
    (line,) = log_lines("exchange.finished")
    assert line["request_id"] == MINE
    assert line["level"] == "warning"
    assert line["route"] == "/mcp"
    assert line["upstream"] == upstream.url
    assert "cannot be reached" in line["cause"]
    assert "mrtr-gateway probe" in line["fix"]


async def test_every_request_has_another_id_of_the_gateways_own(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        await turn.notify("notifications/message", {"level": "info", "data": 1})
        await turn.result(text("x"))

    upstream.tool(tool)
    logged = await client.call(meta={mcp.META_LOG_LEVEL: "info"})
    assert logged.is_stream
    plain = await client.post(mcp.TOOLS_LIST, headers={"X-Request-Id": "not one word"})
    refused = await client.call(state="mrtr1.no")
    found = [reply.headers["X-Request-Id"] for reply in (logged, plain, refused)]
    assert len(set(found)) == 3
    assert all(map(own, found))
    assert refused.error["data"] == {"reason": "invalid_request_state", "requestId": found[2]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/nowhere", b"{}"),
        ("GET", "/nowhere", None),
        ("POST", "/mcp", b"no JSON"),
        ("GET", "/.well-known/oauth-protected-resource/mcp", None),
        ("OPTIONS", "/register/mcp", None),
        ("DELETE", "/mcp", None),
    ],
)
async def test_replies_of_every_kind_carry_the_id(stand: Stand, method: str, path: str, body: bytes | None) -> None:
    url = f"http://{stand.gateway.listen}{path}"
    async with stand.http.request(method, url, data=body, headers={"X-Request-Id": MINE}) as response:
        assert response.headers.getall("X-Request-Id") == [MINE], response.status


async def test_a_notification_is_answered_with_the_id(stand: Stand) -> None:
    meta = {mcp.META_VERSION: mcp.MODERN}
    body = {"jsonrpc": "2.0", "method": "notifications/x", "params": {"_meta": meta}}
    async with stand.http.post(stand.url, json=body, headers={"X-Request-Id": MINE}) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (202, MINE)


async def test_what_is_passed_through_carries_the_id_in_place_of_the_upstreams(
    upstream: FakeUpstream, stand: Stand
) -> None:
    async def tool(turn: Turn) -> None:
        turn.reply(body={"jsonrpc": "2.0", "id": 1, "result": {}}, headers={"X-Request-Id": "theirs"})

    upstream.tool(tool)
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "tool"}}
    async with stand.http.post(stand.url, json=call) as response:
        assert response.status == 200
        (found,) = response.headers.getall("X-Request-Id")
        assert own(found)


async def test_an_error_that_the_upstream_said_is_left_as_it_is(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.error(-32602, "bad city", {"field": "city"}))
    reply = await client.call(headers={"X-Request-Id": MINE})
    assert reply.error == {"code": -32602, "message": "bad city", "data": {"field": "city"}}
    assert reply.headers["X-Request-Id"] == MINE


async def test_an_error_carries_the_id_of_the_round_that_it_ends(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(breaks_when_answered)
    asked = await client.call(headers={"X-Request-Id": "first"})
    assert asked.headers["X-Request-Id"] == "first"
    failed = await client.answer(asked, headers={"X-Request-Id": "second"})
    assert failed.error["data"] == {"reason": "call_lost", "requestId": "second"}


async def test_two_requests_that_wait_for_the_same_get_their_own_ids(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    answered, go = asyncio.Event(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        answered.set()
        await go.wait()
        await turn.reset()

    upstream.tool(tool)
    asked = await client.call()
    async with asyncio.TaskGroup() as group:
        one = group.create_task(client.answer(asked, headers={"X-Request-Id": "one"}))
        await answered.wait()
        two = group.create_task(client.answer(asked, headers={"X-Request-Id": "two"}))
        await eventually(lambda: stand.gateway.downstream.in_flight == 2)
        await eventually(lambda: len(stand.gateway.routes.live["/mcp"].deadlines.silence) == 2)
        go.set()
    for name, reply in (("one", one.result()), ("two", two.result())):
        assert (reply.headers["X-Request-Id"], reply.error["data"]["requestId"]) == (name, name)


async def test_one_id_goes_over_all_hops(upstream: FakeUpstream, log_lines: Lines, begin: Start) -> None:
    upstream.tool(breaks_when_answered)
    peers = {name: f"127.0.0.1:{free_port()}" for name in ("gw-1", "gw-2")}
    owner, other = [await begin(replica={"id": name, "listen": peers[name], "peers": peers}) for name in peers]
    asked = await owner.client().call()
    failed = await other.client().answer(asked, headers={"X-Request-Id": MINE})
    assert failed.headers.getall("X-Request-Id") == [MINE]
    assert failed.error["data"]["requestId"] == MINE
    (line,) = log_lines("exchange.finished")
    assert line["request_id"] == MINE


async def test_a_state_that_is_refused_is_logged_with_what_to_do(log_lines: Lines, client: Client) -> None:
    _ = await client.call(state="mrtr1.no", headers={"X-Request-Id": MINE})
    (line,) = log_lines("state.rejected")
    assert (line["route"], line["request_id"]) == ("/mcp", MINE)
    assert line["note"]


async def test_an_upstream_that_fails_before_a_call_is_logged_with_route_cause_and_fix(
    log_lines: Lines, upstream: FakeUpstream, client: Client
) -> None:
    await upstream.close()
    _ = await client.post(mcp.DISCOVER, headers={"X-Request-Id": MINE})
    (line,) = log_lines("upstream.failed")
    assert {name: line[name] for name in ("level", "route", "upstream", "reason", "request_id")} == {
        "level": "warning",
        "route": "/mcp",
        "upstream": upstream.url,
        "reason": "upstream_unreachable",
        "request_id": MINE,
    }
    assert "cannot be reached" in line["cause"]
    assert "probe" in line["fix"]

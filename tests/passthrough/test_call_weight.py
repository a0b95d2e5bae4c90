"""Requests that pass through are weighed: what does not fit is refused before it goes upstream."""

import asyncio
import json

import aiohttp
import pytest

from tests.passthrough.test_forwarder import OLD
from tests.support import copies
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Stand, eventually, later

LARGE = "x" * 100_000


def message(**parts: object) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **parts}).encode()


def call(id_: int) -> bytes:
    return message(id=id_, method="tools/call", params={"name": "tool", "arguments": {"text": LARGE}})


@pytest.mark.parametrize(("who", "status"), [("ada", 429), ("bob", 503)])
async def test_calls_that_do_not_fit_are_refused(upstream: FakeUpstream, begin: Start, who: str, status: int) -> None:
    stand = await begin(limits={"calls_bytes": 150_000, "calls_bytes_per_principal": 120_000})
    go = upstream.waiting_tool()

    async def post(data: bytes, who: str = "ada") -> tuple[int, bytes]:
        headers = {**OLD, "Authorization": f"Bearer {who}"}
        async with stand.http.post(stand.url, data=data, headers=headers) as response:
            return response.status, await response.read()

    running = later(post(call(1)))  # type: ignore[arg-type]
    _ = await upstream.saw("tools/call")
    assert 100_000 < stand.gateway.calls.used < 101_000
    refused, body = await post(call(2), who)
    assert (refused, json.loads(body)["error"]["data"]["reason"]) == (status, "busy")
    assert len(upstream.of("tools/call")) == 1
    for about in (message(id="q", result={"text": LARGE}), message(method="notifications/x", params={"x": LARGE})):
        assert (await post(about))[0] not in (429, 503), "what is about a call that runs always fits"
    go.set()
    assert b"done" in (await running)[1]  # type: ignore[index]
    await eventually(lambda: stand.gateway.calls.used == 0, "the call is over")
    assert (await post(call(3)))[0] == 200


async def test_the_body_is_dropped_once_the_server_has_accepted_it(upstream: FakeUpstream, stand: Stand) -> None:
    began, accept, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        turn.body["params"] = {}
        began.set()
        await accept.wait()
        await turn.raw(b": here\n\n")
        await go.wait()
        await turn.result(text("done"))

    upstream.tool(tool)
    body = message(id=1, method="tools/call", params={"name": "tool", "arguments": copies.LARGE})
    with copies.counted() as kept:
        posting = later(_open(stand, body))
        await began.wait()
        assert 1 <= kept() < 1.1
        accept.set()
        response = await posting
        assert kept() == stand.gateway.calls.used == 0
        go.set()
        assert b"done" in await response.read()  # type: ignore[attr-defined]


async def _open(stand: Stand, body: bytes) -> aiohttp.ClientResponse:
    return await stand.http.post(stand.url, data=body, headers=OLD)


async def test_a_request_that_never_reaches_its_server_weighs_nothing(upstream: FakeUpstream, stand: Stand) -> None:
    async with upstream.refusing_connections(), stand.http.post(stand.url, data=call(1), headers=OLD) as response:
        assert "error" in await response.json()
    assert stand.gateway.calls.used == 0

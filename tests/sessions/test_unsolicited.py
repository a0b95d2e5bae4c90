"""SEP-2260 on each transport of a legacy server: a question belongs to a call, or no client sees it.

tests/bridge/test_driver.py has the cases over streamable HTTP.
"""

import json

import pytest

from gateway.protocol import mcp
from tests.e2e.wire import wire
from tests.support.fake_sse import FakeSse
from tests.support.gateway_process import gateway
from tests.support.host import fake
from tests.support.stand import Start

REFUSED = {"code": -32602, "message": "No call is in flight that could ask (SEP-2260)"}
OUTCOME = "refused_unsolicited"


async def test_a_question_outside_of_a_call_is_refused_over_http_sse(begin: Start) -> None:
    server = FakeSse()
    await server.start()
    try:
        stand = await begin(route={"upstream": {"url": server.url, "transport": "sse"}})
        assert (await stand.client().call()).text == "done"
        server.streams[-1].say(id="late", method=mcp.ROOTS)
        (answer,) = await server.heard("answer")
        assert (answer["id"], answer["error"]) == ("late", REFUSED)
        assert stand.nested(mcp.ROOTS, OUTCOME) == 1
    finally:
        await server.close()


@pytest.mark.processes
async def test_a_question_outside_of_a_call_is_refused_over_stdio() -> None:
    # One child: a second one would be asked for the answers in vain.
    upstream = {"command": fake("fake_stdio.py"), "warm": 0, "max_children": 1}
    async with gateway(upstream) as gw, wire(gw.url) as client:
        assert (await client.call("late")).text == "asks now"

        async def is_refused() -> bool:
            return bool(json.loads((await client.call("answers")).text))

        await gw.until(is_refused, "the server has its answer", 30)
        (answer,) = json.loads((await client.call("answers")).text)
        assert (answer["id"], answer["error"]) == ("late", REFUSED)
        assert await gw.metric("mcp_gateway_nested_requests_total", method=mcp.ROOTS, outcome=OUTCOME) == 1

"""How often sessions are opened, on a route or as children of a command."""

import json
from typing import Any

import pytest

from gateway.config import InForce, RouteSettings, parse
from gateway.protocol import mcp
from gateway.protocol.errors import Busy
from gateway.runtime.tasks import Tasks
from gateway.sessions.pool.pool import Pool
from gateway.telemetry import Metrics
from tests.support.fake_upstream import FakeUpstream, ask
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, configuration

NO_CHANNEL: Any = None
SLOW = 0.001
"""One session in a thousand seconds: no test takes that long."""
COMMAND = {"upstream": {"command": ["server"], "max_children": 2, "new_children_per_second": SLOW}}


@pytest.mark.parametrize(
    ("sections", "burst", "name"),
    [
        ({"sessions": {"max": 1, "new_per_second": 7}}, 7, "sessions.new_per_second"),
        ({"route": COMMAND}, 2, "upstream.new_children_per_second"),
    ],
    ids=["at least one second's", "children"],
)
async def test_a_burst_of_all_permitted_sessions_is_followed_by_a_clear_refusal(
    sections: dict[str, Any], burst: int, name: str
) -> None:
    config = parse(configuration("http://127.0.0.1:9/mcp", **sections), "test", {})
    metrics = Metrics("test")
    settings = InForce(RouteSettings(config, config.routes[0]))
    pool = Pool(settings, NO_CHANNEL, metrics, Tasks(metrics))
    for _ in range(burst):
        pool.take_opening()
    with pytest.raises(Busy, match="/mcp") as refused:
        pool.take_opening()
    error = refused.value
    assert error.status == 503
    assert name in error.message
    assert metrics.sessions_refused[config.routes[0].path, name].value == 1
    assert int(error.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("sections", "limit"),
    [
        ({"sessions": {"max": 1}}, ("sessions.max", 1)),
        ({"sessions": {"max": 1}, "route": COMMAND}, ("sessions.max", 1)),
        ({"sessions": {"max": 2}, "route": COMMAND}, ("upstream.max_children", 2)),
    ],
)
def test_the_narrower_limit_bounds_the_sessions_of_a_command(sections: dict[str, Any], limit: tuple[str, int]) -> None:
    config = parse(configuration("http://127.0.0.1:9/mcp", **sections), "test", {})
    metrics = Metrics("test")
    pool = Pool(InForce(RouteSettings(config, config.routes[0])), NO_CHANNEL, metrics, Tasks(metrics))
    assert (pool.limit, pool.most) == (limit, limit[1])


# -- with a gateway ---------------------------------------------------------------------------------------------------


def of_kind(stand: Stand, number: int, authorization: str | None = None) -> Client:
    """Return a client whose `clientInfo` no other one has, so that it needs a session of its own."""
    return stand.client(authorization, info={"name": f"client-{number}", "version": "1"})


async def test_a_client_that_varies_its_client_info_opens_few_sessions(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"max": 3, "new_per_second": SLOW})
    replies = [await of_kind(stand, number).call() for number in range(10)]
    assert [reply.status for reply in replies] == [200] * 3 + [503] * 7
    assert replies[3].outcome == (503, -32603, "busy")
    assert int(replies[3].headers["Retry-After"]) > 1
    assert len(upstream.of("initialize")) == 3
    assert (await of_kind(stand, 2).call()).text == "done", "a session that is there is used again"
    assert stand.metric("mcp_gateway_sessions_refused_total", limit="sessions.new_per_second") == 7


@pytest.mark.parametrize("method", [mcp.DISCOVER, "tools/list", "subscriptions/listen"])
async def test_every_way_to_a_new_session_is_limited(upstream: FakeUpstream, begin: Start, method: str) -> None:
    stand = await begin(sessions={"max": 1, "max_per_principal": 1, "new_per_second": 1})
    assert (await of_kind(stand, 0).call()).text == "done"
    params = {"notifications": {}} if method == "subscriptions/listen" else {}
    reply = await of_kind(stand, 1).post(method, params)
    assert reply.outcome == (503, -32603, "busy")
    assert len(upstream.of("initialize")) == 1


async def test_a_retry_that_needs_a_new_session_is_served_while_new_calls_are_refused(
    upstream: FakeUpstream, begin: Start
) -> None:
    limits = {"max": 2, "new_per_second": SLOW, "idle_seconds": 0}
    stand = await begin(sessions=limits, route={"continuation": "replay", "ephemeral": ["tool"]})
    upstream.tool(ask)
    client = stand.client()
    asked = await client.call()  # one session for the list of tools, another one for the call
    assert (await client.call()).status == 503
    assert json.loads((await client.answer(asked)).text)["action"] == "accept"

"""How often sessions are opened: for each principal, for a route, and for the children of a command."""

import json
from typing import Any

import pytest

from gateway.config import InForce, RouteSettings, parse
from gateway.protocol import mcp
from gateway.protocol.errors import Busy
from gateway.sessions.assignment import GATEWAY, Opener
from gateway.sessions.pool.opening_rate import OpeningRate
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import ask
from tests.support.stand import Start
from tests.support.workbench import Client, Stand, configuration

CLIENT = Opener(is_exempt=False)
SLOW = 0.001
"""One session in a thousand seconds: no test takes that long."""
COMMAND = {"upstream": {"command": ["server"], "max_children": 2, "new_children_per_second": SLOW}}


def rate(**sections: Any) -> OpeningRate:
    config = parse(configuration("http://127.0.0.1:9/mcp", **sections), "test", {})
    return OpeningRate(InForce(RouteSettings(config, config.routes[0])))


def taken(limited: OpeningRate, principal: bytes = b"ada", most: int = 50) -> tuple[int, Busy]:
    """Return how many sessions a principal may open at once, and the error for the next one."""
    for count in range(most):
        error = limited.take(principal, CLIENT)
        if error is not None:
            return count, error
    raise AssertionError("no limit was reached")


@pytest.mark.parametrize(
    ("sections", "burst", "status", "name"),
    [
        (
            {"sessions": {"max_per_principal": 3, "new_per_second_per_principal": SLOW}},
            3,
            429,
            "sessions.new_per_second_per_principal",
        ),
        ({"sessions": {"max_per_principal": 1, "new_per_second_per_principal": 7}}, 7, 429, "_per_principal"),
        ({"sessions": {"max": 4, "new_per_second": SLOW}}, 4, 503, "sessions.new_per_second"),
        ({"route": COMMAND}, 2, 503, "upstream.new_children_per_second"),
    ],
    ids=["principal", "at least one second's", "route", "children"],
)
def test_a_burst_of_all_permitted_sessions_is_followed_by_a_clear_refusal(
    sections: dict[str, Any], burst: int, status: int, name: str
) -> None:
    count, error = taken(rate(**sections))
    assert (count, error.status) == (burst, status)
    assert name in error.message
    assert "/mcp" in error.message
    assert int(error.headers["Retry-After"]) >= 1
    assert error.limit.endswith(name)


def test_a_principal_that_is_too_fast_costs_another_one_nothing() -> None:
    limited = rate(sessions={"max_per_principal": 2, "new_per_second_per_principal": SLOW})
    assert taken(limited)[0] == 2
    for _ in range(5):
        assert limited.take(b"ada", CLIENT) is not None
    assert taken(limited, b"bob")[0] == 2


def test_a_request_that_continues_a_call_takes_tokens_but_is_never_refused() -> None:
    limited = rate(sessions={"max": 3, "new_per_second": SLOW})
    for _ in range(5):
        assert limited.take(b"ada", GATEWAY) is None
    assert taken(limited)[0] == 0


# -- with a gateway ---------------------------------------------------------------------------------------------------


def of_kind(stand: Stand, number: int, authorization: str | None = None) -> Client:
    """Return a client whose `clientInfo` no other one has, so that it needs a session of its own."""
    return stand.client(authorization, info={"name": f"client-{number}", "version": "1"})


async def test_a_client_that_varies_its_client_info_opens_few_sessions(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(sessions={"max_per_principal": 3, "new_per_second_per_principal": SLOW})
    replies = [await of_kind(stand, number).call() for number in range(10)]
    assert [reply.status for reply in replies] == [200] * 3 + [429] * 7
    assert replies[3].outcome == (429, -32603, "busy")
    assert int(replies[3].headers["Retry-After"]) > 1
    assert len(upstream.of("initialize")) == 3
    assert (await of_kind(stand, 2).call()).text == "done", "a session that is there is used again"
    assert (await stand.client("Bearer bob").call()).text == "done"
    limit = "sessions.new_per_second_per_principal"
    assert stand.metric("mcp_gateway_sessions_refused_total", limit=limit) == 7


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
    limits = {"max_per_principal": 2, "new_per_second_per_principal": SLOW, "idle_seconds": 0}
    stand = await begin(sessions=limits, route={"continuation": "replay", "ephemeral": ["tool"]})
    upstream.tool(ask)
    client = stand.client()
    asked = await client.call()  # one session for the list of tools, another one for the call
    assert (await client.call()).status == 429
    assert json.loads((await client.answer(asked)).text)["action"] == "accept"


async def test_a_call_continues_in_its_session_whatever_was_refused_meanwhile(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(sessions={"max_per_principal": 2, "new_per_second_per_principal": SLOW})

    async def tool(turn: Turn) -> None:
        _ = await turn.elicit("q")
        await turn.result(text("answered"))

    upstream.tool(tool)
    client = stand.client()
    asked = await client.call()
    statuses = [(await of_kind(stand, number).post("tools/list")).status for number in range(3)]
    assert statuses == [200, 429, 429]
    assert (await client.answer(asked)).text == "answered"

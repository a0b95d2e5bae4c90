"""What a retry must show before another replica is asked for it, and what the owner of its call checks itself."""

import json
from typing import Any

import pytest

from tests.parts.launch import free_port
from tests.support.fake_upstream import FakeUpstream
from tests.support.known_calls import reply, request
from tests.support.raw_connection import raw_connection
from tests.support.replicas import (
    TWICE,
    Cluster,
    Gate,
    asked_peers,
    in_time,
    operations,
    orphan,
    retry_params,
    steps,
)
from tests.support.workbench import ACCEPT

INVALID = (400, -32602, "invalid_request_state")


async def test_both_replicas_count_a_forwarded_retry_while_it_waits(upstream: FakeUpstream, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2")
    gate = Gate(upstream)
    asked = await one.client().call()
    async with raw_connection(two) as raw:
        await raw.send(request(two, body=two.client().build("tools/call", retry_params(asked))[1]))
        await in_time(gate.answered.wait())
        assert (two.gateway.downstream.in_flight, two.gateway.downstream.legs.running) == (1, {})
        assert (one.gateway.downstream.in_flight, len(one.gateway.downstream.legs.relayed)) == (1, 1)
        gate.go.set()
        assert json.loads((await reply(raw))[1])["result"]["content"][0]["text"] == "done"
    assert (steps(one), steps(two)) == ({"held": 1}, {"forwarded": 1})
    assert asked_peers(two) == {"served": 1}


async def test_the_owner_refuses_other_arguments_than_those_of_the_call(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    """The replica that forwards a retry does not compare them: it would do half of the owner's work."""
    asked, (one, two) = await cluster.asked("gw-1", "gw-2")
    answers = dict.fromkeys(asked.questions, ACCEPT)
    other = await two.client().call(arguments={"count": 2}, state=asked.state, answers=answers)
    assert other.outcome == INVALID
    refused = [each.metric("mcp_gateway_state_rejected_total", reason="other_arguments") for each in (one, two)]
    assert refused == [1, 0]
    assert (asked_peers(two), steps(one)) == ({"served": 1}, {})
    assert not upstream.of("answer")
    assert (await two.client().answer(asked)).json == ACCEPT


async def test_a_dead_owners_call_is_not_taken_over_with_other_arguments(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    (one,) = await cluster.begin("gw-1", fakes={"gw-2": f"127.0.0.1:{free_port()}"}, **TWICE)
    asked = await orphan(one, "gw-2", "gw-1")
    calls = len(upstream.of("tools/call"))
    answers = dict.fromkeys(asked.questions, ACCEPT)
    other = await one.client().call(arguments={"count": 2}, state=asked.state, answers=answers)
    assert other.outcome == INVALID
    assert asked_peers(one) == {"dead": 1}
    assert (len(upstream.of("tools/call")), steps(one)) == (calls, {})
    assert (await one.client().answer(asked)).text
    assert operations(one, "complete") == 1, "counted once, though its owner was asked first"


BOUND = {"forward_headers": ["x-api-key"], "bind_headers": ["x-api-key"]}


@pytest.mark.parametrize(
    ("route", "first", "second", "reason"),
    [
        ({}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}, "other_principal"),
        (BOUND, {"x-api-key": "a"}, {"x-api-key": "b"}, "other_headers"),
        (BOUND, {"x-api-key": "a"}, {}, "other_headers"),
    ],
)
async def test_the_retry_of_another_caller_is_not_forwarded(
    upstream: FakeUpstream,
    cluster: Cluster,
    route: dict[str, Any],
    first: dict[str, str],
    second: dict[str, str],
    reason: str,
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route=route)
    asked = await one.client(headers=first).call()
    assert (await two.client(headers=second).answer(asked)).outcome == INVALID
    assert two.metric("mcp_gateway_state_rejected_total", reason=reason) == 1
    assert asked_peers(two) == {}
    for _ in range(2):  # the repeated one gets the kept result
        assert (await two.client(headers=first).answer(asked)).text
    assert asked_peers(two) == {"served": 2}
    assert len(upstream.of("answer")) == 1

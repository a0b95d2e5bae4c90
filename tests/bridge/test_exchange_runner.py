"""What the legs of one exchange get: notifications, and the final message."""

import json
from typing import Any
from unittest.mock import Mock

from msgspec import Raw

from gateway.bridge.call_report import Report
from gateway.bridge.exchange_runner import Replies
from gateway.bridge.response_queue import FinalMessage, ResponseQueue
from gateway.exchange import commands as do
from gateway.exchange.events import Leg
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import COMPLETE, Metrics, Outcome
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import Gate, later
from tests.support.workbench import Client


async def test_only_what_this_request_asked_for_is_forwarded(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities["logging"] = {}

    async def tool(turn: Turn) -> None:
        token = turn.body["params"].get("_meta", {}).get("progressToken")
        for progress in (1, 2):
            await turn.notify(mcp.PROGRESS, {"progressToken": token or "x", "progress": progress})
        await turn.notify(mcp.PROGRESS, {"progressToken": "foreign", "progress": 3})
        await turn.notify(mcp.LOG, {"level": "debug", "data": "low"})
        await turn.notify(mcp.LOG, {"level": "error", "data": "high"})
        await turn.result(text("ok"))

    upstream.tool(tool)
    quiet = await client.call()
    assert not quiet.is_stream
    assert quiet.notifications == []
    loud = await client.call(meta={"progressToken": "mine", mcp.META_LOG_LEVEL: "warning"})
    assert loud.is_stream
    assert [n["params"].get("progress", n["params"].get("data")) for n in loud.notifications] == [1, 2, "high"]
    assert loud.notifications[0]["params"]["progressToken"] == "mine"
    assert loud.headers["X-Accel-Buffering"] == "no"
    assert b"id:" not in loud.data.replace(b'"id":', b"")


async def test_a_new_leg_brings_its_own_progress_token_and_id(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        await turn.elicit("q")
        token = turn.body["params"]["_meta"]["progressToken"]
        await turn.notify(mcp.PROGRESS, {"progressToken": token, "progress": 1})
        await turn.result(text("ok"))

    upstream.tool(tool)
    asked = await client.call(meta={"progressToken": 1})
    done = await client.answer(asked, meta={"progressToken": 2})
    assert [n["params"]["progressToken"] for n in done.notifications] == [2]
    assert done.final["id"] != asked.final["id"]


async def test_two_parallel_retries_share_one_answer_and_one_result(upstream: FakeUpstream, client: Client) -> None:
    gate = Gate(upstream)
    asked = await client.call()
    both = [later(client.answer(asked)) for _ in range(2)]
    await gate.answered.wait()
    gate.go.set()
    assert [(await reply).text for reply in both] == ["done", "done"]
    assert len(upstream.of("answer")) == 1


class Legs:
    """Legs with real queues; what they need to know about their exchange is a FAKE."""

    def __init__(self, count: int = 2, behind_bytes: int = 1000) -> None:
        self.fake_context = Mock()
        self.replies = Replies(self.fake_context, Report(self.fake_context))
        silence = CoarseTimer(5, Tasks(Metrics("0")), "silence")
        self.queues = [
            ResponseQueue(Leg(Raw(b"%d" % number)), silence, behind_bytes, f"request-{number}")
            for number in range(count)
        ]
        for queue in self.queues:
            self.replies.add(queue)
        self.all = tuple(queue.leg for queue in self.queues)

    async def final(self, number: int) -> tuple[FinalMessage, Any]:
        """The final message of a leg, and its body."""
        last = await self.queues[number].take()
        assert isinstance(last, FinalMessage)
        return last, json.loads(last.body)


async def test_each_leg_gets_the_result_under_its_own_id() -> None:
    legs = Legs()
    legs.replies.end(legs.all, b'{"a":1}', COMPLETE)
    assert [(await legs.final(number))[1] for number in (0, 1)] == [
        {"jsonrpc": "2.0", "id": 0, "result": {"a": 1}},
        {"jsonrpc": "2.0", "id": 1, "result": {"a": 1}},
    ]


async def test_each_leg_gets_the_error_of_the_upstream_and_ends_with_its_code() -> None:
    legs = Legs()
    legs.replies.fail(legs.all, jsonrpc.Error(-7, "no"))
    for number in (0, 1):
        last, body = await legs.final(number)
        assert (body["id"], body["error"]) == (number, {"code": -7, "message": "no"})
        assert (last.ending.outcome, last.ending.error_type) == (Outcome.ERROR, "-7")


async def test_each_leg_gets_the_error_of_the_gateway_with_the_id_of_its_own_http_request() -> None:
    legs, lost = Legs(), CallLost("lost")
    legs.replies.fail(legs.all, lost)
    for number in (0, 1):
        last, body = await legs.final(number)
        assert (body["id"], body["error"]["data"]) == (
            number,
            {"reason": "call_lost", "requestId": f"request-{number}"},
        )
        assert last.cause is lost
    legs.fake_context.live.upstream.health.note.assert_called_once_with(lost)


async def test_a_leg_that_left_gets_nothing_more() -> None:
    legs = Legs()
    for _ in range(2):
        legs.replies.discard(legs.all[0])
    legs.replies.end(legs.all[1:], b"{}", COMPLETE)
    assert legs.queues[0]._pending() is None
    assert (await legs.final(1))[1]["id"] == 1


async def test_notifications_that_a_slow_client_lost_are_counted_when_its_leg_ends() -> None:
    legs = Legs(1, behind_bytes=10)
    for _ in range(3):
        legs.replies.queue(legs.all[0]).send(b"x" * 10)
    legs.replies.end(legs.all, b"{}", COMPLETE)
    live = legs.fake_context.live
    live.process.metrics.notifications_dropped.assert_called_once_with(live.route.path, 2)


async def test_a_round_ends_as_one_that_asks_or_as_one_that_only_brings_the_state() -> None:
    for questions, outcome in (({"a": Mock()}, Outcome.INPUT_REQUIRED), ({}, Outcome.STATE_ONLY)):
        legs = Legs(1)
        legs.replies.ask(do.Ask(legs.all, questions, 1), b"{}")
        assert (await legs.final(0))[0].ending.outcome is outcome

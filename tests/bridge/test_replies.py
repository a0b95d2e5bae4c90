"""What the legs of one exchange get: notifications, and the final message."""

from gateway.protocol import mcp
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

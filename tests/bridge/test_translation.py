"""What the client gets of a legacy result or error, and what of its request the legacy server gets."""

from gateway.protocol import mcp
from tests.support.fake_upstream import FORM, FakeUpstream, Turn
from tests.support.workbench import ALL, Client, Stand

HALF = "cut \ud83d"


async def test_an_error_of_the_upstream_is_http_200(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.error(-32050, "odd"))
    reply = await client.call()
    assert (reply.status, reply.error["code"], reply.error["data"]) == (200, -32603, {"upstreamCode": -32050})


async def test_an_error_whose_code_is_mapped_keeps_its_data(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.error(-32050, "odd", {"field": "name", "hints": [1]}))
    assert (await client.call()).error["data"] == {"field": "name", "hints": [1], "upstreamCode": -32050}


async def test_half_an_emoji_goes_through_a_whole_call_unharmed(upstream: FakeUpstream, stand: Stand) -> None:
    # JavaScript's JSON.stringify writes "\\ud83d" for text that was cut within an emoji; so does Python's json.
    async def tool(turn: Turn) -> None:
        await turn.notify(
            "notifications/progress",
            {"progressToken": turn.body["params"]["_meta"]["progressToken"], "progress": 1, "message": HALF},
        )
        await turn.notify("notifications/message", {"level": "info", "data": {HALF: HALF}})
        answer = await turn.ask(
            mcp.ELICIT,
            {
                **FORM,
                "message": HALF,
                "requestedSchema": {
                    **FORM["requestedSchema"],
                    "title": HALF,
                    "properties": {HALF: {"type": "string"}},  # type: ignore[dict-item]
                },
            },
        )
        await turn.result({"content": [{"type": "text", "text": HALF}], "structuredContent": {HALF: answer["result"]}})

    upstream.tool(tool)
    upstream.instructions = HALF
    client = stand.client(info={"name": HALF, "version": "1"}, capabilities={**ALL, HALF: {}})
    arguments = {HALF: [HALF, "\ude00"]}
    meta = {"progressToken": HALF, mcp.META_LOG_LEVEL: "info"}
    asked = await client.call(arguments=arguments, meta=meta)
    assert [note["params"].get("message", note["params"].get("data")) for note in asked.notifications] == [
        HALF,
        {HALF: HALF},
    ]
    assert asked.notifications[0]["params"]["progressToken"] == HALF
    assert asked.questions["cut \ufffd"]["params"]["message"] == HALF
    content = {"action": "accept", "content": {HALF: HALF}}
    done = await client.call(arguments=arguments, state=asked.state, answers={"cut \ufffd": content, HALF: content})
    assert done.text == HALF
    assert done.result["structuredContent"] == {HALF: content}
    assert upstream.of("tools/call")[0].body["params"]["arguments"] == arguments
    assert upstream.of("initialize")[0].body["params"]["clientInfo"]["name"] == HALF
    again = await client.call(arguments=arguments, state=asked.state, answers={"cut \ufffd": content, HALF: content})
    assert again.text == HALF
    assert (await client.post("server/discover")).result["instructions"] == HALF


async def test_half_an_emoji_in_an_error_goes_through_unharmed(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.error(7, HALF, {HALF: HALF}))
    error = (await client.call()).error
    assert (error["code"], error["message"], error["data"]) == (7, HALF, {HALF: HALF})

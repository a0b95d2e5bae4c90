"""One call: its handshake, its rounds, what is forwarded, and the form of its reply."""

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.bridge.driver import Driver
from gateway.exchange.machine import Exchange
from gateway.protocol import mcp
from tests.support.fake_upstream import FORM, SAMPLE, URL, FakeUpstream, Turn, event, text
from tests.support.stand import Start
from tests.support.workbench import ACCEPT, ALL, Client, Stand, eventually


async def one_question(turn: Turn) -> None:
    answer = await turn.elicit("name")
    await turn.result(text(json.dumps(answer)))


async def test_the_handshake_opens_the_side_stream_before_initialized(upstream: FakeUpstream, client: Client) -> None:
    assert (await client.call()).text == "done"
    assert upstream.words == [
        "initialize",
        "GET",
        "notifications/initialized",
        "tools/list",
        "tools/call",
    ]
    assert len({seen.session for seen in upstream.seen[1:]}) == 1
    assert all(seen.headers["MCP-Protocol-Version"] == "2025-11-25" for seen in upstream.seen[1:])


async def test_initialize_carries_this_requests_capabilities_in_the_old_vocabulary(
    upstream: FakeUpstream, stand: Stand
) -> None:
    declared: dict[str, Any] = {
        "elicitation": {"url": {}},
        "extensions": {"io.modelcontextprotocol/tasks": {}, "x/y": {}},
    }
    await stand.client(capabilities=declared).call()
    params = upstream.of("initialize")[0].body["params"]
    assert params["protocolVersion"] == "2025-11-25"
    assert params["capabilities"] == {"elicitation": {"url": {}}, "extensions": {"x/y": {}}}
    assert params["clientInfo"] == {"name": "bench", "version": "1"}


async def test_a_question_is_a_round_and_its_answer_ends_the_call(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(one_question)
    asked = await client.call(arguments={"a": 1})
    assert list(asked.questions) == ["name"]
    assert stand.held == 1
    done = await client.call(arguments={"a": 1}, state=asked.state, answers={"name": ACCEPT})
    assert json.loads(done.text) == ACCEPT
    assert stand.held == 0
    assert len(upstream.of("tools/call")) == 1
    assert len(upstream.of("answer")) == 1
    assert upstream.of("answer")[0].body["id"] == 0, "the id keeps its JSON type"


@pytest.mark.parametrize("id_", [0, 7, "0", "a-b"])
async def test_an_answer_has_the_id_of_its_question_in_its_own_json_type(
    upstream: FakeUpstream, client: Client, id_: Any
) -> None:
    upstream.tool(lambda turn: _ask_with(turn, id_))
    await client.answer(await client.call())
    sent = upstream.of("answer")[0].body["id"]
    assert (sent, type(sent)) == (id_, type(id_))


async def _ask_with(turn: Turn, id_: Any) -> None:
    await turn.elicit(id_=id_)
    await turn.result(text("ok"))


async def test_questions_within_the_quiet_window_share_a_round(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        answers = await asyncio.gather(
            turn.elicit(), turn.ask(mcp.SAMPLE, SAMPLE), turn.ask(mcp.ROOTS), turn.ask(mcp.ELICIT, URL)
        )
        await turn.result(text(str(len(answers))))

    upstream.tool(tool)
    asked = await client.call()
    assert sorted(question["method"] for question in asked.questions.values()) == sorted(
        [mcp.ELICIT, mcp.ELICIT, mcp.SAMPLE, mcp.ROOTS]
    )
    urls = [q for q in asked.questions.values() if q["params"].get("mode") == "url"]
    assert "elicitationId" not in urls[0]["params"]
    answers = {
        key: {
            mcp.ELICIT: {"action": "accept"},
            mcp.SAMPLE: {"role": "assistant", "model": "m", "content": {"type": "text", "text": "x"}},
            mcp.ROOTS: {"roots": []},
        }[question["method"]]
        for key, question in asked.questions.items()
    }
    assert (await client.call(state=asked.state, answers=answers)).text == "4"
    assert len(upstream.of("answer")) == 4


async def test_a_question_on_the_side_stream_before_the_calls_own_head_belongs_to_the_call(
    upstream: FakeUpstream, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        answer = await turn.elicit("early", side=True)  # nothing of the POST's reply was sent yet
        await turn.result(text(answer["action"]))

    upstream.tool(tool)
    asked = await client.call()
    assert list(asked.questions) == ["early"]
    assert (await client.answer(asked)).text == "accept"


async def test_the_result_may_come_on_the_side_stream(upstream: FakeUpstream, stand: Stand, client: Client) -> None:
    closed = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await turn.raw(b": open\n\n")
        await turn.result(text("sideways"), side=True)
        try:
            await turn.for_ever()
        finally:
            closed.set()

    upstream.tool(tool)
    assert (await client.call()).text == "sideways"
    async with asyncio.timeout(2):
        await closed.wait()
    upstream.tool(one_question)
    assert json.loads((await client.answer(await client.call())).text) == ACCEPT
    assert len(upstream.of("initialize")) == 1, "the session was used again"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_question_outside_of_a_call_is_refused_and_counted(
    upstream: FakeUpstream, stand: Stand, client: Client, when: str
) -> None:
    if when == "before":
        await client.post("server/discover")
    else:
        await client.call()
    upstream.side("s1").put_nowait(event({"jsonrpc": "2.0", "id": 5, "method": mcp.ELICIT, "params": FORM}))
    answer = (await upstream.saw("answer"))[0].body
    assert (answer["id"], answer["error"]["code"]) == (5, -32602)
    assert stand.nested(mcp.ELICIT, "refused_unsolicited") == 1


async def test_a_question_during_a_request_of_the_gateways_own_is_refused(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    async def list_tools(turn: Turn) -> None:
        answer = await turn.ask(mcp.ROOTS, side=True)
        assert answer["error"]["code"] == -32602
        await turn.result({"tools": []})

    upstream.on("tools/list", list_tools)
    assert (await client.call()).text == "done"
    assert stand.nested(mcp.ROOTS, "refused_unsolicited") == 1


@pytest.mark.parametrize("in_call", [True, False])
async def test_a_ping_is_answered(upstream: FakeUpstream, client: Client, in_call: bool) -> None:  # noqa: FBT001
    async def tool(turn: Turn) -> None:
        answer = await turn.ask(mcp.PING, id_="p1", side=True)
        await turn.result(text(json.dumps(answer["result"])))

    if in_call:
        upstream.tool(tool)
        assert (await client.call()).text == "{}"
    else:
        await client.call()
        upstream.side("s1").put_nowait(event({"jsonrpc": "2.0", "id": "p1", "method": mcp.PING}))
        assert (await upstream.saw("answer"))[0].body == {"jsonrpc": "2.0", "id": "p1", "result": {}}


async def test_pings_and_refusals_carry_the_credential_of_the_session(upstream: FakeUpstream, stand: Stand) -> None:
    await stand.client("Bearer one").call()
    upstream.side("s1").put_nowait(event({"jsonrpc": "2.0", "id": 1, "method": mcp.PING}))
    assert (await upstream.saw("answer"))[0].headers["Authorization"] == "Bearer one"
    await stand.gateway.close()
    assert upstream.of("DELETE")[0].headers["Authorization"] == "Bearer one"


async def test_a_request_that_no_client_knows_is_method_not_found(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        answer = await turn.ask("tasks/list")
        await turn.result(text(str(answer["error"]["code"])))

    upstream.tool(tool)
    assert (await client.call()).text == "-32601"


async def test_a_client_that_did_not_declare_is_never_asked(upstream: FakeUpstream, stand: Stand) -> None:
    upstream.tool(one_question)
    reply = await stand.client(capabilities={"elicitation": {"url": {}}}).call()
    assert reply.outcome == (400, -32021, None)
    assert reply.error["data"]["requiredCapabilities"] == {"elicitation": {"form": {}}}
    assert (await upstream.saw("answer"))[0].body["error"]["code"] == -32602
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: not stand.sessions("quarantined"))


async def test_undeclared_refuse_lets_the_tool_fall_back(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(route={"undeclared": "refuse"})
    upstream.tool(one_question)
    assert (await stand.client(capabilities={}).call()).text == "null"


async def test_a_stateless_upstream_that_asks_ends_the_call_with_one_clear_error(
    upstream: FakeUpstream, client: Client
) -> None:
    upstream.has_sessions = False
    upstream.tool(one_question)
    reply = await client.call()
    assert reply.outcome == (200, -32603, "upstream_cannot_ask")
    assert "stateless" in reply.error["message"]
    assert "GET" not in upstream.words
    assert "answer" not in upstream.words


async def test_answers_given_in_advance_are_taken(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(one_question)
    assert json.loads((await client.call(answers={"name": ACCEPT})).text) == ACCEPT


async def test_an_answer_of_the_wrong_kind_leaves_the_call_parked(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(one_question)
    asked = await client.call()
    wrong: list[dict[str, Any]] = [{"roots": []}, {"action": "maybe"}, {}]
    for bad in wrong:
        assert (await client.answer(asked, bad)).outcome[:2] == (400, -32602)
    assert stand.held == 1
    assert "answer" not in upstream.words
    assert json.loads((await client.answer(asked)).text) == ACCEPT


async def test_missing_answers_are_asked_again_and_unknown_keys_ignored(
    upstream: FakeUpstream, client: Client
) -> None:
    async def tool(turn: Turn) -> None:
        await asyncio.gather(turn.elicit("one"), turn.elicit("two"))
        await turn.result(text("both"))

    upstream.tool(tool)
    asked = await client.call()
    again = await client.call(state=asked.state, answers={"one": ACCEPT, "three": ACCEPT})
    assert list(again.questions) == ["two"]
    assert (await client.answer(again)).text == "both"
    assert len(upstream.of("answer")) == 2


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


async def test_the_log_level_is_set_on_a_session_only_when_it_differs(upstream: FakeUpstream, client: Client) -> None:
    upstream.capabilities["logging"] = {}
    for level in ("info", "info", "error", None, "error"):
        await client.call(meta={mcp.META_LOG_LEVEL: level} if level else None)
    levels = [seen.body["params"]["level"] for seen in upstream.of(mcp.SET_LEVEL)]
    assert levels == ["info", "error"]
    assert len(upstream.of("initialize")) == 1


async def test_silence_is_filled_with_comments(upstream: FakeUpstream, begin: Start) -> None:
    stand = await begin(timeouts={"keepalive_seconds": 0.02})
    go = asyncio.Event()

    async def tool(turn: Turn) -> None:
        await go.wait()
        await turn.result(text("at last"))

    upstream.tool(tool)
    async with stand.client().open("tools/call", {"name": "tool"}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Accel-Buffering"] == "no"
        seen = b""
        while seen.count(b":\n\n") < 3:
            seen += await response.content.readany()
        go.set()
        rest = await response.content.read()
    assert b"at last" in rest
    assert not [line for line in (seen + rest).split(b"\n") if line.startswith(b"id")]


async def test_a_long_leg_ends_with_a_state_only_round_at_most_so_many_times(
    upstream: FakeUpstream, begin: Start
) -> None:
    stand = await begin(legs={"limit_seconds": 0.03, "rounds": 2})
    client, go = stand.client(), asyncio.Event()

    async def tool(turn: Turn) -> None:
        await go.wait()
        await turn.result(text("slow"))

    upstream.tool(tool)
    reply = await client.call()
    assert reply.questions == {}
    reply = await client.call(state=reply.state)
    assert reply.questions == {}
    waiting = asyncio.get_running_loop().create_task(client.call(state=reply.state))
    await eventually(lambda: stand.held == 0)
    _ = await asyncio.wait((waiting,), timeout=0.1)
    assert not waiting.done(), "the third leg is kept open"
    go.set()
    assert (await waiting).text == "slow"
    assert len(upstream.of("tools/call")) == 1


async def test_a_large_result_is_one_json_body(upstream: FakeUpstream, client: Client) -> None:
    async def tool(turn: Turn) -> None:
        await turn.raw(b": ping\n\n")
        await turn.result(text("x" * 2_000_000))

    upstream.tool(tool)
    reply = await client.call()
    assert not reply.is_stream
    assert len(reply.text) == 2_000_000


async def test_an_upstream_that_answers_in_json_is_served(upstream: FakeUpstream, client: Client) -> None:
    reply = await client.call()
    assert reply.text == "done"
    assert reply.result["_meta"][mcp.META_SERVER_INFO] == {"name": "fake", "version": "1"}


@contextmanager
def leaving_no_cycle() -> Iterator[None]:
    """Fail if an exchange is left to the collector: cycles cost a fifth of the CPU under load, and pauses."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, Driver | Exchange)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_a_plain_call_leaves_nothing_to_the_collector(client: Client) -> None:
    await client.call()
    with leaving_no_cycle():
        for _ in range(5):
            assert (await client.call()).text == "done"


async def test_an_answered_call_whose_result_is_forgotten_leaves_nothing_to_the_collector(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.tool(one_question)

    async def ask_and_answer() -> None:
        await client.answer(await client.call())
        for driver in stand.gateway.lot:
            driver.forget()
            stand.gateway.lot.remove(driver)

    await ask_and_answer()
    with leaving_no_cycle():
        for _ in range(5):
            await ask_and_answer()


async def test_an_error_of_the_upstream_is_http_200(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.error(-32050, "odd"))
    reply = await client.call()
    assert (reply.status, reply.error["code"], reply.error["data"]) == (200, -32603, {"upstreamCode": -32050})


async def test_an_error_whose_code_is_mapped_keeps_its_data(upstream: FakeUpstream, client: Client) -> None:
    upstream.tool(lambda turn: turn.error(-32050, "odd", {"field": "name", "hints": [1]}))
    assert (await client.call()).error["data"] == {"field": "name", "hints": [1], "upstreamCode": -32050}


async def test_an_error_32042_is_a_round_of_urls_and_the_call_runs_again(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.once("tools/call", lambda turn: turn.error(-32042, "visit", {"elicitations": [URL]}))
    asked = await client.call()
    assert next(iter(asked.questions.values()))["params"]["mode"] == "url"
    assert stand.sessions("busy") == 1, "the session stays reserved"
    assert (await client.answer(asked, {"action": "accept"})).text == "done"
    assert len({seen.session for seen in upstream.of("tools/call")}) == 1


async def test_a_reserved_session_that_is_lost_while_the_url_is_visited_is_replaced(
    upstream: FakeUpstream, stand: Stand, client: Client
) -> None:
    upstream.once("tools/call", lambda turn: turn.error(-32042, "visit", {"elicitations": [URL]}))
    asked = await client.call()

    async def refuse(turn: Turn) -> None:
        turn.reply(405)

    upstream.once("GET", refuse)
    upstream.side("s1").put_nowait(None)
    await upstream.saw("GET", 2)
    await eventually(lambda: not any("side stream" in name for name in stand.tasks()))
    assert (await client.answer(asked, {"action": "accept"})).text == "done"
    assert [seen.session for seen in upstream.of("tools/call")] == ["s1", "s2"]
    await eventually(lambda: stand.sessions("busy") == 0)


async def test_discover_needs_no_call(upstream: FakeUpstream, client: Client) -> None:
    upstream.instructions = "Be kind"
    result = (await client.post("server/discover")).result
    assert result["instructions"] == "Be kind"
    assert (await client.post("server/discover")).status == 200
    assert len(upstream.of("initialize")) == 1


OUT_OF_RANGE = ["1e400", "1" * 5000]


@pytest.mark.parametrize("argument", OUT_OF_RANGE, ids=["float", "integer"])
async def test_arguments_that_no_digest_can_hold_are_refused_before_anything_is_run(
    upstream: FakeUpstream, stand: Stand, client: Client, argument: str
) -> None:
    headers, body = client.build("tools/call", {"name": "tool", "arguments": {"n": 0}})
    async with asyncio.timeout(2):
        async with stand.http.post(
            stand.url, headers=headers, data=body.replace(b'"n": 0', f'"n": {argument}'.encode())
        ) as response:
            refused = await response.json()
    assert (response.status, refused["error"]["code"], refused["id"]) == (400, -32602, "c1")
    assert "tools/call" not in upstream.words


@pytest.mark.parametrize("number", OUT_OF_RANGE, ids=["float", "integer"])
async def test_an_answer_that_no_digest_can_hold_is_refused_and_the_call_waits_on(
    upstream: FakeUpstream, stand: Stand, client: Client, number: str
) -> None:
    upstream.tool(one_question)
    asked = await client.call()
    for key in ("name", "unknown"):
        answers = {key: {"action": "accept", "content": {"name": 0}}}
        headers, body = client.build(
            "tools/call", {"name": "tool", "arguments": {}, "requestState": asked.state, "inputResponses": answers}
        )
        body = body.replace(b'"name": 0', f'"name": {number}'.encode())
        async with stand.http.post(stand.url, headers=headers, data=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, -32602)
    assert stand.held == 1
    assert json.loads((await client.answer(asked)).text) == ACCEPT


@pytest.mark.parametrize("number", OUT_OF_RANGE, ids=["float", "integer"])
async def test_a_question_with_a_number_that_python_cannot_hold_breaks_no_call(
    upstream: FakeUpstream, client: Client, number: str
) -> None:
    async def tool(turn: Turn) -> None:
        question = event({"jsonrpc": "2.0", "id": 7, "method": mcp.ELICIT, "params": {**FORM, "x": "number"}})
        waiter = upstream.expect(turn.session, 7)
        await turn.raw(question.replace(b'"number"', number.encode()))
        await turn.result(text(json.dumps((await waiter)["result"])))

    upstream.tool(tool)
    headers, body = client.build("tools/call", {"name": "tool", "arguments": {}})
    async with client.http.post(client.url, headers=headers, data=body) as response:
        data = await response.read()
    assert number.encode() in data
    state = json.loads(data.replace(number.encode(), b"0"))["result"]["requestState"]
    done = await client.call(state=state, answers={"elicitation-1": ACCEPT})
    assert json.loads(done.text) == ACCEPT


HALF = "cut \ud83d"


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


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [("tools/call", {"name": HALF}, -32020), ("tools/" + HALF, {}, -32020), ("resources/read", {"uri": HALF}, -32020)],
)
async def test_half_an_emoji_in_a_name_is_refused_with_the_id(
    stand: Stand, client: Client, method: str, params: dict[str, Any], code: int
) -> None:
    headers, body = client.build(method, params)
    headers = {name: value.replace("\ud83d", "?") for name, value in headers.items()}
    async with stand.http.post(stand.url, headers=headers, data=body) as response:
        refused = await response.json()
    assert (response.status, refused["error"]["code"], refused["id"]) == (400, code, "c1")


async def test_sixty_four_questions_with_long_keys_still_fit(upstream: FakeUpstream, client: Client) -> None:
    titles = [f"{number:03d}" + "k" * 125 for number in range(64)]

    async def tool(turn: Turn) -> None:
        await asyncio.gather(*(turn.elicit(title) for title in titles))
        await turn.result(text("all"))

    upstream.tool(tool)
    asked = await client.call()
    assert sorted(asked.questions) == titles
    assert len(asked.state) <= 8192
    assert (await client.answer(asked)).text == "all"


async def test_capabilities_are_part_of_what_shapes_a_session(upstream: FakeUpstream, stand: Stand) -> None:
    for capabilities in (ALL, {}, ALL):
        await stand.client(capabilities=capabilities).call()
    assert len(upstream.of("initialize")) == 2

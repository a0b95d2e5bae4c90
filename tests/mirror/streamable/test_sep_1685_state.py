"""SEP-1685 by a client that follows the paper line by line, before one replica and before several."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gateway.mirror.streamable.sep_1685_state import KEY
from gateway.mirror.streamable.tokens import NESTED, STATE
from gateway.protocol import mcp
from tests.mirror.conftest import Begin, sealed
from tests.mirror.streamable.test_front import ACCEPT, text
from tests.support.fake_modern import FORM, SAMPLE, FakeModern, Json
from tests.support.legacy_client import CAPABILITIES, LegacyClient, Served
from tests.support.replicas import Cluster
from tests.support.workbench import eventually, jwt

ROUTE: Final = {"era": "mirror", "dialects": ["sep-1685"]}
DECLARED: Final = {**CAPABILITIES, "state": {"scopes": ["request"]}}
ROOTS: Final[Json] = {"method": "roots/list", "params": {}}
DECLINE: Final[Json] = {"action": "decline"}


def state_of(question: Json) -> str:
    state = question["params"]["_meta"][KEY]
    assert isinstance(state, str)
    return state


def echo(question: Json, result: Json) -> Json:
    """The result with the state of its question."""
    return {**result, "_meta": {KEY: state_of(question)}}


class PaperClient(LegacyClient):
    """A client that declares the scope and echoes each state."""

    def __init__(self, stand: Served, **options: Any) -> None:
        super().__init__(stand, **{"capabilities": DECLARED, **options})

    async def echo(self, question: Json, result: Json, url: str | None = None) -> int:
        return await self.answer(question, echo(question, result), url)

    async def refusal(self, question: Json, result: Json, url: str | None = None) -> tuple[int, int]:
        """The status and the error code of an answer."""
        async with self.open({"id": question["id"], "result": result}, url) as stream:
            message = await stream.message()
            assert message["id"] == question["id"]
            return stream.response.status, message["error"]["code"]


REFUSED: Final = (200, -32010)


@pytest.fixture
async def client(begin: Begin) -> PaperClient:
    return await PaperClient(await begin(route=ROUTE)).initialize()


async def test_a_client_that_declares_the_scope_gets_a_state(client: PaperClient, server: FakeModern) -> None:
    requests = {"form": FORM, "sample": SAMPLE, "roots": ROOTS}
    server.tools["all"] = lambda call: call.text(sorted(call.answers)) if call.answers else call.ask(**requests)
    async with client.call("all") as stream:
        questions = [await stream.message() for _ in requests]
        assert {each["method"] for each in questions} == {mcp.ELICIT, mcp.SAMPLE, mcp.ROOTS}
        assert len({state_of(each) for each in questions}) == len(requests)
        for question in questions:
            assert await client.echo(question, ACCEPT) == 202
        assert text(await stream.message()) == sorted(requests)


@pytest.mark.parametrize("declared", [{}, {"state": {}}, {"state": {"scopes": ["session"]}}, {"state": {"scopes": 1}}])
async def test_a_client_without_the_scope_gets_no_state_and_may_set_none(
    begin: Begin, server: FakeModern, declared: Json
) -> None:
    client = await PaperClient(await begin(route=ROUTE), capabilities={**CAPABILITIES, **declared}).initialize()
    async with client.call("ask") as stream:
        question = await stream.message()
        assert "_meta" not in question["params"]
        assert await client.refusal(question, ACCEPT | {"_meta": {KEY: "own"}}) == REFUSED
        assert await client.answer(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_a_route_without_the_dialect_sets_no_state(begin: Begin, server: FakeModern) -> None:
    client = await PaperClient(await begin()).initialize()
    async with client.call("ask") as stream:
        question = await stream.message()
        assert "_meta" not in question["params"]
        assert await client.answer(question, ACCEPT | {"_meta": {KEY: "own"}}) == 202
        assert text(await stream.message()) == {"name": ACCEPT | {"_meta": {KEY: "own"}}}


@pytest.mark.parametrize("result", [ACCEPT, DECLINE, {"action": "cancel"}])
async def test_every_kind_of_answer_brings_its_state(client: PaperClient, server: FakeModern, result: Json) -> None:
    async with client.call("ask") as stream:
        question = await stream.message()
        assert await client.echo(question, result) == 202
        assert text(await stream.message()) == {"name": result}, "the server does not see the state"


@pytest.mark.parametrize("others", [{"example.com/a": 1}, None])
async def test_the_meta_of_others_stays_beside_the_state(
    client: PaperClient, server: FakeModern, others: Json | None
) -> None:
    asked = {**FORM, "params": {**FORM["params"], "_meta": others}}
    server.tools["ask"] = lambda call: call.text(call.answers) if call.answers else call.ask(name=asked)
    async with client.call("ask") as stream:
        question = await stream.message()
        assert question["params"]["_meta"] == {**(others or {}), KEY: state_of(question)}
        given = ACCEPT | {"_meta": {KEY: state_of(question), "example.com/b": 2}}
        assert await client.answer(question, given) == 202
        assert text(await stream.message()) == {"name": ACCEPT | {"_meta": {"example.com/b": 2}}}


CHANGES: Final[dict[str, Callable[[Json], Any]]] = {
    "missing": lambda _: ACCEPT,
    "no_string": lambda question: ACCEPT | {"_meta": {KEY: [state_of(question)]}},
    "no_object": lambda _: [1],
    "changed": lambda question: ACCEPT | {"_meta": {KEY: _flipped(state_of(question))}},
    "cut": lambda question: ACCEPT | {"_meta": {KEY: state_of(question)[:-4]}},
    "the_id": lambda question: ACCEPT | {"_meta": {KEY: question["id"]}},
    "over_8_kb": lambda question: ACCEPT | {"_meta": {KEY: state_of(question) + "A" * 8_192}},
}


def _flipped(state: str) -> str:
    middle = len(state) // 2
    return state[:middle] + ("A" if state[middle] != "A" else "B") + state[middle + 1 :]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_state_that_is_not_echoed_exactly_is_refused(
    client: PaperClient, server: FakeModern, change: Callable[[Json], Any]
) -> None:
    async with client.call("ask") as stream:
        question = await stream.message()
        assert await client.refusal(question, change(question)) == REFUSED
        assert len(server.of(mcp.TOOLS_CALL)) == 1, "the call is as it was"
        assert await client.echo(question, ACCEPT) == 202
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_the_state_of_another_request_is_refused(begin: Begin, server: FakeModern) -> None:
    server.tools["both"] = lambda call: call.text(call.answers) if call.answers else call.ask(a=FORM, b=FORM)
    stand = await begin(route=ROUTE)
    ada, other, eve = [
        await PaperClient(stand, headers={"Authorization": jwt(iss="i", sub=sub)}).initialize()
        for sub in ("ada", "ada", "eve")
    ]
    async with ada.call("both") as stream, other.call("both") as another, eve.call("both") as third:
        one, two = await stream.message(), await stream.message()
        foreign = [(other, another), (eve, third)]
        theirs = [(client, await their.message(), await their.message()) for client, their in foreign]
        for question in (two, *(question for _, *questions in theirs for question in questions)):
            assert await ada.refusal(one, echo(question, ACCEPT)) == REFUSED
        for client, first, second in [(ada, one, two), *theirs]:
            assert await client.echo(first, ACCEPT) == await client.echo(second, DECLINE) == 202
        for each in (stream, another, third):
            assert text(await each.message()) == {"a": ACCEPT, "b": DECLINE}


async def test_a_state_counts_once(client: PaperClient, server: FakeModern) -> None:
    server.tools["both"] = lambda call: call.text(call.answers) if call.answers else call.ask(a=FORM, b=FORM)
    async with client.call("both") as stream:
        one, two = await stream.message(), await stream.message()
        assert await client.echo(one, ACCEPT) == 202
        assert await client.refusal(one, echo(one, DECLINE)) == REFUSED
        assert await client.echo(two, ACCEPT) == 202
        assert text(await stream.message()) == {"a": ACCEPT, "b": ACCEPT}
    assert await client.refusal(two, echo(two, ACCEPT)) == REFUSED, "the call is over"
    assert len(server.of(mcp.TOOLS_CALL)) == 2


async def test_the_state_of_a_cancelled_call_is_refused(client: PaperClient, server: FakeModern) -> None:
    async with client.request(mcp.TOOLS_CALL, {"name": "ask", "arguments": {}}, id_="mine") as stream:
        question = await stream.message()
        assert await client.notify(mcp.CANCELLED, {"requestId": "mine"}) == 202
        assert await client.refusal(question, echo(question, ACCEPT)) == REFUSED
    assert len(server.of(mcp.TOOLS_CALL)) == 1


async def test_an_error_needs_no_state_because_it_has_no_meta(client: PaperClient, server: FakeModern) -> None:
    async with client.call("ask") as stream:
        question = await stream.message()
        refusal = {"jsonrpc": "2.0", "id": question["id"], "error": {"code": -1, "message": "User rejected"}}
        assert (await client.post(refusal))[0] == 202
        assert (await stream.message())["result"]["isError"] is True


async def test_a_state_has_at_most_8_kb(client: PaperClient, server: FakeModern) -> None:
    for size in (10, 5_000, 7_000, 60_000):
        async with client.call("ask", {"large": "x" * size}) as stream:
            question = await stream.message()
            assert len(state_of(question)) <= 8_192
            assert await client.echo(question, ACCEPT) == 202
            assert text(await stream.message()) == {"name": ACCEPT}


# -- several replicas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
async def test_an_answer_at_another_replica_is_checked_by_the_owner(
    server: FakeModern, cluster: Cluster, count: int
) -> None:
    stands = await cluster.begin(*(f"gw-{number}" for number in range(count)), route=ROUTE)
    client = await PaperClient(stands[0]).initialize()
    async with client.call("ask") as stream:
        question = await stream.message()
        assert await client.refusal(question, ACCEPT, stands[-1].url) == REFUSED
        assert await client.echo(question, ACCEPT, stands[-1].url) == 202
        assert text(await stream.message()) == {"name": ACCEPT}
    assert await client.refusal(question, echo(question, ACCEPT), stands[-1].url) == REFUSED
    assert len(server.of(mcp.TOOLS_CALL)) == 2


async def test_a_state_continues_a_call_that_is_too_large_for_an_id(server: FakeModern, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", route=ROUTE)
    client = await PaperClient(one).initialize()
    with suppress(Exception):
        async with client.call("ask", {"large": "x" * 5_000}) as stream:
            question, place = await stream.message(), stream.last
            await cluster.crash(one)
    assert await client.echo(question, ACCEPT, two.url) == 202
    await eventually(lambda: len(server.of(mcp.TOOLS_CALL)) == 2)
    last: Json = server.of(mcp.TOOLS_CALL)[-1]["params"]
    assert last["arguments"] == {"large": "x" * 5_000}
    assert json.dumps(last["inputResponses"]) == json.dumps({"name": ACCEPT})
    assert await client.refusal(question, echo(question, ACCEPT), three.url) == REFUSED
    async with client.listen(place, three.url) as stream:
        assert text(await stream.message()) == {"name": ACCEPT}


async def test_an_expired_state_continues_no_call(server: FakeModern, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", route=ROUTE)
    client = await PaperClient(one).initialize()
    with suppress(Exception):
        async with client.call("ask") as stream:
            question = await stream.message()
            await cluster.crash(one)
    tokens = sealed()
    asked = tokens.place(NESTED, question["id"], tokens.sessions.open(client.headers[mcp.SESSION_ID]).key)
    asked = replace(asked, issued=asked.issued - 601)
    old = {"id": tokens.of_place(NESTED, asked)}
    answer = ACCEPT | {"_meta": {KEY: tokens.of_place(STATE, asked)}}
    assert await client.refusal(old, answer, two.url) == REFUSED
    assert len(server.of(mcp.TOOLS_CALL)) == 1

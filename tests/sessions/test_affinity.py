"""`sessions.affinity: principal`: one session for all calls of a principal."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config.model.route import RouteSessions
from gateway.protocol import mcp
from gateway.protocol.jsonrpc import Message
from gateway.sessions.affinity import SharedSession
from tests.support.fake_upstream import FORM, URL, FakeUpstream, Turn, text
from tests.support.stand import Start
from tests.support.workbench import Client, Reply, Stand, eventually, jwt, later, leave
from tests.upstream.test_faults import challenge

BUSY = (503, -32603, "busy")
ROUTE: dict[str, Any] = {"sessions": {"affinity": "principal"}}


class FakeMember:
    """A session object with the call of one owner or joiner."""

    lost = False

    def __init__(self, state: str) -> None:
        self.resting = "resting" in state
        self.pending = "pending" in state
        self.can_be_joined = "closed" not in state
        self.is_answered = False

    def is_answered_by(self, message: Message) -> bool:
        return self.is_answered


CALL, ASIDE = "asked in call", "asked in call and aside"


@pytest.mark.parametrize(
    ("owner", "joiners", "asked", "can_begin", "has_room"),
    [
        ("", [], "", True, False),
        ("pending", [], CALL, True, False),
        ("pending, resting", [], "", True, False),
        ("pending, resting", [], CALL, True, True),
        ("pending, resting", [], ASIDE, True, False),
        ("pending, resting, closed", [], CALL, True, False),
        ("resting", [], "", True, True),
        ("resting", [], ASIDE, True, True),
        ("pending, resting", ["pending, resting"], CALL, True, True),
        ("pending, resting", ["pending"], CALL, False, False),
        ("", ["pending, resting"], CALL, True, False),
        ("", ["pending, resting"], ASIDE, False, False),
        ("", ["pending, resting", "pending"], CALL, False, False),
    ],
)
def test_a_call_begins_beside_calls_that_wait_for_their_users_and_were_named(
    owner: str, joiners: list[str], asked: str, *, can_begin: bool, has_room: bool
) -> None:
    shared = SharedSession(FakeMember(owner))
    for state in joiners:
        shared.join(FakeMember(state))
    shared.asked_in_call, shared.asked_aside = "call" in asked, "aside" in asked
    assert (shared.can_begin, shared.has_room) == (can_begin, has_room)


@pytest.mark.parametrize(("states", "is_ambiguous"), [([""], False), (["pending"], True), (["", "pending"], True)])
def test_a_call_that_nothing_reads_may_ask_on_the_side_stream_as_well_as_the_one_at_work(
    states: list[str], *, is_ambiguous: bool
) -> None:
    owner, *joiners = map(FakeMember, states)
    shared = SharedSession(owner)
    for joiner in joiners:
        shared.join(joiner)
    shared.has_stray = True
    assert shared.speaker(Message())[1] == is_ambiguous


def test_what_a_joiner_found_lost_is_lost_for_the_owner() -> None:
    shared, joiner = SharedSession(FakeMember("")), FakeMember("")
    shared.join(joiner)
    shared.leave(joiner)
    assert not shared.owner.lost
    joiner.lost = True
    shared.leave(joiner)
    assert shared.owner.lost
    assert not shared.joiners


@pytest.mark.parametrize(
    ("states", "answers", "speaker", "is_ambiguous"),
    [
        ([""], None, 0, False),
        (["pending"], None, 0, False),
        (["", "pending"], None, 1, False),
        (["pending", "pending"], None, 0, True),
        (["pending", "pending"], 1, 1, False),
        (["", "pending", "pending"], 0, 0, True),
    ],
    ids=["no call", "one call", "that of a joiner", "two calls", "a call that it answers", "no call that it answers"],
)
def test_a_message_of_the_side_stream_is_about_the_call_that_it_answers_or_the_only_one(
    states: list[str], answers: int | None, speaker: int, *, is_ambiguous: bool
) -> None:
    members = [FakeMember(state) for state in states]
    shared = SharedSession(members[0])
    for member in members[1:]:
        shared.join(member)
    if answers is not None:
        members[answers].is_answered = True
    assert shared.speaker(Message()) == (members[speaker], is_ambiguous)


class Tool:
    """Does what its arguments say, and watches who runs beside whom."""

    def __init__(self, upstream: FakeUpstream) -> None:
        self.go = asyncio.Event()
        self.refused: list[Any] = []
        self.running = self.most = 0
        self.visited = False
        upstream.tool(self.tool)

    async def tool(self, turn: Turn) -> None:
        if turn.session not in turn.upstream.known:
            turn.reply(404)
            return
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            said = await self.run(turn, turn.body["params"]["arguments"].get("do", "nothing"))
        finally:
            self.running -= 1
        if said is not None:
            await turn.result(text(said))

    async def run(self, turn: Turn, do: str) -> str | None:
        if do == "wait":
            await self.go.wait()
        elif do == "ask":
            return str((await turn.elicit())["action"])
        elif do == "want a page visited" and not self.visited:
            self.visited = True
            await turn.error(-32042, "Visit", {"elicitations": [URL]})
            return None
        elif do.startswith("ask aside"):
            if do == "ask aside when told":
                await self.go.wait()
            answer = await turn.ask("elicitation/create", FORM, side=True)
            if "error" in answer:
                self.refused.append(answer["error"]["code"])
                return "refused"
            return "accept"
        elif do == "end with its question open":
            asked = later(turn.elicit())
            await self.go.wait()
            asked.cancel()
        elif do == "answer aside":
            await turn.raw(b"")
            await turn.result(text("aside"), side=True)
            await turn.for_ever()
        elif do == "hang":
            await turn.for_ever()
        return "done"


@pytest.fixture
def tool(upstream: FakeUpstream) -> Tool:
    return Tool(upstream)


async def stand_with(begin: Start, wait_seconds: float = 5, **sections: Any) -> Stand:
    return await begin(route=ROUTE, timeouts={"session_wait_seconds": wait_seconds}, **sections)


@pytest.fixture
async def stand(begin: Start) -> Stand:
    """A gateway before which all calls of a principal share a session."""
    return await stand_with(begin)


@pytest.fixture
def ada(stand: Stand) -> Client:
    return stand.client("Bearer ada")


async def do(client: Client, what: str) -> Reply:
    return await client.call(arguments={"do": what})


async def ask(client: Client, what: str = "ask") -> Reply:
    """A call that is parked now."""
    asked = await do(client, what)
    assert asked.questions
    return asked


async def answer(client: Client, asked: Reply) -> str:
    return (await client.answer(asked)).text


def sessions(upstream: FakeUpstream) -> list[str | None]:
    return [seen.session for seen in upstream.of("tools/call")]


async def test_calls_of_a_principal_take_turns_in_one_session(
    upstream: FakeUpstream, tool: Tool, stand: Stand
) -> None:
    ada, bob = stand.client("Bearer ada"), stand.client("Bearer bob")
    await asyncio.gather(*(do(ada, "nothing") for _ in range(5)))
    assert tool.most == 1
    assert set(sessions(upstream)) == {"s1"}
    await do(bob, "nothing")
    assert sessions(upstream)[-1] == "s2"
    assert (await do(ada, "nothing")).text == "done"
    assert len(upstream.of("initialize")) == 2
    assert not upstream.of("DELETE")


async def test_a_reload_begins_and_ends_it(tool: Tool, begin: Start) -> None:
    stand = await begin()
    client, config = stand.client("Bearer ada"), stand.gateway.config
    for affinity, most in (("principal", 1), ("none", 3)):
        sessions = RouteSessions(affinity=affinity)
        route = replace(config.routes[0], sessions=sessions)
        stand.gateway.apply(replace(config, routes=(route,)))
        tool.most = 0
        calls = asyncio.gather(*(do(client, "wait") for _ in range(3)))
        await eventually(lambda most=most: tool.running == most, "as many run as may")
        tool.go.set()
        await calls
        tool.go.clear()
        assert tool.most == most


async def test_a_call_goes_beside_one_that_is_parked_by_a_question_that_named_it(
    upstream: FakeUpstream, tool: Tool, ada: Client
) -> None:
    first, second = await ask(ada), await ask(ada)
    assert (await do(ada, "nothing")).text == "done"
    assert await answer(ada, second) == "accept"
    assert (await do(ada, "answer aside")).text == "aside"
    assert await answer(ada, first) == "accept"
    assert (await do(ada, "nothing")).text == "done"
    assert set(sessions(upstream)) == {"s1"}
    assert len(upstream.of("initialize")) == 1
    assert not upstream.of("DELETE")
    assert len(upstream.of("GET")) == 1, "joiners open no side stream"


async def test_no_call_goes_beside_one_that_runs(upstream: FakeUpstream, tool: Tool, begin: Start) -> None:
    stand = await stand_with(begin, wait_seconds=0.5)
    client = stand.client("Bearer ada")
    asked = await ask(client)
    joiner = later(do(client, "wait"))
    await upstream.saw("tools/call", 2)
    assert (await do(client, "nothing")).outcome == BUSY
    assert await answer(client, asked) == "accept"
    assert (await do(client, "nothing")).outcome == BUSY, "the joiner runs still"
    waiting = later(do(client, "nothing"))
    tool.go.set()
    assert (await joiner).text == "done"
    assert (await waiting).text == "done"
    assert set(sessions(upstream)) == {"s1"}


async def test_a_waiting_call_begins_when_the_call_before_it_is_parked(
    upstream: FakeUpstream, tool: Tool, ada: Client
) -> None:
    first, second = await asyncio.gather(ask(ada), ask(ada))
    assert [await answer(ada, asked) for asked in (first, second)] == ["accept", "accept"]
    assert len(upstream.of("initialize")) == 1


async def test_a_call_that_was_asked_aside_keeps_the_session_for_itself(tool: Tool, begin: Start) -> None:
    stand = await stand_with(begin, wait_seconds=0.5)
    client = stand.client("Bearer ada")
    asked = await ask(client, "ask aside")
    busy = await do(client, "nothing")
    assert busy.outcome == BUSY
    assert "sessions.affinity: principal" in busy.error["message"]
    assert (await do(stand.client("Bearer bob"), "nothing")).text == "done"
    assert await answer(client, asked) == "accept"
    assert (await do(client, "nothing")).text == "done"


async def test_a_question_that_any_call_may_have_asked_reaches_no_client(tool: Tool, begin: Start) -> None:
    stand = await stand_with(begin, wait_seconds=0.5)
    client = stand.client("Bearer ada")
    asked = await ask(client)
    assert (await do(client, "ask aside")).text == "refused"
    assert tool.refused == [mcp.INVALID_PARAMS]
    assert (await do(client, "nothing")).outcome == BUSY, "from now on it is known that not all questions name calls"
    assert await answer(client, asked) == "accept"


async def test_a_question_aside_belongs_to_the_only_call_that_there_is(
    upstream: FakeUpstream, tool: Tool, ada: Client
) -> None:
    owner = await ask(ada)
    joiner = later(do(ada, "ask aside when told"))
    await upstream.saw("tools/call", 2)
    assert await answer(ada, owner) == "accept"
    tool.go.set()
    asked = await joiner
    assert asked.questions
    assert await answer(ada, asked) == "accept"
    assert set(sessions(upstream)) == {"s1"}


# The one has ended with -32042, and its session is kept for when it is sent again; of the other its tool gave up.
@pytest.mark.parametrize("asks", ["want a page visited", "end with its question open"])
async def test_a_call_goes_beside_one_whose_user_is_asked_and_whose_tool_has_ended(
    upstream: FakeUpstream, tool: Tool, ada: Client, asks: str
) -> None:
    asked = await ask(ada, asks)
    tool.go.set()
    await eventually(lambda: not tool.running, "the tool has ended")
    assert (await do(ada, "nothing")).text == "done"
    assert await answer(ada, asked) == "done"
    assert set(sessions(upstream)) == {"s1"}


async def having_cancelled(begin: Start, upstream: FakeUpstream, what: str) -> Client:
    """Return a client that has given a call up."""
    stand = await stand_with(begin, hold={"grace_seconds": 0, "quiet_seconds": 0.02})
    client = stand.client("Bearer ada")
    task = later(do(client, what))
    await upstream.saw("tools/call")
    task.cancel()
    await upstream.saw(mcp.CANCELLED)
    return client


async def test_a_cancelled_call_gives_the_session_back_when_it_has_ended(
    upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    client = await having_cancelled(begin, upstream, "wait")
    tool.go.set()
    assert (await do(client, "nothing")).text == "done"
    assert set(sessions(upstream)) == {"s1"}


@pytest.mark.parametrize(("what", "next_session"), [("ask", "s1"), ("ask aside", "s2")])
async def test_a_cancelled_call_costs_the_session_if_a_question_of_it_may_still_be_under_way(
    what: str, next_session: str, upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    """Nothing is held, so a call that asks is cancelled; this one ends soon."""
    stand = await begin(route={**ROUTE, "continuation": "replay"})
    client = stand.client("Bearer ada")
    _ = await ask(client, what)
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: not tool.running, "the tool has ended")
    assert (await do(client, "nothing")).text == "done"
    assert sessions(upstream) == ["s1", next_session]


@pytest.mark.parametrize(("what", "next_session"), [("ask", "s1"), ("ask aside when told", "s2")])
async def test_the_call_of_a_joiner_that_was_given_up_costs_the_session_in_the_same_way(
    what: str, next_session: str, upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    stand = await stand_with(begin, hold={"ttl_seconds": 1})
    client = stand.client("Bearer ada")
    owner = await ask(client)
    joiner = later(do(client, what))
    await upstream.saw("tools/call", 2)
    assert await answer(client, owner) == "accept"
    tool.go.set()
    assert (await joiner).questions
    await upstream.saw(mcp.CANCELLED)
    await eventually(lambda: not tool.running, "the tool has ended")
    assert (await do(client, "nothing")).text == "done"
    assert sessions(upstream) == ["s1", "s1", next_session]


async def test_a_call_that_never_ends_costs_the_session_after_a_while(
    upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    client = await having_cancelled(begin, upstream, "hang")
    assert (await do(client, "nothing")).text == "done"
    assert sessions(upstream) == ["s1", "s2"]


async def test_a_refreshed_token_is_checked_beside_the_call_that_has_the_session(
    upstream: FakeUpstream, tool: Tool, stand: Stand
) -> None:
    old, new = (stand.client(jwt(iss="i", sub="ada", client_id="c", jti=jti)) for jti in ("old", "new"))
    call = later(do(old, "wait"))
    await upstream.saw("tools/call")
    assert (await new.post(mcp.DISCOVER)).status == 200
    assert [seen.session for seen in upstream.of(mcp.PING)] == ["s1"]
    tool.go.set()
    assert (await call).text == "done"
    assert not upstream.of("DELETE")


async def test_a_refreshed_token_is_checked_beside_a_call_that_joined_the_session(
    upstream: FakeUpstream, tool: Tool, stand: Stand
) -> None:
    old, new = (stand.client(jwt(iss="i", sub="ada", client_id="c", jti=jti)) for jti in ("old", "new"))
    first, second = await ask(old), await ask(old)
    again = await new.call(arguments={"do": "ask"}, state=second.state, answers={})
    assert again.questions == second.questions
    assert [seen.session for seen in upstream.of(mcp.PING)] == ["s1"]
    assert [await answer(new, each) for each in (first, second)] == ["accept", "accept"]
    assert not upstream.of("DELETE")


async def test_a_forged_token_does_not_end_the_session_of_the_one_it_names(
    upstream: FakeUpstream, tool: Tool, stand: Stand
) -> None:
    real, forged = (jwt(iss="i", sub="ada", client_id="c", jti=jti) for jti in ("real", "forged"))
    upstream.on("tools/call", challenge(401, only=real, plain=tool.tool))
    ada = stand.client(real)
    assert await answer(ada, await ask(ada, "ask aside")) == "accept"
    assert (await do(stand.client(forged), "nothing")).status == 401
    assert (await do(stand.client(real), "nothing")).text == "done"
    assert set(sessions(upstream)) == {"s1"}
    assert not upstream.of("DELETE")


async def test_a_subscription_has_a_session_of_its_own(upstream: FakeUpstream, tool: Tool, begin: Start) -> None:
    stand = await stand_with(begin, wait_seconds=0.5)
    client = stand.client("Bearer ada")
    await do(client, "nothing")
    async with client.open(mcp.LISTEN, {"notifications": {"toolsListChanged": True}}) as stream:
        _ = await stream.content.readany()
        assert (await do(client, "nothing")).text == "done"
    await upstream.saw("DELETE")
    assert (await do(client, "nothing")).text == "done"
    assert set(sessions(upstream)) == {"s1"}
    assert upstream.of("DELETE")[0].session == "s2"


async def test_a_session_that_is_given_up_is_not_ended_under_its_joiners(
    upstream: FakeUpstream, tool: Tool, stand: Stand, ada: Client
) -> None:
    owner, joiner = await ask(ada), await ask(ada)
    assert await answer(ada, owner) == "accept"
    stand.gateway.routes.live["/mcp"].upstream.pool.retire()
    assert (await do(ada, "nothing")).text == "done"
    await upstream.saw("DELETE")
    assert [seen.session for seen in upstream.of("DELETE")] == ["s2"]
    assert await answer(ada, joiner) == "accept"


async def test_an_idle_session_is_not_ended_under_its_joiners(
    upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    stand = await stand_with(begin, sessions={"idle_seconds": 0.05})
    client = stand.client("Bearer ada")
    owner, joiner = await ask(client), await ask(client)
    assert await answer(client, owner) == "accept"
    swept = asyncio.get_running_loop().time() + 0.2
    await eventually(lambda: asyncio.get_running_loop().time() > swept, "some sweeps have been")
    assert not upstream.of("DELETE")
    assert await answer(client, joiner) == "accept"
    await upstream.saw("DELETE")
    assert len(upstream.of("initialize")) == 1


async def test_a_session_is_neither_used_nor_ended_in_which_the_call_of_a_joiner_may_still_run(
    upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    stand = await stand_with(begin, sessions={"quarantine_seconds": 0.05})
    client = stand.client("Bearer ada")
    owner = await ask(client)
    hanging = later(do(client, "hang"))
    await upstream.saw("tools/call", 2)
    await leave(hanging)
    await eventually(upstream.of("tools/call")[1].cut.is_set, "the gateway has given the call up")
    assert await answer(client, owner) == "accept"
    assert (await do(client, "nothing")).text == "done"
    assert sessions(upstream) == ["s1", "s1", "s2"]
    await stand.gateway.close()
    assert [seen.session for seen in upstream.of("DELETE")] == ["s2"]


async def test_an_idle_session_makes_room_once_its_joiners_have_left(
    upstream: FakeUpstream, tool: Tool, begin: Start
) -> None:
    stand = await stand_with(begin, sessions={"max": 1})
    ada, bob = stand.client("Bearer ada"), stand.client("Bearer bob")
    owner, joiner = await ask(ada), await ask(ada)
    assert await answer(ada, owner) == "accept"
    waiting = later(do(bob, "nothing"))
    pool = stand.gateway.routes.live["/mcp"].upstream.pool
    await eventually(lambda: pool.waiting, "it waits for room")
    assert await answer(ada, joiner) == "accept"
    assert (await waiting).text == "done"
    assert [seen.session for seen in upstream.of("DELETE")] == ["s1"]


async def test_a_session_that_the_upstream_forgot_is_opened_anew_for_all(
    upstream: FakeUpstream, tool: Tool, ada: Client
) -> None:
    parked = await ask(ada)
    upstream.known.clear()
    assert (await do(ada, "nothing")).text == "done"
    assert (await do(ada, "nothing")).text == "done"
    assert sessions(upstream) == ["s1", "s1", "s2", "s2"]
    assert (await ada.answer(parked)).outcome == (200, -32603, "call_lost")
    assert (await do(ada, "nothing")).text == "done"
    assert len(upstream.of("initialize")) == 2

"""Several sessions in one child: who hears what, and what ends with whom (the child is a fake)."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Final

import pytest
from msgspec import Raw

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost
from gateway.upstream.channel import NO_HEADERS, Hearer, SideListener
from gateway.upstream.children.shared_child import ChildHolder, SharedChannel
from tests.support.fake_child import FakeChild, FakeLauncher
from tests.support.workbench import eventually, later

GREETING: Final = jsonrpc.request(b'"init"', mcp.INITIALIZE, {"clientInfo": {"name": "a"}})
OTHER: Final = jsonrpc.request(b'"init"', mcp.INITIALIZE, {"clientInfo": {"name": "b"}})
READY: Final = jsonrpc.notification(mcp.INITIALIZED)


class Launcher(FakeLauncher):
    """A FAKE launcher, of children that answer the handshake and else say what the test has them say."""

    answers = True
    """Whether the next children answer the handshake."""

    def new_child(self) -> FakeChild:
        return GreetingChild(self.client) if self.answers else super().new_child()


class GreetingChild(FakeChild):
    """A FAKE child, which answers the handshake."""

    async def send(self, message: bytes) -> None:
        await super().send(message)
        if self.methods[-1] == mcp.INITIALIZE:
            self.say(id=self.sent[-1]["id"], result={"serverInfo": {}})


class Session(SideListener):
    """A session in the child, with what it has heard."""

    def __init__(self, channel: SharedChannel) -> None:
        self.channel = channel
        self.aside: list[bytes] = []
        self.heard: list[bytes] = []
        self.losses = 0

    async def open(self, greeting: bytes = GREETING) -> "Session":
        await self.channel.initialize(greeting, NO_HEADERS)
        await self.channel.listen("2025-11-25", NO_HEADERS, self)
        await self.channel.send(READY, NO_HEADERS)
        return self

    def hear_side(self, data: bytes) -> None:
        self.aside.append(data)

    def side_closed(self, *, was_open: bool) -> None:
        self.losses += was_open

    def ask(self, id_: bytes, method: str, **params: Any) -> Awaitable[Any]:
        request = jsonrpc.request(id_, method, params)
        sending = self.channel.request(request, NO_HEADERS, Ear(id_, self.heard))
        return later(sending)


class Ear(Hearer):
    """Hears the messages of one request."""

    def __init__(self, id_: bytes, heard: list[bytes]) -> None:
        self._id, self._heard = Raw(id_), heard

    def hear(self, data: bytes, /) -> bool:
        self._heard.append(data)
        return jsonrpc.message(data).id == self._id


class Bench:
    def __init__(self) -> None:
        self.launcher = Launcher()
        self.holder = ChildHolder(self.launcher)

    async def session(self, greeting: bytes = GREETING) -> Session:
        return await Session(SharedChannel(self.holder)).open(greeting)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_sessions_of_one_client_share_the_child_and_its_handshake(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    (child,) = bench.launcher.children
    assert child.methods == [mcp.INITIALIZE, mcp.INITIALIZED]
    await first.channel.close(end_session=True)
    await second.channel.close(end_session=True)
    assert not child.is_closed
    _ = await bench.session()
    assert len(bench.launcher.children) == 1


async def test_another_handshake_gets_another_child_and_the_first_one_ends_with_its_last_session(
    bench: Bench,
) -> None:
    first = await bench.session()
    _ = await bench.session(OTHER)
    old, new = bench.launcher.children
    assert not old.is_closed
    await first.channel.close(end_session=True)
    assert old.is_closed
    assert not new.is_closed


async def test_a_child_whose_handshake_is_given_up_is_ended(bench: Bench) -> None:
    bench.launcher.answers = False
    opening = later(bench.session())
    await eventually(lambda: bench.launcher.children and bench.launcher.children[0].sent)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        _ = await opening
    bench.launcher.answers = True
    _ = await bench.session()
    assert [child.is_closed for child in bench.launcher.children] == [True, False]


async def test_an_answer_reaches_the_session_that_asked(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    asked = first.ask(b"1", mcp.TOOLS_LIST), second.ask(b"2", mcp.TOOLS_LIST)
    await asyncio.sleep(0)
    (child,) = bench.launcher.children
    child.say(id=2, result={})
    child.say(id=1, result={})
    _ = await asyncio.gather(*asked)
    assert (len(first.heard), len(second.heard)) == (1, 1)
    child.say(id=7, result={})


async def test_a_question_reaches_the_session_whose_call_may_ask(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    listing, calling = first.ask(b"1", mcp.TOOLS_LIST), second.ask(b"2", mcp.TOOLS_CALL, name="ask")
    await asyncio.sleep(0)
    (child,) = bench.launcher.children
    child.say(id=9, method=mcp.ELICIT, params={})
    assert (first.heard, len(second.heard)) == ([], 1)
    for number in (1, 2):
        child.say(id=number, result={})
    _ = await asyncio.gather(listing, calling)


async def test_a_question_of_a_task_reaches_the_session_that_waits_for_its_result(bench: Bench) -> None:
    idle, waiting = await bench.session(), await bench.session()
    (child,) = bench.launcher.children
    result = waiting.ask(b"1", mcp.TASKS_RESULT, taskId="t")
    await eventually(lambda: child.methods[-1] == mcp.TASKS_RESULT)
    child.say(id="q", method=mcp.ELICIT, params={})
    child.say(id=1, result={})
    await result
    assert (len(waiting.heard), idle.aside) == (2, [])


async def test_a_change_reaches_one_session_which_tells_the_others(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    bench.launcher.children[0].say(method=mcp.TOOLS_CHANGED)
    assert (len(first.aside), len(second.aside)) == (1, 0)


async def test_the_child_is_subscribed_until_the_last_session_unsubscribes(bench: Bench) -> None:
    sessions = await bench.session(), await bench.session()
    (child,) = bench.launcher.children
    for method in (mcp.SUBSCRIBE, mcp.UNSUBSCRIBE):
        for number, session in enumerate(sessions):
            asked = session.ask(b"%d" % number, method, uri="note://x")
            await asyncio.sleep(0)
            child.say(id=number, result={})
            _ = await asked
    assert child.methods.count(mcp.UNSUBSCRIBE) == 1
    assert child.methods[-1] == mcp.UNSUBSCRIBE


async def test_a_session_that_never_subscribed_ends_no_subscription_of_another_one(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    (child,) = bench.launcher.children
    order = [(first, mcp.UNSUBSCRIBE), (first, mcp.SUBSCRIBE), (second, mcp.SUBSCRIBE), (first, mcp.UNSUBSCRIBE)]
    for number, (session, method) in enumerate(order):
        asked = session.ask(b"%d" % number, method, uri="note://x")
        await asyncio.sleep(0)
        child.say(id=number, result={})
        _ = await asked
    assert child.methods[-1] == mcp.SUBSCRIBE, "the second session is subscribed still"


async def test_the_end_of_the_child_is_the_end_of_all_its_sessions(bench: Bench) -> None:
    first, second = await bench.session(), await bench.session()
    asked = first.ask(b"1", mcp.TOOLS_CALL, name="die")
    await asyncio.sleep(0)
    bench.launcher.children[0].over.set_result("ended (exit code 7)")
    with pytest.raises(CallLost, match="may have had effects"):
        await asked
    assert (first.losses, second.losses) == (1, 1)
    _ = await bench.session()
    assert len(bench.launcher.children) == 2


async def given_up(session: Session, id_: bytes) -> None:
    asked = session.ask(id_, mcp.TOOLS_CALL, name="ask")
    await asyncio.sleep(0)
    asked.cancel()  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        _ = await asked
    await session.channel.close(end_session=False)


async def test_a_question_of_a_call_that_was_given_up_reaches_no_other_call(bench: Bench) -> None:
    await given_up(await bench.session(), b"1")
    second, third = await bench.session(), await bench.session()
    (child,) = bench.launcher.children
    calling = second.ask(b"2", mcp.TOOLS_CALL, name="ask")
    await asyncio.sleep(0)
    child.say(id=9, method=mcp.ELICIT, params={})
    assert second.heard == second.aside == third.aside == []
    assert (child.sent[-1]["id"], child.sent[-1]["error"]["code"]) == (9, mcp.INVALID_PARAMS)
    assert (second.losses, third.losses) == (1, 1), "they end with their calls"
    child.say(id=10, method=mcp.ELICIT, params={})
    assert (child.sent[-1]["id"], second.losses) == (10, 1)
    child.say(id=2, result={})
    _ = await calling
    await second.channel.close(end_session=True)
    assert not child.is_closed
    await third.channel.close(end_session=True)
    assert child.is_closed
    _ = await bench.session()
    assert len(bench.launcher.children) == 2


async def test_a_call_that_was_given_up_and_answered_makes_no_question_unclear(bench: Bench) -> None:
    await given_up(await bench.session(), b"1")
    second = await bench.session()
    (child,) = bench.launcher.children
    child.say(id=1, error={"code": 0, "message": "Request cancelled"})
    calling = second.ask(b"2", mcp.TOOLS_CALL, name="ask")
    await asyncio.sleep(0)
    child.say(id=9, method=mcp.ELICIT, params={})
    assert len(second.heard) == 1
    child.say(id=2, result={})
    _ = await calling
    assert second.losses == 0


async def test_what_is_no_question_stays_clear_after_a_call_was_given_up(bench: Bench) -> None:
    await given_up(await bench.session(), b"1")
    second = await bench.session()
    (child,) = bench.launcher.children
    child.say(id=8, method=mcp.ELICIT, params={})
    assert len(second.aside) == 1, "no call is in flight that it could be mistaken for"
    calling = second.ask(b"2", mcp.TOOLS_CALL, name="count")
    await asyncio.sleep(0)
    child.say(id=9, method=mcp.PING)
    child.say(method=mcp.LOG, params={})
    child.say(id=2, result={})
    _ = await calling
    assert (len(second.heard), second.losses) == (3, 0)

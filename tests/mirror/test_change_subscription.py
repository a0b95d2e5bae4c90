"""The changes at a server of which one legacy session hears (the server is a fake)."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.bridge.subscription import Filter
from gateway.mirror import change_subscription as module
from gateway.mirror.change_subscription import Changes
from gateway.mirror.client_requests import Profile
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, InvalidParams, Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.support.fake_server import FakeServer, Sent
from tests.support.workbench import eventually, later

PROFILE = Profile(mcp.LEGACY, b'{"name":"c","version":"1"}', b"{}")
HEADERS = {"Authorization": "x"}


class Bench:
    """One session before a server whose every word the test says."""

    def __init__(self, tasks: Tasks) -> None:
        self.server, self.tasks = FakeServer(), tasks
        self.told: list[str | None] = []
        self.given_up = 0
        self.changes = Changes(self.server, tasks, PROFILE, self._told, self._gave_up)

    def _told(self, message: bytes) -> None:
        self.told.append(jsonrpc.message(message).method)

    def _gave_up(self) -> None:
        self.given_up += 1

    def subscribe(self, uri: str, method: str = mcp.SUBSCRIBE) -> "asyncio.Task[None]":
        return later(self.changes.change(method, uri, HEADERS))

    @property
    def streams(self) -> list[Sent]:
        return self.server.of(mcp.LISTEN)

    def wanted(self) -> list[str]:
        """The resources of the newest stream."""
        found: list[str] = self.streams[-1].params["notifications"]["resourceSubscriptions"]
        return found

    async def opened(self, count: int) -> Sent:
        """The newest of so many streams."""
        await eventually(lambda: len(self.streams) >= count)
        assert len(self.streams) == count
        return self.streams[-1]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    tasks = Tasks(Metrics("0"))
    found = Bench(tasks)
    yield found
    found.changes.close()
    await eventually(lambda: not tasks, "no task is left")
    assert tasks.failures == 0
    assert all(each.is_aborted for each in found.streams[-1:])


async def settle() -> None:
    """Let the tasks run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_last_of_several_streams_has_everything_that_is_wanted(bench: Bench) -> None:
    both = [bench.subscribe("a:b"), bench.subscribe("c:d")]
    first = await bench.opened(1)
    await settle()
    assert len(bench.streams) == 1, "the second is not open while the first is not acknowledged"
    first.acknowledges("a:b")
    second = await bench.opened(2)
    assert bench.wanted() == ["a:b", "c:d"]
    second.acknowledges("a:b", "c:d")
    _ = await asyncio.gather(*both)
    assert (first.is_aborted, second.is_aborted) == (True, False)
    await bench.changes.change(mcp.SUBSCRIBE, "a:b", HEADERS)
    assert len(bench.streams) == 2


async def test_a_session_that_begins_to_listen_goes_on_until_the_server_can_be_reached(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.0,))
    bench.changes.begin(HEADERS)
    (await bench.opened(1)).fails(Unreachable("refused the connection"))
    (await bench.opened(2)).acknowledges()
    await eventually(lambda: bench.told == [mcp.TOOLS_CHANGED], "something may have changed meanwhile")


async def test_a_session_that_listens_at_once_has_missed_nothing(bench: Bench) -> None:
    bench.changes.begin(HEADERS)
    stream = await bench.opened(1)
    stream.says(method=mcp.TOOLS_CHANGED)
    stream.acknowledges()
    await settle()
    stream.says(method=mcp.PROMPTS_CHANGED)
    assert bench.told == [mcp.PROMPTS_CHANGED]


async def test_a_session_that_begins_to_listen_while_a_lost_stream_is_opened_again_gets_one_stream(
    bench: Bench,
) -> None:
    subscribed = bench.subscribe("a:b")
    first = await bench.opened(1)
    first.acknowledges("a:b")
    await subscribed
    first.completes()
    bench.changes.begin(HEADERS)
    (await bench.opened(2)).acknowledges("a:b")
    await settle()
    assert len(bench.streams) == 2


async def test_what_an_acknowledgement_says_of_tasks_is_not_looked_at(bench: Bench) -> None:
    subscribed = bench.subscribe("a:b")
    stream = await bench.opened(1)
    stream.says(method=mcp.ACKNOWLEDGED, params={"notifications": {"resourceSubscriptions": ["a:b"], "taskIds": None}})
    await subscribed


async def test_resources_are_kept_in_the_order_in_which_they_were_subscribed_to(bench: Bench) -> None:
    """The id of an event names as many of them as fit: always the same ones, whatever the hashes of this process."""
    uris = [f"a:{number}" for number in range(12, 0, -1)]
    bench.changes.add(uris)
    unsubscribed = bench.subscribe("a:5", mcp.UNSUBSCRIBE)
    (await bench.opened(1)).acknowledges()
    await unsubscribed
    assert list(bench.changes.uris) == [uri for uri in uris if uri != "a:5"]


async def test_a_stream_that_is_refused_leaves_the_one_before(bench: Bench) -> None:
    subscribed = bench.subscribe("a:b")
    first = await bench.opened(1)
    first.acknowledges("a:b")
    await subscribed
    refused = bench.subscribe("c:d")
    (await bench.opened(2)).says(error={"code": mcp.INVALID_PARAMS, "message": "no"})
    with pytest.raises(InvalidParams):
        await refused
    await settle()
    first.says(method=mcp.TOOLS_CHANGED)
    assert (len(bench.streams), bench.told, first.is_aborted) == (2, [mcp.TOOLS_CHANGED], False)
    another = bench.subscribe("e:f")
    (await bench.opened(3)).acknowledges("a:b", "e:f")
    await another
    assert first.is_aborted


async def test_a_refused_subscription_is_not_asked_for_again(bench: Bench) -> None:
    refused = bench.subscribe("a:b")
    (await bench.opened(1)).acknowledges()
    with pytest.raises(InvalidParams):
        await refused
    other = bench.subscribe("c:d")
    (await bench.opened(2)).acknowledges("c:d")
    await other
    assert bench.wanted() == ["c:d"]


@pytest.mark.parametrize("turns", [0, 5])
async def test_a_stream_that_ends_with_its_acknowledgement_is_opened_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    async def in_time(answer: "asyncio.Future[Filter]", _: str) -> Filter:
        honoured = await answer
        for _turn in range(turns):  # its end may be noticed before it, or after it
            await asyncio.sleep(0)
        return honoured

    monkeypatch.setattr(module, "in_time", in_time)
    listening = later(bench.changes.listen(HEADERS))
    first = await bench.opened(1)
    first.acknowledges()
    first.completes()
    _ = await listening
    (await bench.opened(2)).acknowledges()
    await eventually(lambda: bench.told == [mcp.TOOLS_CHANGED])


async def test_a_server_that_ends_every_stream_is_asked_only_so_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSES", (0.0,))
    monkeypatch.setattr(module, "_TRIES", 4)
    listening = later(bench.changes.listen(HEADERS))
    for count in range(1, 6):
        stream = await bench.opened(count)
        stream.acknowledges()
        stream.completes()
    _ = await listening
    await eventually(lambda: not bench.tasks)
    assert (len(bench.streams), bench.given_up) == (5, 1)
    again = later(bench.changes.listen(HEADERS))
    (await bench.opened(6)).acknowledges()
    _ = await again


async def test_nothing_that_began_before_the_close_listens_after_it(bench: Bench) -> None:
    first, second = bench.subscribe("a:b"), bench.subscribe("c:d")
    stream = await bench.opened(1)
    await settle()
    stream.acknowledges("a:b")
    bench.changes.close()
    for each in (first, second):
        with pytest.raises(CallLost):
            await each
    assert (len(bench.streams), stream.is_aborted) == (1, True)


async def test_the_uris_of_a_session_have_a_limit_in_bytes(bench: Bench) -> None:
    with pytest.raises(InvalidParams, match="65536 bytes"):
        await bench.changes.change(mcp.SUBSCRIBE, "a:" + "x" * 65_535, HEADERS)
    assert bench.streams == []

"""How the era of a command is found out: each way in which a child may answer the probe (all parts are fakes)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from gateway.children.child import Child
from gateway.children.stderr_log import StderrLog
from gateway.protocol.errors import CallLost, Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from gateway.telemetry.recent_errors import RecentErrors
from gateway.telemetry.upstream_health import UpstreamHealth
from gateway.upstream.children import stdio_era
from gateway.upstream.children.modern_stdio import ModernStdio
from gateway.upstream.children.stdio_era import StdioEra
from tests.support.fake_child import FakeChild, FakeLauncher
from tests.support.logs import Lines

DISCOVERED: Final = {"result": {"supportedVersions": ["2026-07-28"], "capabilities": {}}}
UNKNOWN: Final = {"error": {"code": -32601, "message": "Method not found"}}
UNSUPPORTED: Final = {"error": {"code": -32022, "message": "no", "data": {"supported": ["2026-07-28"]}}}
GREETED: Final = {"result": {"protocolVersion": "2025-11-25", "capabilities": {}}}
ENDS: Final = "ends"
SILENT: Final = "says nothing"
UNREAD: Final = "does not read its input"
COMPLAINT: Final = (
    b"loading\n  the database\nWARNING:root:Failed to validate request: 31 validation errors for ClientRequest\n"
    + b"PingRequest.method\n  Input should be 'ping' %b\n" % (b"x" * 900) * 100  # it takes many turns of the loop
    + b"loading FAILED\n  of the database\nserver/discover: unknown\n"
)
"""What a Python SDK writes about the probe, between what it has to say in any case."""
OWN_WORDS: Final = ["loading", "  the database", "loading FAILED", "  of the database"]


class AnsweringChild(FakeChild):
    """A FAKE child, which answers each method in its own way."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self._answers = answers

    async def send(self, message: bytes) -> None:
        await super().send(message)
        asked = self.sent[-1]
        answer = self._answers[asked["method"]]
        self.stderr_log.data_received(COMPLAINT)
        if answer is UNREAD:
            raise CallLost(UNREAD)
        if answer is ENDS:
            self.over.set_result("ended (exit code 1)")
        elif answer is not SILENT:
            self.say(method="notifications/message", params={})
            self.say(id=asked["id"], **answer)


class Launcher(FakeLauncher):
    """A FAKE launcher of fake children."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self.answers = answers
        self.kept: list[Child] = []
        self.fails = False

    async def take(self) -> FakeChild:
        if self.fails:
            raise Unreachable("cannot be started")
        return await super().take()

    def new_child(self) -> FakeChild:
        return AnsweringChild(self.answers)

    def keep(self, child: Child) -> None:
        self.kept.append(child)


class Bench:
    """The era of one command."""

    def __init__(self, tasks: Tasks, **answers: Any) -> None:
        given = {"server/discover": answers.get("discover"), "initialize": answers.get("initialize")}
        self.launcher = Launcher(given)
        metrics = Metrics("test", ["/mcp"])
        health = UpstreamHealth("/mcp", metrics, RecentErrors(), url=None)
        self.modern = ModernStdio(self.launcher, metrics)
        self.era = StdioEra(self.launcher, self.modern, tasks, health)


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    found = Tasks(Metrics("test", []))
    yield found
    await found.close()


@pytest.mark.parametrize("answer", [DISCOVERED, UNSUPPORTED])
async def test_a_modern_answer_shows_a_modern_server_whose_child_is_used(answer: Any, tasks: Tasks) -> None:
    bench = Bench(tasks, discover=answer)
    assert await asyncio.gather(*(bench.era.is_modern() for _ in range(5))) == [True] * 5
    (child,) = bench.launcher.children
    assert bench.modern.child is child
    assert not child.asked


async def test_any_other_error_shows_a_legacy_server_whose_child_serves_a_session(tasks: Tasks) -> None:
    bench = Bench(tasks, discover=UNKNOWN)
    assert not await bench.era.is_modern()
    assert not await bench.era.is_modern()
    assert bench.launcher.kept == bench.launcher.children
    assert bench.launcher.children[0].methods == ["server/discover"]


@pytest.mark.usefixtures("busy_clock")
@pytest.mark.parametrize("answer", [UNKNOWN, DISCOVERED, ENDS])
async def test_only_what_a_server_complains_of_the_probe_is_at_debug(
    answer: Any, tasks: Tasks, log_lines: Lines
) -> None:
    bench = Bench(tasks, discover=answer)
    _ = await bench.era.is_modern()
    (child,) = bench.launcher.children
    levels: dict[str, list[str]] = {"info": [], "debug": []}
    child.stderr_log.data_received(b"server/discover: later\n")
    for line in log_lines("child.stderr"):
        levels[line["level"]].append(line["text"])
    assert levels["info"] == [*OWN_WORDS, "server/discover: later"]
    assert len(levels["debug"]) == 202
    assert [*child.stderr_log.last][1:3] == OWN_WORDS[2:], "the report of its end has them"


async def test_a_complaint_has_a_bound(log_lines: Lines) -> None:
    log = StderrLog("/mcp", ())
    log.expect_complaint()
    log.data_received(b"Failed to validate request\n")
    for _ in range(600):
        log.data_received(b"  and so on\n")
    assert len([line for line in log_lines("child.stderr") if line["level"] == "debug"]) == 500


async def test_a_child_that_ends_counts_as_legacy_for_a_while_and_not_as_a_failure(tasks: Tasks) -> None:
    bench = Bench(tasks, discover=ENDS)
    assert not await bench.era.is_modern()
    assert bench.era.known is None
    assert bench.launcher.children[0].asked, "its end is expected"
    assert not await bench.era.is_modern()
    assert len(bench.launcher.children) == 1, "it is not asked again at once"


async def test_a_server_that_took_a_handshake_is_asked_no_more(tasks: Tasks) -> None:
    bench = Bench(tasks, discover=ENDS)
    assert not await bench.era.is_modern()
    bench.launcher.has_initialized = True
    assert not await bench.era.is_modern()
    assert bench.era.known is False


async def test_silence_costs_a_bounded_time_and_the_child(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio_era, "_PROBE_SECONDS", 0.01)
    bench = Bench(tasks, discover=SILENT)
    assert not await bench.era.is_modern()
    assert bench.launcher.children[0].is_closed
    assert bench.launcher.kept == []


async def test_a_command_that_cannot_start_says_nothing_of_its_era(tasks: Tasks) -> None:
    bench = Bench(tasks, discover=DISCOVERED)
    bench.launcher.fails = True
    assert not await bench.era.is_modern()
    assert bench.era.known is None


async def test_only_a_refused_handshake_shows_a_modern_only_server(tasks: Tasks) -> None:
    for answer, is_only in ((UNSUPPORTED, True), (GREETED, False)):
        bench = Bench(tasks, discover=DISCOVERED, initialize=answer)
        assert await bench.era.is_modern_only() is is_only
        assert await bench.era.is_modern_only() is is_only
        serving, asked = bench.launcher.children
        assert (serving.methods, asked.methods) == (["server/discover"], ["initialize"])


async def test_a_legacy_server_is_not_asked_whether_it_is_modern_only(tasks: Tasks) -> None:
    bench = Bench(tasks, discover=UNKNOWN)
    assert not await bench.era.is_modern_only()
    assert bench.launcher.children[0].methods == ["server/discover"]


async def test_requests_at_once_ask_for_one_handshake(tasks: Tasks) -> None:
    bench = Bench(tasks, discover=DISCOVERED, initialize=UNSUPPORTED)
    assert await asyncio.gather(*(bench.era.is_modern_only() for _ in range(5))) == [True] * 5
    serving, asked = bench.launcher.children
    assert (serving.methods, asked.methods) == (["server/discover"], ["initialize"])


async def test_a_request_that_comes_as_the_first_probe_ends_still_asks_for_a_handshake(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tasks, discover=DISCOVERED, initialize=UNSUPPORTED)
    coming: list[asyncio.Task[bool]] = []

    def probed(*, is_modern: bool | None) -> None:  # the last thing that the probe does
        assert is_modern
        coming.append(asyncio.create_task(bench.era.is_modern_only()))

    monkeypatch.setattr(bench.era._health, "era_probed", probed)
    assert await bench.era.is_modern()
    assert await coming[0]


async def test_a_modern_server_with_room_for_no_legacy_session_is_modern_only(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio_era, "_PROBE_SECONDS", 0.01)
    bench = Bench(tasks, discover=DISCOVERED, initialize=GREETED)
    bench.launcher.room = 1
    assert await bench.era.is_modern_only()


@pytest.mark.parametrize(
    ("answers", "refusing"),
    [({"discover": UNREAD}, 0), ({"discover": DISCOVERED, "initialize": UNREAD}, 1)],
    ids=["discover", "initialize"],
)
async def test_a_child_that_does_not_take_the_probe_is_ended(
    tasks: Tasks, answers: dict[str, Any], refusing: int
) -> None:
    bench = Bench(tasks, **answers)
    assert not await bench.era.is_modern_only()
    await tasks.settle(5)
    assert [child.is_closed for child in bench.launcher.children] == [False] * refusing + [True]

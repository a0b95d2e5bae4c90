"""The link of one mirrored call, once the call has become a task."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import Raw

from gateway.exchange import events as on
from gateway.exchange import input_requests
from gateway.mirror.call_report import CallReport
from gateway.mirror.call_runner import CallServer, Runner
from gateway.mirror.client_requests import answer_of
from gateway.mirror.tool_catalog import ToolCatalog
from gateway.protocol import mcp
from gateway.protocol.errors import CallLost, GatewayError, Refused, Unreachable
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics
from tests.mirror.test_call_rounds import ACCEPT, answer, call
from tests.mirror.test_task_call import NEEDS_TASKS
from tests.support.fake_modern import FORM
from tests.support.fake_server import FakeServer, Sent, fake_live
from tests.support.workbench import eventually

HEADERS = {"Authorization": "x"}


class FakeExchange:
    """A FAKE exchange, which writes down what it hears, and releases the link at the end."""

    def __init__(self) -> None:
        self.asked: list[input_requests.Question] = []
        self.ended: list[bytes] = []
        self.failed: list[GatewayError] = []
        self.places = 0
        self.link: Runner
        self.request_id = ""

    def hear(self, event: on.Event) -> None:
        match event:
            case on.Asked(questions):
                self.asked += questions
                return
            case on.Sent():
                self.places += 1
                return
            case on.Resulted(result):
                self.ended.append(bytes(result))
            case on.Broke(error):
                self.failed.append(error)
            case _:
                raise AssertionError(event)
        self.link.release()


class Stage:
    """One call whose tool the gateway knows, before a server that the test plays."""

    def __init__(self, tasks: Tasks, seconds: float = 60.0, *, is_child: bool = False) -> None:
        self.server, self.hears, self.tasks = FakeServer(), FakeExchange(), tasks
        catalog = ToolCatalog()
        if is_child:
            self.server.reads_headers = False
        else:
            catalog.learn(("/mcp", b"ada"), {}, Raw(b'{"tools":[{"name":"t","inputSchema":{"type":"object"}}]}'))
        upstream, rounds = CallServer(fake_live(tasks, seconds), self.server, catalog, ("/mcp", b"ada")), call()
        report = CallReport(upstream.live, rounds, None)
        self.link = self.hears.link = Runner(rounds, upstream, self.hears, report, HEADERS)
        self.link.start()

    def answers(self, headers: dict[str, str], **members: Any) -> None:
        """The client answers the only question of the round."""
        (question,) = self.hears.asked
        self.link.headers = headers
        self.link.deliver(((question, answer_of(answer(**members))),), is_whole=True)

    @property
    def last(self) -> Sent:
        return self.server.sent[-1]

    async def begun(self) -> "Stage":
        """The stage, once the call is at the server."""
        _ = await self.next(1)
        return self

    async def next(self, count: int) -> Sent:
        """The request with that number, once it is at the server."""
        await eventually(lambda: len(self.server.sent) >= count, "the server is asked")
        return self.server.sent[count - 1]

    async def failed(self) -> GatewayError:
        """The error with which the call has failed."""
        await eventually(lambda: self.hears.failed, "the call fails")
        (error,) = self.hears.failed
        return error

    async def polled(self, count: int = 1) -> Sent:
        """The poll with that number, once it is at the server."""
        await eventually(lambda: len(self.server.of(mcp.TASKS_GET)) >= count, "the server is asked about the task")
        return self.server.of(mcp.TASKS_GET)[count - 1]

    async def task(self) -> Sent:
        """The first poll of a call that has become a task."""
        self.last.says(error={"code": mcp.MISSING_CAPABILITY, "message": "no", "data": NEEDS_TASKS})
        again = await self.next(2)
        again.says(result={"resultType": "task", "taskId": "t1", "status": "working", "pollIntervalMs": 1})
        return await self.polled()

    async def cancelled(self) -> Sent:
        """The request that cancels the task."""
        await eventually(lambda: self.server.of(mcp.TASKS_CANCEL), "the task is cancelled")
        (sent,) = self.server.of(mcp.TASKS_CANCEL)
        sent.completes()
        return sent


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks(Metrics("0"))
    yield tasks
    await eventually(lambda: not len(tasks), "nothing is under way")
    assert tasks.failures == 0


def says(sent: Sent, status: str, **more: Any) -> None:
    sent.completes(taskId="t1", status=status, pollIntervalMs=1, **more)


async def test_a_server_that_reads_no_headers_is_not_asked_for_its_tools(tasks: Tasks) -> None:
    stage = await Stage(tasks, is_child=True).begun()
    assert [sent.request.method for sent in stage.server.sent] == [mcp.TOOLS_CALL]
    stage.link.cancel()


async def test_a_task_is_polled_with_its_id_in_mcp_name(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    first = await stage.task()
    assert (first.request.target, first.request.headers, first.request.param_headers) == ("t1", HEADERS, {})
    says(first, "working")
    says(await stage.polled(2), "completed", result={"content": []})
    assert stage.hears.ended == [b'{"content":[]}']
    assert len(stage.server.of(mcp.TOOLS_CALL)) == 2
    assert not stage.server.of(mcp.TASKS_CANCEL)
    assert stage.hears.places == 3, "two calls and the new task, but no poll"


async def test_the_answers_of_the_client_go_to_the_task_with_its_newest_headers(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    says(await stage.task(), "input_required", inputRequests={"a": FORM})
    assert [each.key for each in stage.hears.asked] == ["a"]
    stage.answers({"Authorization": "newer"}, result=ACCEPT)
    update = await stage.next(4)
    assert (update.request.method, update.request.target) == (mcp.TASKS_UPDATE, "t1")
    assert update.request.headers == {"Authorization": "newer"}
    update.completes()
    says(await stage.polled(2), "completed", result={"content": []})
    assert len(stage.hears.ended) == 1


async def test_only_the_first_round_of_a_call_that_cannot_be_sent_has_had_no_effects(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    stage.last.fails(Unreachable("no connection"))
    assert isinstance(await stage.failed(), Unreachable)
    stage = await Stage(tasks).begun()
    stage.last.says(result={"resultType": "input_required", "inputRequests": {"a": FORM}, "requestState": "s"})
    stage.answers(HEADERS, result=ACCEPT)
    (await stage.next(2)).fails(Unreachable("no connection"))
    error = await stage.failed()
    assert isinstance(error, CallLost)
    assert "may have had effects" in error.message


@pytest.mark.parametrize("when", ["before a poll", "in a poll", "while it asks"])
async def test_a_task_is_cancelled_with_its_call(tasks: Tasks, when: str) -> None:
    stage = await Stage(tasks).begun()
    poll = await stage.task()
    if when != "in a poll":
        more = {"inputRequests": {"a": FORM}} if when == "while it asks" else {}
        says(poll, "input_required" if more else "working", **more)
    stage.link.cancel()
    sent = await stage.cancelled()
    assert (sent.params["taskId"], sent.request.target, sent.request.headers) == ("t1", "t1", HEADERS)
    await eventually(lambda: poll.is_aborted == (when == "in a poll"))
    stage.link.cancel()
    assert len(stage.server.of(mcp.TASKS_CANCEL)) == 1
    assert len(stage.server.of(mcp.TASKS_GET)) == 1
    assert stage.hears.ended == []
    assert stage.hears.failed == []


async def test_a_call_that_ends_without_its_task_cancels_it(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    says(await stage.task(), "input_required", inputRequests={"a": FORM})
    stage.answers(HEADERS, error={"code": -1, "message": "User rejected"})
    _ = await stage.cancelled()
    assert b"User rejected" in stage.hears.ended[0]


async def test_a_poll_that_failed_is_repeated(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    (await stage.task()).fails(Unreachable("no connection"))
    (await stage.polled(2)).says(error={"code": mcp.INTERNAL_ERROR, "message": "busy"})
    says(await stage.polled(3), "completed", result={"content": []})
    assert len(stage.hears.ended) == 1
    assert stage.hears.failed == []


async def test_a_task_is_lost_after_too_many_failures(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.mirror.call_runner._PAUSES", (0.0, 0.0))
    stage = await Stage(tasks).begun()
    (await stage.task()).fails(CallLost("one"))
    for number, word in ((2, "two"), (3, "three")):
        (await stage.polled(number)).fails(CallLost(word))
    assert (await stage.failed()).message == "three"
    _ = await stage.cancelled()


async def test_a_refused_credential_ends_the_call(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    (await stage.task()).fails(Refused("no", status=401, challenge=None, is_clients=True))
    assert isinstance(await stage.failed(), Refused)
    _ = await stage.cancelled()


async def test_a_task_has_a_time_limit(tasks: Tasks) -> None:
    stage = await Stage(tasks, seconds=0.0).begun()
    stage.last.says(result={"resultType": "task", "taskId": "t1", "status": "working", "pollIntervalMs": 1})
    assert "tasks.ttl_seconds" in (await stage.failed()).message
    _ = await stage.cancelled()
    assert not stage.server.of(mcp.TASKS_GET)


async def test_a_failed_call_that_is_no_task_yet_is_not_repeated(tasks: Tasks) -> None:
    stage = await Stage(tasks).begun()
    stage.last.fails(CallLost("gone"))
    assert isinstance(await stage.failed(), CallLost)
    assert len(stage.server.sent) == 1

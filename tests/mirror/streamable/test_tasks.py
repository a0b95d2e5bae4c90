"""Legacy clients of streamable HTTP whose tool runs as a task at a modern server."""

import asyncio
import json
from typing import Any

from gateway.mirror.streamable.tokens import EVENT
from gateway.protocol import mcp
from tests.mirror.conftest import Begin, sealed
from tests.mirror.streamable.test_front import ACCEPT, text
from tests.mirror.streamable.test_replica_routing import MIRROR, asked
from tests.mirror.test_task_call import NEEDS_TASKS
from tests.support.fake_modern import FORM, Call, FakeModern, Json
from tests.support.legacy_client import LegacyClient
from tests.support.replicas import Cluster
from tests.support.workbench import eventually, jwt, later


class Job:
    """A tool of the fake server that runs as a task only, and goes on when the test says so."""

    def __init__(self, server: FakeModern, **asks: Json) -> None:
        """It asks first if there are questions."""
        server.tools["job"] = self.call
        server.other |= {mcp.TASKS_GET: self.get, mcp.TASKS_UPDATE: self.update, mcp.TASKS_CANCEL: self.cancel}
        self.state: Json = {"status": "input_required", "inputRequests": asks} if asks else {"status": "working"}
        self.made = 0
        self.cancelled = False

    def call(self, call: Call) -> Json:
        if mcp.TASKS not in call.meta[mcp.META_CAPABILITIES].get("extensions", {}):
            return call.error(mcp.MISSING_CAPABILITY, data=NEEDS_TASKS)
        self.made += 1
        return {"result": {"resultType": "task", **self.named(), "status": "working"}}

    def named(self) -> Json:
        times = {"createdAt": "2026-01-01T00:00:00Z", "lastUpdatedAt": "2026-01-01T00:00:00Z"}
        return {"taskId": "t1", **times, "ttlMs": None, "pollIntervalMs": 100}

    def get(self, call: Call) -> Json:
        self.check(call)
        return {"result": {"resultType": "complete", **self.named(), **self.state}}

    def update(self, call: Call) -> Json:
        self.check(call)
        self.end(call, call.answers)
        return {"result": {"resultType": "complete"}}

    def cancel(self, call: Call) -> Json:
        self.check(call)
        self.cancelled = True
        self.state = {"status": "cancelled"}
        return {"result": {"resultType": "complete"}}

    def end(self, call: Call, value: Any) -> None:
        self.state = {"status": "completed", "result": call.text(value)["result"]}

    def check(self, call: Call) -> None:
        assert (call.params["taskId"], call.headers[mcp.NAME_HEADER]) == ("t1", "t1")
        assert call.headers[mcp.METHOD_HEADER] == call.body["method"]
        assert mcp.TASKS in call.meta[mcp.META_CAPABILITIES]["extensions"]


def names_task(client: LegacyClient, place: str) -> bool:
    """Whether a client that comes back with this event id continues a task."""
    tokens = sealed()
    return tokens.place(EVENT, place, tokens.sessions.open(client.headers[mcp.SESSION_ID]).key).progress.task == "t1"


async def test_a_tool_that_needs_a_task_is_an_ordinary_call(client: LegacyClient, server: FakeModern) -> None:
    job = Job(server, name=FORM)
    async with client.call("job") as stream:
        question = await stream.message()
        assert (question["method"], question["params"]) == (FORM["method"], FORM["params"])
        assert await client.answer(question, ACCEPT) == 202
        _ = await stream.place()
        last = await stream.event()
        assert text(json.loads(last.data)) == {"name": ACCEPT}, "a poll moves the place of no call"
    assert [mcp.TASKS in json.dumps(each["params"]["_meta"]) for each in server.of(mcp.TOOLS_CALL)] == [False, True]
    assert (job.made, job.cancelled) == (1, False)


async def test_a_route_may_refuse_tasks(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin(route={"tasks": {"undeclared": "refuse"}})).initialize()
    job = Job(server)
    async with client.call("job") as stream:
        assert (await stream.message())["result"]["isError"] is True
    assert job.made == 0


async def test_a_task_ends_with_a_client_that_stays_away(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin(hold={"ttl_seconds": 0.2})).initialize()
    job = Job(server)
    async with client.call("job"):
        await eventually(lambda: server.of(mcp.TASKS_GET), "the task is asked about")
    await eventually(lambda: job.cancelled, "the task is cancelled")


async def test_tasks_count_as_the_calls_of_their_caller(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin(hold={"max_calls_per_principal": 1})).initialize()
    job = Job(server)
    async with client.call("job") as stream:
        await eventually(lambda: server.of(mcp.TASKS_GET), "the task is asked about")
        async with client.call("job") as other:
            assert other.response.status == 200
            assert (await other.message())["error"]["data"]["reason"] == "busy"
        job.state = {"status": "failed", "error": {"code": -32050, "message": "broken"}}
        assert (await stream.message())["error"] == {"code": -32050, "message": "broken"}


async def test_a_task_outlives_the_replica_that_drives_it(server: FakeModern, cluster: Cluster) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **MIRROR)
    job = Job(server)
    client = await LegacyClient(one).initialize()
    async with client.call("job") as stream:
        while not names_task(client, place := await stream.place()):
            pass
        await cluster.crash(one)
    async with client.listen(place, url=two.url) as stream:
        _ = await stream.place()
        job.state = {"status": "input_required", "inputRequests": {"a": FORM}}
        question, _ = await asked(stream)
        assert await client.answer(question, ACCEPT, url=two.url) == 202
        assert text(await stream.message()) == {"a": ACCEPT}
    assert (job.made, job.cancelled) == (1, False)
    assert two.metric("mcp_gateway_continuations_total", step="resumed") == 1


async def test_the_question_of_a_task_outlives_its_replica(server: FakeModern, cluster: Cluster) -> None:
    one, two, three = await cluster.begin("gw-1", "gw-2", "gw-3", **MIRROR)
    job = Job(server, a=FORM)
    client = await LegacyClient(one).initialize()
    async with client.call("job") as stream:
        question, place = await asked(stream)
        await cluster.crash(one)
    assert await client.answer(question, ACCEPT, url=two.url) == 202
    async with client.listen(place, url=three.url) as stream:
        assert text(await stream.message()) == {"a": ACCEPT}
    assert (job.made, job.cancelled) == (1, False)
    assert len(server.of(mcp.TASKS_UPDATE)) == 1


async def test_a_task_that_changed_hands_ends_with_a_client_that_stays_away(
    server: FakeModern, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", **MIRROR, hold={"ttl_seconds": 0.2})
    job, token = Job(server, a=FORM), jwt(iss="i", sub="ada")
    client = await LegacyClient(one, headers={"Authorization": token}).initialize()
    async with client.call("job") as stream:
        _, place = await asked(stream)
        await cluster.crash(one)
    async with client.listen(place, url=two.url) as stream:
        _ = await stream.place()
    await eventually(lambda: job.cancelled, "the task is cancelled")
    assert server.headers[-1]["Authorization"] == token


async def test_a_client_that_left_before_its_task_was_made_leaves_none(begin: Begin, server: FakeModern) -> None:
    client = await LegacyClient(await begin(), version="2025-06-18").initialize()
    job, go = Job(server), asyncio.Event()
    make = job.call

    async def slow(call: Call) -> Json:
        if mcp.TASKS in call.meta[mcp.META_CAPABILITIES].get("extensions", {}):
            await go.wait()
        return make(call)

    server.tools["job"] = slow

    async def ask() -> None:
        async with client.request("tools/call", {"name": "job", "arguments": {}}, id_="c1"):
            pass

    asking = later(ask())
    await eventually(lambda: len(server.of(mcp.TOOLS_CALL)) == 2, "the task is about to be made")
    assert await client.notify(mcp.CANCELLED, {"requestId": "c1"}) == 202
    await eventually(lambda: server.left == 1, "the server knows that nobody waits")
    await asking
    assert job.made == 0

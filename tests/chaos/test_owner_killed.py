"""SIGKILL of the replica that holds a call, in every state that a call can be in; and SIGTERM, whose time is over.

The right outcome depends on the legacy server (does it keep an event store?) and on the tool (may it run twice?).
In every cell, the server's ledger shows how often the tool ran and was answered, and the metrics of the living
replicas show what they did.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.chaos.stage import Call, Gate, steps
from tests.e2e.wire import wire
from tests.parts.launch import OldServer, old_server
from tests.support.cluster import Cluster, cluster, needs
from tests.support.gateway_process import HELD, Gateway
from tests.support.workbench import Client, Reply

SERVERS = ("py130-store", "ts132-store", "py130")
ONCE, TWICE = TOOLS = ("ask_slow", "ask_read")
STATES = (
    "running",  # the client is connected to the owner and has not been asked yet
    "running, relayed",  # the same in the retry of a round without questions, which came through another replica
    "parked",
    "parked, drained",  # the replica ends in order, at the deadline of its drain
    "answering",  # the client is connected to the owner; the tool has its answer and still works
    "answering, relayed",  # the same, through another replica
    "answered",  # the client has the result and repeats its retry
)

pytestmark = [
    pytest.mark.real,
    pytest.mark.asyncio(loop_scope="session"),
    needs("nginx"),
]

PROMPT_SECONDS = 2.0
"""The promised time in which a retry for a dead replica's call learns that the call is lost."""


@dataclass(frozen=True)
class Stage:
    """One server behind three replicas."""

    server: OldServer
    c: Cluster
    turns: "itertools.cycle[Gateway]"
    """Every replica is the owner once."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=SERVERS)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with old_server(request.param) as server, cluster(server.url) as c:
        yield Stage(server, c, itertools.cycle(c.replicas))


def expected(server: str, tool: str, state: str) -> str:
    """The steps that the living replicas may take."""
    if state == "running":
        return "broken"
    if server.endswith("-store"):
        return "resumed"
    return "replayed" if tool == TWICE else "lost"


@dataclass
class Scene:
    """One cell: a call of `owner`, what its client holds, and the replica that will serve it."""

    call: Call
    owner: Gateway
    survivors: list[Gateway]
    at_owner: Client
    elsewhere: Client
    before: Gate
    after: Gate
    is_drained: bool


async def killed(scene: Scene, step: str, waiting: "asyncio.Task[Reply] | None", state: str) -> Reply:
    """Kill the owner; return what the client gets, by its open reply or by a retry."""
    before = await steps(scene.survivors)
    if scene.is_drained:
        scene.owner.terminate()
        assert await scene.owner.exited() == 0
    else:
        await scene.owner.kill()
    task = waiting or asyncio.get_running_loop().create_task(scene.call.retry(scene.elsewhere, state))
    if step == "lost":
        async with asyncio.timeout(PROMPT_SECONDS):
            return await task

    async def is_taken() -> bool:
        return (await steps(scene.survivors))[step] > before[step]

    await scene.survivors[0].until(is_taken, step)
    scene.before.open()
    scene.after.open()
    return await task


async def play(state: str, scene: Scene, step: str) -> Reply | None:
    """Bring a call into that state and kill its owner; return what its client got in the end."""
    call, loop = scene.call, asyncio.get_running_loop()
    if state == "running":
        async with AsyncExitStack() as leaving:
            opening = loop.create_task(
                leaving.enter_async_context(
                    scene.at_owner.open("tools/call", {"name": call.tool, "arguments": call.arguments})
                )
            )
            await call.began()
            await scene.owner.kill()
            with pytest.raises(aiohttp.ClientError):  # the head of a reply is sent only with its first message
                await opening
        return None
    if state == "running, relayed":
        answer = await scene.at_owner.call(call.tool, call.arguments)
        assert answer.asks == []
        send = scene.elsewhere.call(call.tool, call.arguments, state=answer.state)
        waiting = loop.create_task(send)
        await scene.owner.until_metric(HELD, lambda held: not held)  # it has the retry
        asked = await killed(scene, step, waiting, answer.state)
        return asked if step == "lost" else await call.retry(scene.elsewhere, asked.state)
    scene.before.open()
    token = await call.begin(scene.at_owner)
    if state.startswith("parked"):
        return await killed(scene, step, None, token)
    if state == "answering, relayed":
        waiting = loop.create_task(call.retry(scene.elsewhere, token))
        await call.answered()
        return await killed(scene, step, waiting, token)
    waiting = loop.create_task(call.retry(scene.at_owner, token))
    await call.answered()
    if state == "answered":
        scene.after.open()
        assert call.outcome(await waiting) == "result"
        return await killed(scene, step, None, token)
    before = await steps(scene.survivors)
    await scene.owner.kill()
    with pytest.raises(aiohttp.ClientError):
        await waiting
    assert await steps(scene.survivors) == before
    return await killed(scene, step, None, token)


async def judge(stage: Stage, state: str, tool: str, path: Path) -> None:
    server, c = stage.server, stage.c
    owner = next(stage.turns)
    survivors = [replica for replica in c.replicas if replica is not owner]
    gates = Gate(path / "before"), Gate(path / "after")
    call = Call(server, tool, f"{state} {tool}", *gates)
    step = expected(server.name, tool, state)
    start = len(server.ledger())  # no two cells at once
    before = await steps(survivors)
    async with wire(owner.url) as client:
        scene = Scene(call, owner, survivors, client, client.on(survivors[0].url), *gates, "drained" in state)
        answer = await play(state, scene, step)
    taken = await steps(survivors) - before

    # The client got its result or one error. Exactly one replica took exactly one step.
    given = state in {"answering", "answering, relayed", "answered"}
    if step == "broken":
        assert not taken
    else:
        assert answer is not None
        assert call.outcome(answer) == ("owner_lost" if step == "lost" else "result")
        assert {name for name in ("resumed", "replayed", "lost") if taken[name]} == {step}
        assert taken[step] == 1
    # The tool ran twice only if it may, and each run got its answer once.
    assert call.runs == (2 if step == "replayed" else 1)
    assert call.answers == {"broken": 0, "lost": int(given), "resumed": 1, "replayed": 1 + given}[step]
    if step == "lost" and state not in {"answered", "parked, drained"}:  # a drain declines the question first
        await server.until(lambda: any(e["event"] == "cancelled" for e in server.ledger()[start:]), "cancelled")
    scene.before.open()
    scene.after.open()
    await c.settled()
    if step != "broken":  # the question of that run waits for ever
        ends = [e["event"] for e in server.ledger()[start:] if e["event"] in {"finished", "failed", "cancelled"}]
        finished = {"lost": int(state == "answered"), "resumed": 1, "replayed": 1 + (state == "answered")}[step]
        assert ends.count("finished") >= finished
        assert ends.count("cancelled") <= call.runs - finished
        assert not ends.count("failed")
    await owner.start()


@pytest.mark.parametrize("state", [state for state in STATES if state != "running, relayed"])
@pytest.mark.parametrize("tool", TOOLS)
async def test_every_call_ends_as_promised(stage: Stage, tool: str, state: str, tmp_path: Path) -> None:
    await judge(stage, state, tool, tmp_path)


@pytest.mark.parametrize("name", SERVERS)
async def test_a_retry_without_answers_ends_as_promised(name: str, tmp_path: Path) -> None:
    """A gateway that ends a long leg early, once."""
    legs = {"limit_seconds": 0.2, "rounds": 1}
    async with old_server(name) as server, cluster(server.url, legs=legs) as c:
        stage = Stage(server, c, itertools.cycle(c.replicas))
        for tool in TOOLS:
            (path := tmp_path / tool).mkdir()
            await judge(stage, "running, relayed", tool, path)

"""A state that is too large drops what only other replicas need."""

import asyncio
from random import Random
from unittest.mock import Mock

import pytest

from gateway.exchange.machine import Exchange
from gateway.protocol import mcp
from tests.support.fake_upstream import FakeUpstream, Turn, text
from tests.support.replicas import (
    TWICE,
    Cluster,
    opened,
)
from tests.support.workbench import ACCEPT, Reply, Stand


async def asked_much(upstream: FakeUpstream, stand: Stand, count: int, size: int) -> Reply:
    """A round with many long questions."""

    async def tool(turn: Turn) -> None:
        await turn.raw(b"")
        waits = [
            turn.ask(
                mcp.ELICIT,
                {
                    "message": Random(number).randbytes(size // 2).hex(),
                    "requestedSchema": {"type": "object", "title": f"q{number}", "properties": {}},
                },
            )
            for number in range(count)
        ]
        answers = await asyncio.gather(*waits)
        await turn.result(text(str(len(answers))))

    upstream.tool(tool)
    asked = await stand.client().call()
    assert len(asked.questions) == count
    return asked


@pytest.mark.parametrize(
    ("count", "size", "gives_way"),
    [(2, 100, "nothing"), (5, 1000, "words"), (60, 100, "all")],
)
async def test_a_state_that_is_too_large_drops_what_only_other_replicas_need(
    upstream: FakeUpstream, cluster: Cluster, count: int, size: int, gives_way: str
) -> None:
    limit = 4096
    one, two = await cluster.begin("gw-1", "gw-2", limits={"state_bytes": limit}, **TWICE)
    asked = await asked_much(upstream, one, count, size)
    assert len(asked.state) <= limit
    envelope = opened(asked.state)
    if gives_way == "all":
        assert (envelope.open, envelope.upstream, envelope.record) == ((), None, None)
    else:
        assert len(envelope.open) == count
        assert envelope.upstream is not None
        assert envelope.record == b""
        assert all((each.params is None) == (gives_way == "words") for each in envelope.open)
    reply = await two.client().answer(asked)
    assert reply.text == str(count), "the owner never needs it"


async def test_a_round_without_the_text_of_its_questions_is_taken_over_only_with_all_answers(
    upstream: FakeUpstream, cluster: Cluster
) -> None:
    one, two = await cluster.begin("gw-1", "gw-2", limits={"state_bytes": 4096}, **TWICE)
    asked = await asked_much(upstream, one, 5, 1000)
    await cluster.crash(one)
    some = dict.fromkeys(list(asked.questions)[:-1], ACCEPT)
    reply = await two.client().call(state=asked.state, answers=some)
    assert (reply.status, reply.error["code"]) == (400, -32602)
    assert list(asked.questions)[-1] in reply.error["message"]
    assert len(two.gateway.lot) == two.held == 0


async def test_a_failure_while_a_call_is_restored_frees_its_place(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, (one,) = await cluster.asked("gw-1", route={"continuation": "replay"})
    for broken in ("handle", "restore"):
        with monkeypatch.context() as patched:
            # No known request gets here any more. The test keeps the next bug from occupying a place for ever.
            patched.setattr(Exchange, broken, Mock(side_effect=RuntimeError("a planted bug")))
            reply = await one.client().answer(asked)
        one.planted_bugs += 1
        assert reply.error["code"] == -32603
        assert (len(one.gateway.lot), one.held) == (0, 0)
    assert (await one.client().answer(asked)).result["resultType"] == "complete"

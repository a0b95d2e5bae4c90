"""The requests of several clients in one modern child, which is a fake here."""

import asyncio
import json
from typing import Any, Final
from unittest.mock import Mock

import pytest

from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost, Unreachable
from gateway.upstream.children.modern_stdio import ModernStdio
from tests.support.fake_child import FakeChild, FakeLauncher, fake_client
from tests.support.workbench import eventually, later

CALL: Final = jsonrpc.request(b"1", mcp.TOOLS_CALL, {"name": "tool", "_meta": {mcp.META_PROGRESS_TOKEN: 7}})
LISTEN: Final = jsonrpc.request(b"2", mcp.LISTEN, {"notifications": {}})


def child_of(**timeouts: Any) -> tuple[FakeChild, ModernStdio]:
    launcher = FakeLauncher(fake_client(**timeouts))
    child = launcher.new_child()
    modern = ModernStdio(launcher, Mock())
    modern.use(child)
    return child, modern


async def test_a_call_of_a_silent_child_is_cancelled_and_a_subscription_is_not() -> None:
    child, modern = child_of(idle_seconds=0.02)
    listening = later(modern.request(LISTEN, Mock()))
    await eventually(lambda: len(child.sent) == 1)
    with pytest.raises(CallLost, match=r"silent for timeouts.idle_seconds"):
        await modern.request(CALL, Mock())
    called, cancelled = child.sent[1:]
    assert cancelled == {
        "jsonrpc": "2.0",
        "method": mcp.CANCELLED,
        "params": {"requestId": called["id"]},
    }
    assert not listening.done()
    child.over.set_result("ended (exit code 0)")
    with pytest.raises(CallLost, match="ended"):
        await listening


async def test_a_fault_in_one_client_costs_the_others_nothing() -> None:
    def fails(_message: bytes) -> None:
        raise ZeroDivisionError

    child, modern = child_of()
    heard: list[bytes] = []
    faulty, healthy = (
        later(modern.request(CALL, Mock(hear=fails))),
        later(modern.request(CALL, Mock(hear=heard.append))),
    )
    await eventually(lambda: len(child.sent) == 2)
    first, second = (each["id"] for each in child.sent)
    child.say(method=mcp.PROGRESS, params={"progressToken": first, "progress": 1})
    with pytest.raises(ZeroDivisionError):
        await faulty
    child.say(id=first, result={})
    child.say(id=second, result={"a": 1})
    await healthy
    assert [json.loads(each) for each in heard] == [{"jsonrpc": "2.0", "id": 1, "result": {"a": 1}}]


async def test_requests_do_not_wait_for_ever_for_a_child_for_which_there_is_no_room() -> None:
    launcher = FakeLauncher(fake_client(handshake_seconds=0.02))
    launcher.room = 0
    modern = ModernStdio(launcher, Mock())
    requests = [modern.request(CALL, Mock()) for _ in range(3)]
    for found in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(found, Unreachable)
        assert "upstream.max_children" in found.message


async def test_the_child_of_a_route_that_leads_elsewhere_ends_after_its_last_request() -> None:
    child, modern = child_of()
    calling = later(modern.request(CALL, Mock()))
    await eventually(lambda: len(child.sent) == 1)
    modern.retire()
    assert not child.is_closed
    child.say(id=child.sent[0]["id"], result={})
    await calling
    assert child.is_closed
    assert modern.child is None

"""Fake servers, and what must be true of them after every probe."""

from collections.abc import AsyncIterator

import pytest

from gateway.tools.probe.steps import wire_behaviour
from tests.cluster.conftest import cluster
from tests.support.fake_upstream import FakeUpstream, text

__all__ = ["cluster"]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no option shortens."""
    monkeypatch.setattr(wire_behaviour, "_REPLAY_SECONDS", 0.1)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    """A server with sessions and event streams; the sessions that were opened must all have been ended."""
    async with FakeUpstream() as fake:
        fake.tool(lambda turn: turn.say({"id": turn.id, "result": text("no such tool")}))
        yield fake
        assert not fake.known, "a session is left behind"

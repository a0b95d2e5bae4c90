"""Fixtures: a fake server of HTTP+SSE, replicas."""

from collections.abc import AsyncIterator

import pytest

from tests.cluster.conftest import cluster
from tests.support.fake_sse import FakeSse

__all__ = ["cluster", "sse_server"]


@pytest.fixture
async def sse_server() -> AsyncIterator[FakeSse]:
    """A server of HTTP+SSE, whose version makes streams resumable."""
    async with FakeSse() as fake:
        fake.version = "2025-11-25"
        yield fake

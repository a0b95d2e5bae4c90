"""Fixtures: fake servers of each transport."""

from collections.abc import AsyncIterator

import pytest

from tests.support.fake_sse import FakeSse


@pytest.fixture
async def sse_server() -> AsyncIterator[FakeSse]:
    """A server of HTTP+SSE, whose version makes streams resumable."""
    fake = FakeSse()
    fake.version = "2025-11-25"
    await fake.start()
    yield fake
    await fake.close()

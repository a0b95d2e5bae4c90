"""Runs each test of this folder on both event loops, because their transports differ in the details."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from unittest.mock import Mock

import pytest
import uvloop

from gateway.http_client.client import HttpClient
from gateway.runtime.tasks import Tasks
from tests.support.workbench import eventually


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def tasks() -> Tasks:
    return Tasks(Mock())


@pytest.fixture
async def client(tasks: Tasks) -> AsyncIterator[HttpClient]:
    """A client, which must leave nothing behind."""
    client = HttpClient(tasks)
    yield client
    client.close()
    await eventually(lambda: not client.connections, "all connections are closed")
    await eventually(lambda: not len(tasks), "no task is left")
    assert not tasks.failures
    assert not client.idle

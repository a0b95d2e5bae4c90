"""Name lookups: one for all that come at the same time."""

import asyncio
import socket
from typing import Any

import pytest

from gateway.http_client.connector import Connector
from tests.support.workbench import eventually


class FakeResolver:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
async def resolver(monkeypatch: pytest.MonkeyPatch) -> FakeResolver:
    fake = FakeResolver()
    monkeypatch.setattr("gateway.world.resolve", fake)
    return fake


async def test_lookups_at_the_same_time_are_one(resolver: FakeResolver) -> None:
    known = Connector()
    waiting = [asyncio.gather(known.addresses("a", 80)) for _ in range(3)]
    await eventually(lambda: resolver.asked)
    waiting[0].cancel()
    resolver.go.set()
    assert (await waiting[1])[0] == (await waiting[2])[0]
    assert resolver.asked == ["a"]
    resolver.error = socket.gaierror(-2, "Name or service not known")
    with pytest.raises(socket.gaierror):
        await known.addresses("a", 80)
    resolver.error = None
    _ = await known.addresses("a", 80)
    assert resolver.asked == ["a", "a", "a"]


async def test_closing_ends_the_lookups(resolver: FakeResolver) -> None:
    known = Connector()
    waiting = asyncio.gather(known.addresses("a", 80))
    await eventually(lambda: resolver.asked)
    known.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("host", "family", "address"),
    [
        ("127.0.0.1", socket.AF_INET, ("127.0.0.1", 80)),
        ("::1", socket.AF_INET6, ("::1", 80, 0, 0)),
        ("fe80::1%lo", None, None),
        ("127.1", None, None),
    ],
)
async def test_an_address_is_not_looked_up(resolver: FakeResolver, host: str, family: Any, address: Any) -> None:
    """Other replicas stay within reach while the name service does not answer."""
    resolver.go.set()
    (found,) = await Connector().addresses(host, 80)
    if family is None:
        assert resolver.asked == [host]
    else:
        assert (found[:3], found[4]) == ((family, socket.SOCK_STREAM, socket.IPPROTO_TCP), address)
        assert resolver.asked == []

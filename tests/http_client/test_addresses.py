"""Name lookups: one for all that come at the same time, kept for a while, forgotten when they prove wrong."""

import asyncio
import socket
from typing import Any

import pytest

from gateway.http_client import addresses
from gateway.http_client.addresses import Addresses
from tests.support.workbench import eventually


class FakeResolver:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, host: str, port: int) -> list[Any]:
        self.asked.append(host)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


@pytest.fixture
async def resolver(monkeypatch: pytest.MonkeyPatch) -> FakeResolver:
    fake = FakeResolver()
    monkeypatch.setattr(addresses, "_look_up", fake)
    return fake


async def test_lookups_at_the_same_time_are_one_and_its_result_is_kept(resolver: FakeResolver) -> None:
    known = Addresses()
    waiting = [asyncio.gather(known.of("a", 80)) for _ in range(3)]
    await eventually(lambda: resolver.asked)
    waiting[0].cancel()
    resolver.go.set()
    assert (await waiting[1])[0] == (await waiting[2])[0] == await known.of("a", 80)
    assert resolver.asked == ["a"]


async def test_a_lookup_that_failed_is_not_kept(resolver: FakeResolver) -> None:
    known = Addresses()
    resolver.go.set()
    resolver.error = socket.gaierror(-2, "Name or service not known")
    for _ in range(2):
        with pytest.raises(socket.gaierror):
            await known.of("a", 80)
    assert resolver.asked == ["a", "a"]


async def test_the_number_of_hosts_is_bounded(resolver: FakeResolver) -> None:
    known = Addresses()
    resolver.go.set()
    for number in range(300):
        await known.of(f"h{number}", 80)
    await known.of("h299", 80)
    await known.of("h0", 80)
    assert resolver.asked[300:] == ["h0"]


async def test_closing_ends_the_lookups(resolver: FakeResolver) -> None:
    known = Addresses()
    waiting = asyncio.gather(known.of("a", 80))
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
    (found,) = await Addresses().of(host, 80)
    if family is None:
        assert resolver.asked == [host]
    else:
        assert (found[:3], found[4]) == ((family, socket.SOCK_STREAM, socket.IPPROTO_TCP), address)
        assert resolver.asked == []

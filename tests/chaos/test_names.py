"""`replica.peers_dns` with the system's own resolver, which reads its names from a file of the test (nss_wrapper).

The replicas' peer listeners are on 127.0.0.1, 127.0.0.2, … with one port, as the pods of a headless service are.
"""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from ctypes import CDLL
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.stage import Call, built, prompt, steps
from tests.e2e.wire import wire
from tests.parts.launch import OldServer, free_port, old_server
from tests.support.gateway_process import Gateway, gateway

WRAPPER = "libnss_wrapper.so"
NAME = "replicas.test"


def wraps() -> bool:
    try:
        CDLL(WRAPPER)
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not built("py130"), reason="scripts/parts has not been run"),
    pytest.mark.skipif(not wraps(), reason="apt install libnss-wrapper"),
]


class Names:
    """The records of the name service; the file is read again when its mtime, in whole seconds, differs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._times = itertools.count(1_000_000_000)

    def say(self, *addresses: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{address} {NAME}\n" for address in addresses) or "127.0.0.1 nobody.test\n")
        time = next(self._times)
        os.utime(new, (time, time))
        new.replace(self.path)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Names:
    found = Names(tmp_path / "hosts")
    found.say()
    monkeypatch.setenv("NSS_WRAPPER_HOSTS", str(found.path))
    return found


@pytest_asyncio.fixture
async def server() -> AsyncIterator[OldServer]:
    async with old_server("py130") as found:
        yield found


@pytest_asyncio.fixture
async def replicas(server: OldServer, names: Names, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Gateway]]:
    """Three replicas at the first three addresses; the name has two of them."""
    port = free_port()
    names.say("127.0.0.1", "127.0.0.2")
    monkeypatch.setenv("LD_PRELOAD", WRAPPER)  # for processes that are started from here on
    async with AsyncExitStack() as stack:
        found = []
        for number in (1, 2, 3):
            replica = {"id": f"gw-{number}", "listen": f"127.0.0.{number}:{port}", "peers_dns": f"{NAME}:{port}"}
            found.append(await stack.enter_async_context(gateway(server.url, replica=replica)))
        yield found


def move(replica: Gateway, host: str) -> None:
    """Have it listen at another address from its next start on."""
    section = replica.config["replica"]
    section["listen"] = f"{host}:{section['listen'].rpartition(':')[2]}"


async def test_a_replica_that_is_added_to_the_name_is_found(
    server: OldServer, names: Names, replicas: list[Gateway]
) -> None:
    one, two, three = replicas
    async with wire(one.url) as client:
        known = Call(server, "ask_slow", "of one that is named")
        state = await known.begin(client.on(two.url))
        assert known.outcome(await known.retry(client, state)) == "result"
        fresh = Call(server, "ask_slow", "of one that is new")
        state = await fresh.begin(client.on(three.url))
        names.say("127.0.0.1", "127.0.0.2", "127.0.0.3")
        assert fresh.outcome(await fresh.retry(client, state)) == "result"
    assert await steps([one]) == {"forwarded": 2}
    assert [(call.runs, call.answers) for call in (known, fresh)] == [(1, 1)] * 2


async def test_a_replica_that_moved_is_found(server: OldServer, names: Names, replicas: list[Gateway]) -> None:
    """It is another process with other calls and the same id."""
    one, two, _ = replicas
    async with wire(one.url) as client:
        before = Call(server, "ask_slow", "before it moved")
        state = await before.begin(client.on(two.url))
        assert before.outcome(await before.retry(client, state)) == "result"
        two.terminate()
        assert await two.exited() == 0
        move(two, "127.0.0.4")
        await two.start()
        names.say("127.0.0.1", "127.0.0.4")
        after = Call(server, "ask_slow", "after it moved")
        state = await after.begin(client.on(two.url))
        assert after.outcome(await after.retry(client, state)) == "result"
    assert await steps([one]) == {"forwarded": 2}
    assert [(call.runs, call.answers) for call in (before, after)] == [(1, 1)] * 2


async def test_a_replica_that_is_removed_from_the_name_is_dead(
    server: OldServer, names: Names, replicas: list[Gateway]
) -> None:
    one, two, _ = replicas
    async with wire(one.url) as client:
        call = Call(server, "ask_slow", "of one that is gone")
        state = await call.begin(client.on(two.url))
        await two.kill()
        names.say("127.0.0.1")
        assert call.outcome(await prompt(call.retry(client, state))) == "owner_lost"
        assert (call.runs, call.answers) == (1, 0)


async def test_a_stopped_replica_that_is_not_listed_yet_does_not_count_as_dead(
    server: OldServer, replicas: list[Gateway]
) -> None:
    one, two, _ = replicas
    async with wire(one.url) as client:
        call = Call(server, "ask_slow", "of one that sleeps")
        state = await call.begin(client.on(two.url))
        two.stop()
        refused = await prompt(call.retry(client, state), 5)
        assert (refused.status, call.outcome(refused)) == (503, "owner_stalled")
        two.cont()

        async def served() -> bool:  # the name service is asked twice a second at most
            return call.outcome(await call.retry(client, state)) == "result"

        await one.until(served, "served")
        assert (call.runs, call.answers) == (1, 1)

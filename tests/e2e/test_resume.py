"""Real legacy servers with an event store: a call survives its connection, and the process that sent it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from gateway.exchange import events as on
from gateway.http.upstream_client import Client
from gateway.http.upstream_reply import AwaitedReply
from gateway.http_client.connection import Connection
from gateway.protocol import mcp
from gateway.protocol.errors import CallGone
from gateway.runtime.own_ids import new_id
from gateway.sessions.session import Session
from gateway.upstream.channel import NO_HEADERS, Headers
from tests.parts.launch import NODE, PARTS, OldServer, old_server
from tests.support.upstream_side import KEY, UpstreamSide
from tests.support.workbench import eventually

pytestmark = pytest.mark.real

STORES = {
    "py130": ("py130-store", "progress_ask", {"steps": 2}, "accept"),
    "fm3": ("fm3", "progress_ask", {"steps": 2}, "accept"),
    "py110": ("py110", "progress_ask", {"steps": 2}, "accept"),
    "ts132": ("ts132-store", "progress_ask", {"steps": 2}, "accept"),
    "everything": ("everything", "trigger-elicitation-request", {}, "User provided"),
}


@pytest.fixture(params=STORES)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not (NODE if name in {"ts132", "everything"} else PARTS / name).exists():
        pytest.skip("scripts/parts has not built it")
    return name


@asynccontextmanager
async def store(name: str) -> AsyncIterator[OldServer]:
    recipe = STORES[name][0]
    flags = ["--event-store"] if recipe in {"fm3", "py110"} else []
    async with old_server(recipe, *flags) as server:
        yield server


@asynccontextmanager
async def process(server: OldServer) -> AsyncIterator[UpstreamSide]:
    made = UpstreamSide(server.url)
    made.deadline = 30.0
    try:
        yield made
    finally:
        await made.close()


class Held:
    """A call that waits for an answer."""

    def __init__(self, here: UpstreamSide, session: Session, name: str) -> None:
        _, tool, arguments, self.outcome = STORES[name]
        self.here, self.session = here, session
        self.id = new_id()
        self.running = here.start(here.run(session, NO_HEADERS, tool, arguments, self.id))

    async def question(self) -> bytes:
        ear = self.here.ear
        await eventually(lambda: any(_is_form(event) for event in ear.heard), "the server asks")
        return next(bytes(event.id) for event in ear.heard if _is_form(event) and isinstance(event, on.Nested))


def _is_form(event: on.Event) -> bool:
    return isinstance(event, on.Nested) and event.method == "elicitation/create"


async def test_a_call_survives_its_connection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[AwaitedReply] = []
    original = Client.send

    async def noted(
        client: Client, method: str, url: URL, headers: Headers, body: bytes, *, is_repeatable: bool = False
    ) -> AwaitedReply:
        reply = await original(client, method, url, headers, body, is_repeatable=is_repeatable)
        if b"tools/call" in body or mcp.LAST_EVENT_ID in headers:
            opened.append(reply)
        return reply

    monkeypatch.setattr(Client, "send", noted)
    async with store(name) as server, process(server) as here:
        session = await here.pool.acquire(KEY, NO_HEADERS)
        held = Held(here, session, name)
        question = await held.question()
        before = list(here.ear.heard)
        connection = opened[-1]._pending.carrier
        assert isinstance(connection, Connection)
        assert connection._transport is not None
        connection._transport.abort()
        await eventually(lambda: len(opened) > 1, "it is picked up")
        await here.answer(session, id_=question)
        await held.running
        assert held.outcome in here.ear.text
        assert here.ear.heard[: len(before)] == before
        assert here.ear.progress == ([] if name == "everything" else [1, 2, 3, 4])
        assert here.ear.asked.count(question) == 1
        here.pool.release(session, clean=True)


async def test_a_call_survives_the_process_that_sent_it(name: str) -> None:
    async with store(name) as server, process(server) as successor:
        async with process(server) as owner:
            session = await owner.pool.acquire(KEY, NO_HEADERS)
            held = Held(owner, session, name)
            question = await held.question()
            channel = session.channel
            cursor, session_id = channel.cursor, channel.session_id
            assert cursor is not None
            assert session_id is not None
            held.running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await held.running
            owner.pool.release(session, clean=False)
        adopted = await successor.adopt(NO_HEADERS, session_id, session.shaken.version)
        assert adopted.channel.hears_side
        resuming = successor.start(successor.resume(adopted, NO_HEADERS, cursor, held.id))
        await successor.attached.wait()
        await successor.answer(adopted, id_=question)
        await resuming
        assert held.outcome in successor.ear.text
        assert question not in successor.ear.asked
        assert successor.ear.progress == ([] if name == "everything" else [3, 4])
        successor.pool.release(adopted, clean=True)


async def test_a_call_does_not_survive_its_server(name: str) -> None:
    async with store(name) as server, process(server) as here:
        session = await here.pool.acquire(KEY, NO_HEADERS)
        held = Held(here, session, name)
        await held.question()
        await server.restart()
        with pytest.raises(CallGone):
            await held.running
        here.pool.release(session, clean=False)
